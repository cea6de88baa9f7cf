"""Which backend works on which device, and for which architecture it generates code there."""

from __future__ import annotations

from typing import Literal, TypeGuard

import torch

from embforge.codegen.machine import host_isa
from embforge.codegen.target import BACKENDS, TARGETS, target_named
from embforge.codegen.targets.cuda.arch import nearest_arch

BackendName = Literal["cuda", "cpu", "simt", "reference"]
DEVICES_OF: dict[str, tuple[str, ...]] = {backend.name: backend.devices for backend in BACKENDS.values()}
"""The types of devices on which each backend works."""
USUAL = {target.devices[0]: target.name for target in TARGETS.values() if not target.emulates}
"""The default backend for each type of device."""


def is_backend(name: str) -> TypeGuard[BackendName]:
    """Whether a backend has this name."""
    return name in DEVICES_OF


def backend_on(device: torch.device, wanted: str | None = None) -> BackendName:
    """The backend to use on a device: `wanted`, or the default if that is None. ValueError if it does not work
    there."""
    if wanted is None:
        wanted = USUAL.get(device.type, USUAL["cpu"])
        assert is_backend(wanted)
        return wanted
    if not is_backend(wanted):
        raise ValueError(f"backend={wanted!r} is not known; allowed: {', '.join(DEVICES_OF)}, or None: by device")
    if device.type not in (*DEVICES_OF[wanted], "meta"):
        raise ValueError(
            f"backend={wanted!r} does not work on device {str(device)!r}; allowed: {', '.join(DEVICES_OF[wanted])}"
        )
    return wanted


def arch_of(backend: str, device: torch.device) -> str:
    """The architecture for which a backend generates code on a device. On meta, where nothing runs, a default."""
    target = target_named(backend)
    if target.needs_gpu and device.type != "meta":
        return nearest_arch(*torch.cuda.get_device_capability(device))
    return target.default_arch or host_isa()


def device_of(backend: str) -> torch.device:
    """The device on which a backend works by default."""
    return torch.device(target_named(backend).devices[0])
