"""What a function launches: every collective in order, with its group and bytes, beside the matrix products."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_KINDS = {
    "all_gather_into_tensor": "gather",
    "all_gather_into_tensor_out": "gather",
    "reduce_scatter_tensor": "scatter",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "all_to_all_single": "all_to_all",
}
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::matmul", "aten::bmm")


@dataclasses.dataclass
class Event:
    """One collective (`kind` as above) or matrix product ("mm")."""

    kind: str
    group: str = ""
    sent: int = 0  # bytes of the input
    received: int = 0  # bytes of the output
    source: StorageWeakRef | None = None
    result: StorageWeakRef | None = None


class Counting(TorchDispatchMode):
    """Use as a context; then look at `events`, and `unwaited()`."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.open: dict[int, StorageWeakRef] = {}
        self.most_gathered = 0  # largest number of gathered buffers alive at a launch or product
        self.most_reducing = 0  # the same of reduction inputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        namespace, name = func.name().split(".")[0].split("::")
        if namespace == "_c10d_functional":
            if name == "wait_tensor":
                self.open.pop(args[0].untyped_storage()._cdata, None)
            elif name != "_wrap_tensor_autograd":  # DTensor's
                # The weak reference keeps the address from being used again.
                result, source = (StorageWeakRef(t.untyped_storage()) for t in (out, args[0]))
                group = args[-1] if isinstance(args[-1], str) else ""  # DTensor's own come with a process group
                sent, received = args[0].nbytes, out.nbytes
                self.events.append(Event(_KINDS[name], group, sent, received, source, result))
                self.open[out.untyped_storage()._cdata] = result
                self._look()
        elif f"{namespace}::{name}" in _PRODUCTS:
            self.events.append(Event("mm"))
            self._look()
        return out

    def _look(self) -> None:
        alive = [e for e in self.events if e.kind == "gather" and e.result is not None and not e.result.expired()]
        self.most_gathered = max(self.most_gathered, len(alive))
        reducing = {
            e.source.cdata
            for e in self.events
            if e.kind in ("scatter", "all_reduce") and e.source is not None and not e.source.expired()
        }
        self.most_reducing = max(self.most_reducing, len(reducing))

    def count(self, kind: str, group: str | None = None) -> int:
        return sum(1 for event in self.events if event.kind == kind and group in (None, event.group))

    def counts(self) -> dict[str, int]:
        """Number of collectives of each kind."""
        kinds = dict.fromkeys(event.kind for event in self.events if event.kind != "mm")
        return {kind: self.count(kind) for kind in kinds}

    def bytes(self, kind: str) -> tuple[int, int]:
        """Bytes of the inputs and of the outputs of all collectives of a kind."""
        events = [event for event in self.events if event.kind == kind]
        return sum(event.sent for event in events), sum(event.received for event in events)

    def launches(self) -> list[tuple[str, str, int]]:
        """Kind, group and input bytes in order of launch: what ranks must agree on."""
        return [(event.kind, event.group, event.sent) for event in self.events if event.kind != "mm"]

    def unwaited(self) -> int:
        """Launches that nobody waited for."""
        return len(self.open)


class Waiting(TorchDispatchMode):
    """Launches and waits of reductions in order: S and s a reduce-scatter's, A and a an all-reduce's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = ""
        self.open: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        kind = {"reduce_scatter_tensor": "s", "all_reduce": "a"}.get(func.name().split("::")[-1].split(".")[0])
        if kind is not None:
            self.seen += kind.upper()
            self.open[out.data_ptr()] = kind
        elif "wait_tensor" in func.name():
            self.seen += self.open.pop(args[0].data_ptr(), "")
        return out
