"""Facts about a GPU, for reports about kernels that ran on it."""

from __future__ import annotations

from typing import Any

import torch

from embforge.codegen.machine import package_version
from embforge.launch.cuda.kernels import driver_version

PACKAGES = ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")
"""The packages whose versions are reported."""


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """All facts about a CUDA device: the chip, the driver, torch and packages."""
    return facts_of(torch.cuda.get_device_properties(device), driver_version())


def hardware_facts(properties: Any) -> dict[str, Any]:
    """The facts about the chip in torch's properties of a device."""
    return {
        "name": properties.name,
        "arch": f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
    }


def facts_of(properties: Any, driver: tuple[int, int]) -> dict[str, Any]:
    """All facts, from torch's properties of a device and the newest version of CUDA that the driver supports."""
    return {
        **hardware_facts(properties),
        "driver": "CUDA {}.{}".format(*driver),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        **{name: package_version(name) for name in PACKAGES},
    }
