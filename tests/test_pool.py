"""The pool of real ranks itself: what it returns, and that no failure can hang or poison it."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist

import pool
from pool import WORLD_SIZES, RankError, RankTimeout, run_ranks


class Awkward(Exception):
    """Can be pickled but not unpickled."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")


def describe(rank: int, world_size: int, *args: object) -> tuple[object, ...]:
    return (rank, world_size, dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), *args)


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def sum_of(rank: int, world_size: int, scale: int) -> torch.Tensor:
    x = torch.full((3,), float(rank * scale))
    dist.all_reduce(x)
    return x


def backward(rank: int, world_size: int) -> torch.Tensor:
    x = torch.ones(2, requires_grad=True)
    (grad,) = torch.autograd.grad((x * (rank + 1)).sum(), x)
    dist.all_reduce(grad)
    return grad


def random_number(rank: int, world_size: int) -> float:
    return torch.rand(()).item()


def raise_on(rank: int, world_size: int, ranks: tuple[int, ...], kind: type[Exception]) -> int:
    if rank in ranks:
        raise kind(f"`x` is bad on {ranks}")
    return rank


def raise_while_others_wait(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("only I")
    dist.barrier()


def raise_awkward(rank: int, world_size: int) -> None:
    raise Awkward(1, 2)


def wait_for_ever_on(rank: int, world_size: int, stuck: int) -> None:
    if rank == stuck:
        threading.Event().wait()


def die_on(rank: int, world_size: int, doomed: int) -> None:
    if rank == doomed:
        os._exit(7)


def crash_on(rank: int, world_size: int, doomed: int) -> None:
    if rank == doomed:
        os.kill(os.getpid(), signal.SIGSEGV)


def mismatch(rank: int, world_size: int) -> None:
    dist.all_reduce(torch.zeros(2 + rank))


def warn(rank: int, world_size: int) -> None:
    warnings.warn("mind the gap", UserWarning, stacklevel=1)


def return_a_lock(rank: int, world_size: int) -> object:
    return threading.Lock()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_each_rank_runs_in_its_own_world(world_size: int) -> None:
    expected = [(rank, world_size, rank, world_size, 1, "a", 2) for rank in range(world_size)]
    assert run_ranks(world_size, describe, "a", 2) == expected


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_collectives_and_tensors(world_size: int) -> None:
    for scale in (1, 2, 3):
        expected = torch.full((3,), float(scale * sum(range(world_size))))
        results = run_ranks(world_size, sum_of, scale)
        assert len(results) == world_size
        for result in results:
            torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_autograd_works_after_the_fork_whatever_this_process_did_before() -> None:
    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(x.sum(), x)
    assert [grad.tolist() for grad in run_ranks(2, backward)] == [[3.0, 3.0]] * 2


def test_workers_persist() -> None:
    first = run_ranks(2, process_id)
    assert len(set(first)) == 2
    assert os.getpid() not in first
    assert run_ranks(2, process_id) == first


def test_a_pool_is_renewed_after_its_share_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_ranks(2, process_id)
    monkeypatch.setattr(pool, "CALLS_PER_POOL", 1)
    assert not set(first) & set(run_ranks(2, process_id))


def test_random_numbers_differ_between_ranks_and_repeat_between_calls() -> None:
    first = run_ranks(2, random_number)
    assert first[0] != first[1]
    assert run_ranks(2, random_number) == first


def test_every_rank_raises() -> None:
    with pytest.raises(RankError, match=r"ranks 0, 1, 2 of 3: raised KeyError: ") as caught:
        run_ranks(3, raise_on, (0, 1, 2), KeyError)
    errors = caught.value.exceptions
    assert [type(error) for error in errors] == [KeyError] * 3
    assert len({str(error) for error in errors}) == 1
    assert caught.value.unanswered == ()
    assert caught.value.__cause__ is errors[0]
    assert str(caught.value).count("in raise_on") == 1


def test_one_rank_raises_and_the_others_return() -> None:
    with pytest.raises(RankError, match=r"rank 2 of 3: raised ValueError: `x` is bad on \(2,\)") as caught:
        run_ranks(3, raise_on, (2,), ValueError)
    assert [type(error) for error in caught.value.exceptions] == [type(None), type(None), ValueError]
    assert run_ranks(3, raise_on, (), ValueError) == [0, 1, 2]


def test_one_rank_raises_while_the_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GRACE", 0.5)
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 3: raised ValueError: only I") as caught:
        run_ranks(3, raise_while_others_wait)
    assert time.monotonic() - began < 10
    assert caught.value.unanswered == (0, 2)
    assert "ranks 0, 2 of 3: did not answer within 0.5 s of the first error" in str(caught.value)
    assert "in raise_while_others_wait" in str(caught.value).partition("rank 0 was at:")[2]
    assert len(run_ranks(3, sum_of, 1)) == 3


def test_a_rank_that_does_not_answer() -> None:
    run_ranks(2, process_id)
    with pytest.raises(RankTimeout, match=r"rank 1 of 2: did not answer within 0\.2 s") as caught:
        run_ranks(2, wait_for_ever_on, 1, timeout=0.2)
    assert caught.value.unanswered == (1,)
    assert caught.value.exceptions == [None, None]
    assert "in wait_for_ever_on" in str(caught.value)
    assert len(run_ranks(2, sum_of, 1)) == 2


def test_a_rank_that_dies() -> None:
    with pytest.raises(RankError, match="rank 0 of 2: the process died with exit code 7") as caught:
        run_ranks(2, die_on, 0)
    assert [type(error) for error in caught.value.exceptions] == [ChildProcessError, type(None)]
    assert len(run_ranks(2, sum_of, 1)) == 2


def test_a_rank_that_crashes_says_where() -> None:
    with pytest.raises(RankError, match="rank 1 of 2: the process died with exit code -11") as caught:
        run_ranks(2, crash_on, 1)
    assert "in crash_on" in str(caught.value).partition("rank 1 died at:")[2]


@pytest.mark.skipif("INFO" in pool._ENVIRONMENT.values(), reason="torch 2.11's check of Gloo knows no reduce-scatter")
def test_a_mismatched_collective_raises_instead_of_hanging() -> None:
    with pytest.raises(RankError, match="Detected mismatch between collectives on ranks"):
        run_ranks(2, mismatch)


def test_warnings_are_errors_on_every_rank() -> None:
    with pytest.raises(RankError, match="ranks 0, 1 of 2: raised UserWarning: mind the gap"):
        run_ranks(2, warn)


def test_an_exception_that_does_not_survive_pickling_keeps_its_text() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(1, raise_awkward)
    assert str(caught.value.exceptions[0]) == "Awkward: 1 and 2"


def test_a_result_that_cannot_be_pickled_is_the_ranks_error() -> None:
    with pytest.raises(RankError, match="cannot pickle"):
        run_ranks(1, return_a_lock)


def test_bad_arguments_are_refused_here() -> None:
    with pytest.raises(TypeError, match="expected a function defined at the top level"):
        run_ranks(1, lambda rank, world_size: None)
    with pytest.raises(ValueError, match="`world_size` is 0; expected at least 1"):
        run_ranks(0, process_id)


def test_everything_ends_with_the_session() -> None:
    pids = run_ranks(2, process_id)
    zygote = pool._zygote
    assert zygote is not None
    pool.shutdown()
    assert zygote.process.returncode == 0
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert len(run_ranks(2, process_id)) == 2
