"""embforge: fused embedding kernels generated for your spec. `import embforge as ef`.

Importing it loads neither torch nor pydantic nor cuda: every public name is loaded when it is first used. The operators
that saved programs need are registered with torch as soon as both torch and embforge are imported, in either order.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from embforge.operators.registration import register_or_warn
from embforge.operators.torch_import import when_torch_is_imported

if TYPE_CHECKING:
    import embforge.functional as functional  # noqa: F401
    import embforge.sharded as sharded  # noqa: F401
    from embforge import optim as optim
    from embforge.codegen.errors import CacheError as CacheError
    from embforge.codegen.errors import CompileError as CompileError
    from embforge.codegen.errors import EmbforgeError as EmbforgeError
    from embforge.codegen.errors import KernelBugError as KernelBugError
    from embforge.codegen.errors import LaunchError as LaunchError
    from embforge.codegen.errors import MissingKernelError as MissingKernelError
    from embforge.codegen.errors import PlanError as PlanError
    from embforge.codegen.errors import RankError as RankError
    from embforge.codegen.errors import RuleError as RuleError
    from embforge.codegen.errors import SpecError as SpecError
    from embforge.codegen.errors import ToolchainError as ToolchainError
    from embforge.codegen.errors import WorkloadError as WorkloadError
    from embforge.codegen.params import CpuParams as CpuParams
    from embforge.codegen.params import CudaParams as CudaParams
    from embforge.codegen.spec import CollectionSpec as CollectionSpec
    from embforge.codegen.spec import FeatureSpec as FeatureSpec
    from embforge.codegen.spec import TableSpec as TableSpec
    from embforge.collection import EmbeddingCollection as EmbeddingCollection
    from embforge.explanation import explain as explain
    from embforge.jagged import Jagged as Jagged
    from embforge.jagged import collate as collate
    from embforge.recording import record as record

    __version__: str

_HOME = {
    "CacheError": "embforge.codegen.errors",
    "CollectionSpec": "embforge.codegen.spec",
    "CompileError": "embforge.codegen.errors",
    "CpuParams": "embforge.codegen.params",
    "CudaParams": "embforge.codegen.params",
    "EmbeddingCollection": "embforge.collection",
    "EmbforgeError": "embforge.codegen.errors",
    "FeatureSpec": "embforge.codegen.spec",
    "Jagged": "embforge.jagged",
    "KernelBugError": "embforge.codegen.errors",
    "LaunchError": "embforge.codegen.errors",
    "MissingKernelError": "embforge.codegen.errors",
    "PlanError": "embforge.codegen.errors",
    "RankError": "embforge.codegen.errors",
    "RuleError": "embforge.codegen.errors",
    "SpecError": "embforge.codegen.errors",
    "TableSpec": "embforge.codegen.spec",
    "ToolchainError": "embforge.codegen.errors",
    "WorkloadError": "embforge.codegen.errors",
    "collate": "embforge.jagged",
    "explain": "embforge.explanation",
    "record": "embforge.recording",
}

_MODULES = ("functional", "optim", "sharded")

__all__ = sorted([*_HOME, *_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("embforge")
    if name in _MODULES:
        return import_module(f"embforge.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'embforge' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


when_torch_is_imported(register_or_warn)
