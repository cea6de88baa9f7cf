"""Finds or makes the kernel of a plan: in a directory that `gen` wrote, in the cache, or by compiling it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, TypeVar

from embforge.codegen import cache, manifest
from embforge.codegen.errors import MissingKernelError, ToolchainError
from embforge.codegen.kernel import KernelPlan
from embforge.codegen.machine import switched_on
from embforge.codegen.plan import PLAN_SCHEMA, Plan
from embforge.codegen.render import render
from embforge.codegen.target import target_named
from embforge.codegen.targets import Toolchain, toolchain_of

P = TypeVar("P", bound=KernelPlan)


@dataclass(frozen=True)
class Built(Generic[P]):
    """The kernel of a plan on disk, with its content checked."""

    plan: P
    """The requested plan; `generated_as` has the plan of the binary's symbol if only names differ."""
    source: Path
    binary: Path
    resources: list[dict[str, Any]]
    """Figures per symbol of the binary if they were requested, otherwise empty."""
    cached: bool
    """False if this call compiled it."""


def source_of(plan: KernelPlan) -> str:
    """The plan's generated source text."""
    source = toolchain_of(plan.target).sources[plan.op]
    return render(source.template, source.facts(plan))


def build(
    plan: P,
    *,
    kernels: Path | None = None,
    resources: bool = False,
    ahead_of_time: bool = False,
    on_compile: Callable[[str], None] | None = None,
    also_needed: Callable[[], Iterable[Plan]] = tuple,
) -> Built[P]:
    """The kernel of a plan: from the directory `kernels` (or `EMBFORGE_KERNELS`), or from the cache, or compiled.

    `MissingKernelError` if it would have to be compiled and `EMBFORGE_JIT=0`, or if the directory has a stale or
    damaged one; `CompileError` and `ToolchainError` come from the target.

    `ahead_of_time` is for `embforge gen`, which those errors name as the remedy: neither variable is read then, so that
    a stale directory or a forbidden compiler cannot prevent it from making the kernel.

    `on_compile` is called with the plan's URI just before the compiler is started, if the kernel is not in the cache.

    `also_needed` returns the plans of other kernels that the caller will need: an error about a missing kernel names
    all that are missing.
    """
    directory = kernels or (None if ahead_of_time else directory_from_environment())
    if directory is not None and (record := _emitted(plan, directory)):
        figures = record["symbols"] if resources else []
        named = plan.called(record["symbol"])
        return Built(named, directory / record["source"], directory / record["binary"], figures, cached=True)
    toolchain, source = toolchain_of(plan.target), source_of(plan)
    if ahead_of_time or jit_allowed():
        entry, cached = cache.fetch(_recipe(plan, toolchain, source, on_compile))
    else:
        entry, cached = _cached_or_refuse(plan, toolchain, source, directory, also_needed), True
    return Built(plan, entry.source, entry.binary, _resources(plan, toolchain, entry) if resources else [], cached)


def locate(plan: KernelPlan, *, kernels: Path | None = None) -> Path | None:
    """The path at which `build` would find the plan's binary without compiling it, or None."""
    directory = kernels or directory_from_environment()
    if directory is not None and (record := _emitted(plan, directory)):
        return directory / str(record["binary"])
    entry = _cached(plan, toolchain_of(plan.target), source_of(plan))
    return entry.binary if entry else None


def code_of(plan: KernelPlan) -> str:
    """The source of the plan without names. If two plans have equal texts, the binary of either serves both."""
    return source_of(plan.nameless)


def _emitted(plan: KernelPlan, directory: Path) -> dict[str, Any] | None:
    """The record of the kernel in a directory that `gen` wrote, whatever the names in its spec."""
    return manifest.find_kernel(directory, plan, code_of(plan))


def jit_allowed() -> bool:
    """Whether a missing kernel may be compiled: not if `EMBFORGE_JIT` is 0, false, no or off."""
    return switched_on("EMBFORGE_JIT", default=True)


