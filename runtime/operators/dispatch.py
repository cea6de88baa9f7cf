"""Whether a call must go through torch's dispatcher, or may run the operator's implementation directly, which is
faster."""

from __future__ import annotations

import torch
from torch import Tensor

from embforge.torch_internals import (
    dispatch_modes,
    functorch_level,
    is_exporting,
    profiler_enabled,
    tracing_state,
)

_is_compiling = torch.compiler.is_compiling  # named once for speed, as the functions of torch_internals


def must_dispatch(values: Tensor) -> bool:
    """Whether something must see the operator: a compiler, a tracer, a dispatch mode, a transform, the profiler, or a
    subclass of Tensor."""
    return (
        _is_compiling()
        or dispatch_modes() > 0
        or functorch_level() is not None
        or profiler_enabled()
        or tracing_state() is not None
        or type(values) is not Tensor
    )


def has_numbers(values: Tensor) -> bool:
    """Whether a kernel can read the tensor: it has memory, and is not what a tracer or a transform puts in its
    place."""
    return type(values) is Tensor and not values.is_meta and functorch_level() is None and tracing_state() is None


def leaves_process() -> bool:
    """Whether a graph is being traced that may run in other processes, so that it must not name a kernel of this
    machine."""
    return is_exporting() or tracing_state() is not None
