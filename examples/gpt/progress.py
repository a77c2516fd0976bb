"""A progress bar: one line that is rewritten on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import resource
import shutil
import sys
import time

import torch

PLAIN_LINES = 10


class Progress:
    """Shows how far a run is; `show` is called once a step."""

    def __init__(self, steps: int, tokens_per_step: int, *, silent: bool = False) -> None:
        self.steps, self.tokens_per_step, self.silent = steps, tokens_per_step, silent
        self.terminal = sys.stdout.isatty()
        self.started = time.perf_counter()
        self.paused = 0.0
        self.every = max(1, steps // PLAIN_LINES)

    def show(self, step: int, loss: float) -> None:
        """Say that step number `step` (from 1) is done."""
        if self.silent or not (self.terminal or step == 1 or step % self.every == 0 or step == self.steps):
            return
        seconds = time.perf_counter() - self.started - self.paused
        rate = step * self.tokens_per_step / seconds
        left = seconds / step * (self.steps - step)
        text = f"step {step}/{self.steps}  loss {loss:.3f}  {rate:,.0f} tokens/s  {memory()}  {left:.0f} s left"
        if not self.terminal:
            print(text, flush=True)
            return
        room = shutil.get_terminal_size().columns - len(text) - 4
        done = max(0, room) * step // self.steps
        bar = f"[{'#' * done}{'.' * (room - done)}] " if room > 5 else ""
        print(f"\r\x1b[K{bar}{text}", end="\n" if step == self.steps else "", flush=True)

    def pause(self, seconds: float) -> None:
        """Leave time that went to something else out of the rate."""
        self.paused += seconds


def memory() -> str:
    """The most memory that this rank has used so far."""
    if torch.cuda.is_available():
        return f"{torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB GPU"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{peak / (2**20 if sys.platform == 'darwin' else 2**10):,.0f} MiB"
