"""The private names of torch that embforge needs, each with the reason. No other module reads such names.

A release of torch may change any of them without notice: then this is the file to change. Functions are also named here
for speed: every dot in the path to a function is an attribute access, and small lookups take only microseconds. A few
attributes of tensors, modules and nodes (`_version`, `_parameters`, ...) are listed in pyproject.toml instead, because
calling a function would take longer than reading them.
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

# ---- States in which an operator must be called: torch has public names to enter them, but none to test for them ----

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
functorch_level: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack
profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
tracing_state: Callable[[], object | None] = torch._C._get_tracing_state


def is_exporting() -> bool:
    """Whether `torch.export` is tracing. It reads the flag, because before torch 2.13 torch.compile treats
    `torch.compiler.is_exporting()` as true while it traces."""
    return torch.compiler._is_exporting_flag


def graph_break(reason: str) -> None:
    """Excludes the following code from a compiled graph. If that is not allowed, torch's error contains the reason.

    Only for code that runs under a compiler, which has imported torch._dynamo: importing it takes a second.
    """
    torch._dynamo.graph_break(msg=reason)


def proxies_of(tensor: Tensor) -> Sequence[Any]:
    """The nodes that represent a tensor in a graph that is being traced; none before torch 2.13, or if none is traced.

    In their metadata, autograd's partitioner finds which inputs of a backward may change.
    """
    from torch.fx.experimental import proxy_tensor

    get_proxies = getattr(proxy_tensor, "_get_proxies", None)
    return () if get_proxies is None else get_proxies(tensor)


def is_tracing_proxies() -> bool:
    """Whether a graph is being traced in which proxies represent tensors."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


# ---- The current backward pass: autograd passes its hooks neither the number of the pass nor the wanted gradients ----

current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that runs in this thread; -1 outside of a backward pass."""
current_node: Callable[[], Node | None] = torch._C._current_autograd_node
node_clock: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that autograd will give to the next node of this thread."""
saved_tensors_hooks: Callable[[bool], object | None] = torch._C._autograd._top_saved_tensors_default_hooks
will_run: Callable[[Node], bool] = torch._C._will_engine_execute_node
"""Whether the current backward pass will run a node."""

# ---- Tensors -------------------------------------------------------------------------------------------------

assert_async: Callable[[Tensor], None] = torch._assert_async
"""Makes the device fail if a tensor is false, without waiting for the device."""
can_take_data: Callable[[Tensor, Tensor], bool] = torch._has_compatible_shallow_copy_type
"""Whether the second tensor may be assigned to `data` of the first: not if only one of them is a meta tensor."""


def storage_holders(storage: torch.UntypedStorage) -> int:
    """The number of references in C++, from tensors and storages, to a tensor's memory."""
    return torch._C._storage_Use_Count(storage._cdata)


def sparse_indices(gradient: Tensor) -> Tensor:
    """The same as `gradient.indices()`, which refuses a tensor that is not marked as coalesced."""
    return gradient._indices()


def sparse_values(gradient: Tensor) -> Tensor:
    """The same as `gradient.values()`, which refuses a tensor that is not marked as coalesced."""
    return gradient._values()


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether a parameter has hooks that run after its gradient was accumulated. A copy of a parameter may have
    none."""
    return bool(parameter._post_accumulate_grad_hooks)


# ---- Modules, loops and ranks --------------------------------------------------------------------------------

named_members: Callable[..., Any] = nn.Module._named_members
"""The generator by which `named_parameters` calls `named_modules`: its frame is between the two on the stack."""


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that run before or after its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def scale_of(scaler: GradScaler) -> Tensor | None:
    """The tensor by which a scaler multiplies losses; None before its first use. `get_scale()` would wait for the
    device."""
    return scaler._scale


def number_of_groups() -> int:
    """The number of process groups that this rank is in. torch uses it to name groups of only some ranks."""
    return len(dist.distributed_c10d._world.pg_names)


def timeout_of(group: Any) -> timedelta | None:
    """The timeout of a group's collectives; None if torch does not know it."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout: timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None


def collating() -> ModuleType:
    """The module with `collate` and its table of functions by type. `default_collate` has no way to add functions.

    It is imported when it is used, because importing torch.utils.data takes long.
    """
    from torch.utils.data._utils import collate

    return collate
