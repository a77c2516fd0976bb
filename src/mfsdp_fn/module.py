"""The `nn.Module` bridge: run an unmodified module on a sharded state.

The module runs as a *skeleton*: shallow copies of its submodules that share everything with the originals except
their parameters, which are looked up in the state. So the user's module is never touched, also not when its forward
raises, and there are no hooks on it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .checks import shown
from .errors import StateError, bad
from .rewiring import Rewiring
from .spec import ShardSpec
from .state import ShardState, check_state
from .units import split
from .unsharding import gather_values


def params_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The module's parameters by name, tied ones under each of their names: a tree for `plan` and `shard`.

    >>> import torch
    >>> list(params_of(torch.nn.Linear(2, 3)))
    ['weight', 'bias']
    """
    _check_module(module)
    return dict(module.named_parameters(remove_duplicate=False))


def functional_call(
    module: nn.Module, state: ShardState, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """``module(*args, **kwargs)`` with the parameters of `state`, each unit gathered while its submodule runs.

    Communicates what `unshard` does, for the root unit when the module starts and for every other unit each time
    its submodule is called; inside `value_and_grad`, what that says. A parameter that is read while its unit's
    submodule is not running is gathered for that read. Buffers are the module's own, and are updated. Plan with
    ``plan(params_of(module), …, units=("blocks.*",))``: paths are parameter names.

    Args:
        module: any module; it is not changed.
        state: a state whose paths are the module's parameter names.
        args: positional arguments of the module's forward, as one tuple.
        kwargs: keyword arguments.

    Raises:
        StateError: parameters and paths that don't match (named); `requires_grad` that was flipped after planning; a
            submodule that was compiled in place, whose code is bound to the original parameters; an attribute of a
            kind that can't be rebuilt and refers to a submodule or parameter.

    >>> import torch, mfsdp_fn as mf
    >>> module = torch.nn.Linear(2, 1)
    >>> params = mf.params_of(module)
    >>> state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3()))
    >>> mf.functional_call(module, state, (torch.zeros(2),)).equal(module.bias)
    True
    """
    check_state(state, "state")
    _check_module(module)
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        raise StateError(
            bad("kwargs", f"a {type(kwargs).__name__}", "a dict with names as keys, or None", 'write {"name": value}')
        )
    if not isinstance(args, (tuple, list)):
        raise StateError(bad("args", f"a {type(args).__name__}", "a tuple", "write (x,) for one argument"))
    return _Run(module, state).take(module)(*args, **(kwargs or {}))


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise StateError(bad("module", shown(module), "an nn.Module", "pass the module itself"))


class _Run:
    """One functional call: the skeleton, and which units are gathered now."""

    def __init__(self, module: nn.Module, state: ShardState) -> None:
        self.state = state
        self.leaf_of = _match(module, state.spec)
        self.active: dict[str, dict[int, torch.Tensor]] = {}
        self.skeletons: dict[int, nn.Module] = {}
        self.copies: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self.rewiring = Rewiring(self.copies, {id(p): self.leaf_of[name] for name, p in params_of(module).items()})
        scopes = _scopes(module, state.spec)
        names = {id(submodule): name for name, submodule in module.named_modules()}
        for original in module.modules():
            self.skeletons[id(original)] = self.copies[id(original)] = original.__new__(type(original))
        for original in module.modules():
            self._fill(original, names[id(original)], scopes.get(names[id(original)], ()))

    def take(self, module: nn.Module) -> nn.Module:
        """The skeleton of the whole module; from here on only it and its callers keep this run alive.

        Skeletons refer to the run, so the run lets go of them: a cycle would keep the state's buffers alive until a
        garbage collection.
        """
        root = self.skeletons[id(module)]
        self.skeletons.clear()
        return root

    def _fill(self, original: nn.Module, name: str, units: Sequence[str]) -> None:
        if original._compiled_call_impl is not None or "_orig_mod" in original._modules:
            raise StateError(
                bad(
                    "module",
                    f"a compiled submodule at {name!r}",
                    "modules that are not compiled in place",
                    "compile the step with mfsdp_fn.compile, or a function that calls the block",
                )
            )
        skeleton = self.skeletons[id(original)]
        prefix = f"{name}." if name else ""
        attributes: dict[str, Any] = {}
        late: dict[str, Any] = {}  # what holds parameters is made when they are there: an RNN's `_flat_weights`
        for key, value in vars(original).items():
            if key in _REGISTRIES:
                continue
            if self.rewiring.holds_parameters(value):
                late[key], attributes[key] = value, None
            else:
                attributes[key] = self.rewiring.apply(value, prefix + key, self.parameter)
        attributes["_modules"] = {
            key: None if child is None else self.skeletons[id(child)] for key, child in original._modules.items()
        }
        attributes["_buffers"] = original._buffers
        attributes["_parameters"] = _Parameters(
            self, {key: None if p is None else self.leaf_of[prefix + key] for key, p in original._parameters.items()}
        )
        if type(original).get_parameter is nn.Module.get_parameter:
            attributes["get_parameter"] = _weak_method(skeleton, _get_parameter)
        skeleton.__dict__ = attributes
        if units or late:
            attributes["forward"] = self._scoped(skeleton, attributes.get("forward"), units, late, prefix)

    def _scoped(
        self,
        skeleton: nn.Module,
        own: Callable[..., Any] | None,
        units: Sequence[str],
        late: Mapping[str, Any],
        prefix: str,
    ) -> Callable[..., Any]:
        """The submodule's forward with its units gathered, and its late attributes there, around it."""
        forward = own or _weak_method(skeleton, type(skeleton).forward)
        ref = weakref.ref(skeleton)

        def scoped(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for unit in units:
                    stack.enter_context(self.gathered(unit))
                attributes = vars(ref())
                before = {key: attributes[key] for key in late}
                for key, value in late.items():
                    attributes[key] = self.rewiring.apply(value, prefix + key, self.parameter)
                try:
                    return forward(*args, **kwargs)
                finally:
                    attributes.update(before)

        return scoped

    @contextlib.contextmanager
    def gathered(self, unit: str) -> Iterator[None]:
        """The unit's parameters are there inside."""
        if unit in self.active:  # a submodule that calls itself
            yield
            return
        self.active[unit] = gather_values(self.state[unit])
        try:
            yield
        finally:
            del self.active[unit]

    def parameter(self, leaf: int) -> torch.Tensor:
        """A parameter, gathered for this read if its unit's submodule isn't running."""
        unit = self.state.spec.leaves[leaf].unit
        values = self.active.get(unit)
        return (gather_values(self.state[unit]) if values is None else values)[leaf]


def _weak_method(skeleton: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` bound to a skeleton that holds the result: whoever calls it keeps the skeleton alive."""
    ref = weakref.ref(skeleton)
    return lambda *args, **kwargs: function(ref(), *args, **kwargs)


def _get_parameter(skeleton: nn.Module, target: str) -> Any:
    """As `nn.Module.get_parameter`, which insists on an `nn.Parameter`."""
    path, _, name = target.rpartition(".")
    parameter = skeleton.get_submodule(path)._parameters.get(name)
    # Of what is no parameter torch itself shall say so.
    return nn.Module.get_parameter(skeleton, target) if parameter is None else parameter


class _Parameters(dict[str, Any]):
    """A skeleton's parameter registry: names to leaf numbers, read as tensors."""

    def __init__(self, run: _Run, leaves: dict[str, int | None]) -> None:
        super().__init__(leaves)
        self.run = run

    def __getitem__(self, name: str) -> Any:
        leaf = super().__getitem__(name)
        return None if leaf is None else self.run.parameter(leaf)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (that would be this method)

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]


_REGISTRIES = frozenset(("_parameters", "_buffers", "_modules"))


def _match(module: nn.Module, spec: ShardSpec) -> dict[str, int]:
    """Leaf number of every parameter name; a tied parameter's other names need not be planned."""
    planned = {leaf.path: number for number, leaf in enumerate(spec.leaves)}
    by_id: dict[int, int] = {}
    named = params_of(module)
    for name, parameter in named.items():
        if name in planned:
            by_id.setdefault(id(parameter), planned[name])
    missing = [name for name, parameter in named.items() if id(parameter) not in by_id]
    extra = [path for path in planned if path not in named]
    if missing or extra:
        got = f"parameter {missing[0]!r}, which is not in the state" if missing else f"no parameter {extra[0]!r}"
        raise StateError(bad("module", got, "a module whose parameters are the state's", "plan with params_of(module)"))
    for name, parameter in named.items():
        leaf = spec.leaves[by_id[id(parameter)]]
        if parameter.requires_grad != leaf.requires_grad:
            raise StateError(
                bad(
                    "module",
                    f"requires_grad={parameter.requires_grad} at {name!r}",
                    f"{leaf.requires_grad}, as planned",
                    "plan again: trainability is part of the plan",
                )
            )
    return {name: planned.get(name, by_id[id(parameter)]) for name, parameter in named.items()}


def _scopes(module: nn.Module, spec: ShardSpec) -> dict[str, list[str]]:
    """Units by the name of the submodule around whose forward they are gathered: the deepest that holds them."""
    submodules = {split(name): name for name, _ in module.named_modules()}
    scopes: dict[str, list[str]] = {}
    for unit in spec.units:
        path = split(unit)
        while path not in submodules:
            path = path[:-1]
        scopes.setdefault(submodules[path], []).append(unit)
    return scopes
