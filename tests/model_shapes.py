"""Shapes of one layer of some dense models, as their public configurations have them, and how many layers there are.

Tensors that Muon leaves to another optimizer (embeddings, heads) are not here.
"""

from __future__ import annotations


def llama(dim: int, ffn: int, kv: int) -> dict[str, tuple[int, ...]]:
    return {
        "input_layernorm": (dim,),
        "q_proj": (dim, dim),
        "k_proj": (kv, dim),
        "v_proj": (kv, dim),
        "o_proj": (dim, dim),
        "post_attention_layernorm": (dim,),
        "gate_proj": (ffn, dim),
        "up_proj": (ffn, dim),
        "down_proj": (dim, ffn),
    }


DENSE: dict[str, tuple[dict[str, tuple[int, ...]], int]] = {
    "Llama-3.1-8B": (llama(4096, 14336, 1024), 32),
    "Llama-3.1-70B": (llama(8192, 28672, 1024), 80),
    "Llama-3.1-405B": (llama(16384, 53248, 1024), 126),
}
