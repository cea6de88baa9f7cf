"""What torch can do with tensors of each number format, and what to do where it cannot."""

from __future__ import annotations

import torch
from torch import Tensor

from embforge.codegen.dtypes import DTYPES, ID_DTYPES


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for a dtype of the spec."""
    dtype: torch.dtype = getattr(torch, DTYPES[name].torch_name)
    return dtype


ID_NAMES = {torch_dtype(name): name for name in ID_DTYPES}
"""The dtypes that ids may have, with the names that plans have for them."""
_KNOWN = {torch_dtype(name): dtype for name, dtype in DTYPES.items()}


def torch_computes(dtype: torch.dtype) -> bool:
    """Whether torch can draw, index and differentiate tensors of a table's dtype, and not only convert them."""
    return _KNOWN[dtype].torch_computes


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether it is int8 or an 8-bit float: vectors of such numbers may have a scale."""
    return dtype in _KNOWN and _KNOWN[dtype].is_packed


def as_indexable(tensor: Tensor) -> Tensor:
    """The tensor, or its bytes if its numbers have one byte: torch can index, gather and send bytes, but not every
    dtype of that size. In all of them, zero is the byte 0."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
