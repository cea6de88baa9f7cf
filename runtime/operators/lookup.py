"""The implementations of the operators of lookups, training and updates.

They are defined once for all specs: the `program` arguments of a call say which kernels it runs. Their schemas are in
registration.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from embforge.autograd_calls import Context
from embforge.launch.grouped import rule_parts
from embforge.launch.kernels import Kernel, Program
from embforge.launch.metadata import check_tables, metadata_of
from embforge.number_formats import torch_dtype
from embforge.operator_arguments import (
    RulePlan,
    check_sequence_rows,
    check_states,
    checked_batch,
    checked_gradients,
    rows_in,
    rows_of,
    sequence_elements,
)
from embforge.operators.exported import lookup_kernel, lookup_named
from embforge.operators.registration import Implementation, register
from embforge.torch_internals import is_tracing_proxies, proxies_of
from embforge.training.calls import (
    ROWS_CHANGED,
    ForwardResults,
    TableMemory,
    refuse_double_backward,
    run_forward_kernel,
    run_update_kernel,
    run_weight_gradient_kernel,
)
from embforge.training.enclosing_model import refuse_replicas
from embforge.training.numbers import MOVED, numbers_of, update_is_wanted

_FP32 = torch.float32
MAY_CHANGE = "saved_tensor_with_no_vc_check"
"""torch's mark, in a traced graph, for an input of the backward whose version is not checked (torch 2.13)."""


def _lookup(
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    tables: Sequence[Tensor],
    sequence_rows: Sequence[int] | None,
    program: str,
    bounds_check: str,
) -> tuple[Tensor, Tensor]:
    kernel: Kernel = lookup_kernel(program, values.device)
    layout = kernel.plan.layout
    batch = checked_batch(kernel.plan, values, offsets, weights, bounds_check)
    check_tables(layout, tables)
    rows = sequence_rows or ()
    check_sequence_rows(layout, batch, rows)
    numbers = numbers_of(tables[0])
    if numbers is not None:
        numbers.note_forward()
    elements = sequence_elements(layout, rows)
    pooled, sequence = kernel(metadata_of(tables, bounds_check), tables, batch, elements, bounds_check)
    return pooled, values.new_empty(0, dtype=pooled.dtype) if sequence is None else sequence


def _lookup_fake(
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    tables: Sequence[Tensor],
    sequence_rows: Sequence[int] | None,
    program: str,
    bounds_check: str,
) -> tuple[Tensor, Tensor]:
    named = lookup_named(program)
    dtype = torch_dtype(named.spec.output_dtype)
    batch = (offsets.numel() - 1) // len(named.spec.features)
    pooled = values.new_empty((batch, named.layout.output_width), dtype=dtype)
    return pooled, values.new_empty(sequence_elements(named.layout, sequence_rows or ()), dtype=dtype)


@lru_cache(maxsize=256)
def program_of(text: str) -> Program:
    """The program that an operator's argument describes."""
    return Program.from_text(text)


@lru_cache(maxsize=256)
def _rules(text: str) -> tuple[RulePlan, ...]:
    """The kernel plans of an update's program, each with the tables that it trains: all tables if there is one rule."""
    parts = rule_parts(text)
    if parts:
        return tuple(RulePlan(program_of(part.program).plan, part.tables) for part in parts)
    plan = program_of(text).plan
    return (RulePlan(plan, tuple(range(len(plan.spec.tables)))),)


