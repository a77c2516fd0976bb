"""What one rank does: plan, shard, train, validate, sample."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import mfsdp_fn as mf

from . import data
from .model import GPT, initial_value
from .optimizer import make_optimizer
from .plot import plot_losses
from .progress import Progress
from .sample import sample
from .world import mean_over_ranks, world

STRATEGIES = {
    "ddp": mf.ddp,
    "zero1": mf.zero1,
    "zero2": mf.zero2,
    "zero3": mf.zero3,
    "hsdp": mf.hsdp,
    "hfsdp": mf.hfsdp,
}
VALIDATIONS = 10  # besides the one before the first step
LossFn = Callable[[mf.ShardState, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass
class History:
    """Losses, averaged over ranks: of each step's batch, and on the validation text by steps done."""

    train: list[float] = dataclasses.field(default_factory=list)
    validation: dict[int, float] = dataclasses.field(default_factory=dict)


def run(options: argparse.Namespace) -> None:
    """Everything that a rank does; rank 0 prints and writes files."""
    with world(options.mesh) as mesh:
        out, first = Path(options.out), dist.get_rank() == 0
        if first:
            out.mkdir(parents=True, exist_ok=True)
        corpus = data.load_corpus(options.context)
        model, state = build(options, mesh)
        if first:
            print(describe(options, state.spec))
            print(
                f"{len(corpus.train):,} bytes of Python source to train on, "
                f"{len(corpus.validation):,} of other files to validate on",
                flush=True,
            )
        state, history = train(options, corpus, model, state)
        text = sample(model, state, "def ", options.sample, temperature=options.temperature, seed=options.seed)
        if first:
            report(options, out, history, text)


def build(options: argparse.Namespace, mesh: DeviceMesh) -> tuple[GPT, mf.ShardState]:
    """The model without values, and its sharded weights. No rank ever holds all of them."""
    with torch.device("meta"):
        model = GPT(layers=options.layers, width=options.width, heads=options.heads, context=options.context)
    params = mf.params_of(model)
    spec = mf.plan(
        params,
        mesh,
        STRATEGIES[options.strategy](),
        units=("blocks.*",),
        precision=mf.MixedPrecisionPolicy(compute=torch.bfloat16 if options.precision == "bf16" else None),
        grad_scale=1 / options.microbatches,  # gradients are summed over microbatches, and a mean is wanted
    )

    def init_fn(path: str, parameter: torch.Tensor) -> torch.Tensor:
        return initial_value(path, parameter, layers=options.layers, seed=options.seed)

    return model, mf.shard(params, spec, init_fn=init_fn)


def train(
    options: argparse.Namespace, corpus: data.Corpus, model: GPT, state: mf.ShardState
) -> tuple[mf.ShardState, History]:
    """The training loop."""
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), state.spec.device
    generator = torch.Generator().manual_seed(1000 * options.seed + rank)  # each rank sees other data

    def loss_fn(state: mf.ShardState, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = mf.functional_call(model, state, (ids,))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    optimizer = make_optimizer(options, state.spec)
    opt_state = optimizer.init(state)
    history = History(validation={0: validate(loss_fn, state, corpus, options)})
    progress = Progress(options.steps, tokens_per_step(options, ranks), silent=rank != 0)
    for step in range(1, options.steps + 1):
        grads, losses = None, []
        for number in range(options.microbatches):
            ids, targets = data.random_windows(corpus.train, options.batch, options.context, generator)
            last = number == options.microbatches - 1
            loss, grads = mf.value_and_grad(loss_fn, is_last_microbatch=last, accumulate=grads, donate=True)(
                state, ids.to(device), targets.to(device)
            )
            losses.append(loss)
        grads, _ = mf.optim.clip_by_global_norm(grads, 1.0)
        state, opt_state = optimizer.step(grads, opt_state, state, donate=True)
        history.train.append(mean_over_ranks(torch.stack(losses).mean()))
        progress.show(step, history.train[-1])
        if step == options.steps or step % math.ceil(options.steps / VALIDATIONS) == 0:
            began = time.perf_counter()
            history.validation[step] = validate(loss_fn, state, corpus, options)
            progress.pause(time.perf_counter() - began)
    return state, history


@torch.no_grad()
def validate(loss_fn: LossFn, state: mf.ShardState, corpus: data.Corpus, options: argparse.Namespace) -> float:
    """The loss on windows that are spread over the validation text, each rank taking its part."""
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), state.spec.device
    ids, targets = data.spread_windows(corpus.validation, 4 * options.batch, options.context, rank, ranks)
    pairs = zip(ids.split(options.batch), targets.split(options.batch), strict=True)
    losses = [loss_fn(state, ids.to(device), targets.to(device)) for ids, targets in pairs]
    return mean_over_ranks(torch.stack(losses).mean())


def tokens_per_step(options: argparse.Namespace, ranks: int) -> int:
    """Tokens of all ranks and microbatches."""
    return options.batch * options.microbatches * options.context * ranks


def describe(options: argparse.Namespace, spec: mf.ShardSpec) -> str:
    """One line about the run."""
    ranks = dist.get_world_size()
    parameters = sum(math.prod(group.layout.tensor_shapes[i]) for group in spec.groups for i in range(len(group.paths)))
    return (
        f"{parameters:,} parameters, {options.strategy} and {options.optimizer} in {options.precision} over {ranks} "
        f"{spec.device.type} rank{'s' if ranks > 1 else ''}, {tokens_per_step(options, ranks):,} tokens a step"
    )


def report(options: argparse.Namespace, out: Path, history: History, text: str) -> None:
    """Write the picture, the numbers and the sample; print what matters of them."""
    title = f"{options.layers} layers of width {options.width}, {options.strategy}, {options.optimizer}"
    plot_losses(out / "loss.png", history.train, history.validation, title)
    rows = [f"{step},{loss},{history.validation.get(step, '')}\n" for step, loss in enumerate([*history.train, ""])]
    (out / "loss.csv").write_text("".join(["steps_done,train,validation\n", *rows]), encoding="utf-8")
    (out / "sample.txt").write_text(text, encoding="utf-8")
    print(f"\n--- sample at temperature {options.temperature:g}\n{text}\n---\n")
    print(f"train loss       step 0: {history.train[0]:.3f}   last: {history.train[-1]:.3f}")
    print(f"validation loss  before: {history.validation[0]:.3f}   after: {history.validation[options.steps]:.3f}")
    print(f"wrote {', '.join(str(out / name) for name in ('loss.png', 'loss.csv', 'sample.txt'))}")
