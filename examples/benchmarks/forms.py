"""The forms of this library: pure functions of one sharded state, which all of them share; and the wire alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from case import LR, NO_WIRE, Case, Contender, NotHereError, norms_of
from model import Config, build

import mfsdp_fn as mf
from mfsdp_fn.collectives import PendingCollective, all_gather, reduce_scatter

UNITS = ("blocks.*", "emb", "head")
Loss = Callable[[mf.ShardState, torch.Tensor, torch.Tensor], torch.Tensor]
optimizer = mf.optim.adamw(lr=LR)


def planned(
    params: Any, mesh: Any, compute: torch.dtype, reduce: torch.dtype, *, stored: bool, inflight: int = 1
) -> mf.ShardSpec:
    """The plan of all forms: zero3, a unit a block, the embedding and the head.

    `stored`: a shard of the weights in the compute dtype is kept. `inflight`: reduction inputs alive at once.
    """
    precision = mf.MixedPrecisionPolicy(compute=compute, reduce=reduce)
    # The head's weights are needed again at once, so nobody gathers them twice (nor does FSDP2 here).
    runtime = mf.RuntimePolicy(("head",), store_compute_weights=stored, max_inflight_reductions=inflight)
    return mf.plan(params, mesh, mf.zero3(), units=UNITS, precision=precision, runtime=runtime)


class Weights:
    """Main weights of one case, seen through two plans, and one optimizer state; steps are made in place."""

    def __init__(self, case: Case) -> None:
        module = build(case.config, case.device)
        params = mf.params_of(module)
        ways = [(True, 1), (True, 2), (False, 1), (False, 2)]
        self.plans = {
            way: planned(params, case.mesh, case.compute, case.reduce, stored=way[0], inflight=way[1]) for way in ways
        }
        layouts = [[group.layout for group in plan.groups] for plan in self.plans.values()]
        assert all(layout == layouts[0] for layout in layouts)
        self.main = mf.shard(params, self.plans[False, 1]).main
        self.synced: mf.ShardState | None = None
        self.opt_state: Any = None

    def state(self, stored: bool, inflight: int = 1) -> mf.ShardState:
        plan = self.plans[stored, inflight]
        bare = mf.ShardState(self.main, (None,) * len(self.main), plan)
        if not stored:
            return bare
        if self.synced is None:
            self.synced = mf.sync_model_weights(bare)
        return dataclasses.replace(self.synced, spec=plan)

    def step(self, stored: bool, inflight: int, step: Callable[..., Any], case: Case) -> torch.Tensor:
        """One step through one plan. The others' compute weights are then one step old, which no timing sees."""
        state, spec = self.state(stored, inflight), self.plans[stored, inflight]
        if self.opt_state is None:
            self.opt_state = optimizer.init(state)
        kept = self.opt_state
        moments = {n: dataclasses.replace(getattr(kept, n), spec=spec) for n in ("exp_avg", "exp_avg_sq")}
        state, self.opt_state, loss = step(
            state, dataclasses.replace(kept, spec=spec, **moments), case.tokens, case.targets
        )
        self.main, self.synced = state.main, state if stored else self.synced
        return loss


