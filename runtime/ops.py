"""The torch operators: defined once, whatever the spec. A plan's text says which kernel a call means.

Importing this module registers the operators; nothing is registered per spec.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.layout import CollectionLayout
from embforge.codegen.plan import Plan
from embforge.inputs import BOUNDS_CHECKS, Batch
from embforge.launch.gradients import Gradients
from embforge.launch.kernels import Program, kernel_of
from embforge.launch.metadata import check_tables, metadata_of
from embforge.training.calls import (
    ROWS_CHANGED,
    Storage,
    refuse_double_backward,
    run_forward,
    run_update,
    run_weight_gradient,
)

_FP32 = torch.float32

LOOKUP = (
    "lookup(Tensor values, Tensor offsets, Tensor? weights, Tensor[] tables, SymInt[] sequence_rows, "
    "str program, str bounds_check) -> (Tensor pooled, Tensor sequence)"
)
"""For results that nobody differentiates. `tables`: `[rows, dim]` in layout order. `sequence_rows`: ids of each `none`
feature. `program`: see `Program`."""

LOOKUP_TRAIN = (
    "lookup_train(Tensor values, Tensor offsets, Tensor? weights, Tensor[] tables, Tensor[] states, Tensor anchor, "
    "Tensor hyper, Tensor counters, SymInt[] sequence_rows, str forward, str backward, str weight_gradient, "
    "str bounds_check, bool[] trainable) -> (Tensor pooled, Tensor sequence, Tensor divisors, Tensor winners)"
)
"""A lookup whose backward updates `tables` and `states`. `anchor` is what autograd sees of them. `divisors` and
`winners`: what the backward needs of the forward, see codegen/signature.py. Three programs: `forward` keeps these."""

UPDATE = (
    "update_(Tensor grad_pooled, Tensor grad_sequence, Tensor values, Tensor offsets, Tensor? weights, "
    "Tensor divisors, Tensor winners, Tensor(a!)[] tables, Tensor(b!)[] states, Tensor hyper, Tensor(c!) counters, "
    "str program, str bounds_check, bool[] trainable) -> Tensor"
)
"""Rows and states updated from the gradients of a lookup. Returns 0, or infinity where `hyper` has a loss scale and
gradients are not finite: then nothing has changed."""

WEIGHT_GRADIENT = (
    "weight_gradient(Tensor grad_pooled, Tensor grad_sequence, Tensor values, Tensor offsets, Tensor? weights, "
    "Tensor divisors, Tensor winners, Tensor[] tables, str program, str bounds_check) -> Tensor"
)
"""The gradient of a lookup's weights, `[ids]`."""


def _lookup(
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    tables: Sequence[Tensor],
    sequence_rows: Sequence[int],
    program: str,
    bounds_check: str,
) -> tuple[Tensor, Tensor]:
    kernel = kernel_of(program)
    layout = kernel.plan.layout
    _check_arguments(kernel.plan, values, offsets, weights, bounds_check)
    check_tables(layout, tables)
    batch = Batch(values, offsets, weights, (offsets.numel() - 1) // len(layout.features), None)
    _check_sequence_rows(layout, batch, sequence_rows)
    elements = sequence_elements(layout, sequence_rows)
    pooled, sequence = kernel(metadata_of(tables, bounds_check), tables, batch, elements, bounds_check)
    return pooled, values.new_empty(0, dtype=pooled.dtype) if sequence is None else sequence


def _lookup_fake(
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    tables: Sequence[Tensor],
    sequence_rows: Sequence[int],
    program: str,
    bounds_check: str,
) -> tuple[Tensor, Tensor]:
    plan = _program(program).plan
    dtype = getattr(torch, DTYPES[plan.spec.output_dtype].torch_name)
    batch = (offsets.numel() - 1) // len(plan.spec.features)
    pooled = values.new_empty((batch, plan.layout.output_width), dtype=dtype)
    return pooled, values.new_empty(sequence_elements(plan.layout, sequence_rows), dtype=dtype)


def _check_arguments(plan: Plan, values: Tensor, offsets: Tensor, weights: Tensor | None, bounds_check: str) -> None:
    """What a caller of the module has from `normalise` and a caller of the operator must see to."""
    id_dtype = getattr(torch, DTYPES[plan.id_dtype].torch_name)
    for name, tensor, dtype in (
        ("values", values, id_dtype),
        ("offsets", offsets, id_dtype),
        ("weights", weights, _FP32),
    ):
        if tensor is None:
            continue
        if tensor.dtype != dtype and plan.target != "reference":
            raise TypeError(f"{name}: dtype {tensor.dtype} does not fit the program; allowed: {dtype}")
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)}, strides {tensor.stride()}; allowed: 1-D, contiguous"
            )
    if weights is not None and weights.numel() != values.numel():
        raise ValueError(f"weights: {weights.numel()} numbers for {values.numel()} ids; give one weight an id")
    if (offsets.numel() - 1) % len(plan.spec.features) or offsets.numel() == 0:
        raise ValueError(f"offsets: length {offsets.numel()} does not fit {len(plan.spec.features)} features")
    if bounds_check not in BOUNDS_CHECKS:
        raise ValueError(f"bounds_check={bounds_check!r} is not known; allowed: {', '.join(BOUNDS_CHECKS)}")


