"""The private torch API that the library rests on: in few files, each use with a test that fails when it goes."""

from __future__ import annotations

import io
import re
import tokenize
import weakref
from pathlib import Path

import pytest
import torch
from torch.distributed.distributed_c10d import (
    _resolve_process_group,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import mfsdp_fn
from mfsdp_fn.testing import single_rank

PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._\w+(\.\w+)?|\._cdata\b|\bfrom torch[\w.]*\._\w+|\bfrom torch[\w.]* import [\w, ]*\b_\w+"
)
# Where private API is used, and which. What the compiled path needs has tests beside its own.
ALLOWED = {
    "collectives.py": r"torch\.ops\._c10d_functional|torch\._foreach_copy_|.*import _resolve_process_group",
    # The first collective on a new group; the number of groups (tests/test_communicators.py).
    "communicators.py": r"torch\.ops\._c10d_functional|.*import _world",
    "symmetric.py": r"torch\.ops\._c10d_functional",
    "session.py": r"\._cdata",  # which buffer a saved view belongs to
    "saved.py": r"\._version",  # whether a saved tensor was written to
    "activation_checkpoints.py": r"torch\._C\._autograd",  # checkpoints are told apart
    "autodiff.py": r"from torch\.utils import _pytree",  # states become nodes of torch's own pytrees
    "compiling.py": r"(from )?torch\._(dynamo|functorch|inductor)\b.*",
    "casting.py": r"torch\.ops\._c10d_functional",
    "graph.py": r"torch\.ops\._c10d_functional",
    "labels.py": r"from torch\._C\._profiler",  # tests/test_labels.py
}


def code_of(path: Path) -> str:
    """The source without strings and comments."""
    kept = []
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in (tokenize.COMMENT, tokenize.STRING):
            kept.append((token.type, token.string))
    text = tokenize.untokenize(kept)
    return re.sub(r"\s*\.\s*", ".", re.sub(r"[^\S\n]+", " ", text))


def test_private_api_is_used_where_it_is_named() -> None:
    root = Path(mfsdp_fn.__file__).parent
    found = {}
    for path in sorted(root.rglob("*.py")):
        allowed = re.compile(ALLOWED.get(path.name, "nothing"))
        hits = sorted({m.group() for m in PRIVATE.finditer(code_of(path)) if not allowed.match(m.group())})
        if hits:
            found[str(path.relative_to(root))] = hits
    assert not found


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("all_gather_into_tensor", "(Tensor input, int group_size, Any group_name) -> Tensor"),
        ("reduce_scatter_tensor", "(Tensor input, str reduce_op, int group_size, Any group_name) -> Tensor"),
        ("all_reduce", "(Tensor input, str reduce_op, Any group_name) -> Tensor"),
        ("broadcast", "(Tensor input, int src, Any group_name) -> Tensor"),
        ("wait_tensor", "(Tensor tensor) -> Tensor"),
        (
            "all_gather_into_tensor_out",
            "(Tensor input, int group_size, Any group_name, *, Tensor(a!) out) -> Tensor(a!)",
        ),
        (
            "reduce_scatter_tensor_out",
            "(Tensor input, str reduce_op, int group_size, Any group_name, *, Tensor(a!) out) -> Tensor(a!)",
        ),
        ("all_reduce_", "(Tensor(a!) input, str reduce_op, Any group_name) -> Tensor(a!)"),
    ],
)
def test_functional_collectives(name: str, schema: str) -> None:
    found = str(getattr(torch.ops._c10d_functional, name).default._schema)
    # Newer releases take a process group where a name was; a name still does.
    assert re.sub(r"(str|Any) group_name", "Any group_name", found) == f"_c10d_functional::{name}{schema}"


def test_a_process_group_gives_its_backend() -> None:
    with single_rank() as mesh:
        assert type(mesh.get_group(0)._get_backend(torch.device("cpu"))).__name__.startswith("ProcessGroup")


def test_a_launch_must_be_waited_for_and_gives_a_new_tensor() -> None:
    with single_rank() as mesh:
        x = torch.arange(4.0)
        for raw in (
            torch.ops._c10d_functional.all_reduce(x, "sum", mesh.get_group(0).group_name),
            torch.ops._c10d_functional.all_gather_into_tensor(x, 1, mesh.get_group(0).group_name),
            torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", 1, mesh.get_group(0).group_name),
        ):
            done = torch.ops._c10d_functional.wait_tensor(raw)
            assert torch.equal(done, x) and done.data_ptr() != x.data_ptr()


def test_groups_are_found_by_name() -> None:
    with single_rank() as mesh:
        group = mesh.get_group(0)
        found = _resolve_process_group(group.group_name)  # pyright: ignore[reportArgumentType]
        assert found.group_name == group.group_name and found.size() == 1


def test_foreach_copy_casts_and_follows_strides() -> None:
    source = torch.arange(6.0).reshape(2, 3).t()
    target = torch.empty(3, 2, dtype=torch.float64)
    torch._foreach_copy_([target], [source])  # pyright: ignore[reportPrivateImportUsage]
    assert torch.equal(target, source.double())


def test_storage_addresses_and_weak_references() -> None:
    base = torch.zeros(4)
    view = base[1:3]
    assert base.untyped_storage()._cdata == view.untyped_storage()._cdata
    assert torch.zeros(4).untyped_storage()._cdata != base.untyped_storage()._cdata
    held = StorageWeakRef(base.untyped_storage())
    address = base.untyped_storage()._cdata
    del base
    assert not held.expired()
    del view
    assert held.expired()
    # While the weak reference lives, no other storage gets the address.
    assert all(torch.zeros(4).untyped_storage()._cdata != address for _ in range(100))


def test_an_alias_lives_as_long_as_views_of_it() -> None:
    """Not private, but not documented: views keep their base's Python object alive, also through views of views."""
    buffer = torch.arange(4.0)
    alias = torch.empty(0).set_(buffer.untyped_storage(), 0, buffer.shape, buffer.stride())
    held = weakref.ref(alias)
    view = alias[1:3].view(1, 2).t()
    del alias
    assert held() is not None
    del view
    assert held() is None


def test_the_innermost_hooks_identify_a_checkpoint() -> None:
    top = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
    assert top(False) is None
    seen = []

    def part(x: torch.Tensor) -> torch.Tensor:
        seen.extend([top(False)[0], top(False)[0]])
        return x * x

    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        checkpoint(part, x, use_reentrant=False)
    assert seen[0] is seen[1] and seen[1] is not seen[2]
    assert all(hook.__module__ == "torch.utils.checkpoint" for hook in seen)


def test_reentrant_checkpoint_is_recognised_by_its_frame() -> None:
    frames = []

    def part(x: torch.Tensor) -> torch.Tensor:
        import sys

        frame = sys._getframe()
        while frame is not None:
            frames.append((frame.f_code.co_name, Path(frame.f_code.co_filename).name))
            frame = frame.f_back
        return x * 2

    checkpoint(part, torch.ones(2, requires_grad=True), use_reentrant=True)
    assert ("forward", "checkpoint.py") in frames
