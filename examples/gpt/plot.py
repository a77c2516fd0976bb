"""The loss curve as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt

UNIFORM = math.log(256)  # the loss of a model that finds every byte equally likely


def plot_losses(path: Path, train: Sequence[float], validation: Mapping[int, float], title: str) -> None:
    """Draw the training loss of each step, its running mean, and the validation loss where it was measured."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.axhline(UNIFORM, color="0.6", linewidth=1, linestyle=":", label="every byte equally likely")
    axes.plot(range(len(train)), train, color="tab:blue", alpha=0.3, linewidth=1, label="train, each step")
    axes.plot(range(len(train)), running_mean(train), color="tab:blue", linewidth=2, label="train, running mean")
    axes.plot(
        list(validation), list(validation.values()), color="tab:orange", marker="o", markersize=5, label="validation"
    )
    last = max(validation)
    axes.annotate(
        f"{validation[last]:.2f}",
        (last, validation[last]),
        xytext=(0, 8),
        textcoords="offset points",
        ha="center",
        color="tab:orange",
    )
    axes.set(xlabel="optimizer steps done", ylabel="loss (nats a byte)", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def running_mean(values: Sequence[float], decay: float = 0.9) -> list[float]:
    """Exponential running mean, without the pull towards zero that a start at zero would give."""
    means: list[float] = []
    total = weight = 0.0
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        means.append(total / weight)
    return means
