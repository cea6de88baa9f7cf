"""The torch operators: defined once, whatever the spec. A plan's text says which kernel a call means.

Importing this module registers `embforge::lookup`; nothing is registered per spec.
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
from embforge.launch.kernels import Program, kernel_of
from embforge.launch.metadata import check_tables, metadata_of

_FP32 = torch.float32

LOOKUP = (
    "lookup(Tensor values, Tensor offsets, Tensor? weights, Tensor[] tables, SymInt[] sequence_rows, "
    "str program, str bounds_check) -> (Tensor pooled, Tensor sequence)"
)
"""`tables`: `[rows, dim]` in layout order. `sequence_rows`: ids of each `none` feature. `program`: see `Program`."""


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


def _refuse_backward(context: Any, *gradients: Tensor) -> Any:
    raise RuntimeError(
        "embforge::lookup has no backward yet: this version runs forward only. "
        "Leave requires_grad=False on the tables, or detach the result"
    )


def _register() -> torch.library.Library:
    library = torch.library.Library("embforge", "DEF")
    library.define(LOOKUP)
    for key in ("CPU", "CUDA"):
        library.impl("lookup", _lookup, key)
    torch.library.register_fake("embforge::lookup", _lookup_fake, lib=library)
    torch.library.register_autograd("embforge::lookup", _refuse_backward, lib=library)
    return library


LIBRARY = _register()
"""Keeps the registration alive: torch drops a library's operators with it."""

lookup: Any = torch.ops.embforge.lookup.default
