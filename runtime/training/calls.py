"""Runs the kernels of one training call: its forward, and what its backward does with the gradients.

The torch operators use it (for compilers, modes and profilers), and so does plain eager code, which skips the
dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from embforge.inputs import Batch
from embforge.launch.gradients import Gradients
from embforge.launch.kernels import Kernel, ReduceKernel, TrainKernel, WeightGradientKernel, kernel_of
from embforge.launch.metadata import Metadata, metadata_of, update_metadata_of
from embforge.launch.update_kernel import UpdateKernel

DOUBLE_BACKWARD = (
    "the backward of an embforge lookup updates rows, or makes gradients of tables, and cannot itself be "
    "differentiated; call backward without create_graph=True, or compute second derivatives with torch.nn.EmbeddingBag"
)
ROWS_CHANGED = (
    "the gradient of per-sample weights needs the rows that the forward read, but another backward of this module has "
    "updated rows since; call the module once per backward pass, or use accumulate=True, which updates in step()"
)


_address = Tensor.data_ptr  # named once for speed, because every backward calls it for every table


class Programs(NamedTuple):
    """The programs of the kernels that one module runs for one dtype of ids. A program is a kernel plan's text, see
    `launch/kernels.py`; it is empty if the module does not need the kernel."""

    forward: str
    train: str
    """The forward of a training call. It also returns divisors and winners if the backward needs them; otherwise it is
    `forward`."""
    backward: str
    """The update in a backward pass; empty without a fused optimizer."""
    reduce: str
    """The sums of the gradients of every row that occurs, for torch's optimizers and for accumulation."""
    weight_gradient: str
    """The gradient of per-sample weights."""
    step: str
    """The update from accumulated gradients; empty unless they accumulate."""
    merge: str
    """The reduction of accumulated gradients to one gradient per row; empty unless they accumulate."""
    resolve: str
    """The resolve step, which turns ids into rows before all other kernels; empty where ids are rows."""


class ForwardResults(NamedTuple):
    """The results of a forward kernel: what the caller gets, and what its backward needs."""

    pooled: Tensor
    sequence: Tensor | None
    divisors: Tensor | None
    winners: Tensor | None


@dataclass(frozen=True)
class TableMemory:
    """The memory of the tables that a call reads and trains, and the metadata by which kernels find it.

    It describes the tables as they were when it was made. A module uses one for all calls until a table moves. It has
    nothing to do with `TableSpec.storage`, which is the kind of a table.
    """

    tables: Sequence[Tensor]
    states: Sequence[Tensor]
    trainable: Sequence[bool]
    bounds_check: str

    @cached_property
    def metadata(self) -> Metadata:
        """The metadata of the tables for a forward kernel."""
        return metadata_of(self.tables, self.bounds_check)

    def update_metadata(self) -> Metadata:
        """The metadata of the tables for a backward kernel. A backward may run long after its forward, so this method
        compares addresses with those of the cached metadata."""
        addresses, metadata = self._update_metadata
        if addresses != self._addresses():
            metadata = update_metadata_of(self.tables, self.states, self.trainable, self.bounds_check)
        return metadata

    @cached_property
    def _update_metadata(self) -> tuple[list[int], Metadata]:
        metadata = update_metadata_of(self.tables, self.states, self.trainable, self.bounds_check)
        return self._addresses(), metadata

    def _addresses(self) -> list[int]:
        return [*map(_address, self.tables), *map(_address, self.states)]

    @cached_property
    def trained(self) -> list[Tensor]:
        """The tables that an update changes."""
        return [table for table, trained in zip(self.tables, self.trainable, strict=True) if trained]


def run_forward_kernel(
    program: str, memory: TableMemory, batch: Batch, sequence_elements: int, all_programs: Sequence[str] = ()
) -> ForwardResults:
    """Runs the forward kernel of a program, whether it returns divisors and winners or not.

    `all_programs`, here and in the functions below: all programs that the module runs. An error about a kernel that is
    missing names those of the others that are missing too.
    """
    kernel: Kernel | TrainKernel = kernel_of(program, all_programs)
    results = kernel(memory.metadata, memory.tables, batch, sequence_elements, memory.bounds_check)
    pooled, sequence, divisors, winners = (
        results if len(results) == len(ForwardResults._fields) else (*results, None, None)
    )
    return ForwardResults(pooled, sequence, divisors, winners)


def run_update_kernel(
    program: str,
    memory: TableMemory,
    batch: Batch,
    gradients: Gradients,
    hyper: Tensor,
    counters: Tensor,
    all_programs: Sequence[str] = (),
) -> Tensor:
    """Updates rows and states in place. Returns the verdict: 0, or infinity if gradients were not finite and nothing
    was changed."""
    kernel: UpdateKernel = kernel_of(program, all_programs)
    verdict = kernel(
        memory.update_metadata(),
        memory.tables,
        memory.states,
        batch,
        gradients,
        hyper,
        counters,
        memory.bounds_check,
    )
    # Makes autograd refuse backwards for which rows were saved before this update.
    torch.autograd.graph.increment_version([*memory.trained, counters])
    return verdict


def run_reduce_kernel(
    program: str, memory: TableMemory, batch: Batch, gradients: Gradients, all_programs: Sequence[str] = ()
) -> list[tuple[Tensor, Tensor]]:
    """For each table, the rows that occur in the batch and the sum of each row's gradients."""
    kernel: ReduceKernel = kernel_of(program, all_programs)
    return kernel(memory.update_metadata(), memory.tables, batch, gradients, memory.bounds_check)


def run_weight_gradient_kernel(
    program: str, memory: TableMemory, batch: Batch, gradients: Gradients, all_programs: Sequence[str] = ()
) -> Tensor:
    """The gradient of the batch's per-sample weights; zeros if `program` is empty because no feature is weighted."""
    if not program:
        return torch.zeros(batch.values.shape, dtype=torch.float32, device=batch.values.device)
    kernel: WeightGradientKernel = kernel_of(program, all_programs)
    return kernel(memory.update_metadata(), memory.tables, batch, gradients, memory.bounds_check)


def refuse_double_backward() -> None:
    """Raises RuntimeError in a backward that autograd records, as it does with create_graph=True."""
    if torch.is_grad_enabled():
        raise RuntimeError(DOUBLE_BACKWARD)
