"""On which device a module's tables are to lie."""

from __future__ import annotations

import torch

from embforge.codegen.errors import ToolchainError


def chosen_device(device: str | torch.device | None) -> torch.device:
    """The device that was asked for, None being torch's default. `ToolchainError` if it is a GPU and there is none."""
    chosen = torch.get_default_device() if device is None else torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ToolchainError(
            f"device={str(chosen)!r} needs a CUDA GPU and a torch built for it; none is here; use device='cpu', or "
            "backend='simt' on device='cpu' to execute the CUDA kernels slowly without a GPU"
        )
    return chosen
