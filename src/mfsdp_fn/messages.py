"""Messages straight from tensor to tensor, for backends that take many at once: nothing is packed and nothing copied.

NCCL runs a batch of sends and receives as one kernel, as it does an all-to-all, which is such a batch. Gloo has no such
thing, and Dynamo would bake each rank's list of peers into its graph, so there what goes to one peer is packed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class PendingMessages:
    """Launched sends and receives, and the tensors that travel: alive until they are waited for."""

    works: tuple[dist.Work, ...]
    tensors: tuple[torch.Tensor, ...]

    def wait(self) -> None:
        """Order what follows on the current stream after all of them."""
        for work in self.works:
            work.wait()


def launch(
    sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]], group: dist.ProcessGroup
) -> PendingMessages:
    """Launch messages of contiguous tensors, each with the global rank it goes to or comes from.

    What one rank sends to another arrives in the order in which both list it.
    """
    operations = [dist.P2POp(dist.isend, tensor, rank, group) for rank, tensor in sends]
    operations += [dist.P2POp(dist.irecv, tensor, rank, group) for rank, tensor in receives]
    works = dist.batch_isend_irecv(operations) if operations else ()
    return PendingMessages(tuple(works), tuple(operation.tensor for operation in operations))
