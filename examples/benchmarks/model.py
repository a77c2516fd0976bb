"""The Llama-like model that every contender of the benchmarks runs: same code, same data."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    vocab: int = 32000
    width: int = 4096
    heads: int = 32
    hidden: int = 14336
    layers: int = 8


SIZES = {
    "tiny": Config(vocab=512, width=64, heads=4, hidden=128, layers=3),
    "0.3B": Config(width=1024, heads=16, hidden=3584, layers=16),
    "2B": Config(),
    "8B": Config(layers=36),
}


class Block(nn.Module):
    """Attention and a gated MLP, each behind an RMSNorm."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.norm1 = nn.RMSNorm(c.width)
        self.qkv = nn.Linear(c.width, 3 * c.width, bias=False)
        self.out = nn.Linear(c.width, c.width, bias=False)
        self.norm2 = nn.RMSNorm(c.width)
        self.up = nn.Linear(c.width, 2 * c.hidden, bias=False)
        self.down = nn.Linear(c.hidden, c.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        gate, value = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Model(nn.Module):
    """Tokens and targets to a loss."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.emb = nn.Embedding(c.vocab, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.width)
        self.head = nn.Linear(c.width, c.vocab, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def build(config: Config, device: torch.device) -> Model:
    """The model with the same weights everywhere."""
    torch.manual_seed(0)
    with device:
        return Model(config)
