"""Optimizers over sharded states: pure `init` and `step`, elementwise on flat local buffers."""

from .adamw import AdamWState, adamw
from .base import Optimizer
from .clip import clip_by_global_norm, global_norm
from .muon import MuonState, muon
from .sgd import SGDState, sgd
from .transformation import GradientTransformation, TransformationState, from_gradient_transformation

__all__ = [
    "AdamWState",
    "GradientTransformation",
    "MuonState",
    "Optimizer",
    "SGDState",
    "TransformationState",
    "adamw",
    "clip_by_global_norm",
    "from_gradient_transformation",
    "global_norm",
    "muon",
    "sgd",
]
