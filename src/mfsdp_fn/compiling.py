"""`compile`: a whole training step as one graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import lookup_backend

from . import graph


def compile(step: Callable[..., Any] | None = None, **torch_compile_options: Any) -> Callable[..., Any]:
    """`torch.compile(fullgraph=True)` of a whole step: forward, gathers, backward, reductions and update in one graph.

    Usable as a decorator, with or without options. What whole-step graphs need is switched on for calls of `step`
    only: tracing of `torch.autograd.grad`. The step becomes one ATen graph in which backward gathers weights again and
    launches stand ahead of the compute that they run beside; then `backend` compiles it.

    Args:
        step: the function; its states, batches and scalars are inputs, so nothing is baked in but the plan.
        **torch_compile_options: passed on to `torch.compile`. `backend` gets the finished graph.

    Results equal the eager ones; leave it out to debug.
    """
    if step is None:
        return lambda fn: compile(fn, **torch_compile_options)
    options: dict[str, Any] = {"fullgraph": True, **torch_compile_options}
    backend = options.pop("backend", "inductor")
    inner_options: Mapping[str, Any] = options.pop("options", None) or {}
    compiled = torch.compile(step, backend=_backend(backend, inner_options), **options)

    @functools.wraps(step)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # inside a larger step that is being compiled
            return step(*args, **kwargs)
        # Recomputation is done here (graph.regather); the compiler's own would only warn about what it can't do.
        with (
            torch._dynamo.config.patch(trace_autograd_ops=True),
            torch._functorch.config.patch(remat_using_tags_for_fwd_loss_bwd_graph=False),
        ):
            return compiled(*args, **kwargs)

    return call


def _backend(backend: str | Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Dynamo's graph to ATen, our passes, then the user's backend."""
    inner = lookup_backend(backend) if isinstance(backend, str) else backend

    def finish(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graph.regather(module.graph)
        graph.schedule(module.graph)
        module.graph.lint()
        module.recompile()
        result = inner(module, inputs, options=dict(options)) if options else inner(module, inputs)
        return make_boxed_func(result)

    return aot_autograd(fw_compiler=finish, keep_inference_input_mutations=True)
