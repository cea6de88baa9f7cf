"""Gets kernels for this process: finds them on disk, or compiles them and prints a line on stderr."""

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


def build_here(plan: P, kernels: str | None, also_needed: Callable[[], Iterable[Plan]] = tuple) -> Built[P]:
    """Does what `build` does, and prints a line on stderr if the compiler has to run, because the call then takes
    seconds instead of microseconds.

    If several processes need the kernel at the same time, only the one that compiles it prints the line.
    `EMBFORGE_QUIET=1` turns the line off. `also_needed` returns the plans whose kernels the caller will need too.
    """
    return build(
        plan,
        kernels=Path(kernels) if kernels else None,
        on_compile=None if switched_on("EMBFORGE_QUIET", default=False) else _report,
        also_needed=also_needed,
    )


def _report(uri: str) -> None:
    print(f"embforge: compiling {uri} (takes seconds, once: the cache keeps it) ...", file=sys.stderr, flush=True)
