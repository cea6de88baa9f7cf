"""`embforge gen`: a spec becomes sources, binaries and a manifest in a directory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embforge.cli.common import (
    EXIT_CODES,
    console,
    json_option,
    param_option,
    plans_for,
    print_json,
    spec_argument,
    stage_bar,
    training_plans_for,
)
from embforge.cli.tuned_plans import tuned_plans_for

if TYPE_CHECKING:
    from embforge.codegen.plan import Plan
    from embforge.codegen.spec import CollectionSpec

ID_CHOICES = {"int64": ("int64",), "int32": ("int32",), "both": ("int64", "int32")}


@click.command(epilog=EXIT_CODES)
@spec_argument
@click.option("--target", type=click.Choice(["cuda", "cpu", "simt"]), required=True, help="What the kernels run on.")
@click.option(
    "--arch",
    "archs",
    multiple=True,
    help="sm_75 .. sm_120, or avx512, avx2, neon, generic; may be repeated. Default: every GPU generation; this CPU.",
)
@click.option("--out", "out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Where to write.")
@click.option("--ids", type=click.Choice(list(ID_CHOICES)), default="int64", show_default=True, help="Type of the ids.")
@click.option(
    "--train",
    "rules",
    multiple=True,
    metavar="RULE",
    help="Emit what training by this rule takes, too: sgd, adam, rowwise_adagrad, ... with +l2, +decoupled, +clip or "
    "+nearest for options that change the code, as adam+decoupled; a JSON file of an optimizer's update.to_dict(); "
    "none: sparse gradients for torch.optim. May be repeated. Numbers such as the learning rate are never compiled in.",
)
@click.option("--accumulate", is_flag=True, help="With --train: the kernels of accumulate=True, too.")
@click.option("--sources-only", is_flag=True, help="Emit sources and the manifest, compile nothing.")
@click.option(
    "--tuned",
    is_flag=True,
    help="Emit what a module on this machine runs: the parameters that `embforge tune` found, where they fit.",
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), help="With --tuned: the batch_size= that modules are made with, if any."
)
@param_option
@json_option
def gen(
    spec: CollectionSpec,
    target: str,
    archs: Sequence[str],
    out: Path,
    ids: str,
    rules: Sequence[str],
    accumulate: bool,
    sources_only: bool,
    tuned: bool,
    batch_size: int | None,
    overrides: Sequence[str],
    as_json: bool,
) -> None:
    """Generate SPEC's kernels into a directory: sources, binaries, manifest.json.

    Deploy the directory and point EMBFORGE_KERNELS (or kernels=) at it: nothing is compiled there. Names do not count:
    the kernels also serve specs whose collection, tables and features are called otherwise.
    A directory may hold the kernels of several specs, targets and archs; gen adds to what is there.
    """
    from embforge.codegen.manifest import MANIFEST

    if accumulate and not rules:
        raise click.UsageError("--accumulate works with --train only; say by which rule, as --train adam")
    if tuned and overrides:
        raise click.UsageError("--tuned and --param both say which parameters to use; give one of them")
    if batch_size is not None and not tuned:
        raise click.UsageError("--batch-size chooses among tuned results; add --tuned")
    chosen = archs or default_archs(target)
    why: list[str] = []
    if tuned:
        plans, why = tuned_plans_for(spec, target, chosen, ID_CHOICES[ids], rules, accumulate, batch_size)
    elif rules:
        plans = training_plans_for(spec, target, chosen, ID_CHOICES[ids], overrides, rules, accumulate)
    else:
        plans = plans_for(spec, target, chosen, ID_CHOICES[ids], overrides)
    records = emit(plans, out, sources_only=sources_only)
    if as_json:
        reasons = {"tuned": why} if tuned else {}
        print_json({"directory": str(out), "manifest": str(out / MANIFEST), "kernels": records, **reasons})
        return
    from embforge.cli.display.resources import resource_table

    screen = console()
    if any(record["symbols"] for record in records):
        screen.print(resource_table(records))
    count = "1 kernel" if len(records) == 1 else f"{len(records)} kernels"
    for line in why:
        screen.print(line, soft_wrap=True, markup=False)
    screen.print(f"{count} in {out}/, listed in {out / MANIFEST}", soft_wrap=True)


def default_archs(target: str) -> tuple[str, ...]:
    """All GPU generations, the one that simt runs, or this machine's instruction set."""
    if target in ("cuda", "simt"):
        from embforge.codegen.targets.cuda.arch import ARCHS, DEFAULT_ARCH

        return tuple(ARCHS) if target == "cuda" else (DEFAULT_ARCH,)
    from embforge.codegen.machine import host_isa

    return (host_isa(),)


def emit(plans: Sequence[Plan], out: Path, *, sources_only: bool = False) -> list[dict[str, Any]]:
    """Writes the plans' kernels and the manifest into a directory and returns their records."""
    from embforge.codegen.build import Built, build_many, code_of, source_of
    from embforge.codegen.cache import write_atomically
    from embforge.codegen.manifest import kernel_record, write_manifest
    from embforge.codegen.targets import target_named

    sources = [source_of(plan) for plan in plans]  # all of them before anything is written: a bad plan leaves no files
    built: Sequence[Built | None] = [None] * len(plans)
    if not sources_only:
        with stage_bar() as tell:
            tell("compiling", 0, len(plans))
            done = count(1)
            built = build_many(
                plans,
                resources=True,
                ahead_of_time=True,
                progress=lambda _: tell("compiling", next(done), len(plans)),
            )
    out.mkdir(parents=True, exist_ok=True)
    records = []
    for plan, source, made in zip(plans, sources, built, strict=True):
        target = target_named(plan.target)
        source_name = f"{plan.uri}{target.source_suffix}"
        binary_name = f"{plan.uri}{target.binary_suffix}" if made else None
        binary = made.binary.read_bytes() if made else None
        write_atomically(out / source_name, source.encode())
        if binary is not None and binary_name is not None:
            write_atomically(out / binary_name, binary)
        figures = made.resources if made else []
        records.append(kernel_record(plan, code_of(plan), source, source_name, binary, binary_name, figures))
    if note := write_manifest(out, records):
        click.echo(f"embforge: {note}", err=True)
    return records
