"""Pools of Gloo processes that run a test's function for real, one rank in each process.

    def double_the_rank(rank, world_size, factor):
        x = torch.tensor(rank)
        dist.all_reduce(x)
        return x.item() * factor

    def test_double():
        assert run_ranks(4, double_the_rank, 2) == [12, 12, 12, 12]

There is one pool for each world size. It starts when it is first asked for and lives until the session ends,
a rank fails, or `CALLS_PER_POOL` calls have been made.

Workers are forked, which makes a pool cheap, but never from the process that runs pytest: autograd and OpenMP
start threads there, and a fork of a process with threads inherits locks that nobody will release. They are
forked from a *zygote*, a fresh interpreter that imports torch, runs no tensor operation and waits for orders.
"""

from __future__ import annotations

import faulthandler
import importlib.metadata
import json
import os
import pickle
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

WORLD_SIZES = (1, 2, 3, 4)
TIMEOUT = 60.0
GRACE = 3.0  # seconds that the others get once a rank has failed: they may wait for it in a collective
CALLS_PER_POOL = 50  # process groups made by tests are never destroyed and each holds sockets and threads

_ENVIRONMENT = {
    # DETAIL: a mismatched collective raises at once instead of hanging. Its wrapper of torch 2.11's Gloo knows no
    # reduce-scatter.
    "TORCH_DISTRIBUTED_DEBUG": "INFO" if importlib.metadata.version("torch").startswith("2.11.") else "DETAIL",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # else importing numpy starts threads in the zygote
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",  # else the host's name must resolve
}
_PRELOAD = ("torch.distributed", "torch.distributed.tensor", "pytest", "hypothesis", "numpy", "mfsdp_fn")


class RankError(AssertionError):
    """Some rank raised, died or did not answer.

    Attributes:
        exceptions: what each rank raised, in rank order; None where it returned or did not answer. A rank
            that died has a ChildProcessError.
        unanswered: the ranks that gave no answer in time.
    """

    def __init__(self, message: str, exceptions: list[BaseException | None], unanswered: tuple[int, ...]) -> None:
        super().__init__(message)
        self.exceptions = exceptions
        self.unanswered = unanswered


class RankTimeout(RankError):
    """No rank raised, but some did not answer in time."""


def run_ranks(world_size: int, fn: Callable[..., T], *args: object, timeout: float = TIMEOUT) -> list[T]:
    """Run `fn(rank, world_size, *args)` on every rank of a Gloo world and return the results in rank order.

    `fn` is a module-level function; its arguments and its result travel by pickle (a view of a tensor takes
    its whole storage along). It runs in a process group of exactly `world_size`, with one thread, under the
    session's warning filters, and with a random seed that differs between ranks but not between calls.

    Raises:
        RankError: some rank raised or died; the message has the tracebacks, `.exceptions` the exceptions.
        RankTimeout: no rank raised, but some did not answer in `timeout` seconds.
    """
    if world_size < 1:
        raise ValueError(f"`world_size` is {world_size}; expected at least 1.")
    try:
        payload = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"`fn` ({fn!r}) or its arguments can't be pickled ({error}); expected a function defined at the "
            "top level of an importable module and arguments without lambdas, process groups or open files."
        ) from error
    pool = _pools.get(world_size)
    if pool is not None and pool.calls >= CALLS_PER_POOL:
        pool.stop()
        pool = None
    if pool is None:
        pool = _Pool(world_size)
    pool.calls += 1
    return pool.run(payload, timeout)


def configure(warning_filters: Sequence[str]) -> None:
    """Use these warning filters (pytest's notation) in pools that start from now on."""
    _warning_filters[:] = warning_filters


def warm_up() -> None:
    """Start the zygote now, so that it imports torch while something else goes on."""
    global _zygote
    if _zygote is None:
        _zygote = _Zygote()


def shutdown() -> None:
    """Stop every pool and the zygote."""
    global _zygote
    for pool in list(_pools.values()):
        pool.stop()
    if _zygote is not None:
        _zygote.close()
        _zygote = None


# The side of the process that runs pytest.


