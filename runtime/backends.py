"""Which backend works where, and what it generates code for there."""

from __future__ import annotations

from typing import Literal

import torch

from embforge.codegen.machine import host_isa
from embforge.codegen.targets.cuda.arch import DEFAULT_ARCH, nearest_arch

BackendName = Literal["cuda", "cpu", "simt", "reference"]
DEVICES_OF: dict[str, tuple[str, ...]] = {
    "cuda": ("cuda",),
    "cpu": ("cpu",),
    "simt": ("cpu",),
    "reference": ("cpu", "cuda"),
}
"""Which device types a backend works on."""


def backend_on(device: torch.device, wanted: str | None = None) -> str:
    """The backend to use on that device: `wanted`, else the usual one. ValueError if it does not work there."""
    if wanted is None:
        return "cuda" if device.type == "cuda" else "cpu"
    if wanted not in DEVICES_OF:
        raise ValueError(f"backend={wanted!r} is not known; allowed: {', '.join(DEVICES_OF)}, or None: by device")
    if device.type not in (*DEVICES_OF[wanted], "meta"):
        raise ValueError(
            f"backend={wanted!r} does not work on device {str(device)!r}; allowed: {', '.join(DEVICES_OF[wanted])}"
        )
    return wanted


def arch_of(backend: str, device: torch.device) -> str:
    """What the backend generates code for on that device; on meta, where nothing runs, for any."""
    if backend == "cpu":
        return host_isa()
    if backend == "reference":
        return "torch"
    if backend == "simt" or device.type == "meta":
        return DEFAULT_ARCH
    return nearest_arch(*torch.cuda.get_device_capability(device))
