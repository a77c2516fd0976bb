"""A checkpoint's directory: torch.distributed.checkpoint's format, written beside and put in place when whole."""

from __future__ import annotations

import io
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from .checkpoint_entries import Entry
from .checks import shown
from .errors import StateError, bad

INDEX, FORMAT = "mfsdp_fn.pt", 1  # what is no tensor of the model: a small file of its own, safe to read


def as_path(path: Any) -> Path:
    """The directory as a Path.

    Raises:
        StateError: no path of the local file system.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str) or not text or "://" in text:
        raise StateError(bad("path", shown(path), "a directory's path", "pass a str or Path on a shared file system"))
    return Path(os.path.abspath(text))


def beside(target: Path, what: str) -> Path:
    """Where a checkpoint is while it is no more, or not yet, in its place."""
    return target.with_name(f".{target.name}.mfsdp_fn-{what}")


def check_target(target: Path) -> None:
    """Refuse to write over what is no checkpoint.

    Raises:
        StateError: naming `path`.
    """
    if not os.path.lexists(target) or (target / INDEX).is_file():
        return
    if not target.is_dir():
        raise StateError(bad("path", f"a file, {target}", "a directory, or nothing yet", "choose another path"))
    if any(target.iterdir()):
        raise StateError(
            bad(
                "path",
                f"{target}, a directory with other things than a checkpoint in it",
                "an earlier checkpoint, an empty directory, or nothing yet",
                f"choose a path inside it, such as {target / 'step-1'}",
            )
        )


class Writer:
    """One rank's part in writing a checkpoint: each method a phase, after which ranks agree that it went well."""

    def __init__(self, target: Path, entries: Sequence[Entry]) -> None:
        self.target, self.new = target, beside(target, "new")
        self.storage = FileSystemWriter(self.new)
        self.parts = {
            (entry.name, part.offsets): (entry, part.data) for entry in entries for part in entry.parts if part.written
        }

    def clear(self) -> None:
        """First rank: a new directory beside the target."""
        shutil.rmtree(self.new, ignore_errors=True)
        self.new.mkdir(parents=True)

    def plan(self) -> SavePlan:
        """What this rank writes."""
        return SavePlan([_write_item(entry, offsets, data) for (_, offsets), (entry, data) in self.parts.items()])

    def write(self, plans: list[SavePlan], number: int) -> list[WriteResult]:
        """This rank's file, from all ranks' plans."""
        self.storage.set_up_storage_writer(number == 0)
        self.storage.prepare_local_plan(plans[number])
        plan = self.storage.prepare_global_plan(plans)[number]
        return self.storage.write_data(plan, _Writing({index: data for index, (_, data) in self.parts.items()})).wait()

    def finish(self, plans: list[SavePlan], results: list[list[WriteResult]], index: dict[str, Any]) -> None:
        """First rank: what the files hold, then the checkpoint in its place, and the older one removed.

        Raises:
            StateError: a tensor that ranks don't hold all of, or files that this rank can't see.
        """
        _, metadata = create_default_global_save_plan(plans)
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            written = sum(chunk.sizes.numel() for chunk in stored.chunks)
            if written != stored.size.numel():
                raise StateError(
                    bad(name, f"{written} elements of all ranks", f"{stored.size.numel()}", "save states of one plan")
                )
        self.storage.finish(metadata, results)
        with open(self.new / INDEX, "wb") as file:
            torch.save({"format": FORMAT} | index, file)
            file.flush()
            os.fsync(file.fileno())
        for result in (result for row in results for result in row):
            if not (self.new / result.storage_data.relative_path).is_file():
                raise StateError(
                    bad(
                        "path",
                        f"{self.target}, where the first rank doesn't see {result.storage_data.relative_path}",
                        "a directory on a file system that all ranks share",
                        "choose another path",
                    )
                )
        self._put_in_place()

    def _put_in_place(self) -> None:
        old = beside(self.target, "old")
        replaced = os.path.lexists(self.target)
        if replaced:  # only then: without a target `old` may be the one whole checkpoint
            shutil.rmtree(old, ignore_errors=True)
            os.replace(self.target, old)
        try:
            os.replace(self.new, self.target)
        except OSError:
            if replaced:
                os.replace(old, self.target)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def abandon(self) -> None:
        """First rank: nothing is left of a save that failed."""
        shutil.rmtree(self.new, ignore_errors=True)


def _write_item(entry: Entry, offsets: tuple[int, ...], data: torch.Tensor) -> WriteItem:
    box = ChunkStorageMetadata(torch.Size(offsets), data.shape)
    return WriteItem(
        index=MetadataIndex(entry.name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(box, TensorProperties(dtype=entry.dtype), entry.shape),
    )


class _Writing(DefaultSavePlanner):
    def __init__(self, data: dict[tuple[str, tuple[int, ...]], torch.Tensor]) -> None:
        super().__init__()
        self.data = data

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self.data[write_item.index.fqn, tuple(write_item.index.offset or ())]


class Reader:
    """A checkpoint to read: what it holds, from two small files."""

    def __init__(self, target: Path) -> None:
        if not (target / INDEX).is_file():
            old = beside(target, "old")
            where = f"the one that it was to replace is whole: move {old} there" if old.is_dir() else "see the path"
            got = f"{target}, where there is {'no checkpoint' if target.exists() else 'nothing'}"
            raise StateError(bad("path", got, "a directory that checkpoint.save wrote", where))
        self.target = target
        self.index: dict[str, Any] = torch.load(target / INDEX, map_location="cpu", weights_only=True)
        if self.index["format"] != FORMAT:
            raise StateError(
                bad(
                    "path",
                    f"format {self.index['format']}",
                    f"format {FORMAT}",
                    "read it with the version that wrote it",
                )
            )
        self.storage = FileSystemReader(target)
        self.metadata: Metadata = self.storage.read_metadata()

    @property
    def stored(self) -> dict[str, Any]:
        """Shape, dtype and boxes of each tensor, by name."""
        return self.metadata.state_dict_metadata

    def plan(self, entries: Sequence[Entry]) -> tuple[LoadPlan, _Reading]:
        """What this rank reads, and where to.

        Raises:
            StateError: boxes that the checkpoint doesn't have, naming the tensor.
        """
        items: list[ReadItem] = []
        data: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        for entry in entries:
            parts = [part for part in entry.parts if part.data.numel()]
            wanted = [ChunkStorageMetadata(torch.Size(part.offsets), part.data.shape) for part in parts]
            found = create_read_items_for_chunk_list(entry.name, self.stored[entry.name], wanted)
            if sum(math.prod(item.lengths) for item in found) != sum(part.data.numel() for part in parts):
                raise StateError(
                    bad("path", f"a checkpoint with a part of {entry.name!r} alone", "all of it", "save again")
                )
            items += found
            data.update({(entry.name, part.offsets): part.data for part in parts})
        return LoadPlan(items), _Reading(data)

    def read(self, plan: LoadPlan, planner: _Reading) -> None:
        """Into this rank's memory."""
        self.storage.set_up_storage_reader(self.metadata, False)
        with torch.no_grad():
            self.storage.read_data(plan, planner).wait()


class _Reading(DefaultLoadPlanner):
    def __init__(self, data: dict[tuple[str, tuple[int, ...]], torch.Tensor]) -> None:
        super().__init__()
        self.data = data

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        box = self.data[read_item.dest_index.fqn, tuple(read_item.dest_index.offset or ())]
        for dim, (start, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            box = box.narrow(dim, start, size)
        return box

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass
