"""Train a byte-level GPT, sharded, on the source of Python's standard library.

    .venv/bin/python examples/train_gpt.py                          one rank a GPU, or two on the CPU
    .venv/bin/python examples/train_gpt.py --strategy zero1 --microbatches 2
    .venv/bin/torchrun --nproc-per-node 4 examples/train_gpt.py --strategy hsdp --mesh 2 2

The parts are in `gpt/`: `train.py` is the one to read for how the library is used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gpt import launch

DEFAULTS = {"layers": 4, "width": 128, "heads": 4, "context": 128, "batch": 16, "steps": 300, "sample": 300}
SMALL = {"layers": 2, "width": 64, "heads": 2, "context": 64, "batch": 8, "steps": 30, "sample": 60}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; --small changes defaults, so that options beside it still count."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT, sharded, on the source of Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    strategies = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp")
    add("--strategy", default="zero3", choices=strategies, help="what is sharded: the README's table compares them")
    add("--mesh", type=_positive, nargs=2, metavar=("OUTER", "INNER"), help="ranks an axis, for hsdp and hfsdp")
    optimizers = ("adamw", "sgd", "muon")
    add("--optimizer", default="adamw", choices=optimizers, help="muon: matrices only, adamw for the rest")
    add("--lr", type=float, help="peak learning rate; left out, one that suits the optimizer")
    add("--precision", default="fp32", choices=("fp32", "bf16"), help="of compute; main weights are fp32")
    add("--layers", type=_positive, help="transformer blocks")
    add("--width", type=_positive, help="size of the hidden state; a multiple of --heads")
    add("--heads", type=_positive, help="attention heads of a block")
    add("--context", type=_positive, help="bytes that the model sees")
    add("--batch", type=_positive, help="sequences a rank and microbatch")
    add("--microbatches", type=_positive, default=1, help="gradients are accumulated over these, each step")
    add("--steps", type=_positive, help="optimizer steps")
    add("--sample", type=_positive, help="bytes of text to generate at the end")
    add("--temperature", type=float, default=0.8, help="of the sample: lower is less random")
    add("--ranks", type=_positive, help="local ranks; left out, one a GPU, or two on the CPU")
    add("--seed", type=int, default=0, help="of weights, batches and the sample")
    add("--out", default="out/train_gpt", help="folder for the loss curve and the sample")
    add("--small", action="store_true", help="a run of some seconds")
    parser.set_defaults(**(SMALL if "--small" in arguments else DEFAULTS))
    options = parser.parse_args(arguments)
    if options.strategy in ("hsdp", "hfsdp") and not options.mesh:
        parser.error(f"--strategy {options.strategy} shards over two axes: give --mesh OUTER INNER")
    if options.mesh and options.strategy not in ("hsdp", "hfsdp"):
        parser.error(f"--mesh is for hsdp and hfsdp; {options.strategy} has one axis")
    if options.mesh and not launch.is_rank():
        options.ranks = options.ranks or options.mesh[0] * options.mesh[1]
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {value}")
    return value


def main() -> int:
    """Be a rank, or start ranks."""
    options = parse(sys.argv[1:])
    if launch.is_rank():

        def work() -> None:
            from gpt import train  # imports torch, which the parent has no use for where there is no GPU

            train.run(options)

        return launch.as_rank(work)
    ranks = options.ranks or launch.default_ranks()
    print(f"starting {ranks} rank{'s' if ranks > 1 else ''}: the first step comes some seconds later", flush=True)
    return launch.run_ranks(launch.this_program(), ranks)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(launch.INTERRUPTED)
