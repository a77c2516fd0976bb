"""Tables about owner compute, by planning alone: bytes exchanged against a lower bound, and load balance.

    python examples/benchmarks/owner_tables.py

The bound 2 b (P/N) (N-1)/N is what a rank sends if all P elements of all matrices are gathered from even shards to
evenly spread owners and scattered back, in b bytes each. Matrices that one rank holds whole don't travel, so
what is sent can be less.
"""

from __future__ import annotations

import torch

import mfsdp_fn as mf
from mfsdp_fn.owner_planning import GroupOwnerLayout, ns_cost_fn, owner_loads, plan_owners

WIRE = 2  # bytes: Muon's exchange is in bfloat16, whatever the weights are in
DIMS = {"Llama-3.1-8B": (4096, 14336, 32), "Llama-3.1-70B": (8192, 28672, 80), "Llama-3.1-405B": (16384, 53248, 126)}


def spec_of(model: str, ranks: int, one_unit: bool) -> mf.ShardSpec:
    dim, ffn, layers = DIMS[model]
    shapes = {"q": (dim, dim), "k": (1024, dim), "v": (1024, dim), "o": (dim, dim)}
    shapes |= {"gate": (ffn, dim), "up": (ffn, dim), "down": (dim, ffn), "norm1": (dim,), "norm2": (dim,)}
    params = {
        f"layers.{i}.{name}": torch.empty(shape, device="meta").requires_grad_()
        for i in range(layers)
        for name, shape in shapes.items()
    }
    mesh = mf.AbstractMesh((ranks,), ("dp",))
    return mf.plan(params, mesh, mf.zero3(), units=() if one_unit else ("layers.*",))


def loads(layouts: list[GroupOwnerLayout]) -> dict[int, float]:
    found: dict[int, float] = {}
    for owners in layouts:
        found = owner_loads(owners.layout, owners.tensor_to_owner, initial_loads=found)
    return found


def main() -> None:
    print("| model | groups | ranks | mean GB sent a rank | most | bound | mean / bound | max load / mean | no carry |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in DIMS:
        for one_unit in (False, True):
            for ranks in (2, 4, 8, 32, 64):
                spec = spec_of(model, ranks, one_unit)
                layouts = list(plan_owners(spec).values())
                sent = [0.0] * ranks
                elements = 0
                for owners in layouts:
                    elements += sum(owners.layout.tensor_shapes[i].numel() for i in owners.tensor_to_owner)
                    for (holder, owner), count in owners.traffic().items():
                        sent[holder] += count * WIRE / 1e9  # to the owner
                        sent[owner] += count * WIRE / 1e9  # and back
                bound = 2 * WIRE * elements / ranks * (ranks - 1) / ranks / 1e9
                mean = sum(sent) / ranks
                total = sum(ns_cost_fn(5)(o.layout.tensor_shapes[i]) for o in layouts for i in o.tensor_to_owner)
                planned = max(loads(layouts).values()) * ranks / total
                alone = max(loads([GroupOwnerLayout.from_group(group) for group in spec.groups]).values())
                print(
                    f"| {model} | {'one' if one_unit else 'a layer'} | {ranks} | {mean:.3f} | {max(sent):.3f} "
                    f"| {bound:.3f} | {mean / bound:.3f} | {planned:.3f} | {alone * ranks / total:.3f} |"
                )


if __name__ == "__main__":
    main()
