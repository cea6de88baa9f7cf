"""One call of the kernel that turns ids into rows, for all GPU launchers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from embforge.codegen.kernel import KERNELS
from embforge.codegen.plan import Plan
from embforge.codegen.targets.cuda.launch import KernelLaunch
from embforge.codegen.targets.cuda.resolve import resolve_launch
from embforge.inputs import Batch
from embforge.launch.gpu.backward_call import torch_empty
from embforge.launch.gpu.forward_call import Value
from embforge.launch.metadata import Metadata


class ResolveCall(NamedTuple):
    """What a call launches, and with which tensors."""

    kernels: tuple[KernelLaunch, ...]
    rows: Tensor
    by_name: dict[str, Value]
    """Every argument by name."""

    def arguments(self) -> list[Value]:
        """The arguments of the kernel, in call order."""
        return [self.by_name[name] for name in KERNELS["resolve"].in_blocks]


def resolve_call(
    plan: Plan,
    metadata: Metadata,
    batch: Batch,
    empty: Callable[[Sequence[int], torch.dtype, torch.device], Tensor] = torch_empty,
) -> ResolveCall:
    """The call that turns the ids of a batch into rows, on the device of the batch. Without ids nothing is launched."""
    values, offsets, _, size, _ = batch
    rows, count = empty(values.shape, values.dtype, values.device), values.numel()
    by_name: dict[str, Value] = {
        "metadata": metadata.words,
        "values": values,
        "offsets": offsets,
        "rows": rows,
        "batch": size,
        "num_values": count,
    }
    return ResolveCall((resolve_launch(plan, count),) if count else (), rows, by_name)
