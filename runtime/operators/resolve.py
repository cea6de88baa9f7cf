"""The operator of the resolve step, which turns ids into rows before a lookup. Its schema is in registration.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embforge.launch.kernels import ResolveKernel
from embforge.launch.metadata import check_remaps, remap_metadata_of
from embforge.operator_arguments import checked_batch
from embforge.operators.exported import lookup_kernel
from embforge.operators.registration import Implementation, register


def _resolve(values: Tensor, offsets: Tensor, remaps: Sequence[Tensor], program: str) -> Tensor:
    kernel: ResolveKernel = lookup_kernel(program, values.device)
    batch = checked_batch(kernel.plan, values, offsets, None, "error")
    check_remaps(kernel.plan.spec, remaps, values.device)
    return kernel(remap_metadata_of(kernel.plan.spec, remaps), remaps, batch)


IMPLEMENTATIONS = {"resolve": Implementation(_resolve, lambda values, *rest: torch.empty_like(values))}
"""The implementations by operator name."""

register()

resolve: Any = torch.ops.embforge.resolve.default
