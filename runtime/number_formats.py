"""What torch can do with tensors of a number format, and the way around where it cannot."""

from __future__ import annotations

import torch
from torch import Tensor

from embforge.codegen.dtypes import DTYPES


def torch_dtype(name: str) -> torch.dtype:
    """torch's own dtype of a table that the spec gives this dtype."""
    dtype: torch.dtype = getattr(torch, DTYPES[name].torch_name)
    return dtype


_KNOWN = {torch_dtype(name): dtype for name, dtype in DTYPES.items()}


def torch_computes(dtype: torch.dtype) -> bool:
    """Whether torch draws, indexes and differentiates numbers of a table's format, and does not merely convert them."""
    return _KNOWN[dtype].torch_computes


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether numbers are a byte each, as int8 and 8-bit floats are: weights of such numbers may come with a scale for
    each row."""
    return dtype.itemsize == 1


def as_indexable(tensor: Tensor) -> Tensor:
    """The tensor, or its bytes if its numbers are a byte each: torch indexes, gathers and sends bytes, but not every
    format of that size. Zero is zero in all of them."""
    return tensor.view(torch.uint8) if is_quantized(tensor.dtype) else tensor