@dataclass(frozen=True)
class _Answer:
    """What came back from one rank."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


class _Zygote:
    """The interpreter that workers are forked from."""

    def __init__(self) -> None:
        self.control, theirs = Pipe()
        boot = (
            "import json, sys; sys.path[:] = json.loads(sys.argv[2]); import pool; pool._zygote_main(int(sys.argv[1]))"
        )
        path = [os.path.dirname(os.path.abspath(__file__)), *(entry or os.getcwd() for entry in sys.path)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", boot, str(theirs.fileno()), json.dumps(path)],
            env=os.environ | _ENVIRONMENT,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for pytest, which then stops the workers in its own time
        )
        theirs.close()

    def fork(self, world_size: int, ends: list[int]) -> list[int]:
        """Fork one worker a rank; `ends` are a connection and a pipe for stack dumps for each in turn."""
        self.control.send(("fork", world_size, list(_warning_filters)))
        for end in ends:
            send_handle(self.control, end, self.process.pid)
        return self.control.recv()

    def kill(self, pids: list[int]) -> list[int]:
        """End these workers and return their exit codes (a worker that had died by itself keeps its own)."""
        self.control.send(("kill", pids))
        return self.control.recv()

    def close(self) -> None:
        self.control.close()
        self.process.wait()


class _Pool:
    """One Gloo world of persistent workers."""

    def __init__(self, world_size: int) -> None:
        warm_up()
        assert _zygote is not None
        self.zygote = _zygote
        self.calls = 0
        self.folder = tempfile.mkdtemp(prefix="mfsdp_fn-pool-")
        self.connections: list[Connection] = []
        self.stacks: list[int] = []
        ends: list[int] = []
        theirs: list[Connection] = []
        for _ in range(world_size):
            ours, their_connection = Pipe()
            read_end, write_end = os.pipe()
            self.connections.append(ours)
            self.stacks.append(read_end)
            theirs.append(their_connection)
            ends += [their_connection.fileno(), write_end]
        self.pids = self.zygote.fork(world_size, ends)
        # Without these copies a worker's death closes its connection, and run() sees it.
        for connection in theirs:
            connection.close()
        for write_end in ends[1::2]:
            os.close(write_end)
        _pools[world_size] = self
        self.run(pickle.dumps((_join_world, (os.path.join(self.folder, "store"),))), TIMEOUT)

    def run(self, payload: bytes, timeout: float) -> list[Any]:
        try:
            for connection in self.connections:
                with suppress(BrokenPipeError):  # a dead worker is found when its answer is read
                    connection.send_bytes(payload)
            answers = self._collect(timeout)
            if any(answer is None or answer.error is not None for answer in answers):
                self._fail(answers, timeout)
        except BaseException:
            # Whatever went wrong, ranks may now disagree about which collective comes next.
            self.stop()
            raise
        return [answer.value for answer in answers if answer is not None]

    def stop(self) -> list[int]:
        """End the workers and return their exit codes."""
        world_size = len(self.connections)
        if _pools.get(world_size) is not self:
            return []
        del _pools[world_size]
        codes = self.zygote.kill(self.pids)
        for connection in self.connections:
            connection.close()
        for read_end in self.stacks:
            os.close(read_end)
        shutil.rmtree(self.folder, ignore_errors=True)
        return codes

    def _collect(self, timeout: float) -> list[_Answer | None]:
        answers: list[_Answer | None] = [None] * len(self.connections)
        waiting = {connection: rank for rank, connection in enumerate(self.connections)}
        deadline = time.monotonic() + timeout
        failed = False
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in self.connections:
                if connection not in ready:
                    continue
                rank = waiting.pop(connection)
                answer = self._receive(rank)
                answers[rank] = answer
                if answer.error is not None and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _receive(self, rank: int) -> _Answer:
        try:
            reply = self.connections[rank].recv_bytes()
        except (EOFError, ConnectionResetError):
            return _Answer(error=ChildProcessError("the process died"))
        return _Answer(*pickle.loads(reply))

    def _fail(self, answers: list[_Answer | None], timeout: float) -> NoReturn:
        unanswered = tuple(rank for rank, answer in enumerate(answers) if answer is None)
        stacks = {rank: self._stack(rank) for rank in unanswered}
        died = [rank for rank, answer in enumerate(answers) if answer and answer.error is not None and not answer.trace]
        last = {rank: said for rank in died if (said := self._read_stack(rank, patience=0.1))}
        codes = self.stop()
        exceptions: list[BaseException | None] = [None] * len(answers)
        reports: dict[tuple[str, str], list[int]] = {}  # ranks that raised the same error share one report
        for rank, answer in enumerate(answers):
            if answer is None or answer.error is None:
                continue
            error = answer.error
            if isinstance(error, ChildProcessError) and not answer.trace and codes:
                error = ChildProcessError(f"the process died with exit code {codes[rank]}")
            exceptions[rank] = error
            headline = f"raised {type(error).__name__}: {error}" if answer.trace else str(error)
            reports.setdefault((headline, answer.trace), []).append(rank)
        heads = [f"{_name(ranks, len(answers))}: {head}" for (head, _), ranks in reports.items()]
        bodies = [f"{_name(ranks, len(answers))}:\n{trace}" for (_, trace), ranks in reports.items() if trace]
        bodies += [f"rank {rank} died at:\n{stack}" for rank, stack in last.items()]
        if unanswered:
            when = f"{GRACE:g} s of the first error" if reports else f"{timeout:g} s"
            heads.append(f"{_name(unanswered, len(answers))}: did not answer within {when}")
            bodies += [f"rank {rank} was at:\n{stack}" for rank, stack in stacks.items()]
        message = "\n".join(heads) + "\n\n" + "\n".join(bodies)
        kind = RankError if reports else RankTimeout
        first = next((error for error in exceptions if error is not None), None)
        raise kind(message, exceptions, unanswered) from first

    def _stack(self, rank: int) -> str:
        """Where a worker that doesn't answer is: its handler writes this even while it is blocked in C++."""
        os.kill(self.pids[rank], signal.SIGUSR1)  # safe: the zygote reaps no worker before it is told to
        return self._read_stack(rank, patience=1.0) or "(it did not say)\n"

    def _read_stack(self, rank: int, patience: float) -> str:
        chunks: list[bytes] = []
        while select.select([self.stacks[rank]], [], [], patience)[0]:
            chunk = os.read(self.stacks[rank], 1 << 16)
            if not chunk:
                break
            chunks.append(chunk)
            patience = 0.1
        return b"".join(chunks).decode(errors="replace")


