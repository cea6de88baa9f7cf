"""Converts drawn batches to the tensors that lookups take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embforge.inputs import Batch
from embforge.tuner.workload import workload


def input_of(drawn: workload.Batch, device: torch.device | str = "cpu", id_dtype: torch.dtype | None = None) -> Batch:
    """The batch as a call's input on a device. If nothing is moved or converted, it shares the arrays' memory."""

    def put(array: Any, dtype: torch.dtype | None = None) -> Tensor:
        return torch.from_numpy(array).to(device, dtype)

    weights = None if drawn.weights is None else put(drawn.weights)
    return Batch(put(drawn.values, id_dtype), put(drawn.offsets, id_dtype), weights, drawn.size, None)
