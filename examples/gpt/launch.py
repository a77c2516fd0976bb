"""Local ranks: start them, end them all when one fails or the user presses Ctrl-C.

Each rank is this program again in a process of its own, told its rank by the variables that torchrun uses too. Two
pipes tie it to its parent: one that the rank reads, whose end means that the parent is gone, and one that the parent
reads, whose end means that the rank is gone, and which carries the traceback if it failed.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

INTERRUPTED = 128 + signal.SIGINT  # what a shell reports for Ctrl-C
GRACE = 5.0  # seconds between asking a rank to end and killing it

_REPORT_FD = "TRAIN_REPORT_FD"
_STORE = "TRAIN_STORE"


def is_rank() -> bool:
    """Whether this process was started as a rank, by `run_ranks` or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def store_url() -> str:
    """Where ranks meet: the file that `run_ranks` named, else the address that torchrun gave."""
    return f"file://{os.environ[_STORE]}" if _STORE in os.environ else "env://"


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_ranks() -> int:
    """One rank a GPU; without GPUs two on the CPU, so that something is sharded."""
    import torch

    return torch.cuda.device_count() or 2


def run_ranks(command: Sequence[str], ranks: int) -> int:
    """Run `command` as that many ranks until all have ended; return the exit code for this process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` runs
    processes: list[subprocess.Popen[bytes]] = []
    reports: list[int] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        # Blocked while children start, and so in the children for good: Ctrl-C goes to the whole terminal group, but
        # only the parent acts on it. One that comes meanwhile is delivered when it is unblocked here.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            try:
                for rank in range(ranks):
                    reader, writer = os.pipe()
                    environment = _environment(rank, ranks, writer, os.path.join(folder, "store"))
                    reports.append(reader)
                    processes.append(
                        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, pass_fds=[writer])
                    )
                    os.close(writer)
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            return _watch(processes, reports)
        except KeyboardInterrupt:
            print("\nInterrupted: all ranks were ended.", file=sys.stderr)
            return INTERRUPTED
        finally:
            _end(processes)
            for reader in reports:
                os.close(reader)


def _environment(rank: int, ranks: int, report: int, store: str) -> Mapping[str, str]:
    mine = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores() // ranks)),  # ranks that fight over cores are slower than idle ones
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",  # else the host's name must resolve
    }
    names = {_REPORT_FD: str(report), _STORE: store}
    return defaults | os.environ | {name: str(value) for name, value in mine.items()} | names


def _watch(processes: Sequence[subprocess.Popen[bytes]], reports: Sequence[int]) -> int:
    """Wait for all ranks, or for the first one that fails."""
    texts = [b""] * len(processes)
    with selectors.DefaultSelector() as selector:
        for rank, reader in enumerate(reports):
            selector.register(reader, selectors.EVENT_READ, rank)
        while selector.get_map():
            for key, _ in selector.select():
                rank, chunk = key.data, os.read(key.fd, 1 << 16)
                texts[rank] += chunk
                if chunk:
                    continue
                selector.unregister(key.fd)
                code = processes[rank].wait()
                if code == 0:
                    continue
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed (exit code {code})"
                print(f"\nRank {rank} {how}; the others were ended.\n{texts[rank].decode()}", file=sys.stderr)
                return 128 - code if code < 0 else code
    return 0


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second Ctrl-C must not leave ranks behind
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def as_rank(work: Callable[[], None]) -> int:
    """Run a rank's work: under `run_ranks` tied to the parent, under torchrun as it is."""
    if _REPORT_FD not in os.environ:
        work()
        return 0
    report = int(os.environ[_REPORT_FD])
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        work()
    except BaseException as error:
        # Told and gone at once: the ranks that wait for this one see their connection break only after that, and
        # what they then raise is not what went wrong.
        sys.stdout.flush()
        with open(report, "w", encoding="utf-8", closefd=False) as pipe:
            pipe.write(str(error) if isinstance(error, SystemExit) else traceback.format_exc())
        os._exit(1)
    return 0


def _follow_parent() -> None:
    """End this process when its parent is gone, however that went."""
    while os.read(0, 1):
        pass
    os._exit(1)


def this_program() -> list[str]:
    """The command line of this process."""
    return [sys.executable, str(Path(sys.argv[0]).resolve()), *sys.argv[1:]]
