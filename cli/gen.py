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
from embforge.codegen.target import TARGETS, target_named

if TYPE_CHECKING:
    from embforge.codegen.plan import Plan
    from embforge.codegen.spec import CollectionSpec

ID_CHOICES = {"int64": ("int64",), "int32": ("int32",), "both": ("int64", "int32")}


@click.command(epilog=EXIT_CODES, short_help="Generate SPEC's kernels into a directory.")
@spec_argument
@click.option("--target", type=click.Choice(list(TARGETS)), required=True, help="What to generate for.")
@click.option(
    "--arch",
    "archs",
    multiple=True,
    help="GPU generation (sm_75 .. sm_120) or CPU instruction set (avx512, avx2, neon, generic). Repeatable. Default: "
    "every GPU generation, or the instruction set of this CPU.",
)
@click.option(
    "--out", "out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Directory to write into."
)
@click.option("--ids", type=click.Choice(list(ID_CHOICES)), default="int64", show_default=True, help="Type of the ids.")
@click.option(
    "--train",
    "rules",
    multiple=True,
    metavar="RULE",
    help="Also generate the kernels that training with this rule needs: sgd, adam, rowwise_adagrad, ...; with +l2, "
    "+decoupled, +clip or +nearest for options that change the code (adam+decoupled); a JSON file of an optimizer's "
    "update.to_dict(); or none, for sparse gradients that torch.optim applies. Numbers such as the learning rate are "
    "never compiled in. Repeatable.",
)
@click.option("--accumulate", is_flag=True, help="With --train: also the kernels of accumulate=True.")
@click.option("--sources-only", is_flag=True, help="Write sources and the manifest, but compile nothing.")
@click.option(
    "--tuned",
    is_flag=True,
    help="Use the plan fields that a module on this machine would use: those of `embforge tune` where they fit.",
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), help="With --tuned: the batch_size= that modules are made with."
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

    Copy the directory to another machine and set EMBFORGE_KERNELS (or kernels=) to it: nothing is compiled there.
    The same kernels also serve specs that differ only in the names of the collection, its tables and features.
    A directory may hold the kernels of several specs, targets and architectures; gen adds to those that it has.
    """
    from embforge.codegen.manifest import MANIFEST

    if accumulate and not rules:
        raise click.UsageError("--accumulate works with --train only; add a rule, e.g. --train adam")
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
    """The architectures to generate for if the user names none: all GPU generations, simt's, or this CPU's."""
    facts = target_named(target)
    if facts.needs_gpu:
        from embforge.codegen.targets.cuda.arch import ARCHS

        return tuple(ARCHS)
    from embforge.codegen.machine import host_isa

    return (facts.default_arch or host_isa(),)


def emit(plans: Sequence[Plan], out: Path, *, sources_only: bool = False) -> list[dict[str, Any]]:
    """Writes the plans' kernels and the manifest into a directory; returns the manifest's records."""
    from embforge.codegen.build import Built, build_many, code_of, source_of
    from embforge.codegen.cache import write_atomically
    from embforge.codegen.manifest import kernel_record, write_manifest

    sources = [source_of(plan) for plan in plans]  # before anything is written, so that a bad plan leaves no files
    built: Sequence[Built[Plan] | None] = [None] * len(plans)
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
