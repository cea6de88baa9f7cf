"""Whether a call must go through the torch operator, or may do the operator's work itself, which is faster."""

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

_is_compiling = torch.compiler.is_compiling  # named once, as those are


def must_be_seen(values: Tensor) -> bool:
    """Whether somebody must see the operator: a tracer, a mode, a transform, the profiler, a subclass."""
    return (
        _is_compiling()
        or dispatch_modes() > 0
        or functorch_level() is not None
        or profiler_enabled()
        or tracing_state() is not None
        or type(values) is not Tensor
    )


def has_numbers(values: Tensor) -> bool:
    """Whether a kernel could read it: not a tracer's or a transform's stand-in."""
    return type(values) is Tensor and not values.is_meta and functorch_level() is None and tracing_state() is None


def leaves_process() -> bool:
    """Whether a graph is being made that may run elsewhere, so that it must name no kernel of this machine."""
    return is_exporting() or tracing_state() is not None
