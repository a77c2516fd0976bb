"""A small GPT over bytes: a plain `nn.Module` that knows nothing about sharding."""

from __future__ import annotations

import math
import zlib

import torch
import torch.nn.functional as F
from torch import nn

BYTES = 256


class Block(nn.Module):
    """Attention and MLP, each behind a norm and around a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """Bytes to logits of the next byte; embedding and head are one tensor."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"`heads` got {heads}; expected a divisor of the width, {width}; change either.")
        self.layers, self.context = layers, context
        self.embedding = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def initial_value(path: str, parameter: torch.Tensor, *, layers: int, seed: int) -> torch.Tensor:
    """A parameter's first value, a function of its path and the seed alone: the same on every rank, and whatever the
    number of ranks.
    """
    if path.endswith("bias"):
        return torch.zeros(parameter.shape)
    if parameter.dim() < 2:
        return torch.ones(parameter.shape)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {path}".encode()))
    # What is added to the residual stream is scaled down, so that its variance doesn't grow with depth.
    deviation = 0.02 / math.sqrt(2 * layers) if "_out." in path else 0.02
    return torch.randn(parameter.shape, generator=generator) * deviation
