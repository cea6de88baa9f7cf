"""The one place that imports NVIDIA's Python packages, which come with the extra `embforge[cuda]`."""

from __future__ import annotations

from importlib import import_module
from threading import Lock
from typing import Any

from embforge.codegen.errors import ToolchainError

INSTALL = "pip install 'embforge[cuda]' (from a clone: pip install '.[cuda]')"
_IMPORTING = Lock()
"""cuda.core has circular imports: a second thread that imports it at the same time would get half of it."""


def cuda_module(name: str) -> Any:
    """A module of the cuda packages, such as `cuda.core`. `ToolchainError` names the extra if it is not installed."""
    try:
        with _IMPORTING:
            return import_module(name)
    except ImportError as error:
        raise ToolchainError(
            f"CUDA needs NVIDIA's Python packages, and {name} cannot be imported ({error}); {INSTALL} on Linux or "
            "Windows; on macOS use target cpu"
        ) from error
