"""Checks the arguments of the torch operators. Kernels trust them; a module's own calls are checked by `normalise`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from embforge.codegen.layout import STATE_BYTES, CollectionLayout
from embforge.codegen.plan import Plan
from embforge.codegen.rules.rule import COUNTERS, HYPER
from embforge.codegen.target import target_named
from embforge.inputs import BOUNDS_CHECKS, Batch
from embforge.launch.gradients import Gradients
from embforge.launch.metadata import check_tables
from embforge.number_formats import torch_dtype

_FP32 = torch.float32


def checked_batch(plan: Plan, values: Tensor, offsets: Tensor, weights: Tensor | None, bounds_check: str) -> Batch:
    """The batch of an operator's call. Raises the errors of `check_arguments`."""
    check_arguments(plan, values, offsets, weights, bounds_check)
    return Batch(values, offsets, weights, (offsets.numel() - 1) // len(plan.spec.features), None)


def check_arguments(plan: Plan, values: Tensor, offsets: Tensor, weights: Tensor | None, bounds_check: str) -> None:
    """Raises TypeError or ValueError unless ids, offsets, weights and `bounds_check` are as the kernel of a plan
    expects."""
    id_dtype = torch_dtype(plan.id_dtype)
    for name, tensor, dtype in (
        ("values", values, id_dtype),
        ("offsets", offsets, id_dtype),
        ("weights", weights, _FP32),
    ):
        if tensor is None:
            continue
        if tensor.dtype != dtype and target_named(plan.target).is_generated:
            raise TypeError(f"{name}: dtype {tensor.dtype} does not fit the program; allowed: {dtype}")
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)}, strides {tensor.stride()}; allowed: 1-D, contiguous"
            )
    if weights is not None and weights.numel() != values.numel():
        raise ValueError(f"weights: {weights.numel()} numbers for {values.numel()} ids; give one weight per id")
    if (offsets.numel() - 1) % len(plan.spec.features) or offsets.numel() == 0:
        raise ValueError(f"offsets: length {offsets.numel()} does not fit {len(plan.spec.features)} features")
    if bounds_check not in BOUNDS_CHECKS:
        raise ValueError(f"bounds_check={bounds_check!r} is not known; allowed: {', '.join(BOUNDS_CHECKS)}")


def check_sequence_rows(layout: CollectionLayout, batch: Batch, sequence_rows: Sequence[int]) -> None:
    """Raises ValueError if `sequence_rows` does not agree with the offsets.

    A kernel writes as many rows as the offsets say, and would write past the end of a smaller result.
    """
    if not layout.sequence_features or not batch.offsets.is_cpu or batch.batch == 0:
        return  # reading a GPU's offsets would wait for the device
    borders = batch.offsets[:: batch.batch].tolist()
    true = [borders[f.index + 1] - borders[f.index] for f in layout.sequence_features]
    if true != list(sequence_rows) and min(true) >= 0:
        raise ValueError(f"sequence_rows: {list(sequence_rows)} does not fit the offsets, which say {true}")


def sequence_elements(layout: CollectionLayout, sequence_rows: Sequence[int]) -> int:
    """The number of elements of the flat sequence output. `sequence_rows`: the number of ids of each `none` feature."""
    return sum(rows * f.dim for rows, f in zip(sequence_rows, layout.sequence_features, strict=True))


def rows_of(layout: CollectionLayout, blocks: Sequence[Tensor]) -> list[Tensor]:
    """The rows `[rows, dim]` in the memory of tables, contiguous `[rows, stride]`. ValueError for other shapes."""
    for table, block in zip(layout.tables, blocks, strict=True):
        if block.dim() != 2 or block.shape[1] != table.stride_elements or not block.is_contiguous():
            raise ValueError(
                f"tables: {table.table.name!r} has shape {tuple(block.shape)} and strides {block.stride()}; "
                f"allowed: contiguous [rows, {table.stride_elements}]"
            )
    return rows_in(layout, blocks)


def rows_in(layout: CollectionLayout, tables: Sequence[Tensor]) -> list[Tensor]:
    """The rows `[rows, dim]` of tables that are only read.

    `tables` may be `[rows, stride]`, or `[rows, dim]` with the stride of the layout. ValueError for other tensors.
    """
    rows = [tensor[:, : table.table.embedding_dim] for table, tensor in zip(layout.tables, tables, strict=True)]
    check_tables(layout, rows)
    return rows


class RulePlan(NamedTuple):
    """The kernel plan of an update, and the tables that it may train, by their indices in the spec."""

    plan: Plan
    tables: tuple[int, ...]


def check_states(
    rules: Sequence[RulePlan], tables: Sequence[Tensor], states: Sequence[Tensor], hyper: Tensor, counters: Tensor
) -> None:
    """Raises ValueError unless states, hyperparameters and counters have the shapes that a backward needs."""
    if len(states) != len(tables):
        raise ValueError(f"states: {len(states)} for {len(tables)} tables; pass one tensor per table")
    wanted: list[tuple[str, Tensor, tuple[int, ...], torch.dtype]] = []
    numbers = 0
    for plan, indices in rules:
        assert plan.update is not None
        for index in indices:
            width = plan.layout.tables[index].state_stride_bytes // STATE_BYTES
            wanted.append(("states", states[index], (tables[index].shape[0], width), _FP32))
        numbers += len(HYPER) + len(plan.update.rule.hyper)
    wanted.append(("hyper", hyper, (numbers,), torch.float64))
    wanted.append(("counters", counters, (len(COUNTERS),), torch.int64))
    for name, tensor, shape, dtype in wanted:
        _check_tensor(name, tensor, shape, dtype)


def checked_gradients(
    plan: Plan, batch: Batch, pooled: Tensor, sequence: Tensor, divisors: Tensor, winners: Tensor
) -> Gradients:
    """The gradients that a backward kernel takes. ValueError unless they have the shapes and dtypes that it trusts."""
    layout, dtype = plan.layout, torch_dtype(plan.spec.output_dtype)
    size = batch.batch
    _check_tensor("grad_pooled", pooled, (size, layout.output_width), dtype)
    _check_tensor("divisors", divisors, (size, layout.divisor_width) if layout.divisor_width else (0,), _FP32)
    _check_tensor("winners", winners, (size, layout.winner_width) if layout.winner_width else (0,), batch.values.dtype)
    if sequence.dtype != dtype or sequence.dim() != 1 or not sequence.is_contiguous():
        raise ValueError(f"grad_sequence: {sequence.dtype} {tuple(sequence.shape)}; allowed: contiguous 1-D {dtype}")
    check_sequence_gradient(layout, batch, sequence)
    return Gradients(
        pooled,
        sequence if layout.sequence_features else None,
        divisors if layout.divisor_width else None,
        winners if layout.winner_width else None,
    )


def check_sequence_gradient(layout: CollectionLayout, batch: Batch, sequence: Tensor) -> None:
    """Raises ValueError unless the gradient of the sequence output fits the offsets.

    A kernel reads as many gradients as the offsets say, and they may have changed since the forward.
    """
    if not layout.sequence_features or not batch.offsets.is_cpu or batch.batch == 0:
        return  # reading a GPU's offsets would wait for the device
    borders = batch.offsets[:: batch.batch].tolist()
    elements = sum((borders[f.index + 1] - borders[f.index]) * f.dim for f in layout.sequence_features)
    if sequence.numel() != elements and elements >= 0:
        raise ValueError(
            f"grad_sequence: {sequence.numel()} numbers; offsets say {elements}; was the batch changed between forward "
            "and backward?"
        )


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: {tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}; "
            f"allowed: contiguous {dtype} {shape}"
        )
