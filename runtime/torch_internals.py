"""The private names of torch that we need, each with its reason. No other module of ours reads such names.

A release of torch may change any of them without a word: then this is the file to look at. Functions are named here
once for speed, too: every dot in the path to a function is a look-up, and small lookups are counted in microseconds.
A few attributes of tensors, modules and nodes (`_version`, `_parameters`, ...) are listed in pyproject.toml instead,
because a function around them would cost more than they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd.graph import Node

# ---- Who must see an operator: torch has public names for entering these states, none for asking ------------

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
functorch_level: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack
profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
tracing_state: Callable[[], object | None] = torch._C._get_tracing_state


def is_exporting() -> bool:
    """Whether `torch.export` traces. The flag itself: before torch 2.13 a compiler that traces takes
    `torch.compiler.is_exporting()` for true."""
    return torch.compiler._is_exporting_flag


def graph_break(reason: str) -> None:
    """Leaves what follows out of a compiled graph; torch's error says the reason where that is not allowed. Importing
    torch._dynamo takes a second, so it is not imported until a compiler has done so."""
    torch._dynamo.graph_break(msg=reason)


def proxies_of(tensor: Tensor) -> Sequence[Any]:
    """The nodes that stand for a tensor in a graph that is being traced; none unless torch 2.13 or later traces.
    By their notes autograd's partitioner knows which inputs of a backward may change."""
    from torch.fx.experimental import proxy_tensor

    found = getattr(proxy_tensor, "_get_proxies", None)
    return () if found is None else found(tensor)


def is_tracing_proxies() -> bool:
    """Whether a graph is being traced whose tensors have proxies."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


# ---- The backward pass that runs: autograd tells its hooks neither which pass it is nor what it was asked for -----

current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that runs in this thread; -1 outside of one."""
current_node: Callable[[], Node | None] = torch._C._current_autograd_node
node_clock: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node of this thread gets."""
saved_tensors_hooks: Callable[[bool], object | None] = torch._C._autograd._top_saved_tensors_default_hooks
will_run: Callable[[Node], bool] = torch._C._will_engine_execute_node
"""Whether the pass that runs comes to a node."""

# ---- Tensors -------------------------------------------------------------------------------------------------

assert_async: Callable[[Tensor], None] = torch._assert_async
"""Fails on the device if a tensor is false, without waiting for it."""
can_take_data: Callable[[Tensor, Tensor], bool] = torch._has_compatible_shallow_copy_type
"""Whether `tensor.data` may be set to the other: not between a meta tensor and one with memory."""


def storage_holders(storage: torch.UntypedStorage) -> int:
    """How many tensors and storages in C++ hold a tensor's memory."""
    return torch._C._storage_Use_Count(storage._cdata)


def sparse_indices(gradient: Tensor) -> Tensor:
    """As `gradient.indices()`, which refuses a tensor that does not know that it is coalesced."""
    return gradient._indices()


def sparse_values(gradient: Tensor) -> Tensor:
    """As `gradient.values()`, which refuses a tensor that does not know that it is coalesced."""
    return gradient._values()


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether hooks run after the accumulation of its gradient: a copy of a parameter may have lost ours."""
    return bool(parameter._post_accumulate_grad_hooks)


# ---- Modules, loops and ranks --------------------------------------------------------------------------------

named_members: Callable[..., Any] = nn.Module._named_members
"""The generator between `named_parameters` and `named_modules`, whose frame tells who asked."""


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def scale_of(scaler: GradScaler) -> Tensor | None:
    """The tensor that a scaler multiplies losses by, None before its first use. `get_scale()` would wait for the
    device."""
    return scaler._scale


def number_of_groups() -> int:
    """How many process groups this rank is in: torch names groups of a part of the ranks by it."""
    return len(dist.distributed_c10d._world.pg_names)


def timeout_of(group: Any) -> timedelta | None:
    """How long collectives of a group wait; None: torch does not say."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        found: timedelta | None = getattr(options, "_timeout", None)
        if found is not None:
            return found
    return None


def collating() -> ModuleType:
    """The module with `collate` and its table of functions by type, which `default_collate` takes no additions to.
    Imported when it is used, as torch.utils.data takes long."""
    from torch.utils.data._utils import collate

    return collate
