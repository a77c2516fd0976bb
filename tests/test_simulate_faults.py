"""`testing.simulate` tells what real ranks hang or go wrong at, and refuses what it can't simulate."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.exc import Unsupported

import mfsdp_fn as mf
from mfsdp_fn import collectives, communicators
from mfsdp_fn.testing import SimulatedMesh, simulate, single_rank
from mfsdp_fn.turns import Turns


def state_of(mesh: SimulatedMesh, **options: Any) -> mf.ShardState:
    params = {name: torch.ones(2, 2, requires_grad=True) for name in ("l.0.w", "l.1.w")}
    return mf.shard(params, mf.plan(params, mesh, mf.zero3(), units=("l.*",), **options))


def gather(*units: str) -> Callable[[mf.ShardState], Any]:
    return lambda state: [mf.unshard(state[unit]) for unit in units]


ORDERS: dict[str, tuple[Any, Any, str]] = {
    "swapped, of one size": (
        gather("l.0", "l.1"),
        gather("l.1", "l.0"),
        r"two kinds of collective \d over axis 'dp': all_gather of \(2, 2, 2\) elements of torch.float32 of group "
        r"'l.\d float32' from rank \d, and all_gather of .* of group 'l.\d float32' from rank \d; expected the same",
    ),
    "another kind": (
        gather("l.0"),
        lambda state: mf.reduce(dict.fromkeys(("l.0.w", "l.1.w"), torch.ones(2, 2)), state.spec),
        r"two kinds of collective \d over axis 'dp': (all_gather|reduce_scatter) .*, and (all_gather|reduce_scatter) ",
    ),
    "skipped": (
        gather("l.0", "l.1"),
        gather("l.0"),
        r"ranks that wait for each other: rank 0 waits for ranks \[1, 2\] in collective \d over axis 'dp', all_gather "
        r".* of group 'l.1 float32'; ranks \[1, 2\] have ended; expected the same collectives in the same order",
    ),
    "launched by one": (
        lambda state: mf.launch(state["l.0"]),
        lambda state: None,
        r"collective \d over axis 'dp', all_gather .* of group 'l.0 float32', from ranks \[0\] of \[0, 1, 2\] only",
    ),
}


@pytest.mark.parametrize("case", ORDERS)
def test_ranks_that_disagree(case: str) -> None:
    one, others, text = ORDERS[case]

    def fn(mesh: SimulatedMesh) -> Any:
        state = state_of(mesh)
        # `shard` and `plan` launch none for zero3: only objects are exchanged.
        assert not mesh.collectives
        return (others if mesh.get_rank() else one)(state)

    with pytest.raises(mf.OrderError, match=text):
        simulate(3)(fn)


def test_all_stuck_ranks_are_named() -> None:
    def fn(mesh: SimulatedMesh) -> Any:
        return mf.unshard(state_of(mesh[("outer", "inner")[mesh.get_rank() in (1, 2)]])["l.0"])

    with pytest.raises(mf.OrderError, match=r"rank 0 waits for ranks \[\d\] .* over axis 'outer'.*; rank 1 waits for "):
        simulate((2, 2))(fn)


def test_plans_that_differ() -> None:
    def fn(mesh: SimulatedMesh) -> None:
        state_of(mesh, grad_scale=1.0 + mesh.get_rank() // 2)

    with pytest.raises(mf.PlanError, match=r"differs between ranks: rank 0 of the mesh has «group .*», rank 2 has «"):
        simulate(3)(fn)

    def fails(mesh: SimulatedMesh) -> None:
        state_of(mesh, block_size=mesh.get_rank() - 1)

    with pytest.raises(mf.PlanError, match=r"`block_size` got (0|-1); expected a positive integer"):
        simulate(3)(fails)


@pytest.mark.parametrize("where", ["before", "forward", "backward", "after"])
def test_an_exception_on_one_rank(where: str) -> None:
    """It comes out as it is, naming the rank, however deep others wait; each of them cleans up."""
    cleaned = []

    def fn(mesh: SimulatedMesh) -> None:
        fails = mesh.get_rank() == 2
        try:
            state = state_of(mesh)
            if fails and where == "before":
                raise KeyError("mine")

            def loss_fn(state: mf.ShardState) -> torch.Tensor:
                x = mf.unshard(state["l.0"])["w"]
                if fails and where == "forward":
                    raise KeyError("mine")
                loss = (x @ mf.unshard(state["l.1"])["w"] @ x).sum()
                if fails and where == "backward":
                    loss.register_hook(lambda grad: {}["mine"])
                return loss

            mf.value_and_grad(loss_fn)(state)
            if fails and where == "after":
                raise KeyError("mine")
            mf.unshard(state)
        finally:
            cleaned.append(mesh.get_rank())

    with pytest.raises(KeyError, match="mine") as caught:
        simulate(4)(fn)
    assert caught.value.__notes__ == ["Raised by simulated rank 2 of 4."]
    assert sorted(cleaned) == [0, 1, 2, 3]


def test_no_rank_goes_on_after_a_failure() -> None:
    def fn(mesh: SimulatedMesh) -> None:
        state = state_of(mesh)
        try:
            gather("l.0" if mesh.get_rank() else "l.1")(state)
        except mf.OrderError:
            gather("l.0")(state)
            pytest.fail("went on")

    with pytest.raises(mf.OrderError, match="two kinds of collective"):
        simulate(2)(fn)


def test_an_interrupt_stops_all_ranks() -> None:
    before = torch.get_num_threads()

    def fn(mesh: SimulatedMesh) -> None:
        state = state_of(mesh)
        if mesh.get_rank() == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        while True:
            mf.unshard(state)

    with pytest.raises(KeyboardInterrupt):
        simulate(2)(fn)
    for thread in threading.enumerate():
        if thread.name.startswith("simulated rank"):
            thread.join()
    assert torch.get_num_threads() == before


def test_a_write_to_what_travels() -> None:
    def fn(mesh: SimulatedMesh) -> Any:
        state = state_of(mesh)
        pending = mf.launch(state["l.0"])
        if mesh.get_rank() == 1:
            state.main[0].add_(1)
        return mf.wait(pending)

    text = r"`state` got a write to the input of all_gather .* over axis 'dp' after its launch; expected buffers that"
    with pytest.raises(mf.StateError, match=text) as caught:
        simulate(2)(fn)
    assert caught.value.__notes__ == ["Raised by simulated rank 1 of 2."]


def test_a_step_that_donates_what_travels() -> None:
    def fn(mesh: SimulatedMesh) -> Any:
        state, optimizer = state_of(mesh), mf.optim.sgd(0.1)
        pending = mf.launch(state["l.0"])
        optimizer.step(mf.zeros_like(state), optimizer.init(state), state, donate=True)
        return mf.wait(pending)

    with pytest.raises(mf.DonatedError, match="donated to sgd"):
        simulate(2)(fn)


def test_exchanges_that_disagree() -> None:
    def fn(mesh: SimulatedMesh) -> torch.Tensor:
        peers = communicators.peers_of(mesh)
        return collectives.all_to_all(torch.ones(3), [1, 1], [1, 2], peers).wait()

    with pytest.raises(
        mf.OrderError, match=r"an all_to_all over axis 'dp' in which rank 0 sends 2 .* expects 1; expected"
    ):
        simulate(2)(fn)


# Refused


def test_a_mesh_is_its_ranks() -> None:
    meshes: list[SimulatedMesh] = []

    def fn(mesh: SimulatedMesh) -> Any:
        meshes.append(mesh)
        state = state_of(mesh)
        return state if len(meshes) == 1 else state_of(meshes[0])

    with pytest.raises(mf.SimulationError, match="`mesh` got the mesh of simulated rank 0, used by rank 1; expected"):
        simulate(2)(fn)
    state = simulate(2)(state_of)[1]
    with pytest.raises(mf.SimulationError, match="the mesh of simulated rank 1, used outside its call; expected"):
        mf.unshard(state)


REFUSED: dict[str, tuple[Callable[[SimulatedMesh], Any], type[Exception], str]] = {
    "mfsdp_fn.compile": (
        lambda mesh: mf.compile(mf.unshard, backend="aot_eager")(state_of(mesh)),
        mf.SimulationError,
        "`step` got a compiled step on a simulated rank; expected an eager one; leave mfsdp_fn.compile out",
    ),
    "torch.compile": (
        lambda mesh: torch.compile(lambda state: mf.unshard(state), backend="aot_eager", fullgraph=True)(
            state_of(mesh)
        ),
        Unsupported,
        "`step` got a compiled step on a simulated rank",
    ),
    "devices": (
        lambda mesh: mf.reduce(dict.fromkeys(("l.0.w", "l.1.w"), torch.ones(2, 2, device="meta")), state_of(mesh).spec),
        mf.SimulationError,
        "`params` got a meta tensor on a simulated rank; expected CPU tensors; move them to the CPU",
    ),
    "to_dtensors": (
        lambda mesh: mf.to_dtensors(state_of(mesh)),
        mf.StateError,
        "`state` got a state on a simulated mesh; expected one on a DeviceMesh; plan with a real mesh",
    ),
    "get_group": (
        lambda mesh: mesh.get_group(0),
        mf.SimulationError,
        "`mesh` got a simulated mesh, which has no process",
    ),
    "torch.distributed": (lambda mesh: dist.get_rank(), ValueError, "process group has not been initialized"),
    "axis": (lambda mesh: mesh["tp"], mf.SimulationError, r"`axis` got 'tp'; expected one of \('dp',\)"),
    "names": (lambda mesh: mesh["dp", "dp"], mf.SimulationError, r"`names` got \('dp', 'dp'\)"),
    "reshaped": (lambda mesh: mesh.reshaped((3,), ("a",)), mf.SimulationError, r"`shape` got \(3,\); .* for 2 ranks"),
    "local rank": (
        lambda mesh: mesh.reshaped((2, 1), ("a", "b")).get_local_rank(),
        mf.SimulationError,
        r"`axis` got None; expected one of \('a', 'b'\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_inside(case: str) -> None:
    fn, kind, text = REFUSED[case]
    with pytest.raises(kind, match=text):
        simulate(2)(fn)


# Dynamo looks for `.grad` of its inputs and hides the warning that it gets, but not from an "error" filter.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_block_is_not_a_compiled_step() -> None:
    block = torch.compile(lambda w, x: (w @ x).relu(), backend="aot_eager")

    def fn(mesh: SimulatedMesh) -> Any:
        loss_fn = lambda state: block(mf.unshard(state["l.0"])["w"], mf.unshard(state["l.1"])["w"]).sum()  # noqa: E731
        return mf.unshard(mf.value_and_grad(loss_fn)(state_of(mesh))[1])["l.0.w"].tolist()

    assert simulate(2)(fn) == 2 * [[[2.0, 2.0], [2.0, 2.0]]]


def test_process_groups_are_refused() -> None:
    text = "`simulate` got a process with a torch.distributed process group; expected one without"
    with single_rank(), pytest.raises(mf.SimulationError, match=text):
        simulate(2)(lambda mesh: None)

    def fn(mesh: SimulatedMesh) -> Any:
        with single_rank():
            return state_of(mesh)

    with pytest.raises(mf.SimulationError, match=text):
        simulate(2)(fn)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0,), "`world_size` got 0; expected a positive number of ranks, or a tuple of axis sizes; write 4"),
        ((True,), "`world_size` got True; expected"),
        (("4",), "`world_size` got '4'; expected"),
        (((2, 0),), r"`world_size` got \(2, 0\); expected"),
        (((),), r"`world_size` got \(\); expected"),
        (([2, 2],), r"`world_size` got \[2, 2\]; expected"),
        (((2, 2), ("a", "a")), r"`names` got \('a', 'a'\); expected a tuple of 2 different axis names"),
        (((2, 2), ("a",)), "`names` got"),
        (((2, 2), "ab"), "`names` got 'ab'; expected"),
        (((2, 2, 2),), "`names` got None; expected a tuple of 3 different axis names; name each axis"),
    ],
)
def test_what_makes_no_mesh(arguments: Any, text: str) -> None:
    with pytest.raises(mf.SimulationError, match=text):
        simulate(*arguments)


def test_turns_run_in_order_and_one_at_a_time() -> None:
    turns, said, ready = Turns(), [], []

    def call(number: int) -> int:
        said.append(number)
        ready.append(number)
        turns.wait(lambda: len(ready) == 3, lambda: "the others")
        said.append(number)
        return number * number

    assert turns.run([lambda n=n: call(n) for n in range(3)]) == [0, 1, 4]
    assert said == [0, 1, 2, 2, 0, 1]
    assert turns.current() is None
