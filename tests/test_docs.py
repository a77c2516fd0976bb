"""The Python in the documents runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mfsdp_fn import testing

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: Path) -> list[tuple[int, str]]:
    """Each block's first line number and text."""
    text = document.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in BLOCK.finditer(text)]


def run_document(rank: int, world_size: int, name: str) -> int:
    """Run a document's blocks in order in one namespace; `mesh` is there, as its text says.

    A block that begins with "# test_" is a test file of its own, run afterwards and without a process group.
    """
    document = ROOT / name
    found = blocks(document)
    with testing.single_rank() as mesh:
        namespace: dict[str, Any] = {"__name__": "document", "mesh": mesh}
        for line, text in found:
            if not text.startswith("# test_"):
                run_block(document, line, text, namespace)
    for line, text in found:
        if text.startswith("# test_"):
            namespace = {"__name__": "document"}
            run_block(document, line, text, namespace)
            tests = [value for name, value in namespace.items() if name.startswith("test_")]
            assert tests
            for test in tests:
                test()
    return len(found)


def run_block(document: Path, line: int, text: str, namespace: dict[str, Any]) -> None:
    # Padded with empty lines, so that a traceback names the document's own line.
    exec(compile("\n" * (line - 1) + text, str(document), "exec"), namespace)


@pytest.mark.parametrize("name", ["README.md", "docs/tour.md"])
def test_python_in_the_documents_runs(name: str) -> None:
    assert run_document(0, 1, name) > 0