def _check_sequence_rows(layout: CollectionLayout, batch: Batch, sequence_rows: Sequence[int]) -> None:
    """A kernel writes as many rows as offsets say: a caller who says fewer would have it write past the end."""
    if not layout.sequence_features or not batch.offsets.is_cpu or batch.batch == 0:
        return  # a look at a GPU's offsets would wait for it
    borders = batch.offsets[:: batch.batch].tolist()
    true = [borders[f.index + 1] - borders[f.index] for f in layout.sequence_features]
    if true != list(sequence_rows) and min(true) >= 0:
        raise ValueError(f"sequence_rows: {list(sequence_rows)} given, offsets say {true}")


def sequence_elements(layout: CollectionLayout, sequence_rows: Sequence[int]) -> int:
    """Numbers in the flat sequence output, from the ids of each `none` feature."""
    return sum(rows * f.dim for rows, f in zip(sequence_rows, layout.sequence_features, strict=True))


@lru_cache(maxsize=256)
def _program(text: str) -> Program:
    return Program.from_text(text)


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
    plan = _program(forward).plan
    batch = _checked_batch(plan, values, offsets, weights, bounds_check)
    check_tables(plan.layout, tables)
    _check_sequence_rows(plan.layout, batch, sequence_rows)
    storage = Storage(tables, states, trainable, bounds_check)
    kept = run_forward(forward, storage, batch, sequence_elements(plan.layout, sequence_rows))
    return (
        kept.pooled,
        _or_empty(kept.sequence, kept.pooled),
        _or_empty(kept.divisors, hyper, _FP32),
        _or_empty(kept.winners, values),
    )


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
    pooled, sequence = _lookup_fake(values, offsets, weights, tables, sequence_rows, forward, bounds_check)
    layout, size = _program(forward).plan.layout, pooled.shape[0]
    divisors = (size, layout.divisor_width) if layout.divisor_width else (0,)
    winners = (size, layout.winner_width) if layout.winner_width else (0,)
    return pooled, sequence, values.new_empty(divisors, dtype=_FP32), values.new_empty(winners)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    values, offsets, weights, tables, states, _, hyper, counters, rows, _, backward, weight_gradient, bounds, train = (
        inputs
    )
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(values, offsets, weights, *output[2:])
    # Not saved: they are meant to have changed when the backward of a second call runs.
    ctx.tables, ctx.states, ctx.hyper, ctx.counters = list(tables), list(states), hyper, counters
    ctx.programs, ctx.bounds_check, ctx.trainable = (backward, weight_gradient), bounds, train
    ctx.versions, ctx.sequences = [table._version for table in tables], len(rows)


def _train(ctx: Any, grad_pooled: Tensor, grad_sequence: Tensor, *unused: Tensor) -> Any:
    refuse_double_backward()
    values, offsets, weights, divisors, winners = ctx.saved_tensors
    backward, weight_gradient = ctx.programs
    given = (grad_pooled.contiguous(), grad_sequence.contiguous(), values, offsets, weights, divisors, winners)
    wanted = None
    if ctx.needs_input_grad[2]:
        if ctx.versions != [table._version for table in ctx.tables]:
            raise RuntimeError(ROWS_CHANGED)
        wanted = torch.ops.embforge.weight_gradient(*given, ctx.tables, weight_gradient, ctx.bounds_check)
    verdict = None
    if ctx.needs_input_grad[5]:
        verdict = torch.ops.embforge.update_(
            *given, ctx.tables, ctx.states, ctx.hyper, ctx.counters, backward, ctx.bounds_check, ctx.trainable
        )
    nothing, none = [None] * len(ctx.tables), [None] * ctx.sequences
    return None, None, wanted, nothing, nothing, verdict, None, None, none, None, None, None, None, None


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
    plan = _program(program).plan
    batch = _checked_batch(plan, values, offsets, weights, bounds_check)
    check_tables(plan.layout, tables)
    gradients = _checked_gradients(plan, batch, grad_pooled, grad_sequence, divisors, winners)
    return run_update(program, Storage(tables, states, trainable, bounds_check), batch, gradients, hyper, counters)


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
    plan = _program(program).plan
    batch = _checked_batch(plan, values, offsets, weights, bounds_check)
    check_tables(plan.layout, tables)
    gradients = _checked_gradients(plan, batch, grad_pooled, grad_sequence, divisors, winners)
    states, frozen = [table.new_empty(0) for table in tables], [False] * len(tables)
    return run_weight_gradient(program, Storage(tables, states, frozen, bounds_check), batch, gradients)


