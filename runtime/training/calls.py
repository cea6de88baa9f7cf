"""One training call: what its forward runs, and what its backward does with the gradients.

Used by the operators (for compilers, modes and profilers) and by plain eager code, which skips the dispatcher.
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
    "updated rows since; call the module once a backward pass, or use accumulate=True, which updates in step()"
)


_address = Tensor.data_ptr  # named once, because a backward asks every table


class Programs(NamedTuple):
    """The texts of the kernels of one module and id dtype."""

    forward: str
    train: str
    """The forward of a training call: it keeps divisors and winners if the backward needs any, else it is `forward`."""
    backward: str
    """Empty without a fused optimizer."""
    reduce: str
    weight_gradient: str
    step: str
    """The backward of accumulated gradients; empty unless they accumulate."""
    merge: str
    """Their reduction to one gradient a row."""
    resolve: str
    """The step before all of these that turns ids into rows; empty where ids are rows."""


class Kept(NamedTuple):
    """What a training forward computes."""

    pooled: Tensor
    sequence: Tensor | None
    divisors: Tensor | None
    winners: Tensor | None


@dataclass(frozen=True)
class Storage:
    """The rows that a call reads and trains, with what kernels know of them.

    It describes the tables as they lay when it was made, so a module keeps one from call to call until they move.
    """

    tables: Sequence[Tensor]
    states: Sequence[Tensor]
    trainable: Sequence[bool]
    bounds_check: str

    @cached_property
    def metadata(self) -> Metadata:
        """What a forward is told of the tables."""
        return metadata_of(self.tables, self.bounds_check)

    def update_metadata(self) -> Metadata:
        """What a backward is told of them. It may run long after its forward, so it looks where they lie now."""
        addresses, made = self._update_metadata
        if addresses != self._addresses():
            made = update_metadata_of(self.tables, self.states, self.trainable, self.bounds_check)
        return made

    @cached_property
    def _update_metadata(self) -> tuple[list[int], Metadata]:
        made = update_metadata_of(self.tables, self.states, self.trainable, self.bounds_check)
        return self._addresses(), made

    def _addresses(self) -> list[int]:
        return [*map(_address, self.tables), *map(_address, self.states)]

    @cached_property
    def trained(self) -> list[Tensor]:
        """The tables that an update changes."""
        return [table for table, trained in zip(self.tables, self.trainable, strict=True) if trained]


def run_forward(
    program: str, storage: Storage, batch: Batch, sequence_elements: int, beside: Sequence[str] = ()
) -> Kept:
    """A training forward, by whichever kernel. `beside`: as of `kernel_of`, here and below."""
    kernel: Kernel | TrainKernel = kernel_of(program, beside)
    found = kernel(storage.metadata, storage.tables, batch, sequence_elements, storage.bounds_check)
    pooled, sequence, divisors, winners = found if len(found) == len(Kept._fields) else (*found, None, None)
    return Kept(pooled, sequence, divisors, winners)


def run_update(
    program: str,
    storage: Storage,
    batch: Batch,
    gradients: Gradients,
    hyper: Tensor,
    counters: Tensor,
    beside: Sequence[str] = (),
) -> Tensor:
    """Rows and states updated in place; 0, or infinite if gradients are not finite and nothing was changed."""
    kernel: UpdateKernel = kernel_of(program, beside)
    verdict = kernel(
        storage.update_metadata(),
        storage.tables,
        storage.states,
        batch,
        gradients,
        hyper,
        counters,
        storage.bounds_check,
    )
    # Whoever saved a row for a backward must know.
    torch.autograd.graph.increment_version([*storage.trained, counters])
    return verdict


def run_reduce(
    program: str, storage: Storage, batch: Batch, gradients: Gradients, beside: Sequence[str] = ()
) -> list[tuple[Tensor, Tensor]]:
    """Of every table the rows that occur and their gradients."""
    kernel: ReduceKernel = kernel_of(program, beside)
    return kernel(storage.update_metadata(), storage.tables, batch, gradients, storage.bounds_check)


def run_weight_gradient(
    program: str, storage: Storage, batch: Batch, gradients: Gradients, beside: Sequence[str] = ()
) -> Tensor:
    """The gradient of the batch's weights; zeros without a program, that is if no feature is weighted."""
    if not program:
        return torch.zeros(batch.values.shape, dtype=torch.float32, device=batch.values.device)
    kernel: WeightGradientKernel = kernel_of(program, beside)
    return kernel(storage.update_metadata(), storage.tables, batch, gradients, storage.bounds_check)


def refuse_double_backward() -> None:
    """Raises inside a backward that autograd records for another one."""
    if torch.is_grad_enabled():
        raise RuntimeError(DOUBLE_BACKWARD)