@functools.cache
def loss_of(config: Config, how: str) -> Loss:
    """The loss, written out or the module through `functional_call`; independent of any state."""
    skeleton = build(config, torch.device("meta"))
    block_module, names = skeleton.blocks[0], [f"blocks.{i}" for i in range(config.layers)]

    def block(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(block_module, params, (x,))

    if how == "blocks compiled":
        block = torch.compile(block, dynamic=False)

    def written_out(state: mf.ShardState, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens, mf.unshard(state["emb"])["weight"])
        for name in names:
            x = block(mf.unshard(state[name]), x)
        x = F.rms_norm(x, (config.width,), mf.unshard(state[""])["norm.weight"])
        logits = F.linear(x, mf.unshard(state["head"])["weight"])
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def bridged(state: mf.ShardState, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mf.functional_call(skeleton, state, (tokens, targets))

    return bridged if how == "module" else written_out


@functools.cache
def programs_of(config: Config, how: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(forward and backward, whole step) of one form: made once, so that it compiles once for all states."""
    value_and_grad = mf.value_and_grad(loss_of(config, how))

    def step(state: mf.ShardState, opt_state: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        loss, grads = value_and_grad(state, tokens, targets)
        state, opt_state = optimizer.step(grads, opt_state, state, donate=True)
        return state, opt_state, loss

    if how == "one graph":
        return mf.compile(value_and_grad, dynamic=False), mf.compile(step, dynamic=False)
    return value_and_grad, step


def gradient_norms(grads: mf.ShardState) -> torch.Tensor:
    """Of every parameter, from this rank's pieces."""
    parts = []
    for group, main in zip(grads.spec.groups, grads.main, strict=True):
        parts += [(group.paths[index], main[start:stop]) for index, start, stop in group.main_pieces]
    return norms_of(parts, [leaf.path for leaf in grads.spec.leaves], sharded=True)


def ours(case: Case, how: str, *, stored: bool = True, inflight: int = 1) -> Contender:
    """Eager, the module, blocks compiled, or one graph."""
    weights = case.once("mfsdp_fn", lambda: Weights(case))
    forward_backward, step = programs_of(case.config, how)
    weights.state(stored, inflight)  # made now: it is resident

    def call() -> Any:
        return forward_backward(weights.state(stored, inflight), case.tokens, case.targets)

    def whole_step() -> torch.Tensor:
        return weights.step(stored, inflight, step, case)

    return Contender(lambda: call()[0], whole_step, lambda: gradient_norms(call()[1]))


def captured(case: Case, how: str) -> Contender:
    """Forward and backward of a form as one CUDA graph; needs CUDA.

    Each graph has a memory pool of its own: a pool whose last graph is gone can't be captured into again.
    """
    if case.device.type != "cuda":
        raise NotHereError("needs CUDA")
    weights, call = case.once("mfsdp_fn", lambda: Weights(case)), programs_of(case.config, how)[0]
    state = weights.state(True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is made on first use can't be made during a capture
        for _ in range(2):
            call(state, case.tokens, case.targets)
    torch.cuda.current_stream().wait_stream(side)
    graphs: list[torch.cuda.CUDAGraph] = []

    def capture() -> mf.ShardState:
        graphs.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            _, grads = call(state, case.tokens, case.targets)
        graphs.append(graph)
        return grads

    def norms() -> torch.Tensor:
        grads = capture()
        graphs[0].replay()
        return gradient_norms(grads)

    capture()
    return Contender(lambda: graphs[0].replay(), None, norms, capture)


def wire_alone(case: Case, *, side_by_side: bool) -> Contender:
    """A floor: the collectives of one zero3 microbatch and nothing else.

    Backward gathers neither the embedding, which it doesn't read, nor the head, which it has.

    One after the other, or as a step can have them at best: forward's gathers, then each of backward's gathers beside
    a reduction, at most two of each under way.
    """
    if case.mesh.size() == 1:
        raise NotHereError(NO_WIRE)
    state = case.once("mfsdp_fn", lambda: Weights(case)).state(True)
    pairs = list(zip(state.spec.groups, state.main, state.compute, strict=True))
    longest = max(group.layout.size for group in state.spec.groups)
    packed = torch.zeros(longest, dtype=case.reduce, device=case.device)

    def gather(number: int) -> PendingCollective:
        group, main, compute = pairs[number]
        move = group.gathers[0]
        return all_gather(main if compute is None else compute, move.sizes, move.axis)

    def scatter(number: int) -> PendingCollective:
        group = pairs[number][0]
        move = group.grad_scatters[0]
        return reduce_scatter(packed.narrow(0, 0, group.layout.size), move.sizes, move.axis)

    def forward_backward() -> None:
        for number in range(len(pairs)):
            gather(number).wait()
        waiting: list[PendingCollective] = []
        for number in reversed(range(len(pairs))):
            again = pairs[number][0].name.startswith("blocks")
            for launch in (gather, scatter) if again else (scatter,):
                pending = launch(number)
                if side_by_side:
                    waiting.append(pending)
                else:
                    pending.wait()
            while len(waiting) > 2:
                waiting.pop(0).wait()
        for pending in waiting:
            pending.wait()

    return Contender(forward_backward)
