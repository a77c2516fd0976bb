"""What the plan alone says about a step: collectives and their bytes, and the memory of what is not activations.

    python examples/benchmarks/prediction.py --size 8B --ranks 64

Needs no process group and no GPU: the plan is made over an AbstractMesh from a model without storage.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable

import torch
from model import SIZES, Config, build

import mfsdp_fn as mf
from mfsdp_fn.buffer import Move

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in a step: how many, and the bytes of their fuller side, padding included.

    A rank sends or receives (N-1)/N of the bytes of gathers and reduce-scatters, and twice that of all-reduces.
    """

    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Bytes on this rank, unless said otherwise."""

    traffic: dict[str, Traffic]
    main: int
    compute: int  # beside the main weights; 0 where they are cast at each gather
    gradients: int
    largest_unit: int  # gathered
    transient: int  # beside weights and gradients, at most, activations left out
    padding: float  # of the elements

    @property
    def resident(self) -> int:
        return self.main + self.compute

    @property
    def peak(self) -> int:
        return self.resident + self.gradients + self.transient


def _total(moves: Iterable[tuple[Move, int]]) -> Traffic:
    """Of (move, bytes an element); an uneven collective carries the largest part for everyone, one rank nothing."""
    sending = [(move, itemsize) for move, itemsize in moves if sum(move.sizes) and move.axis.size > 1]
    sizes = [max(move.sizes) * len(move.sizes) * itemsize for move, itemsize in sending]
    return Traffic(len(sizes), sum(sizes))


def _add(*parts: Traffic) -> Traffic:
    return Traffic(sum(part.count for part in parts), sum(part.bytes for part in parts))


def predict(spec: mf.ShardSpec, *, microbatches: int = 1) -> Prediction:
    """Of one step in which every unit is used once a microbatch and needed again in backward."""
    gathers: list[Traffic] = []
    scatters: list[Traffic] = []
    all_reduces: list[Traffic] = []
    for group in spec.groups:
        dtypes, kept = group.dtypes, group.unit in spec.kept_units
        compute, reduce = dtypes.compute.itemsize, dtypes.reduce.itemsize
        times = microbatches * (1 if kept else 2)
        gathers += [_total((move, compute) for move in group.gathers)] * times
        if not group.requires_grad:
            continue
        gathers.append(_total((move, compute) for move in group.sync_gathers))
        scatters += [_total((move, reduce) for move in group.grad_scatters)] * microbatches
        scatters.append(_total((move, reduce) for move in group.deferred_scatters))
        size = group.grad_range.size * reduce
        count = sum(axis.size > 1 for axis in group.deferred_all_reduces) if size else 0
        all_reduces.append(Traffic(count, size * count))
    by_kind = {"gather": _add(*gathers), "scatter": _add(*scatters), "all_reduce": _add(*all_reduces)}
    numel = spec.numel
    return Prediction(
        traffic={kind: traffic for kind, traffic in by_kind.items() if traffic.count},
        main=sum(g.main_range.size * g.dtypes.main.itemsize for g in spec.groups),
        compute=sum(g.compute_range.size * g.dtypes.compute.itemsize for g in spec.groups if g.has_compute),
        gradients=sum(g.main_range.size * g.dtypes.grad.itemsize for g in spec.groups if g.requires_grad),
        largest_unit=max(_gathered(spec, unit) for unit in spec.units),
        transient=_transient(spec),
        padding=(sum(g.layout.size for g in spec.groups) - numel) / max(numel, 1),
    )


def _gathered(spec: mf.ShardSpec, unit: str) -> int:
    groups = [spec.groups[number] for number in spec.unit_groups(unit)]
    return sum(group.layout.size * group.dtypes.compute.itemsize for group in groups if group.gathers)


def _transient(spec: mf.ShardSpec) -> int:
    """The most that backward has at once for one unit.

    The unit and the one ahead gathered, its gradients as autograd has them and packed, and what its reduction brings,
    where that is not the gradient itself.
    """
    found = [0]
    for position, unit in enumerate(spec.units):
        groups = [spec.groups[number] for number in spec.unit_groups(unit) if spec.groups[number].requires_grad]
        here = _gathered(spec, unit) + (_gathered(spec, spec.units[position - 1]) if position else 0)
        for group in groups:
            compute, reduce = group.dtypes.compute.itemsize, group.dtypes.reduce.itemsize
            here += group.layout.size * (compute + reduce)
            if group.dtypes.reduce != group.dtypes.grad:
                here += group.grad_range.size * reduce
        found.append(here)
    return max(found)


def predicted_spec(
    config: Config, ranks: int, compute: torch.dtype, reduce: torch.dtype, *, stored: bool = True
) -> mf.ShardSpec:
    """The plan of the benchmarks, seen from rank 0."""
    from forms import planned  # here, so that a prediction does not load what it does not need

    mesh = mf.AbstractMesh((ranks,), ("dp",))
    return planned(mf.params_of(build(config, torch.device("meta"))), mesh, compute, reduce, stored=stored)


def lines(prediction: Prediction, ranks: int) -> list[str]:
    """For people."""
    kinds = {"gather": "all-gathers", "scatter": "reduce-scatters", "all_reduce": "all-reduces"}
    moved = []
    for kind, traffic in prediction.traffic.items():
        wire = traffic.bytes * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
        moved.append(
            f"{traffic.count} {kinds[kind]} of {traffic.bytes / GIB:.3f} GiB ({wire / GIB:.3f} on the wire a rank)"
        )
    p = prediction
    return [
        f"  a step: {', '.join(moved) or 'nothing is sent'}",
        f"  resident {p.resident / GIB:.2f} GiB (main {p.main / GIB:.2f}, compute {p.compute / GIB:.2f}), gradients "
        f"{p.gradients / GIB:.2f}, largest gathered unit {p.largest_unit / GIB:.3f}, padding {p.padding:.3%}",
        f"  peak without activations at most {p.peak / GIB:.2f} GiB",
    ]


def describe(name: str, config: Config, ranks: int, reduce: torch.dtype) -> list[str]:
    """The prediction of the benchmark's two plans."""
    found = []
    for stored, title in ((True, "compute weights stored"), (False, "cast at gather")):
        spec = predicted_spec(config, ranks, torch.bfloat16, reduce, stored=stored)
        head = f"predicted for {name} over {ranks} rank(s), {spec.numel / 1e9:.2f} B parameters, {title}:"
        found += [head, *lines(predict(spec), ranks)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, nargs="+", default=["2B"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 8, 64])
    args = parser.parse_args()
    for size in args.size:
        for ranks in args.ranks:
            print(*describe(size, SIZES[size], ranks, torch.float32), sep="\n")


if __name__ == "__main__":
    main()
