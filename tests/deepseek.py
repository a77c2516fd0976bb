"""Shapes of DeepSeek-V3's layers, as its public configuration has them."""

from __future__ import annotations

Shape = tuple[int, ...]

ATTENTION: list[Shape] = [
    (1536, 7168),
    (1536,),
    (24576, 1536),
    (576, 7168),
    (512,),
    (32768, 512),
    (7168, 16384),
    (7168,),
    (7168,),
]
DENSE_LAYER: list[Shape] = [*ATTENTION, (18432, 7168), (7168, 18432), (18432, 7168)]
GATE: list[Shape] = [(256, 7168), (256,)]
EXPERT: list[Shape] = [(2048, 7168), (7168, 2048), (2048, 7168)]
PER_EXPERT_LAYER: list[Shape] = [*ATTENTION, *GATE, *EXPERT, *EXPERT * 256]
FUSED_LAYER: list[Shape] = [*ATTENTION, *GATE, *EXPERT, *((256, *shape) for shape in EXPERT)]
