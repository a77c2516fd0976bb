"""Padding of the layouts that `plan` makes, against the chunk rule of the builder, by planning alone.

    python examples/benchmarks/layout_tables.py model_shapes.json

The file holds shapes of one layer of each kind: {"models": {name: {"layer_kinds": [{"kind": …, "params": {path:
shape}, "experts": {"count": …, "params": {path with {e}: shape}}, "experts_fused_alt": {path: shape}}]}}}, experts
where there are any. Weights are gathered in bf16.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import mfsdp_fn as mf

RANKS = (8, 64, 256)
PRECISION = mf.MixedPrecisionPolicy(compute=torch.bfloat16, reduce=torch.bfloat16)


def layers(model: dict[str, Any]) -> Iterator[tuple[str, dict[str, list[int]]]]:
    for layer in model["layer_kinds"]:
        if "experts" not in layer:
            yield layer["kind"], layer["params"]
            continue
        experts = layer["experts"]
        each = {path.format(e=e): shape for e in range(experts["count"]) for path, shape in experts["params"].items()}
        yield "single experts", layer["params"] | each
        yield "fused experts", layer["params"] | layer["experts_fused_alt"]


def padding(shapes: dict[str, list[int]], ranks: int, **options: Any) -> tuple[float, float, float, str]:
    """By the chunk rule, as planned; the largest segment over the mean; what was picked."""
    params = {path: torch.empty(shape, device="meta").requires_grad_() for path, shape in shapes.items()}
    mesh = mf.AbstractMesh((ranks,), ("dp",))
    spec = mf.plan(params, mesh, mf.zero3(), precision=PRECISION, **options)
    rule = sum(group.choice.chunk_rule for group in spec.groups) / spec.numel
    planned = sum(group.layout.size for group in spec.groups) / spec.numel - 1
    widest = sum(max(g.layout.rank_range(rank).size for rank in range(ranks)) for g in spec.groups)
    picked = " + ".join(group.choice.picked for group in spec.groups)
    return rule, planned, widest * ranks / spec.numel - 1, picked


def main() -> None:
    models = json.loads(Path(sys.argv[1]).read_text())["models"]
    print("| layer | block | ranks | rule | padded | split by row size | `auto`: segment over the mean | picked |")
    print("|---|---|---|---|---|---|---|---|")
    for name, model in models.items():
        for kind, shapes in layers(model):
            leading = 2 if kind.startswith("fused") else 1
            for block in (1, 32):
                for ranks in RANKS:
                    options = {"block_size": block, "leading_dims": leading}
                    rule, padded, _, _ = padding(shapes, ranks, **options)
                    if leading > 1:  # the rule cuts dim 0
                        rule, _, _, _ = padding(shapes, ranks, block_size=block)
                    _, split, _, _ = padding(shapes, ranks, split_by_row_size=True, **options)
                    _, _, widest, picked = padding(shapes, ranks, shard_layout="auto", **options)
                    print(
                        f"| {name}, {kind} | {block} | {ranks} | {rule:.2%} | {padded:.2%} | {split:.2%} "
                        f"| {widest:.2%} | {picked} |"
                    )


if __name__ == "__main__":
    main()
