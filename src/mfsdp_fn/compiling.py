"""`compile`: a whole training step as one graph.

Everything private that this needs of torch's compilers is imported where it is used: it is slow to import, and a user
who doesn't compile should not pay for it.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from . import casting, graph, products, recomputation
from .checks import check_flag, check_function, shown
from .errors import MfsdpError, StateError, bad
from .simulation import refuse_compiling


def compile(step: Callable[..., Any] | None = None, **torch_compile_options: Any) -> Callable[..., Any]:
    """`torch.compile(fullgraph=True)` of a whole step: forward, gathers, backward, reductions and update in one graph.

    Usable as a decorator, with or without options. What whole-step graphs need is switched on for calls of `step`
    only: tracing of `torch.autograd.grad`. The step becomes one ATen graph in which backward gathers weights again and
    computes again what is cheap (norms, activations, casts: nothing random, no product), and launches stand ahead of
    the compute that they run beside; then `backend` compiles it.

    Args:
        step: the function; its states, batches and scalars are inputs, so nothing is baked in but the plan.
        **torch_compile_options: passed on to `torch.compile`. `backend` gets the finished graph.

    Results equal the eager ones, bit for bit with ``backend="aot_eager"``; leave it out to debug. Inductor rounds
    elsewhere: gradients of half-precision matrices and embeddings are summed in the dtype in which they are reduced,
    straight in the buffer that is sent, instead of being rounded to the compute dtype first.

    Raises:
        MfsdpError: a bad option, by name.
    """
    if step is not None:
        check_function("step", step, "mf.compile(step)")
    _check_options(torch_compile_options)
    if step is None:
        return lambda fn: compile(fn, **torch_compile_options)
    options: dict[str, Any] = {"fullgraph": True, **torch_compile_options}
    options.pop("mode", None)
    backend = options.pop("backend", None)
    backend = "inductor" if backend is None else backend  # as torch.compile has it since 2.13
    inner_options: Mapping[str, Any] = options.pop("options", None) or {}
    compiled = torch.compile(step, backend=_backend(backend, inner_options), **options)
    called = False

    @functools.wraps(step)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # inside a larger step that is being compiled
            return step(*args, **kwargs)
        nonlocal called
        if not called and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise StateError(
                bad(
                    "step",
                    "a first call inside a CUDA graph capture",
                    "a call outside it before",
                    "run the step once on a side stream to warm up and compile, then capture it",
                )
            )
        refuse_compiling()
        from torch._dynamo import config as dynamo_config
        from torch._functorch import config as functorch_config

        # Recomputation is done here (graph.regather); the compiler's own would only warn about what it can't do.
        with (
            dynamo_config.patch(trace_autograd_ops=True),
            functorch_config.patch(remat_using_tags_for_fwd_loss_bwd_graph=False),
        ):
            result = compiled(*args, **kwargs)
        called = True
        return result

    return call


def _check_options(options: Mapping[str, Any]) -> None:
    known = inspect.signature(torch.compile).parameters
    for name, value in options.items():
        if name not in known or name == "model":
            raise MfsdpError(bad(name, shown(value), "an option of torch.compile", "mend the name or leave it out"))
        if name in ("fullgraph", "disable") or (name == "dynamic" and value is not None):
            check_flag(name, value)
    mode, backend, inner = options.get("mode"), options.get("backend"), options.get("options")
    if mode is not None and mode != "default":
        raise MfsdpError(
            bad(
                "mode",
                shown(mode),
                "no mode, or 'default'",
                "pass Inductor settings as options={…}; for CUDA graphs capture the step in a torch.cuda.CUDAGraph",
            )
        )
    known_backend = isinstance(backend, str) and backend in torch.compiler.list_backends(())
    if backend is not None and not callable(backend) and not known_backend:
        fix = "see torch.compiler.list_backends()"
        raise MfsdpError(bad("backend", shown(backend), "the name of a backend, or a function", fix))
    if inner is not None and not (isinstance(inner, Mapping) and all(isinstance(key, str) for key in inner)):
        raise MfsdpError(bad("options", shown(inner), "the backend's settings by name, or None", "write {'x': True}"))


# Inductor moves nodes to their users and to where memory peaks less; either undoes launching early.
_KEEP_ORDER = {"reorder_for_locality": False, "reorder_for_peak_memory": False}


def _last_pass() -> Callable[[fx.Graph], None]:
    """Inductor's last pass: casts go where they are gathered from, and what `graph.weights_read_late` finds becomes a
    tensor instead of being computed again.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Last(CustomGraphPass):
        def __call__(self, graph_: fx.Graph) -> None:
            casting.cast_into_gathered(graph_)
            for node in graph.weights_read_late(graph_):
                node.meta["inductor_realize_to_strides"] = True  # the key that Inductor's own passes use

        def uuid(self) -> Any:
            return get_hash_for_files((__file__, graph.__file__, casting.__file__))

    return Last()


def _with_casts_in_place(backend: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: fx.GraphModule, inputs: list[Any]) -> Any:
        casting.cast_into_gathered(module.graph)
        module.recompile()
        return backend(module, inputs)

    return call


def _backend(backend: str | Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Dynamo's graph to ATen, our passes, then the user's backend."""
    # Public, but the module re-exports it without an `__all__`.
    from functorch.compile import make_boxed_func  # pyright: ignore[reportPrivateImportUsage]
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.registry import lookup_backend

    inner: Callable[..., Any]
    if backend == "inductor":
        settings = {**_KEEP_ORDER, "post_grad_custom_post_pass": _last_pass(), **options}

        def inductor(module: fx.GraphModule, inputs: list[Any]) -> Any:
            products.compute_into_packed(module.graph)
            module.recompile()
            with warnings.catch_warnings():
                # Importing it makes torch warn of its own use of torch.jit.
                warnings.simplefilter("ignore", DeprecationWarning)
                from torch._inductor.compile_fx import compile_fx
            return compile_fx(module, inputs, config_patches=settings)

        inner = inductor

    else:
        inner = lookup_backend(backend) if isinstance(backend, str) else backend
        if options:
            inner = functools.partial(inner, options=dict(options))
        if isinstance(backend, str):  # a function may look at the graph, and finds plain gathers there
            inner = _with_casts_in_place(inner)

    def finish(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        recomputation.recompute(module.graph, graph.regather(module.graph))
        graph.schedule(module.graph)
        module.graph.lint()
        module.recompile()
        return make_boxed_func(inner(module, inputs))

    return aot_autograd(fw_compiler=finish, keep_inference_input_mutations=True)
