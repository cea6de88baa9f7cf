"""Memory of big exchanges, used again from call to call: fresh pages cost the host as much as the bytes that fill
them."""

from __future__ import annotations

import torch
from torch import Tensor

from embforge.memory import Results


class Buffers:
    """Uninitialised tensors by what they are for. One that somebody still holds is never given out again."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], Results] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":  # torch's own allocator keeps what is freed
            return torch.empty(shape, dtype=dtype, device=device)
        found = self._kept.get((name, dtype))
        if found is None:
            found = self._kept.setdefault((name, dtype), Results(dtype))
        return found.empty(*shape)
