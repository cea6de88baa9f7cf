"""`embforge tune`: finds the fastest plan fields for a spec on this machine and stores them for later modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from embforge.cli.common import (
    EXIT_CODES,
    console,
    fields_given,
    json_option,
    print_json,
    spec_argument,
    stage_bar,
    waiting,
)
from embforge.cli.durations import Duration
from embforge.codegen.target import GPU_ARCH, TUNED, target_named

if TYPE_CHECKING:
    from embforge.codegen.spec import CollectionSpec
    from embforge.tuner.estimate.static import StaticReport

DEFAULT_SECONDS = 180.0
INTERRUPTED = 130
"""The exit code that shells report for Ctrl-C."""
KEPT_OPTIONS = ("user", "project", "none")

STUDY_OPTIONS = ("--on", "--train", "--workload", "--baseline", "--cache", "--ids", "--storage", "--report")
"""Options that name a study or its report; they act whether the study runs or is only shown."""
MODES = {
    "a measured run": (*STUDY_OPTIONS, "--budget", "--trials", "--seed", "--store"),
    "--trials 0": STUDY_OPTIONS,
    "--list": ("--on", "--train", "--ids", "--arch"),
    "--static": ("--on", "--train", "--workload", "--budget", "--trials", "--store", "--arch"),
}
"""What the command can do, and the options that act then; others are refused. --json always acts."""


@click.command(epilog=EXIT_CODES, short_help="Find and store the fastest plan fields for SPEC.")
@spec_argument
@click.option("--on", type=click.Choice(TUNED), default="cpu", show_default=True, help="Target to tune for.")
@click.option(
    "--train",
    metavar="RULE",
    help="Tune the backward and update of RULE instead of the lookup: sgd, adam, adam+l2, ..., or none for a backward "
    "that only reduces gradients.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    help="Traffic to tune for, e.g. zipf:1.05,len=geo:20,batch=2048 or trace:FILE.npz. If repeated, the result must be "
    "fast on all of them.  [default: uniform,batch=2048]",
)
@click.option("--budget", type=Duration(), help="Time for search and finals, e.g. 90s, 10m, 1h30m.  [default: 3m]")
@click.option(
    "--trials",
    type=click.IntRange(min=0),
    help="Most candidates to try in this run; without --budget there is no time limit then. 0 runs nothing and shows "
    "what the study has found so far.",
)
@click.option(
    "--baseline",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Begin the search at this point instead of the default, and time candidates next to it. In the finals, the "
    "winner is still compared with the default. Repeatable.",
)
@click.option(
    "--cache",
    "cache_state",
    type=click.Choice(["warm", "cold"]),
    default="warm",
    show_default=True,
    help="Time calls that follow each other (warm), or calls that find the CPU's caches empty (cold).",
)
@click.option("--ids", type=click.Choice(["int64", "int32"]), default="int64", show_default=True, help="Type of ids.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of random batches, orders and proposals.",
)
@click.option(
    "--store",
    type=click.Choice(KEPT_OPTIONS),
    default="user",
    show_default=True,
    help="Where to store the result: in this user's store, in the project's (embforge-tuned/ next to the spec), or "
    "nowhere.",
)
@click.option(
    "--storage",
    metavar="URL",
    help="Where to keep trials: a SQLite file, postgresql+psycopg://USER:PASSWORD@HOST/NAME or journal:///FILE. "
    "Processes that name the same storage share the work.  [default: EMBFORGE_STUDIES, or if that is not set a file in "
    "the user's store]",
)
@click.option(
    "--report",
    "page",
    type=click.Path(dir_okay=False, path_type=Path),
    help="HTML file to write a page about the study into.",
)
@click.option(
    "--list", "listed", is_flag=True, help="Only print the search space, its size and why points were removed."
)
@click.option(
    "--static",
    "estimated",
    is_flag=True,
    help="Rank CUDA plans without a GPU, by an estimate from compiled code and counted memory sectors; a later "
    "measured run begins with the best. Needs --on cuda.",
)
@click.option("--arch", help="With --static or --list: GPU generation, sm_75 .. sm_120.  [default: sm_90]")
@json_option
@click.pass_context
def tune(
    ctx: click.Context,
    spec: CollectionSpec,
    on: str,
    train: str | None,
    workloads: Sequence[str],
    budget: float | None,
    trials: int | None,
    baseline: Sequence[str],
    cache_state: str,
    ids: str,
    seed: int,
    store: str,
    storage: str | None,
    page: Path | None,
    listed: bool,
    estimated: bool,
    arch: str | None,
    as_json: bool,
) -> None:
    """Find the fastest plan fields for SPEC on this machine and store them: modules made from now on use them.

    \b
      embforge tune dlrm --budget 10m                        the lookup
      embforge tune dlrm --train adam --report out.html      the backward and update, with a page about it
      embforge tune dlrm --list                              what would be searched

    Every candidate is verified bit for bit against the reference, then timed together with the default. In the finals,
    the best ones are timed in shuffled, interleaved rounds; the default stays unless the gain exceeds the measured
    noise. You can interrupt the run at any time: the same command continues where it stopped.
    """
    _check_options(ctx, on, listed, estimated, arch, page, workloads, trials, store)
    spec = spec.by_rows()  # what is tuned begins with rows, and takes their workloads
    if listed:
        _list(spec, on, train, arch, ids, as_json)
    elif estimated:
        _estimate(spec, train, workloads, budget or DEFAULT_SECONDS, trials, arch or GPU_ARCH, store != "none", as_json)
    else:
        if budget is None and trials is None:
            budget = DEFAULT_SECONDS
        _tune(
            spec,
            budget,
            page,
            as_json,
            on=on,
            train=train,
            workloads=workloads,
            trials=trials,
            baseline=fields_given(baseline, "--baseline") or None,
            seed=seed,
            storage=storage,
            store=None if store == "none" else store,
            cache=cache_state,
            id_dtype=ids,
        )


def _check_options(
    ctx: click.Context,
    on: str,
    listed: bool,
    estimated: bool,
    arch: str | None,
    page: Path | None,
    workloads: Sequence[str],
    trials: int | None,
    store: str,
) -> None:
    if listed and estimated:
        raise click.UsageError("--list and --static both say what to do; give one of them")
    needs_gpu = target_named(on).needs_gpu
    if estimated and not needs_gpu:
        raise click.UsageError("--static ranks CUDA plans; add --on cuda")
    if arch and not (needs_gpu and (estimated or listed)):
        raise click.UsageError("--arch works with --on cuda and --static or --list; a measured run takes the device's")
    if page and (listed or estimated):
        raise click.UsageError("--report shows measured trials; leave it out, or leave out --list and --static")
    if estimated and len(workloads) > 1:
        raise click.UsageError("--static takes one --workload only")
    if estimated and trials == 0:
        raise click.UsageError(
            "--static needs --trials of at least 1; leave --trials out to rank all plans in the budget"
        )
    if estimated and store == "project":
        raise click.UsageError(
            "--static stores its estimate for this user's later runs; allowed: --store user, --store none"
        )
    if page and not page.parent.is_dir():
        raise click.UsageError(f"--report {page}: there is no folder {page.parent}; create it, or name another one")
    mode = "--list" if listed else "--static" if estimated else "--trials 0" if trials == 0 else "a measured run"
    _refuse_idle_options(ctx, mode)


def _refuse_idle_options(ctx: click.Context, mode: str) -> None:
    """Refuses options that do nothing in a mode, because a user who writes one expects it to do something."""
    acting = {*MODES[mode], mode.partition(" ")[0], "--json"}  # with the option that names the mode
    written = [
        param.opts[0]
        for param in ctx.command.params
        if isinstance(param, click.Option) and ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
    ]
    if idle := [option for option in written if option not in acting]:
        verb = "does" if len(idle) == 1 else "do"
        raise click.UsageError(f"{', '.join(idle)} {verb} nothing with {mode}, which takes {', '.join(MODES[mode])}")


def _list(spec: CollectionSpec, on: str, train: str | None, arch: str | None, ids: str, as_json: bool) -> None:
    from embforge.cli.display.tune_tables import space_json, space_table
    from embforge.codegen.machine import host_isa
    from embforge.codegen.plans import update_named
    from embforge.codegen.tuned.hardware import any_gpu
    from embforge.tuner.search.space import space_of

    op, update = ("forward", None) if train is None else ("backward", update_named(train))
    target = target_named(on)
    arch = arch or target.default_arch or host_isa()
    with waiting("counting points"):
        from embforge.plan_choice import cpu_hardware

        hardware = cpu_hardware() if target.hardware == "cpu" else any_gpu(arch)
        space = space_of(op, on, arch, spec, hardware, update, id_dtype=ids)
    if as_json:
        print_json(space_json(space))
    else:
        console().print(space_table(space))


def _estimate(
    spec: CollectionSpec,
    train: str | None,
    workloads: Sequence[str],
    budget: float,
    trials: int | None,
    arch: str,
    kept: bool,
    as_json: bool,
) -> None:
    from embforge.cli.display.tune_tables import static_table
    from embforge.codegen.plans import update_named
    from embforge.tuner.estimate.estimate import FORMULA
    from embforge.tuner.estimate.seeds import save_seeds
    from embforge.tuner.estimate.static import rank
    from embforge.tuner.workload.workload import Workload, parse

    op, update = ("forward", None) if train is None else ("backward", update_named(train))
    workload = parse(workloads[0]) if workloads else Workload()
    with stage_bar() as tell:
        report = rank(spec, arch, op, workload, budget, update=update, most=trials, progress=tell)
    path = save_seeds(report) if kept else None
    if as_json:
        print_json(_estimate_json(report, path))
        return
    screen = console()
    screen.print(static_table(report))
    compiled = f"{len(report.rows)} plans ranked, {len(report.refused)} refused, of {len(report.space.points):,} points"
    use = "an estimate, which no module uses; " + (
        f"a measured run begins with it: {path}" if path else "not stored, because of --store none"
    )
    for line in (FORMULA, compiled, use):
        screen.print(line, soft_wrap=True, markup=False)


def _estimate_json(report: StaticReport, path: Path | None) -> dict[str, Any]:
    from embforge.tuner.estimate.estimate import FORMULA

    return {
        "estimate": True,
        "formula": FORMULA,
        "op": report.op,
        "arch": report.arch,
        "workload": report.workload,
        "points": len(report.space.points),
        "rows": [asdict(row) for row in report.rows],
        "refused": [{"params": asdict(params), "why": why} for params, why in report.refused],
        "file": None if path is None else str(path),
    }


def _tune(spec: CollectionSpec, budget: float | None, page: Path | None, as_json: bool, **options: Any) -> None:
    with waiting("loading torch and the tuner"):
        from embforge.cli.display.tune_progress import Status, display
        from embforge.cli.display.tune_result import places_of, print_result, result_json
        from embforge.tuner.report.data import report_of
        from embforge.tuner.report.page import write_report
        from embforge.tuner.tune import tune as run

    status = Status(budget, anchor="the baseline" if options["baseline"] else "the default")
    try:
        with display(status) as tell:
            result = run(spec, budget=budget, progress=tell, **options)
    except KeyboardInterrupt:
        click.echo(
            "embforge: interrupted; no finished trial is lost: the same command continues where it was", err=True
        )
        raise click.exceptions.Exit(INTERRUPTED) from None
    report = report_of(result.study)
    if page is not None:
        write_report(page, report)
    if as_json:
        about = {"storage": result.storage, "finished": result.finished, "unstored": result.unstored}
        files = {"stored": [str(path) for path in result.paths], "report": str(page) if page else None}
        print_json(result_json(report) | about | files)
        return
    screen = console()
    print_result(screen, report)
    for line in places_of(result, page):
        screen.print(line, soft_wrap=True, markup=False)  # no line breaks, so that paths can be copied
