"""Facts about a GPU that a report of what ran on it needs."""

from __future__ import annotations

from typing import Any

import torch

from embforge.codegen.machine import package_version
from embforge.launch.cuda.kernels import driver_version

PACKAGES = ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """What torch and the driver say about a CUDA device."""
    return facts_of(torch.cuda.get_device_properties(device), driver_version())


def hardware_facts(properties: Any) -> dict[str, Any]:
    """What torch's properties of a device say about the chip."""
    return {
        "name": properties.name,
        "arch": f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
    }


def facts_of(properties: Any, driver: tuple[int, int]) -> dict[str, Any]:
    """The facts from torch's properties of a device and the newest CUDA that the driver serves."""
    return {
        **hardware_facts(properties),
        "driver": "CUDA {}.{}".format(*driver),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        **{name: package_version(name) for name in PACKAGES},
    }