def _lookup_train(
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    tables: Sequence[Tensor],
    states: Sequence[Tensor],
    anchor: Tensor,
    hyper: Tensor,
    counters: Tensor,
    sequence_rows: Sequence[int],
    forward: str,
    backward: str,
    weight_gradient: str,
    bounds_check: str,
    trainable: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = program_of(forward).plan
    batch = checked_batch(plan, values, offsets, weights, bounds_check)
    tables = rows_of(plan.layout, tables)
    check_sequence_rows(plan.layout, batch, sequence_rows)
    memory = TableMemory(tables, states, trainable, bounds_check)
    if any(trainable):
        refuse_replicas()
    numbers = numbers_of(hyper)
    if numbers is not None:
        numbers.note_forward(in_node=True)
    elements = sequence_elements(plan.layout, sequence_rows)
    kept = run_forward_kernel(forward, memory, batch, elements, (forward, backward, weight_gradient))
    return forward_results(kept, values)


def _lookup_train_fake(
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    tables: Sequence[Tensor],
    states: Sequence[Tensor],
    anchor: Tensor,
    hyper: Tensor,
    counters: Tensor,
    sequence_rows: Sequence[int],
    forward: str,
    backward: str,
    weight_gradient: str,
    bounds_check: str,
    trainable: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return forward_results_fake(values, offsets, sequence_rows, forward)


def forward_results(kept: ForwardResults, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of a forward kernel as an operator returns them, with empty tensors in the place of None."""
    return (
        kept.pooled,
        _or_empty(kept.sequence, kept.pooled),
        _or_empty(kept.divisors, kept.pooled, _FP32),
        _or_empty(kept.winners, values),
    )


def forward_results_fake(
    values: Tensor, offsets: Tensor, sequence_rows: Sequence[int] | None, program: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tensors with the shapes and dtypes of `forward_results`, for compilers."""
    pooled, sequence = _lookup_fake(values, offsets, None, (), sequence_rows, program, "")
    layout, size = program_of(program).plan.layout, pooled.shape[0]
    divisors = (size, layout.divisor_width) if layout.divisor_width else (0,)
    winners = (size, layout.winner_width) if layout.winner_width else (0,)
    return pooled, sequence, values.new_empty(divisors, dtype=_FP32), values.new_empty(winners)


class _Context(Context, Protocol):
    """What a forward keeps for its backward in addition to the saved tensors."""

    tables: list[Tensor]
    states: list[Tensor]
    hyper: Tensor
    counters: Tensor
    programs: tuple[str, str]
    """The programs of the update and of the gradient of per-sample weights."""
    bounds_check: str
    trainable: Sequence[bool]
    versions: list[int]
    """The versions of the tables when the forward ran."""
    sequences: int
    """The number of features that are not pooled."""


def _keep(ctx: _Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (
        values,
        offsets,
        weights,
        tables,
        states,
        _,
        hyper,
        counters,
        rows,
        _,
        backward,
        weight_gradient,
        bounds_check,
        trainable,
    ) = inputs
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(values, offsets, weights, *output[2:])
    # Not saved for backward: when the backward of a second call runs, the first one is expected to have changed them.
    ctx.tables, ctx.states, ctx.hyper, ctx.counters = list(tables), list(states), hyper, counters
    ctx.programs, ctx.bounds_check, ctx.trainable = (backward, weight_gradient), bounds_check, trainable
    ctx.versions, ctx.sequences = [table._version for table in tables], len(rows)
    # The gradient of weights needs the rows that the forward read, so then they must not change.
    _mark_inputs_that_may_change([*tables, *states, hyper, counters], may_change=not ctx.needs_input_grad[2])


def _mark_inputs_that_may_change(tensors: Sequence[Tensor], *, may_change: bool) -> None:
    """Marks, in a graph that is being traced, the inputs of its backward that may change after its forward.

    Without the mark torch would check the versions of all inputs, as if they had been saved, and so refuse the backward
    of the second of two calls.
    """
    if not is_tracing_proxies():
        return
    from torch.fx.traceback import current_meta

    may_change = may_change and "recompute" not in current_meta  # a repeated forward must read the same rows
    for tensor in tensors:
        for proxy in proxies_of(tensor):  # there are none before torch 2.13, which therefore refuses the second call
            meta = proxy.node.meta
            meta[MAY_CHANGE] = may_change and meta.get(MAY_CHANGE, True)


def _train(ctx: _Context, grad_pooled: Tensor, grad_sequence: Tensor, *unused: Tensor) -> Any:
    refuse_double_backward()
    values, offsets, weights, divisors, winners = ctx.saved_tensors
    backward, weight_gradient = ctx.programs
    inputs = (grad_pooled.contiguous(), grad_sequence.contiguous(), values, offsets, weights, divisors, winners)
    grad_weights = None
    if ctx.needs_input_grad[2]:
        if ctx.versions != [table._version for table in ctx.tables]:
            raise RuntimeError(ROWS_CHANGED)
        grad_weights = torch.ops.embforge.weight_gradient(*inputs, ctx.tables, weight_gradient, ctx.bounds_check)
    verdict = None
    if ctx.needs_input_grad[5]:
        verdict = torch.ops.embforge.update_(
            *inputs, ctx.tables, ctx.states, ctx.hyper, ctx.counters, backward, ctx.bounds_check, ctx.trainable
        )
        if torch.compiler.is_compiling():  # no kernel runs, which would raise the versions
            torch.autograd.graph.increment_version(ctx.tables)
    # torch counts a list of tensors as its elements, and an empty list too, but a list of numbers as one argument.
    per_table = [None] * len(ctx.tables)
    grad_rows: list[None] | None = None if ctx.sequences else []
    return None, None, grad_weights, per_table, per_table, verdict, None, None, grad_rows, None, None, None, None, None


def _update(
    grad_pooled: Tensor,
    grad_sequence: Tensor,
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    divisors: Tensor,
    winners: Tensor,
    tables: Sequence[Tensor],
    states: Sequence[Tensor],
    hyper: Tensor,
    counters: Tensor,
    program: str,
    bounds_check: str,
    trainable: Sequence[bool],
) -> Tensor:
    rules = _rules(program)
    plan = rules[0].plan  # the plans of all rules have the same rows, batch and gradients
    batch = checked_batch(plan, values, offsets, weights, bounds_check)
    tables = rows_of(plan.layout, tables)
    check_states(rules, tables, states, hyper, counters)
    gradients = checked_gradients(plan, batch, grad_pooled, grad_sequence, divisors, winners)
    if not update_is_wanted(hyper):  # a compiled backward is one node, so that only the operator can find out
        return hyper.new_zeros(1, dtype=_FP32)
    numbers = numbers_of(hyper)
    if numbers is not None:
        if numbers.hyper is not hyper:
            raise RuntimeError(MOVED)
        numbers.take_scale()
    return run_update_kernel(
        program, TableMemory(tables, states, trainable, bounds_check), batch, gradients, hyper, counters
    )


def _weight_gradient(
    grad_pooled: Tensor,
    grad_sequence: Tensor,
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    divisors: Tensor,
    winners: Tensor,
    tables: Sequence[Tensor],
    program: str,
    bounds_check: str,
) -> Tensor:
    plan = program_of(program).plan
    batch = checked_batch(plan, values, offsets, weights, bounds_check)
    tables = rows_in(plan.layout, tables)
    gradients = checked_gradients(plan, batch, grad_pooled, grad_sequence, divisors, winners)
    states, frozen = [table.new_empty(0) for table in tables], [False] * len(tables)
    return run_weight_gradient_kernel(program, TableMemory(tables, states, frozen, bounds_check), batch, gradients)


def _or_empty(tensor: Tensor | None, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(0, dtype=dtype or like.dtype) if tensor is None else tensor


def _keep_nothing(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keeps nothing for a backward that only raises an error."""


def _refuse_backward(ctx: Context, *gradients: Tensor) -> NoReturn:
    raise RuntimeError(
        "embforge::lookup has no gradient: it is the operator for results that are not differentiated; "
        "call the module, or embforge::lookup_train"
    )


IMPLEMENTATIONS = {
    "lookup": Implementation(_lookup, _lookup_fake, _refuse_backward, _keep_nothing),
    "lookup_train": Implementation(_lookup_train, _lookup_train_fake, _train, _keep),
    "update_": Implementation(_update, lambda pooled, *rest: pooled.new_empty(1, dtype=_FP32)),
    "weight_gradient": Implementation(
        _weight_gradient, lambda pooled, sequence, values, *rest: values.new_empty(values.shape, dtype=_FP32)
    ),
}
"""The implementations by operator name."""

register()

lookup: Any = torch.ops.embforge.lookup.default
lookup_train: Any = torch.ops.embforge.lookup_train.default
