"""The autograd function of a lookup in plain eager code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from embforge.autograd_calls import Context
from embforge.inputs import Batch
from embforge.launch.gradients import Gradients, readable
from embforge.launch.kernels import kernel_of
from embforge.operator_arguments import check_sequence_gradient
from embforge.storage.parameter_table import gradient_of
from embforge.training.calls import (
    ROWS_CHANGED,
    Programs,
    TableMemory,
    refuse_double_backward,
    run_forward_kernel,
    run_reduce_kernel,
    run_update_kernel,
    run_weight_gradient_kernel,
)
from embforge.training.numbers import MOVED, Numbers, update_is_wanted

Sink = Callable[[Gradients, list[tuple[Tensor, Tensor]]], Tensor]


class TrainableTable(Protocol):
    """What a training call reads of a table object. It may change between a forward and its backward."""

    trainable: bool
    """With a fused optimizer: whether a backward updates the table."""
    sparse: bool
    """Without a fused optimizer: whether the gradient of the table is sparse."""


class Call(NamedTuple):
    """A training call of a module, as it was when its forward ran."""

    programs: Programs
    memory: TableMemory
    table_objects: Sequence[TrainableTable]
    """The table objects. A fused optimizer does not train a table that was frozen between a forward and its
    backward."""
    sequence_elements: int
    numbers: Numbers | None
    """The hyperparameters of the fused optimizers; None without one: then the tables get gradients."""
    parameters: Sequence[Tensor]
    """The tables as parameters; empty with a fused optimizer."""
    accumulate: Sink | None
    """If gradients accumulate: keeps the reduced gradients of a backward and returns its verdict, see
    `Trainer.take`."""


class _Context(Context, Protocol):
    """What a forward keeps for its backward in addition to the saved tensors."""

    call: Call
    size: int
    """The number of samples in the batch."""
    versions: list[int]
    """The versions of the rows when the forward ran. Only set if per-sample weights want a gradient."""


class Lookup(torch.autograd.Function):
    """`apply(call, values, offsets, size, weights, anchor, *parameters)` returns the pooled result, and the sequence if
    a feature is not pooled.

    `weights` gets its gradient. `anchor` gets the verdict of the update: 0, or infinity if gradients were not finite.
    `parameters` (tables without a fused optimizer) get coalesced sparse gradients, or dense ones.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        call: Call,
        values: Tensor,
        offsets: Tensor,
        size: int,
        weights: Tensor | None,
        anchor: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        kept = run_forward_kernel(
            call.programs.train,
            call.memory,
            Batch(values, offsets, weights, size, None),
            call.sequence_elements,
            call.programs,
        )
        ctx.save_for_backward(values, offsets, weights, kept.divisors, kept.winners)
        ctx.call, ctx.size = call, size
        if ctx.needs_input_grad[4]:
            ctx.versions = versions_of(call)
        return kept.pooled if kept.sequence is None else (kept.pooled, kept.sequence)

    @staticmethod
    def backward(ctx: _Context, grad_pooled: Tensor, grad_sequence: Tensor | None = None) -> Any:
        refuse_double_backward()
        call = ctx.call
        values, offsets, weights, divisors, winners = ctx.saved_tensors
        batch = Batch(values, offsets, weights, ctx.size, None)
        sequence = None if grad_sequence is None else readable(grad_sequence)
        if sequence is not None:
            check_sequence_gradient(kernel_of(call.programs.train).plan.layout, batch, sequence)
        gradients = Gradients(readable(grad_pooled), sequence, divisors, winners)
        weight_gradient = anchor_gradient = None
        if ctx.needs_input_grad[4]:
            if ctx.versions != versions_of(call):
                raise RuntimeError(ROWS_CHANGED)
            weight_gradient = run_weight_gradient_kernel(
                call.programs.weight_gradient, call.memory, batch, gradients, call.programs
            )
        wanted = ctx.needs_input_grad[6:]
        table_gradients: Sequence[Tensor | None] = [None] * len(wanted)
        if call.numbers is not None:
            # If weights need no gradient, a pass that runs this node can only want the update of rows.
            if ctx.needs_input_grad[5] and (weight_gradient is None or update_is_wanted(call.numbers.hyper)):
                anchor_gradient = _train(call, call.numbers, batch, gradients)
        elif any(wanted):
            reduced = run_reduce_kernel(call.programs.reduce, call.memory, batch, gradients, call.programs)
            table_gradients = [
                gradient_of(table, *sums, sparse=table_object.sparse) if want else None
                for table, table_object, sums, want in zip(
                    call.parameters, call.table_objects, reduced, wanted, strict=True
                )
            ]
        return None, None, None, None, weight_gradient, anchor_gradient, *table_gradients


def versions_of(call: Call) -> list[int]:
    """torch's version counters of the tables: a changed counter means that rows have changed."""
    return [table._version for table in call.memory.tables]


def _train(call: Call, numbers: Numbers, batch: Batch, gradients: Gradients) -> Tensor:
    programs, memory, trainable = call.programs, call.memory, [table.trainable for table in call.table_objects]
    if numbers.hyper.device != memory.tables[0].device:
        raise RuntimeError(MOVED)
    numbers.take_scale()
    if trainable != memory.trainable:
        if True not in trainable:
            return torch.zeros(1, dtype=torch.float32, device=gradients.pooled.device)
        memory = replace(memory, trainable=trainable)
    if call.accumulate is None:
        with numbers.lock:
            return run_update_kernel(
                programs.backward, memory, batch, gradients, numbers.hyper, numbers.counters, programs
            )
    return call.accumulate(gradients, run_reduce_kernel(programs.reduce, memory, batch, gradients, programs))
