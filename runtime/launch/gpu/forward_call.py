"""One call of a plan's forward kernels, for all GPU launchers: results, work space and arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from embforge.codegen.kernel import KERNELS
from embforge.codegen.plan import Plan
from embforge.codegen.targets.cuda.launch import QUEUE_COUNTERS, ForwardLaunch, LaunchShape, launch_of
from embforge.inputs import Batch
from embforge.launch.metadata import Metadata
from embforge.number_formats import torch_dtype

MOST_BLOCKS = 2**31 - 1
"""The largest grid. It limits samples too, because kernels count them in 32 bits."""

Value = Tensor | int | None
"""An argument of a kernel. A tensor is passed by its address, None as a null pointer."""


class ForwardCall(NamedTuple):
    """What a call launches, and with which tensors."""

    op: str
    work: ForwardLaunch
    pooled: Tensor
    sequence: Tensor | None
    divisors: Tensor | None
    winners: Tensor | None
    by_name: dict[str, Value]
    """Every argument by name except `status`, which outlives calls."""

    def arguments(self, status: Tensor) -> list[Value]:
        """The arguments of the kernels, in call order."""
        by_name = self.by_name | {"status": status}
        return [by_name[name] for name in KERNELS[self.op].in_blocks]


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def forward_call(
    plan: Plan,
    shape: LaunchShape,
    metadata: Metadata,
    batch: Batch,
    sequence_elements: int,
    empty: Callable[[Sequence[int], torch.dtype, torch.device], Tensor] = _empty,
) -> ForwardCall:
    """The call of a forward with a batch, on the device of the batch; results are not initialised.

    `empty` makes a tensor of a shape, dtype and device for results and work space. Raises ValueError for a batch that
    is too large for a launch.
    """
    values, offsets, weights, size, _ = batch
    device, dtype = values.device, torch_dtype(plan.spec.output_dtype)
    if size == 0 and values.numel():
        raise ValueError(f"offsets: values has {values.numel()} ids, offsets has no bag for them; both must agree")
    work = _launch_of(shape, size, values.numel())
    pooled = empty((size, plan.layout.output_width), dtype, device)
    has_sequence = bool(plan.layout.sequence_features)
    sequence = empty((sequence_elements,), dtype, device) if has_sequence else None
    keeps, layout = plan.op == "forward_train", plan.layout
    divisors = empty((size, layout.divisor_width), torch.float32, device) if keeps and layout.divisor_width else None
    winners = empty((size, layout.winner_width), values.dtype, device) if keeps and layout.winner_width else None
    queue = empty((work.queue_words,), torch.int64, device)
    queue[:QUEUE_COUNTERS].zero_()
    scratch = empty((work.scratch_floats,), torch.float32, device)
    by_name: dict[str, Value] = {
        "metadata": metadata.words,
        "values": values,
        "offsets": offsets,
        "weights": weights,
        "pooled": pooled,
        "sequence": sequence,
        "divisors": divisors,
        "winners": winners,
        "batch": size,
        "num_values": values.numel(),
        "sequence_size": sequence_elements,
        "scratch": scratch,
        "queue": queue,
    }
    return ForwardCall(plan.op, work, pooled, sequence, divisors, winners, by_name)


def _launch_of(shape: LaunchShape, batch: int, num_values: int) -> ForwardLaunch:
    work = launch_of(shape, batch, num_values)
    blocks = max((kernel.grid for kernel in work.kernels), default=0)
    if batch > MOST_BLOCKS or blocks > MOST_BLOCKS:
        raise ValueError(
            f"offsets, values: {batch} samples with {num_values} ids need {blocks} blocks; allowed: {MOST_BLOCKS} "
            "samples and blocks; split the batch"
        )
    return work
