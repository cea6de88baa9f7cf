"""The targets for which kernels are generated, as facts that cost nothing to import. No other code compares names.

A target's params, toolchain, launchers and rules of tuning are in tables keyed by its name: `codegen/params.py`,
`codegen/targets/__init__.py`, `runtime/launch/launchers.py` and `tuner/search/targets.py`. A test compares their keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embforge.codegen.errors import PlanError

Split = Literal["threads", "blocks"]
"""How the work of a call is split: over the threads of a pool, or over the blocks of a grid."""
GPU_ARCH = "sm_90"
"""The architecture for which CUDA is generated if there is no GPU and the user names none."""


@dataclass(frozen=True)
class Target:
    """A target for which kernels are generated; or the reference, which computes the same without generated code."""

    name: str
    devices: tuple[str, ...]
    """The types of torch devices on which it works, the usual one first."""
    split: Split | None = None
    """How work is split, which decides the arguments of its kernels."""
    hardware: Literal["cpu", "gpu"] | None = None
    """The kind of hardware for which its plans are tuned; None: they are never tuned."""
    default_arch: str | None = None
    """The architecture to generate for if there is no device; None: the instruction set of this machine."""
    runs_text_of: str | None = None
    """The target whose text and symbols its kernels have, if it emulates that one."""
    source_suffix: str = ""
    binary_suffix: str = ""

    @property
    def is_generated(self) -> bool:
        """Whether its kernels are generated code, which a toolchain makes."""
        return bool(self.source_suffix)

    @property
    def needs_gpu(self) -> bool:
        """Whether its kernels run on GPUs only."""
        return self.devices == ("cuda",)

    @property
    def is_native(self) -> bool:
        """Whether its architectures are instruction sets of the host, so that not every host runs code for them."""
        return self.is_generated and self.default_arch is None

    @property
    def emulates(self) -> bool:
        """Whether it executes the text of another target, slowly and with checks."""
        return self.runs_text_of is not None

    @property
    def text_of(self) -> str:
        """The target whose text its kernels have: itself, or the one that it emulates."""
        return self.runs_text_of or self.name


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("cpu", ("cpu",), "threads", "cpu", source_suffix=".cpp", binary_suffix=".so"),
        Target("cuda", ("cuda",), "blocks", "gpu", GPU_ARCH, source_suffix=".cu", binary_suffix=".cubin"),
        Target("simt", ("cpu",), "blocks", None, GPU_ARCH, "cuda", source_suffix=".cu", binary_suffix=".so"),
    )
}
"""All targets, by name."""

BACKENDS: dict[str, Target] = {**TARGETS, "reference": Target("reference", ("cpu", "cuda"), default_arch="torch")}
"""All backends, which can execute a plan: the targets and the reference."""

TUNED = tuple(target.name for target in TARGETS.values() if target.hardware is not None)
"""The targets whose plans are tuned."""


def target_named(name: str) -> Target:
    """The target of that name, or the reference; `PlanError` lists the names that are allowed."""
    target = BACKENDS.get(name)
    if target is None:
        raise PlanError(f"target {name!r} is not known; allowed: {', '.join(BACKENDS)}")
    return target
