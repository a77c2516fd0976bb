"""Text that every machine has: the source files of Python's own standard library, as bytes."""

from __future__ import annotations

import dataclasses
import sysconfig
from pathlib import Path

import torch

SKIPPED = frozenset(("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"))
HELD_OUT = 10  # every tenth file is for validation
CAP = 8 << 20  # bytes


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes to train on, and bytes of other files to validate on."""

    train: torch.Tensor
    validation: torch.Tensor


def load_corpus(context: int) -> Corpus:
    """Read the same bytes in the same order on every rank."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in root.rglob("*.py") if not SKIPPED.intersection(path.relative_to(root).parts)]
    train, validation = bytearray(), bytearray()
    for number, path in enumerate(sorted(paths, key=lambda path: path.relative_to(root).as_posix())):
        if len(train) + len(validation) >= CAP:
            break
        (train if number % HELD_OUT else validation).extend(path.read_bytes())
    if min(len(train), len(validation)) <= context + 1:
        raise SystemExit(f"{root} holds too little Python source to train on; is the standard library zipped?")
    return Corpus(_tensor(train), _tensor(validation))


def _tensor(text: bytearray) -> torch.Tensor:
    return torch.frombuffer(text, dtype=torch.uint8)


def random_windows(
    text: torch.Tensor, batch: int, context: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (the inputs shifted by one byte) at random places."""
    return _windows(text, torch.randint(len(text) - context, (batch,), generator=generator), context)


def spread_windows(
    text: torch.Tensor, batch: int, context: int, rank: int, ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of windows that are spread evenly over the text: always the same ones."""
    places = torch.arange(batch * ranks) * (len(text) - context - 1) // (batch * ranks)
    return _windows(text, places[rank::ranks], context)


def _windows(text: torch.Tensor, places: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    both = text[places[:, None] + torch.arange(context + 1)].long()
    return both[:, :-1], both[:, 1:]
