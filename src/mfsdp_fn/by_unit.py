"""What a plan says by unit: on which mesh a unit lies, with which placements, and its gradients' factor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from . import units as units_module
from .communicators import Mesh, ranks_of
from .errors import PlanError, bad
from .mesh import AbstractMesh, check_abstract_mesh
from .placement import Placements, RowAtomic, check_placements, with_block_size
from .simulated_mesh import SimulatedMesh
from .tensor_parallel import same_mesh


@dataclasses.dataclass(frozen=True)
class UnitSettings:
    """What holds for one unit."""

    mesh: Mesh
    placements: Placements
    grad_scale: float


def default_mesh(mesh: Any) -> Mesh:
    """The mesh over which all ranks agree: the mesh itself, or that of ``""`` where there is one by unit.

    Raises:
        PlanError: what isn't a mesh, naming the argument.
    """
    if isinstance(mesh, Mapping):
        if "" not in mesh:
            raise PlanError(
                bad("mesh", f"meshes for {list(mesh)}", 'one for "" too', 'write {"": dp_mesh, "blocks.*.experts": …}')
            )
        for pattern, one in mesh.items():
            _check_mesh(one, _entry("mesh", pattern) if isinstance(pattern, str) else "mesh")
        return mesh[""]
    _check_mesh(mesh, "mesh")
    return mesh


def settings_of(
    units: Sequence[str], mesh: Any, placements: Any, grad_scale: Any, block_size: int
) -> tuple[UnitSettings, dict[str, UnitSettings]]:
    """The default settings, and each unit's.

    Raises:
        PlanError: a pattern that matches no unit, placements for another number of axes, a mesh off the default one;
            blocks of several rows where no unit is cut by rows.
    """
    meshes = _by_pattern("mesh", mesh, units)
    layouts = _by_pattern("placements", placements, units)
    scales = _by_pattern("grad_scale", grad_scale, units)
    scales.setdefault("", 1.0)
    if "" not in layouts:
        raise PlanError(
            bad(
                "placements",
                f"placements for {list(layouts)}",
                'some for "" too',
                'write {"": hsdp(), "blocks.*.experts": zero3()}',
            )
        )
    for pattern, one in layouts.items():
        if not isinstance(one, Placements):
            argument = _entry("placements", pattern if isinstance(placements, Mapping) else "")
            raise PlanError(bad(argument, repr(one), "Placements", "call a preset, such as zero3()"))
    for pattern, one in scales.items():
        if isinstance(one, bool) or not isinstance(one, (int, float)) or not math.isfinite(one):
            argument = _entry("grad_scale", pattern if isinstance(grad_scale, Mapping) else "")
            raise PlanError(bad(argument, one, "a finite number", "leave it out for the mean over ranks"))
    for pattern, one in meshes.items():
        if pattern:
            _check_inside(one, meshes[""], _entry("mesh", pattern))
        # Each mesh is one object from here on: a slice that was taken twice has one set of communicators.
        meshes[pattern] = next(other for other in meshes.values() if _is_same(one, other))

    def settle(unit: str) -> UnitSettings:
        there = units_module.split(unit)
        at, where = _longest("mesh", meshes, there)
        laid, how = _longest("placements", layouts, there)
        argument = _entry("placements", laid if isinstance(placements, Mapping) else "")
        if at and how.ndim != where.ndim:
            raise PlanError(
                bad(
                    argument,
                    f"{how.ndim} placements for unit {unit!r}",
                    f"one for each of the {where.ndim} axes of mesh[{at!r}]",
                    'give placements by unit too: {"": hsdp(), "blocks.*.experts": zero3()}',
                )
            )
        check_placements(how, where.ndim, argument)
        return UnitSettings(where, how, float(_longest("grad_scale", scales, there)[1]))

    default, found = settle(""), {unit: settle(unit) for unit in units}
    used = dict.fromkeys(one.placements.optimizer for one in found.values())
    if block_size > 1 and used and not any(type(p) is RowAtomic for optimizer in used for p in optimizer):
        raise PlanError(
            bad(
                "block_size",
                block_size,
                f"1 with the optimizer placements {', '.join(map(str, used))}",
                "leave it out: no RowAtomic() is there to keep blocks together for",
            )
        )

    def blocked(one: UnitSettings) -> UnitSettings:
        return dataclasses.replace(one, placements=with_block_size(one.placements, block_size))

    return blocked(default), {unit: blocked(one) for unit, one in found.items()}


def check_keep_gathered(patterns: Sequence[str], settings: Mapping[str, UnitSettings]) -> None:
    """Refuse patterns of units to keep gathered that say nothing.

    Raises:
        PlanError: a pattern that matches no unit, or only units that are never gathered.
    """
    units_module.check_patterns("runtime.keep_gathered", patterns)
    for pattern in patterns:
        found = [unit for unit in settings if units_module.matches(pattern, units_module.split(unit))]
        if not found:
            raise PlanError(
                bad(
                    "runtime.keep_gathered",
                    repr(pattern),
                    f"a pattern that matches one of the units {tuple(settings)[:6]}",
                    "mend the pattern or leave it out",
                )
            )
        if not any(p.is_sharded for unit in found for p in settings[unit].placements.parameter):
            raise PlanError(
                bad(
                    "runtime.keep_gathered",
                    f"{pattern!r}, whose units {tuple(found[:6])} keep whole weights",
                    "a pattern of units that are gathered, as under zero3(), hsdp() or hfsdp()",
                    "leave it out",
                )
            )


def _entry(argument: str, pattern: str) -> str:
    return f"{argument}[{pattern!r}]" if pattern else argument


def _by_pattern(argument: str, value: Any, units: Sequence[str]) -> dict[str, Any]:
    """Values by pattern; each pattern matches some unit, and no two disagree about one."""
    if not isinstance(value, Mapping):
        return {"": value}
    units_module.check_patterns(argument, list(value))
    for pattern in value:
        if pattern and not any(_applies(pattern, units_module.split(unit)) for unit in units):
            raise PlanError(
                bad(
                    argument,
                    repr(pattern),
                    f"a pattern that matches one of the units {list(units[:6])}",
                    "mend the pattern, or make such a unit with units=(…)",
                )
            )
    return dict(value)


def _applies(pattern: str, unit: units_module.Path) -> bool:
    """Whether a pattern matches a unit or something that the unit lies in."""
    return units_module.matches(pattern, unit[: len(units_module.split(pattern))])


def _longest(argument: str, values: Mapping[str, Any], unit: units_module.Path) -> tuple[str, Any]:
    """The longest pattern that applies to a unit, and its value; ``""`` applies to all.

    Raises:
        PlanError: two of one length do.
    """
    found = sorted((p for p in values if _applies(p, unit)), key=lambda pattern: -len(units_module.split(pattern)))
    if len(found) > 1 and len(units_module.split(found[0])) == len(units_module.split(found[1])):
        raise PlanError(
            bad(
                argument,
                f"{found[0]!r} and {found[1]!r} for unit {'.'.join(unit)!r}",
                "one longest pattern a unit",
                "make one of them longer, or leave it out",
            )
        )
    return found[0], values[found[0]]


def _check_mesh(mesh: Any, argument: str) -> None:
    if isinstance(mesh, AbstractMesh):
        check_abstract_mesh(mesh)
    elif isinstance(mesh, SimulatedMesh):
        pass  # made by `simulate`, with this rank
    elif not isinstance(mesh, DeviceMesh):
        raise PlanError(
            bad(argument, repr(mesh), "a DeviceMesh or an AbstractMesh", "make one with init_device_mesh(…)")
        )
    elif mesh.get_coordinate() is None:
        raise PlanError(
            bad(
                argument,
                "a mesh without this rank",
                "a mesh that holds the calling rank",
                "call plan only on ranks of the mesh",
            )
        )


def _is_same(one: Mesh, other: Mesh) -> bool:
    if isinstance(one, DeviceMesh) and isinstance(other, DeviceMesh):
        return same_mesh(one, other)
    return one == other


def _check_inside(mesh: Mesh, default: Mesh, argument: str) -> None:
    """Refuse a mesh that is no cell of the default one, as far as this rank can tell."""
    if isinstance(mesh, AbstractMesh) or isinstance(default, AbstractMesh):
        if type(mesh) is not type(default):
            raise PlanError(
                bad(argument, f"a {type(mesh).__name__}", f"a {type(default).__name__}, as the default", "mix no kinds")
            )
        if default.size() % mesh.size():
            raise PlanError(
                bad(
                    argument,
                    f"{mesh.size()} ranks",
                    f"a number that divides the default mesh's {default.size()}",
                    "units on a smaller mesh lie in cells of the default one",
                )
            )
        return
    outside = sorted(set(ranks_of(mesh)) - set(ranks_of(default)))
    if outside or mesh.device_type != default.device_type:
        raise PlanError(
            bad(
                argument,
                f"a mesh with ranks {outside[:4]} that the default mesh doesn't have"
                if outside
                else f"a {mesh.device_type} mesh beside a {default.device_type} one",
                "ranks and devices of the default mesh",
                'let mesh[""] be the widest',
            )
        )
