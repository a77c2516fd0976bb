"""Which optimizer, which learning rate at which step, and which parameters decay."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch

import mfsdp_fn as mf

LEARNING_RATES = {"adamw": 3e-3, "sgd": 0.3, "muon": 0.02}
FINAL_FRACTION = 0.1
WARMUP_FRACTION = 0.1


def schedule(peak: float, steps: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Linear warm-up, then a cosine down to a tenth; a function of the step counter, which is a tensor."""
    warmup = max(1, round(WARMUP_FRACTION * steps))

    def lr(step: torch.Tensor) -> torch.Tensor:
        step = step.float()
        done = ((step - warmup) / max(1, steps - warmup)).clamp(0, 1)
        cosine = FINAL_FRACTION + (1 - FINAL_FRACTION) * (1 + torch.cos(math.pi * done)) / 2
        return peak * torch.minimum((step + 1) / warmup, cosine)

    return lr


def make_optimizer(options: argparse.Namespace, spec: mf.ShardSpec) -> mf.optim.Optimizer:
    """The optimizer that the options name; only matrices inside blocks decay."""
    lr = schedule(options.lr or LEARNING_RATES[options.optimizer], options.steps)
    flat = [leaf.path for leaf in spec.leaves if len(leaf.shape) < 2 or not leaf.path.startswith("blocks.")]
    overrides = {path: {"weight_decay": 0.0} for path in flat}
    if options.optimizer == "sgd":
        return mf.optim.sgd(lr, momentum=0.9, nesterov=True, weight_decay=1e-4, overrides=overrides)
    if options.optimizer == "muon":
        fallback = mf.optim.adamw(lr=schedule(LEARNING_RATES["adamw"], options.steps), weight_decay=0.0)
        return mf.optim.muon(lr=lr, fallback=fallback)
    return mf.optim.adamw(lr=lr, betas=(0.9, 0.95), weight_decay=0.1, overrides=overrides)