def build_many(
    plans: Iterable[P],
    *,
    kernels: Path | None = None,
    resources: bool = False,
    ahead_of_time: bool = False,
    progress: Callable[[Built[P]], None] | None = None,
    workers: int | None = None,
) -> list[Built[P]]:
    """Builds plans in parallel; compilers run outside Python's lock. Results are in the order of the plans.

    `progress` is called in this thread after each build. The first failure cancels builds that have not begun, and is
    raised.
    """
    plans = list(plans)
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        futures = [
            pool.submit(build, plan, kernels=kernels, resources=resources, ahead_of_time=ahead_of_time)
            for plan in plans
        ]
        try:
            for future in as_completed(futures):
                built = future.result()
                if progress is not None:
                    progress(built)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def _recipe(
    plan: KernelPlan, toolchain: Toolchain, source: str, on_compile: Callable[[str], None] | None = None
) -> cache.Recipe:
    def compile_plan(path: Path) -> bytes:
        if on_compile is not None:
            on_compile(plan.uri)
        return toolchain.compile(plan, path)

    fields = {f"target.{label}": value for label, value in toolchain.fingerprint(plan).items()}
    fields |= {"cache_schema": cache.CACHE_SCHEMA, "plan_schema": str(PLAN_SCHEMA), "source": source}
    return cache.Recipe(
        uri=plan.uri,
        key=cache.key_of(fields),
        source=source,
        source_suffix=target_named(plan.target).source_suffix,
        binary_suffix=target_named(plan.target).binary_suffix,
        compile=compile_plan,
    )


def _resources(plan: KernelPlan, toolchain: Toolchain, entry: cache.Entry) -> list[dict[str, Any]]:
    figures = cache.load_resources(entry, _reader())
    if figures is None:
        figures = toolchain.resources(plan, entry.binary.read_bytes())
        cache.store_resources(entry, _reader(), figures)
    return figures


@functools.cache
def _reader() -> str:
    """A hash of the code that reads resource figures from binaries, because the cache goes by content only."""
    folder = Path(str(files("embforge.codegen.targets")))
    return cache.key_of({str(path.relative_to(folder)): path.read_text("utf-8") for path in folder.rglob("*.py")})


def directory_from_environment() -> Path | None:
    """The directory that is searched before the cache: `EMBFORGE_KERNELS`, if it is set."""
    chosen = os.environ.get("EMBFORGE_KERNELS")
    return Path(chosen).expanduser() if chosen else None


def _cached(plan: KernelPlan, toolchain: Toolchain, source: str) -> cache.Entry | None:
    try:
        recipe = _recipe(plan, toolchain, source)
    except ToolchainError:  # without the compiler there is no key, so nothing can be found in the cache
        return None
    return cache.load(cache.entry_dir(recipe), recipe.key)


def _cached_or_refuse(
    plan: KernelPlan,
    toolchain: Toolchain,
    source: str,
    directory: Path | None,
    also_needed: Callable[[], Iterable[Plan]],
) -> cache.Entry:
    entry = _cached(plan, toolchain, source)
    if entry is not None:
        return entry
    looked = f"{directory} and the cache" if directory else "the cache"
    refusal = f"and EMBFORGE_JIT={os.environ['EMBFORGE_JIT']} forbids compiling"
    if not isinstance(plan, Plan):
        raise MissingKernelError(
            f"kernel {plan.uri} is not in {looked}, {refusal} it; let one process compile it, with EMBFORGE_JIT unset "
            "and the same EMBFORGE_CACHE_DIR"
        )
    needed = list({one.uri: one for one in (*also_needed(), plan)}.values())
    missing = [one.uri for one in needed if one.uri == plan.uri or _is_missing(one, directory)]
    kernel, it = (f"kernel {plan.uri} is", "it") if len(missing) == 1 else (f"kernels {', '.join(missing)} are", "them")
    command = manifest.gen_command(needed, directory)
    remedy = f"make {it} beforehand by `{command}` and set EMBFORGE_KERNELS={directory or 'DIR'}"
    if needed == [plan] and plan.op == "forward":
        remedy += "; a module with an optimizer needs `--train RULE` too"
    raise MissingKernelError(f"{kernel} not in {looked}, {refusal} {it}; {remedy}")


def _is_missing(plan: Plan, directory: Path | None) -> bool:
    """Whether the kernel would have to be compiled, also because the existing one is stale or damaged."""
    try:
        return locate(plan, kernels=directory) is None
    except MissingKernelError:
        return True
