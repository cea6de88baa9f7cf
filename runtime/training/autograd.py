"""A lookup that autograd records, in plain eager code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from embforge.arguments import check_sequence_gradient
from embforge.autograd_calls import Context
from embforge.inputs import Batch
from embforge.launch.gradients import Gradients, readable
from embforge.launch.kernels import kernel_of
from embforge.storage.parameter_table import gradient_of
from embforge.training.calls import (
    ROWS_CHANGED,
    Programs,
    Storage,
    refuse_double_backward,
    run_forward,
    run_reduce,
    run_update,
    run_weight_gradient,
)
from embforge.training.numbers import MOVED, Numbers, update_is_wanted

Sink = Callable[[Gradients, list[tuple[Tensor, Tensor]]], Tensor]


class Holder(Protocol):
    """A table that knows how it is trained."""

    trainable: bool
    sparse: bool
    """Whether the gradient of a table without a fused optimizer is sparse."""


class Call(NamedTuple):
    """A training call of a module, as it was when its forward ran."""

    programs: Programs
    storage: Storage
    holders: Sequence[Holder]
    """The tables: what is frozen between a forward and its backward is not trained by a fused optimizer."""
    sequence_elements: int
    numbers: Numbers | None
    """Of a fused optimizer; without one, gradients go to the tables."""
    parameters: Sequence[Tensor]
    """The tables as parameters, without a fused optimizer."""
    accumulate: Sink | None
    """Takes what a backward reduced, if gradients accumulate, and says whether it may be used."""


class _Context(Context, Protocol):
    """What a forward keeps for its backward, beside the saved tensors."""

    call: Call
    size: int
    """The samples of the batch."""
    versions: list[int]
    """Of the rows, where weights want a gradient."""


class Lookup(torch.autograd.Function):
    """`apply(call, values, offsets, batch, weights, anchor, *parameters)` -> pooled, and sequence if there is any.

    Gradients: of `weights`; of `anchor` the verdict of the update; of `parameters` (tables without a fused optimizer)
    coalesced sparse ones, or dense ones.
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
        kept = run_forward(
            call.programs.train,
            call.storage,
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
            weight_gradient = run_weight_gradient(
                call.programs.weight_gradient, call.storage, batch, gradients, call.programs
            )
        wanted = ctx.needs_input_grad[6:]
        table_gradients: Sequence[Tensor | None] = [None] * len(wanted)
        if call.numbers is not None:
            # Where weights need no gradient, a pass that comes here can only want the rows.
            if ctx.needs_input_grad[5] and (weight_gradient is None or update_is_wanted(call.numbers.hyper)):
                anchor_gradient = _train(call, call.numbers, batch, gradients)
        elif any(wanted):
            reduced = run_reduce(call.programs.reduce, call.storage, batch, gradients, call.programs)
            table_gradients = [
                gradient_of(table, *found, sparse=holder.sparse) if want else None
                for table, holder, found, want in zip(call.parameters, call.holders, reduced, wanted, strict=True)
            ]
        return None, None, None, None, weight_gradient, anchor_gradient, *table_gradients


def versions_of(call: Call) -> list[int]:
    """What tells that rows have changed."""
    return [table._version for table in call.storage.tables]


def _train(call: Call, numbers: Numbers, batch: Batch, gradients: Gradients) -> Tensor:
    programs, storage, trainable = call.programs, call.storage, [holder.trainable for holder in call.holders]
    if numbers.hyper.device != storage.tables[0].device:
        raise RuntimeError(MOVED)
    numbers.take_scale()
    if trainable != storage.trainable:
        if True not in trainable:
            return torch.zeros(1, dtype=torch.float32, device=gradients.pooled.device)
        storage = replace(storage, trainable=trainable)
    if call.accumulate is None:
        with numbers.lock:
            return run_update(programs.backward, storage, batch, gradients, numbers.hyper, numbers.counters, programs)
    return call.accumulate(gradients, run_reduce(programs.reduce, storage, batch, gradients, programs))
