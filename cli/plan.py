"""`embforge plan`: finds which rank should hold which part of a spec's tables, and predicts what a step costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embforge.cli.common import (
    CHECK_FAILED,
    EXIT_CODES,
    OK,
    console,
    json_option,
    load_spec,
    print_json,
    stage_bar,
    waiting,
)
from embforge.codegen.dtypes import WIRE_FORMATS

if TYPE_CHECKING:
    from embforge.codegen.planner.cost import Step
    from embforge.codegen.planner.search import Choice
    from embforge.codegen.planner.simulate import Simulation
    from embforge.codegen.planner.topology import Topology
    from embforge.codegen.sharding.kinds import ShardPlan
    from embforge.codegen.spec import CollectionSpec

KIND_NAMES = ("data_parallel", "table_wise", "row_wise", "column_wise", "grid", "hierarchical")


@dataclass(frozen=True)
class Planned:
    """A shard plan for one number of ranks, with its predictions."""

    plan: ShardPlan
    choices: Sequence[Choice]
    """Why each table has its kind; empty if the user chose the plan."""
    simulation: Simulation


@click.command(epilog=EXIT_CODES, short_help="Choose how to shard SPEC's tables over ranks.")
@click.argument("spec_text", metavar="[SPEC]", required=False)
@click.option(
    "--world-size",
    "world_sizes",
    multiple=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of ranks; repeat the option to compare several. Default: as many as the topology has.",
)
@click.option(
    "--topology",
    metavar="FILE",
    help="The machines: a TOML file, one of h100x8, a100x8 and laptop, or local, which is what --calibrate measured "
    "here. Default: local.",
)
@click.option("--kind", type=click.Choice(KIND_NAMES), help="Shard every table in this way instead of searching.")
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Evaluate the plan in a JSON file that --out wrote instead of searching.",
)
@click.option(
    "--only", "constraints", multiple=True, metavar="TABLE=KIND,..", help="Allow a table only these kinds. Repeatable."
)
@click.option(
    "--optimizer",
    default="rowwise_adagrad",
    show_default=True,
    metavar="RULE",
    help="Update rule of the training step, or none for a forward only.",
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=2048, show_default=True, help="Samples per rank and step."
)
@click.option(
    "--workload",
    default="uniform",
    show_default=True,
    help="How ids and bag lengths are distributed, e.g. zipf:1.05 or zipf:1.2,len=geo:20.",
)
@click.option(
    "--forward",
    type=click.Choice(WIRE_FORMATS),
    default="fp32",
    show_default=True,
    help="Number format in which ranks send looked-up vectors.",
)
@click.option(
    "--gradients",
    type=click.Choice(WIRE_FORMATS),
    default="fp32",
    show_default=True,
    help="Number format in which ranks send gradients.",
)
@click.option(
    "--duplicates",
    type=click.Choice(["keep", "merge"]),
    default="keep",
    show_default=True,
    help="Whether equal ids are merged before they are sent: duplicates= of the sharded module.",
)
@click.option(
    "--pools",
    type=click.Choice(["all", "different"]),
    default="all",
    show_default=True,
    help="Whether equal pooled results are sent once: pools= of the sharded module, whose default on CPUs is "
    '"different".',
)
@click.option("--calibrate", is_flag=True, help="First measure this machine (half a minute) and save the numbers.")
@click.option(
    "--ranks", type=click.IntRange(2, 64), help="Processes that --calibrate starts. Default: one per GPU or CPU."
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan as JSON.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the predictions, e.g. plan.svg.")
@json_option
@click.pass_context
def plan(
    ctx: click.Context,
    /,
    spec_text: str | None,
    world_sizes: tuple[int, ...],
    topology: str | None,
    kind: str | None,
    plan_file: Path | None,
    constraints: Sequence[str],
    calibrate: bool,
    ranks: int | None,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
    **step_words: Any,
) -> None:
    """Choose how to shard every table of SPEC, so that a training step is short and every rank's memory suffices.

    The ranks do not have to exist: a laptop can plan for 1024 GPUs. All numbers are predictions of a cost model
    (docs/planning.md): memory with optimizer states, bytes over each link, seconds per step, imbalance. They are as
    good as the topology's numbers, which are assumptions from data sheets unless --calibrate measured them.

    \b
      embforge plan dlrm --topology h100x8                       eight GPUs
      embforge plan dlrm --topology h100x8 --world-size 1024     128 such nodes
      embforge plan dlrm --topology h100x8 --kind row_wise       what row-wise would cost
      embforge plan dlrm --calibrate                             measure this machine, plan for it
      embforge plan dlrm --topology h100x8 --out plan.json       for ShardPlan.from_dict
      embforge plan dlrm --topology h100x8 --world-size 8 --world-size 64 --world-size 512 --plot scaling.svg

    Exits with 1 if the plan of --kind or --plan does not fit into memory; with 2, naming the table, if no plan does.
    """
    if kind and plan_file:
        raise click.UsageError("--kind and --plan both say what the plan is; give one of them", ctx)
    if spec_text is None and not calibrate:
        raise click.UsageError("Missing argument 'SPEC'; it may be left out with --calibrate only", ctx)
    measured = _calibrate(ranks) if calibrate else None
    if spec_text is None:
        _print_measured(as_json)
        return
    from embforge.codegen.planner.constants import with_tuned
    from embforge.codegen.planner.simulate import assumptions
    from embforge.codegen.planner.topology import load_topology

    spec = load_spec(spec_text)
    step = _step(spec, **step_words)
    machines = measured if measured is not None and topology is None else load_topology(topology)
    machines, notes = with_tuned(machines, spec, step.update)
    fixed = _fixed_plan(spec, kind, plan_file)
    planned = []
    for size in world_sizes or (machines.world_size,):
        with waiting(f"planning {len(spec.tables)} tables on {size} ranks"):
            planned.append(_plan(spec, machines.of_size(size), step, fixed, _constraints(constraints)))
    notes = [*assumptions(machines, step), *notes]
    if out is not None:
        out.write_text(json.dumps(planned[-1].plan.to_dict(), indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        from embforge.codegen.planner.plot import draw

        kinds = kind or (plan_file.name if plan_file else "planned by ShardPlan.auto")
        draw(
            plot, [result.simulation for result in planned], f"{spec.name or 'spec'} on {machines.name}: {kinds}", notes
        )
    files = {"plan": out, "plot": plot}
    if as_json:
        print_json(_json(planned, notes, files))
    else:
        _print(spec, planned, notes, files)
    ctx.exit(OK if all(result.simulation.fits for result in planned) else CHECK_FAILED)


def _calibrate(ranks: int | None) -> Topology:
    with waiting("loading torch"):
        from embforge.sharded.calibrate import calibrate as measure
    from embforge.codegen.planner.topology import save_calibrated

    with stage_bar() as progress:
        topology = measure(ranks, progress=progress)
    path = save_calibrated(topology)
    click.echo(f"embforge: measured {topology.ranks_per_node} ranks of this machine; saved in {path}", err=True)
    return topology


def _print_measured(as_json: bool) -> None:
    from embforge.codegen.planner.topology import calibrated_path

    if as_json:
        print_json({"topology": str(calibrated_path())})
    else:
        console().print(calibrated_path().read_text(), markup=False, end="")


def _step(
    spec: CollectionSpec,
    optimizer: str,
    batch_size: int,
    workload: str,
    forward: Any,
    gradients: Any,
    duplicates: Any,
    pools: Any,
) -> Step:
    from embforge.codegen.planner.access import Access
    from embforge.codegen.planner.cost import Step
    from embforge.codegen.planner.traffic import Wire
    from embforge.codegen.plans import update_named
    from embforge.tuner.workload import workload as workloads

    parsed = workloads.parse(workload)
    numbers = workloads.traffic(spec, parsed)
    length = numbers.bag_length if parsed.lengths is not None or "trace:" in workload else None
    access = Access(numbers.skew or 0.0, length)
    return Step(batch_size, access, update_named(optimizer), Wire(forward, gradients, duplicates, pools=pools))


def _constraints(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    kinds_of = {}
    for text in texts:
        table, separator, kinds = text.partition("=")
        if not separator:
            raise click.UsageError(f"--only {text!r} is not TABLE=KIND,.., e.g. --only users=row_wise,column_wise")
        kinds_of[table.strip()] = tuple(kind.strip() for kind in kinds.split(","))
    return kinds_of


def _fixed_plan(spec: CollectionSpec, kind: str | None, plan_file: Path | None) -> ShardPlan | None:
    from embforge.codegen.errors import PlanError
    from embforge.codegen.reading.documents import DocumentError, read_json
    from embforge.codegen.sharding.kinds import ShardPlan

    if kind is not None:
        return ShardPlan({table.name: kind for table in spec.tables})
    if plan_file is None:
        return None
    try:
        return ShardPlan.from_dict(read_json(plan_file))
    except (OSError, DocumentError, PlanError) as error:
        raise PlanError(f"{plan_file}: not the JSON of a shard plan's to_dict(): {error}") from error


def _plan(
    spec: CollectionSpec,
    topology: Topology,
    step: Step,
    fixed: ShardPlan | None,
    constraints: dict[str, tuple[str, ...]],
) -> Planned:
    from embforge.codegen.planner.search import choose
    from embforge.codegen.planner.simulate import simulate
    from embforge.codegen.sharding.placement import place

    chosen = None if fixed is not None else choose(spec, topology, step=step, constraints=constraints)
    plan = chosen.plan if chosen is not None else fixed
    assert plan is not None
    placement = place(plan, spec, topology.world_size, topology.ranks_per_node)
    return Planned(plan, chosen.choices if chosen else (), simulate(placement, topology, step))


def _json(planned: Sequence[Planned], notes: Sequence[str], files: dict[str, Path | None]) -> dict[str, Any]:
    from dataclasses import asdict

    runs = []
    for result in planned:
        tables = [asdict(choice) | {"kind": choice.kind.name} for choice in result.choices]
        runs.append(result.simulation.to_json() | {"plan": result.plan.to_dict(), "tables": tables})
    written = {name: str(path) for name, path in files.items() if path is not None}
    return {"predicted": True, "assumptions": list(notes), "runs": runs, "files": written}


def _print(
    spec: CollectionSpec, planned: Sequence[Planned], notes: Sequence[str], files: dict[str, Path | None]
) -> None:
    from embforge.cli.display.plan_tables import (
        byte_table,
        kind_table,
        memory_line,
        reasons,
        scaling_table,
        step_table,
    )

    screen = console()
    last = planned[-1]
    if len(planned) == 1:
        screen.print(kind_table(spec, last.plan, last.choices))
        for line in reasons(last.choices):
            screen.print(line, markup=False)
        screen.print(byte_table(last.simulation))
        screen.print(step_table(last.simulation))
        screen.print(memory_line(last.simulation), soft_wrap=True, markup=False)
    else:
        screen.print(scaling_table([result.simulation for result in planned]))
    if not all(result.simulation.fits for result in planned):
        screen.print(
            "does not fit into memory; leave --kind and --plan out to search for a plan that does", markup=False
        )
    screen.print("predicted, not measured:", markup=False)
    for note in notes:
        screen.print(f"  - {note}", soft_wrap=True, markup=False)
    for name, path in files.items():
        if path is not None:
            screen.print(f"{name}: {path}", soft_wrap=True, markup=False)
