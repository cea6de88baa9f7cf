"""Kernels for weights that a caller passes: one per dim, dtype and kind of lookup, for any number of rows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple
from warnings import warn

import torch
from torch import Tensor

from embforge.backends import arch_of, backend_on
from embforge.codegen.dtypes import OUTPUT_DTYPES, TABLE_DTYPES
from embforge.codegen.errors import MissingKernelError, ToolchainError
from embforge.codegen.params import params_type
from embforge.codegen.plans import training_plans
from embforge.codegen.spec import MAX_DIM, MAX_ROWS, CollectionSpec, FeatureSpec, TableSpec
from embforge.launch.kernels import Kernel, Program, kernel_of
from embforge.number_formats import torch_dtype

_NAME_OF: dict[torch.dtype, str] = {torch_dtype(name): name for name in TABLE_DTYPES}
_ROW_LIMITS = (2**31 - 1, MAX_ROWS)
"""Kernels are made for at most one of these numbers of rows: a row's number takes 4 bytes or 8."""


class WeightPrograms(NamedTuple):
    """The programs of one kind of lookup, and the stride (in elements) and alignment (in bytes) that rows must have."""

    forward: str
    train: str
    reduce: str
    weight_gradient: str
    stride: int
    alignment: int


def programs_for(weight: Tensor, dtype: torch.dtype, pooling: str, weighted: bool) -> WeightPrograms | None:
    """The programs that look rows of `weight` up and return `dtype`; None if there are no kernels for these tensors."""
    names = _NAME_OF.get(weight.dtype), _NAME_OF.get(dtype)
    rows, dim = weight.shape
    if names[0] is None or names[1] not in OUTPUT_DTYPES or not 1 <= dim <= MAX_DIM or rows > MAX_ROWS:
        return None
    device = weight.device if weight.is_cuda else None
    texts = _texts(device, dim, names[0], names[1], pooling, weighted, rows > _ROW_LIMITS[0])
    has_stride = weight.stride() == (texts.stride, 1) or (rows == 1 and weight.stride(1) == 1)
    if weight.is_neg():  # its memory holds negated numbers, which torch negates again when it reads them
        return None
    return texts if has_stride and weight.data_ptr() % texts.alignment == 0 else None


@lru_cache(maxsize=1024)
def _texts(
    device: torch.device | None, dim: int, dtype: Any, output_dtype: Any, pooling: Any, weighted: bool, many: bool
) -> WeightPrograms:
    target = backend_on(device or torch.device("cpu"))
    spec = CollectionSpec(
        (TableSpec("weight", _ROW_LIMITS[many], dim, dtype),),
        (FeatureSpec("input", "weight", pooling, weighted),),
        output_dtype,
        "functional",
    )
    arch = arch_of(target, device or torch.device("cpu"))
    plans = training_plans(spec, target, arch, "int64", params_type(target, "forward")())
    text = {name: Program(plan).text for name, plan in plans.items()}
    layout = plans["forward"].layout.tables[0]
    weight_gradient = text.get("weight_gradient", "")
    return WeightPrograms(
        text["forward"], text["train"], text["reduce"], weight_gradient, layout.stride_elements, layout.alignment
    )


@lru_cache(maxsize=1024)
def forward_kernel(program: str) -> Kernel | None:
    """The kernel of a forward program; None, with a warning, if it cannot be built, because torch can do the lookup."""
    try:
        kernel: Kernel = kernel_of(program)
    except (MissingKernelError, ToolchainError) as error:
        warn(f"embforge.functional: torch does this lookup, more slowly, because {error}", stacklevel=4)
        return None
    return kernel


def check_ids(name: str, ids: Tensor) -> None:
    """Raises TypeError if a tensor has a dtype that ids cannot have."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: dtype {ids.dtype} is not allowed; allowed: torch.int32, torch.int64")


def check_device(weight: Tensor, **others: Tensor | None) -> None:
    """Raises ValueError if an argument is not on the device of the weight."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != weight.device:
            raise ValueError(f"{name}: on device {tensor.device}, weight is on {weight.device}; move one of them")
