"""Plan -> kernel on disk: from a directory that `gen` emitted, from the cache, or compiled now."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from embforge.codegen import cache, manifest
from embforge.codegen.errors import MissingKernelError, ToolchainError
from embforge.codegen.machine import switched_on
from embforge.codegen.plan import PLAN_SCHEMA, Plan
from embforge.codegen.render import render
from embforge.codegen.stages import StagePlan
from embforge.codegen.targets import Target, target_named


@dataclass(frozen=True)
class Built:
    """A plan's kernel on disk, content checked."""

    plan: Plan
    """As it was asked for; `generated_as` says if the binary's symbol is that of a plan with other names."""
    source: Path
    binary: Path
    resources: list[dict[str, Any]]
    """Figures per symbol of the binary if they were asked for, else empty."""
    cached: bool
    """False if this call compiled it."""


def source_of(plan: Plan) -> str:
    """The plan's generated source text."""
    source = target_named(plan.target).sources[plan.op]
    return render(source.template, source.facts(plan))


def build(
    plan: Plan,
    *,
    kernels: Path | None = None,
    resources: bool = False,
    ahead_of_time: bool = False,
    on_compile: Callable[[str], None] | None = None,
) -> Built:
    """The plan's kernel: from `kernels` (or `EMBFORGE_KERNELS`), else the cache, else compiled.

    `MissingKernelError` if it would have to be compiled and `EMBFORGE_JIT=0`, or if the given directory holds a
    stale or damaged one; `CompileError` and `ToolchainError` come from the target.

    `ahead_of_time` is for `embforge gen`, the remedy those errors name: it reads neither variable, so that a stale
    directory or a forbidden compiler cannot keep it from making the kernel.

    `on_compile` is told the plan's URI if the kernel is in no cache, just before the compiler is started.
    """
    directory = kernels or (None if ahead_of_time else directory_from_environment())
    if directory is not None and (record := _emitted(plan, directory)):
        figures = record["symbols"] if resources else []
        named = plan if record["symbol"] == plan.symbol else replace(plan, generated_as=record["symbol"])
        return Built(named, directory / record["source"], directory / record["binary"], figures, cached=True)
    target, source = target_named(plan.target), source_of(plan)
    if ahead_of_time or jit_allowed():
        entry, cached = cache.fetch(_recipe(plan, target, source, on_compile))
    else:
        entry, cached = _cached_or_refuse(plan, target, source, directory), True
    return Built(plan, entry.source, entry.binary, _resources(plan, target, entry) if resources else [], cached)


def locate(plan: Plan, *, kernels: Path | None = None) -> Path | None:
    """Where `build` would find the plan's binary without compiling it, or None."""
    directory = kernels or directory_from_environment()
    if directory is not None and (record := _emitted(plan, directory)):
        return directory / str(record["binary"])
    entry = _cached(plan, target_named(plan.target), source_of(plan))
    return entry.binary if entry else None


def code_of(plan: Plan | StagePlan) -> str:
    """The source of the plan without names: equal texts mean that one's binary does what the other's does."""
    return source_of(manifest.shape_of(plan))  # type: ignore[arg-type]


def _emitted(plan: Plan, directory: Path) -> dict[str, Any] | None:
    """The record of the kernel in a directory that `gen` wrote, whatever the names in its spec."""
    return manifest.find_kernel(directory, plan, code_of(plan))


def jit_allowed() -> bool:
    """Whether a missing kernel may be compiled: not if `EMBFORGE_JIT` is 0, false, no or off."""
    return switched_on("EMBFORGE_JIT", default=True)


def build_many(
    plans: Iterable[Plan],
    *,
    kernels: Path | None = None,
    resources: bool = False,
    ahead_of_time: bool = False,
    progress: Callable[[Built], None] | None = None,
    workers: int | None = None,
) -> list[Built]:
    """`build` for each plan, in parallel; compilers run outside Python's lock. Results in the order of the plans.

    `progress` is called in this thread as each is done. The first failure cancels what has not begun and is raised.
    """
    plans = list(plans)
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        one = functools.partial(build, kernels=kernels, resources=resources, ahead_of_time=ahead_of_time)
        futures = [pool.submit(one, plan) for plan in plans]
        try:
            for future in as_completed(futures):
                built = future.result()
                if progress is not None:
                    progress(built)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def _recipe(plan: Plan, target: Target, source: str, on_compile: Callable[[str], None] | None = None) -> cache.Recipe:
    def compile_plan(path: Path) -> bytes:
        if on_compile is not None:
            on_compile(plan.uri)
        return target.compile(plan, path)

    fields = {f"target.{label}": value for label, value in target.fingerprint(plan).items()}
    fields |= {"cache_schema": cache.CACHE_SCHEMA, "plan_schema": str(PLAN_SCHEMA), "source": source}
    return cache.Recipe(
        uri=plan.uri,
        key=cache.key_of(fields),
        source=source,
        source_suffix=target.source_suffix,
        binary_suffix=target.binary_suffix,
        compile=compile_plan,
    )


def _resources(plan: Plan, target: Target, entry: cache.Entry) -> list[dict[str, Any]]:
    figures = cache.load_resources(entry, _reader())
    if figures is None:
        figures = target.resources(plan, entry.binary.read_bytes())
        cache.store_resources(entry, _reader(), figures)
    return figures


@functools.cache
def _reader() -> str:
    """A hash of the code that reads figures off binaries: by content, like everything in the cache."""
    modules = sorted(files("embforge.codegen.targets").iterdir(), key=lambda item: item.name)
    return cache.key_of({item.name: item.read_text("utf-8") for item in modules if item.name.endswith(".py")})


def directory_from_environment() -> Path | None:
    """Where kernels are looked for before the cache: `EMBFORGE_KERNELS`, if it is set."""
    chosen = os.environ.get("EMBFORGE_KERNELS")
    return Path(chosen).expanduser() if chosen else None


def _cached(plan: Plan, target: Target, source: str) -> cache.Entry | None:
    try:
        recipe = _recipe(plan, target, source)
    except ToolchainError:  # without the compiler no key can be named, so nothing in the cache can answer to it
        return None
    return cache.load(cache.entry_dir(recipe), recipe.key)


def _cached_or_refuse(plan: Plan, target: Target, source: str, directory: Path | None) -> cache.Entry:
    entry = _cached(plan, target, source)
    if entry is not None:
        return entry
    looked = f"{directory} and the cache" if directory else "the cache"
    if plan.op == "stages":
        remedy = "let one process compile it, with EMBFORGE_JIT unset and the same EMBFORGE_CACHE_DIR"
    else:
        command = manifest.gen_command(plan, directory)
        remedy = f"make it beforehand by `{command}` and set EMBFORGE_KERNELS={directory or 'DIR'}"
    raise MissingKernelError(
        f"kernel {plan.uri} is not in {looked}, and EMBFORGE_JIT={os.environ['EMBFORGE_JIT']} forbids compiling it; "
        f"{remedy}"
    )
