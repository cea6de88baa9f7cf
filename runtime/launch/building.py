"""Kernels for this process: found on disk, or compiled now, which a line on stderr says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from embforge.codegen.build import Built, build
from embforge.codegen.kernel import KernelPlan
from embforge.codegen.machine import switched_on
from embforge.codegen.plan import Plan

P = TypeVar("P", bound=KernelPlan)


def build_here(plan: P, kernels: str | None, beside: Callable[[], Iterable[Plan]] = tuple) -> Built[P]:
    """As `build`; if the compiler has to run, stderr says so, because a call then takes seconds and not microseconds.

    However many processes want the kernel at once, only the one that compiles it says so. `EMBFORGE_QUIET=1` turns
    the line off.
    """
    return build(
        plan,
        kernels=Path(kernels) if kernels else None,
        on_compile=None if switched_on("EMBFORGE_QUIET", default=False) else _say,
        beside=beside,
    )


def _say(uri: str) -> None:
    print(f"embforge: compiling {uri} (takes seconds, once: the cache keeps it) ...", file=sys.stderr, flush=True)
