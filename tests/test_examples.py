"""The examples as a reader runs them: programs of their own, with what they print and leave behind."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TIMEOUT = 300  # seconds; far more than any of these takes, for machines that are busy with other things
LAUNCHER = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); from gpt import launch; "


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=TIMEOUT, env=environment()
    )


def environment() -> dict[str, str]:
    """Without what would make an example believe that it is a rank already, and with warnings as errors."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return inherited | {"PYTHONWARNINGS": "error", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}


def losses(output: str, name: str) -> tuple[float, float]:
    match = re.search(rf"^{name} loss +\w+(?: 0)?: ([\d.]+) +\w+: ([\d.]+)$", output, re.MULTILINE)
    assert match, output
    return float(match[1]), float(match[2])


def test_every_option_of_train_gpt_is_explained() -> None:
    options = re.findall(r"^    add\((.*)\)$", (EXAMPLES / "train_gpt.py").read_text(), re.MULTILINE)
    assert len(options) >= 15
    assert not [option for option in options if "help=" not in option]


@pytest.mark.parametrize(
    "options",
    [
        ("--strategy", "zero3"),
        pytest.param(("--strategy", "zero1", "--microbatches", "2", "--optimizer", "sgd"), marks=pytest.mark.soak),
        pytest.param(("--strategy", "zero2", "--precision", "bf16", "--steps", "10"), marks=pytest.mark.soak),
        pytest.param(("--strategy", "hfsdp", "--mesh", "1", "2", "--steps", "10"), marks=pytest.mark.soak),
    ],
    ids=lambda options: options[1],
)
def test_train_gpt_learns_and_leaves_its_files(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run(EXAMPLES / "train_gpt.py", "--small", "--out", tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("starting 2 ranks: ")
    for name in ("train", "validation"):
        before, after = losses(done.stdout, name)
        assert before == pytest.approx(5.5, abs=0.4)  # ln 256 = 5.545: it knows nothing yet
        assert after < before - 0.5
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "loss.csv").read_text().splitlines()) >= 12
    assert (tmp_path / "sample.txt").read_text(encoding="utf-8").startswith("def ")


def test_strategies_agree_about_the_losses(tmp_path: Path) -> None:
    curves = []
    for strategy in ("ddp", "zero3"):
        out = tmp_path / strategy
        done = run(EXAMPLES / "train_gpt.py", "--small", "--steps", "5", "--strategy", strategy, "--out", out)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = (out / "loss.csv").read_text().splitlines()[1:6]
        curves.append([float(row.split(",")[1]) for row in rows])
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--strategy", "hsdp"), "give --mesh OUTER INNER"),
        (("--mesh", "1", "2"), "--mesh is for hsdp and hfsdp"),
        (("--steps", "0"), "expected a positive number, got 0"),
    ],
)
def test_train_gpt_refuses_options_that_mean_nothing(options: tuple[str, ...], message: str) -> None:
    done = run(EXAMPLES / "train_gpt.py", *options)
    assert done.returncode == 2
    assert message in done.stderr


def test_custom_step_learns_alone() -> None:
    done = run(EXAMPLES / "custom_step.py")
    assert done.returncode == 0, done.stdout + done.stderr
    check_custom_step(done.stdout)


def test_custom_step_learns_under_torchrun() -> None:
    done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLES / "custom_step.py")
    assert done.returncode == 0, done.stdout + done.stderr
    check_custom_step(done.stdout)


def check_custom_step(output: str) -> None:
    found = [float(text) for text in re.findall(r"loss ([\d.]+)", output)]
    assert len(found) == 5
    assert found[-1] < 0.1 * found[0]


# Ends of a run. A pipe that every process of the run inherits tells when the last of them is gone: it reads as ended
# only then. So nothing here has to poll or to wait for a guessed time.


@pytest.fixture
def witness() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)


def start(witness: tuple[int, int], *command: str | Path) -> subprocess.Popen[str]:
    """Start a program whose standard error, which its ranks inherit, is the witness' end."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=witness[1],
        text=True,
        env=environment(),
        start_new_session=True,
        # A shell's background job, as this one may be, ignores interrupts, and so would its children.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    os.close(witness[1])
    return process


def everything(reader: int) -> str:
    """What was written to standard error, once every process that had it open is gone."""
    with os.fdopen(os.dup(reader), encoding="utf-8") as pipe:
        return pipe.read()


def wait_for_first_step(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1/"):
            break


@pytest.mark.parametrize("whom", ["parent", "group"])
def test_ctrl_c_ends_all_ranks(tmp_path: Path, witness: tuple[int, int], whom: str) -> None:
    options = ("--small", "--steps", "100000", "--out", tmp_path)
    with start(witness, EXAMPLES / "train_gpt.py", *options) as process:
        wait_for_first_step(process)
        if whom == "parent":
            process.send_signal(signal.SIGINT)
        else:
            os.killpg(process.pid, signal.SIGINT)
        assert process.wait(TIMEOUT) == 130
        assert everything(witness[0]) == "\nInterrupted: all ranks were ended.\n"


def test_ranks_end_when_their_parent_is_killed(tmp_path: Path, witness: tuple[int, int]) -> None:
    options = ("--small", "--steps", "100000", "--out", tmp_path)
    with start(witness, EXAMPLES / "train_gpt.py", *options) as process:
        wait_for_first_step(process)
        process.kill()
        process.wait(TIMEOUT)
        assert everything(witness[0]) == ""


def launched(tmp_path: Path, work: str, ranks: int) -> list[str]:
    """A program that runs `work` as the given number of ranks; the ranks are this program again."""
    program = tmp_path / "program.py"
    program.write_text(
        f"{LAUNCHER}import os\ndef work():\n    rank = int(os.environ['RANK'])\n    {work}\n"
        f"sys.exit(launch.as_rank(work) if launch.is_rank() else launch.run_ranks(launch.this_program(), {ranks}))\n"
    )
    return [str(program)]


@pytest.mark.parametrize(
    ("work", "code", "message"),
    [
        ("1 // (rank - 1) or print(end='') if rank == 1 else input()", 1, "ZeroDivisionError"),
        ("os.kill(os.getpid(), 9) if rank == 1 else input()", 137, "Rank 1 was killed by SIGKILL"),
        ("sys.exit('no text') if rank == 1 else input()", 1, "no text"),
    ],
    ids=["raises", "killed", "exits"],
)
def test_a_rank_that_fails_ends_the_others(
    tmp_path: Path, witness: tuple[int, int], work: str, code: int, message: str
) -> None:
    with start(witness, *launched(tmp_path, work.replace("input()", "__import__('threading').Event().wait()"), 3)) as p:
        assert p.wait(TIMEOUT) == code
        text = everything(witness[0])
    assert "Rank 1" in text and message in text
    assert "Rank 0" not in text and "Rank 2" not in text


def test_ranks_that_succeed_end_with_success(tmp_path: Path, witness: tuple[int, int]) -> None:
    with start(witness, *launched(tmp_path, r"os.write(1, b'%d\n' % rank)", 3)) as process:
        assert process.stdout is not None
        assert sorted(process.stdout.read().split()) == ["0", "1", "2"]
        assert process.wait(TIMEOUT) == 0
        assert everything(witness[0]) == ""