def _name(ranks: Sequence[int], world_size: int) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {world_size}"


_pools: dict[int, _Pool] = {}
_zygote: _Zygote | None = None
_warning_filters: list[str] = ["error"]


# The zygote's side.


def _zygote_main(control_fd: int) -> None:
    control = Connection(control_fd)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a process group of 4 ranks takes a dozen files
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 14)), hard))
    for name in _PRELOAD:
        with suppress(ImportError):  # a test that needs it says so in its own traceback
            import_module(name)
    children: set[int] = set()
    try:
        while True:
            order = control.recv()
            if order[0] == "fork":
                pids = _fork_workers(control, *order[1:])
                children.update(pids)
                control.send(pids)
            else:
                control.send([_end(pid) for pid in order[1]])
                children.difference_update(order[1])
    except (EOFError, ConnectionResetError):  # pytest closed its end, or was killed
        pass
    finally:
        for pid in children:
            _end(pid)


def _fork_workers(control: Connection, world_size: int, warning_filters: list[str]) -> list[int]:
    ends = [recv_handle(control) for _ in range(2 * world_size)]
    for end in ends:
        os.set_inheritable(end, False)
    if os.path.isdir("/proc/self/task"):
        assert len(os.listdir("/proc/self/task")) == 1, "an import started a thread: forking is not safe"
    pids: list[int] = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            try:
                control.close()
                mine = ends[2 * rank : 2 * rank + 2]
                for end in ends:
                    if end not in mine:
                        os.close(end)
                _work(rank, world_size, Connection(mine[0]), mine[1], warning_filters)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(1)
        pids.append(pid)
    for end in ends:
        os.close(end)
    return pids


def _end(pid: int) -> int:
    os.kill(pid, signal.SIGKILL)  # no effect on one that is dead already: it keeps its exit code
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# The workers' side.


def _work(rank: int, world_size: int, connection: Connection, stacks: int, warning_filters: list[str]) -> NoReturn:
    import torch

    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks, all_threads=True)  # a crash in C++ says where too
    torch.set_num_threads(1)
    while True:
        try:
            payload = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        reply = _answer(rank, world_size, payload, warning_filters)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(reply)


def _answer(rank: int, world_size: int, payload: bytes, warning_filters: list[str]) -> bytes:
    import torch
    from _pytest.config import parse_warning_filter

    with warnings.catch_warnings():
        for text in warning_filters:
            warnings.filterwarnings(*parse_warning_filter(text, escape=False))
        try:
            fn, args = pickle.loads(payload)
            torch.manual_seed(1000 + rank)
            return pickle.dumps((fn(rank, world_size, *args), None, ""))
        except BaseException as error:  # pytest.fail and SystemExit are answers too
            frames = error.__traceback__.tb_next if error.__traceback__ else None
            trace = "".join(traceback.format_exception(type(error), error, frames))
            return pickle.dumps((None, _portable(error), trace))


def _portable(error: BaseException) -> BaseException:
    """The exception, or a stand-in with the same text where it doesn't survive pickling."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


def _join_world(rank: int, world_size: int, store_path: str) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    # Far longer than any call: it is run_ranks that gives up, because it can say which rank was where.
    timeout = timedelta(minutes=30)
    dist.init_process_group(
        "gloo", init_method=f"file://{store_path}", rank=rank, world_size=world_size, timeout=timeout
    )