def _checked_batch(plan: Plan, values: Tensor, offsets: Tensor, weights: Tensor | None, bounds_check: str) -> Batch:
    _check_arguments(plan, values, offsets, weights, bounds_check)
    return Batch(values, offsets, weights, (offsets.numel() - 1) // len(plan.spec.features), None)


def _checked_gradients(
    plan: Plan, batch: Batch, pooled: Tensor, sequence: Tensor, divisors: Tensor, winners: Tensor
) -> Gradients:
    """What a backward takes, its shapes checked: kernels trust them."""
    layout, dtype = plan.layout, getattr(torch, DTYPES[plan.spec.output_dtype].torch_name)
    size = batch.batch
    wanted = {
        "grad_pooled": (pooled, (size, layout.output_width), dtype),
        "divisors": (divisors, (size, layout.divisor_width) if layout.divisor_width else (0,), _FP32),
        "winners": (winners, (size, layout.winner_width) if layout.winner_width else (0,), batch.values.dtype),
    }
    for name, (tensor, shape, kind) in wanted.items():
        if tuple(tensor.shape) != shape or tensor.dtype != kind or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}; "
                f"allowed: contiguous {kind} {shape}, as the lookup gave it"
            )
    if sequence.dtype != dtype or sequence.dim() != 1 or not sequence.is_contiguous():
        raise ValueError(f"grad_sequence: {sequence.dtype} {tuple(sequence.shape)}; allowed: contiguous 1-D {dtype}")
    if layout.sequence_features and batch.offsets.is_cpu and size:
        borders = batch.offsets[::size].tolist()
        elements = sum((borders[f.index + 1] - borders[f.index]) * f.dim for f in layout.sequence_features)
        if sequence.numel() != elements and elements >= 0:
            raise ValueError(f"grad_sequence: {sequence.numel()} numbers; offsets say {elements}")
    return Gradients(
        pooled,
        sequence if layout.sequence_features else None,
        divisors if layout.divisor_width else None,
        winners if layout.winner_width else None,
    )


def _or_empty(tensor: Tensor | None, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(0, dtype=dtype or like.dtype) if tensor is None else tensor


def _refuse_backward(context: Any, *gradients: Tensor) -> Any:
    raise RuntimeError(
        "embforge::lookup has no gradient: it is the operator for results that nobody differentiates; "
        "call the module, or embforge::lookup_train"
    )


def _register() -> torch.library.Library:
    library = torch.library.Library("embforge", "DEF")
    kernels = {
        "lookup": (LOOKUP, _lookup),
        "lookup_train": (LOOKUP_TRAIN, _lookup_train),
        "update_": (UPDATE, _update),
        "weight_gradient": (WEIGHT_GRADIENT, _weight_gradient),
    }
    for name, (schema, function) in kernels.items():
        library.define(schema)
        for key in ("CPU", "CUDA"):
            library.impl(name, function, key)
    fakes: dict[str, Any] = {
        "lookup": _lookup_fake,
        "lookup_train": _lookup_train_fake,
        "update_": lambda pooled, *rest: pooled.new_empty(1, dtype=_FP32),
        "weight_gradient": lambda pooled, sequence, values, *rest: values.new_empty(values.shape, dtype=_FP32),
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"embforge::{name}", fake, lib=library)
    torch.library.register_autograd("embforge::lookup", _refuse_backward, lib=library)
    torch.library.register_autograd("embforge::lookup_train", _train, setup_context=_keep, lib=library)
    return library


LIBRARY = _register()
"""Keeps the registration alive: torch drops a library's operators with it."""

lookup: Any = torch.ops.embforge.lookup.default
lookup_train: Any = torch.ops.embforge.lookup_train.default
