"""The operators for tables with dense gradients: a lookup that is differentiable by its tables, and its backward.

Both are pure functions with fake implementations, so that compiled graphs can contain forward and backward. Their
schemas are in registration.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from embforge.autograd_calls import Context
from embforge.launch.metadata import check_tables
from embforge.number_formats import torch_computes, torch_dtype
from embforge.operator_arguments import check_sequence_rows, checked_batch, checked_gradients, sequence_elements
from embforge.operators.lookup import forward_results, forward_results_fake, program_of
from embforge.operators.registration import Implementation, register
from embforge.storage.common import NO_TORCH_GRADIENT
from embforge.storage.parameter_table import dense_gradient
from embforge.training.calls import TableMemory, refuse_double_backward, run_forward_kernel, run_reduce_kernel


def _lookup_dense(
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    tables: Sequence[Tensor],
    sequence_rows: Sequence[int] | None,
    forward: str,
    reduce: str,
    weight_gradient: str,
    bounds_check: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = program_of(forward).plan
    batch = checked_batch(plan, values, offsets, weights, bounds_check)
    check_tables(plan.layout, tables)
    rows = sequence_rows or ()
    check_sequence_rows(plan.layout, batch, rows)
    memory = TableMemory(tables, (), (), bounds_check)
    elements = sequence_elements(plan.layout, rows)
    kept = run_forward_kernel(forward, memory, batch, elements, (forward, reduce, weight_gradient))
    return forward_results(kept, values)


def _lookup_dense_fake(
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    tables: Sequence[Tensor],
    sequence_rows: Sequence[int] | None,
    forward: str,
    reduce: str,
    weight_gradient: str,
    bounds_check: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return forward_results_fake(values, offsets, sequence_rows, forward)


class _Context(Context, Protocol):
    """What a forward keeps for its backward in addition to the saved tensors."""

    programs: list[str]
    """The programs for the gradients of tables and for the gradient of per-sample weights."""
    bounds_check: str


def _keep(ctx: _Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    values, offsets, weights, tables, _, _, *programs, bounds_check = inputs
    ctx.mark_non_differentiable(*output[2:])
    read = tables if ctx.needs_input_grad[2] else ()  # the gradient of weights needs the rows that the forward read
    ctx.save_for_backward(values, offsets, weights, *output[2:], *read)
    ctx.programs, ctx.bounds_check = programs, bounds_check


def _backward(ctx: _Context, grad_pooled: Tensor, grad_sequence: Tensor, *unused: Tensor) -> Any:
    refuse_double_backward()
    values, offsets, weights, divisors, winners, *tables = ctx.saved_tensors
    reduce, weight_gradient = ctx.programs
    inputs = (grad_pooled.contiguous(), grad_sequence.contiguous(), values, offsets, weights, divisors, winners)
    grad_weights = None
    if ctx.needs_input_grad[2]:
        grad_weights = torch.ops.embforge.weight_gradient(*inputs, tables, weight_gradient, ctx.bounds_check)
    wanted = ctx.needs_input_grad[3]
    for table, want in zip(program_of(reduce).plan.spec.tables, wanted, strict=True):
        if want and not torch_computes(torch_dtype(table.dtype)):
            raise TypeError(f"table {table.name!r}: {NO_TORCH_GRADIENT}")
    dense = iter(torch.ops.embforge.dense_gradients(*inputs, reduce, ctx.bounds_check, wanted) if any(wanted) else ())
    grad_tables = [next(dense) if want else None for want in wanted]
    return None, None, grad_weights, grad_tables, None, None, None, None, None


def _dense_gradients(
    grad_pooled: Tensor,
    grad_sequence: Tensor,
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    divisors: Tensor,
    winners: Tensor,
    program: str,
    bounds_check: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    plan = program_of(program).plan
    batch = checked_batch(plan, values, offsets, weights, bounds_check)
    gradients = checked_gradients(plan, batch, grad_pooled, grad_sequence, divisors, winners)
    tables = _stand_ins(program, values.device)
    empty = [table.new_empty(0) for table in tables]
    reduced = run_reduce_kernel(program, TableMemory(tables, empty, list(wanted), bounds_check), batch, gradients)
    return [
        dense_gradient(table.shape, rows, sums.to(table.dtype))
        for table, (rows, sums), want in zip(tables, reduced, wanted, strict=True)
        if want
    ]


def _dense_gradients_fake(
    grad_pooled: Tensor,
    grad_sequence: Tensor,
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    divisors: Tensor,
    winners: Tensor,
    program: str,
    bounds_check: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    tables = [table for table, want in zip(program_of(program).plan.spec.tables, wanted, strict=True) if want]
    return [
        values.new_empty((table.num_embeddings, table.embedding_dim), dtype=torch_dtype(table.dtype))
        for table in tables
    ]


@lru_cache(maxsize=256)
def _stand_ins(program: str, device: torch.device) -> tuple[Tensor, ...]:
    """Tensors with the shapes of the tables and the memory of one number each: a reduction reads no row of a table."""
    return tuple(
        torch.empty(1, dtype=torch_dtype(table.dtype), device=device).expand(table.num_embeddings, table.embedding_dim)
        for table in program_of(program).plan.spec.tables
    )


IMPLEMENTATIONS = {
    "lookup_dense": Implementation(_lookup_dense, _lookup_dense_fake, _backward, _keep),
    "dense_gradients": Implementation(_dense_gradients, _dense_gradients_fake),
}
"""The implementations by operator name."""

register()

lookup_dense: Any = torch.ops.embforge.lookup_dense.default
dense_gradients: Any = torch.ops.embforge.dense_gradients.default
