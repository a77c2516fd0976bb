"""Which layout `plan` gives a group, and why. Pure integers: the same on every rank."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Sequence
from fractions import Fraction

import torch

from .layout import GlobalLayout
from .layout_builder import build_for_row_atomic, build_for_row_atomic_unpadding
from .packing_search import pack_segments
from .placement import ShardLayout
from .ragged_boundaries import on_aligned_boundaries

ALIGNMENT = 16  # bytes: what a vector load, a matrix kernel or NCCL's fast path wants a start or a length to be of
THRESHOLD = Fraction(1, 32)  # by how much padding may lengthen the largest segment before it is not worth it
# How much padding may add to what is gathered where it lengthens no segment. More than the threshold, since then only
# eager NCCL gains from uneven segments, and a graph copies for them; and never little: a small message takes as long
# as its launch.
MORE_SENT = Fraction(1, 8)
LITTLE = 2**16  # bytes


class Wire(enum.Enum):
    """How uneven segments travel in eager code: as they are (NCCL), padded (Gloo), or not at all (symmetric memory)."""

    AS_THEY_ARE = "as they are"
    PADDED = "padded"
    EQUAL_ONLY = "equal only"


@dataclasses.dataclass(frozen=True)
class LayoutChoice:
    """What `plan` predicted for a group, in elements, and which layout it took.

    Args:
        picked: "padded", "unpadded" or "owners" (each tensor whole at its owner).
        why: the reason, for `explain`.
        padding: elements of padding in all segments, were the group padded.
        padded: the segment of every rank, were it padded.
        ragged: the largest segment of a rank, were it not padded.
        chunk_rule: elements of padding by the builder's own rule.
    """

    picked: str
    why: str
    padding: int = 0
    padded: int = 0
    ragged: int = 0
    chunk_rule: int = 0


def unit_of(itemsizes: Sequence[int]) -> int:
    """The least number of elements whose bytes are a multiple of 16 in each dtype.

    >>> unit_of((2, 4)), unit_of((16,))
    (8, 1)
    """
    return max(ALIGNMENT // math.gcd(ALIGNMENT, size) for size in itemsizes)


@functools.lru_cache(maxsize=256)  # a model's layers are mostly alike
def choose_layout(
    shapes: tuple[torch.Size, ...],
    ranks: int,
    *,
    block_size: int = 1,
    shard_layout: ShardLayout | None = ShardLayout.PADDED,
    unit: int = 1,
    leading_dims: tuple[int, ...] = (),
    wire: Wire = Wire.AS_THEY_ARE,
) -> tuple[GlobalLayout, LayoutChoice]:
    """The layout of one group: padded (the denser of two packings), not padded, or the better of both.

    Padded is the chunk rule's layout unless `pack_segments` finds smaller segments, or equal ones in which fewer
    matrices start off 16 bytes. Not padded is the builder's layout with boundaries moved to 16 bytes where a row or
    block ends nearby.

    Left to choose (`shard_layout` None), in this order:

    1. Where only equal segments can be sent (symmetric memory): padded.
    2. The largest segment, which bounds memory, and the time of a compiled graph and of Gloo, whose wire carries the
       largest for everyone: not padded if padding makes it longer by more than 1 part in 32.
    3. All that is gathered, which is the time of eager NCCL, whose wire carries segments as they are: not padded if
       padding adds more than 1 part in 8, and more than 64 KiB. Only on such a wire: on others uneven segments as
       long as padded ones save nothing, and are copied.
    4. Else padded: even collectives are the cheapest.

    Args:
        shapes: of the group's tensors, in buffer-planning order.
        ranks: number of segments.
        block_size: rows that are never cut apart.
        shard_layout: what was asked for; None to choose.
        unit: elements in 16 bytes, of the narrowest dtype in use.
        leading_dims: see `GlobalLayout`.
        wire: how uneven segments travel in eager code.

    >>> shapes = (torch.Size([2, 5]), torch.Size([2, 7]))
    >>> layout, choice = choose_layout(shapes, 2)
    >>> layout.rank_to_offset, layout.tensor_to_offset, choice.chunk_rule
    ((0, 14, 28), (0, 14), 46)
    >>> choice = choose_layout((torch.Size([3, 5]), torch.Size([3, 7])), 5, shard_layout=None)[1]
    >>> choice.picked, choice.why
    ('unpadded', 'padded is 40.00 % longer: more than 1/32')
    >>> for wire in Wire:  # two rows are the largest segment in any case; padding gives every rank two
    ...     choice = choose_layout((torch.Size([17, 4096]),), 16, shard_layout=None, wire=wire)[1]
    ...     print(choice.padded == choice.ragged == 2 * 4096, choice.picked, "since", choice.why)
    True unpadded since padded sends 88.24 % more: more than 1/8
    True padded since unpadded is no shorter
    True padded since symmetric memory takes only equal segments
    """
    depths = leading_dims or (1,) * len(shapes)
    rows = [torch.Size((math.prod(s[:d]), *s[d:])) if s else s for s, d in zip(shapes, depths, strict=True)]
    seed = build_for_row_atomic(rows, ranks, block_size=block_size)
    ragged = build_for_row_atomic_unpadding(rows, ranks, block_size=block_size)
    ragged = on_aligned_boundaries(ragged, block_size, unit)
    padded = _denser(seed, ranks, block_size, unit)
    widest = max(stop - start for start, stop in zip(ragged.rank_to_offset, ragged.rank_to_offset[1:], strict=False))
    segment, numel = padded.size // ranks, ragged.size
    if shard_layout is not None:
        picked, why = shard_layout, "as asked for"
    else:
        picked, why = _pick(segment, widest, padded.size, numel, unit, wire)
    choice = LayoutChoice(picked.value, why, padded.size - numel, segment, widest, seed.size - numel)
    layout = padded if picked is ShardLayout.PADDED else ragged
    return dataclasses.replace(layout, tensor_shapes=shapes, leading_dims=leading_dims), choice


def _pick(padded: int, ragged: int, sent: int, numel: int, unit: int, wire: Wire) -> tuple[ShardLayout, str]:
    """By the segment if padded, the largest if not, what is sent of all if padded, and of all if not."""
    if wire is Wire.EQUAL_ONLY:
        return ShardLayout.PADDED, "symmetric memory takes only equal segments"
    if padded * THRESHOLD.denominator > ragged * (THRESHOLD.denominator + THRESHOLD.numerator):
        return ShardLayout.UNPADDED, f"padded is {_more(padded, ragged)} longer: more than {THRESHOLD}"
    much = sent - numel > numel * MORE_SENT and (sent - numel) * ALIGNMENT > LITTLE * unit
    if much and wire is Wire.AS_THEY_ARE:
        return ShardLayout.UNPADDED, f"padded sends {_more(sent, numel)} more: more than {MORE_SENT}"
    if padded <= ragged:
        return ShardLayout.PADDED, "unpadded is no shorter"
    return ShardLayout.PADDED, f"{_more(padded, ragged)} longer than unpadded: at most {THRESHOLD}"


def _more(one: int, other: int) -> str:
    return f"{float(Fraction(one - other, other)):.2%}".replace("%", " %")


def _denser(seed: GlobalLayout, ranks: int, block_size: int, unit: int) -> GlobalLayout:
    """The chunk rule's layout, or a better one."""
    shapes = seed.tensor_shapes
    segment, stray = seed.size // ranks, _stray(seed, unit)
    numels = tuple(shape.numel() for shape in shapes)
    aligns = tuple(block_size * seed.row_shape(index).numel() for index in range(len(shapes)))
    if segment * ranks == sum(numels) and not stray:
        return seed
    found = pack_segments(numels, aligns, ranks, unit, segment + bool(stray))
    if found is None:
        return seed
    offsets, size = found
    made = GlobalLayout(shapes, offsets, size * ranks, tuple(rank * size for rank in range(ranks + 1)))
    return made if size < segment or _stray(made, unit) < stray else seed


def _stray(layout: GlobalLayout, unit: int) -> int:
    """How many matrices start off 16 bytes."""
    pairs = zip(layout.tensor_to_offset, layout.tensor_shapes, strict=True)
    return sum(1 for offset, shape in pairs if len(shape) > 1 and offset % unit)
