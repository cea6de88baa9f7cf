"""`embforge demo`: runs everything once, in a few minutes, on one example."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import click

from embforge.cli.common import (
    CHECK_FAILED,
    EXIT_CODES,
    OK,
    console,
    json_option,
    load_spec,
    params_of,
    plans_for,
    print_json,
    stage_bar,
    waiting,
)

EXAMPLE = "dlrm"
WORKLOAD = "zipf:1.05,batch=512"
SECONDS = 8.0
TUNING_SECONDS = 30.0
PATIENCE = 20.0
"""How many seconds to wait before timing until other processes leave the machine alone."""
NEXT = """What to do next
  look at the kernels      {out}/*.cpp, {out}/*.cu
  with your own tables     write a spec like examples/specs/dlrm.toml
                           (`embforge schema` has its JSON schema), then
                           embforge gen SPEC --target cuda --out DIR
  tuned for your machine   embforge tune dlrm --budget 3m
                           modules use what it finds
  check every plan field   embforge verify dlrm --on cpu
                           embforge verify dlrm --on simt --counters
  from Python              spec = ef.CollectionSpec.from_toml("SPEC")
                           ef.EmbeddingCollection(spec); see README.md
  if you have a GPU        embforge verify dlrm --on cuda
                           you would be the first, and we would love to hear"""


@click.command(epilog=EXIT_CODES, short_help="Run everything once on an example.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("embforge-demo"),
    show_default=True,
    help="Directory for the generated kernels.",
)
@json_option
@click.pass_context
def demo(ctx: click.Context, out: Path, as_json: bool) -> None:
    """Run everything once: turn an example spec into a CPU kernel and cubins for eight GPU generations; check them,
    run the CUDA kernels on an emulated GPU, time and tune the CPU kernel."""
    from embforge.cli.bench import notes_of, timing_table
    from embforge.cli.display.resources import resource_table
    from embforge.cli.display.tune_result import comparison_table, result_json
    from embforge.cli.gen import default_archs, emit
    from embforge.cli.verify import check_table
    from embforge.codegen.build import build
    from embforge.codegen.errors import ToolchainError
    from embforge.tuner.bench.forward import bench_spec
    from embforge.tuner.measure.quiet import wait_until_quiet
    from embforge.tuner.report.data import report_of
    from embforge.tuner.report.page import headline
    from embforge.tuner.tune import tune
    from embforge.verify.lookups import verify

    screen = console()

    def say(*lines: Any) -> None:
        if not as_json:
            for line in lines:
                heading = isinstance(line, str) and line.startswith("[bold]")  # wraps between words; a path does not
                screen.print(line, soft_wrap=isinstance(line, str) and not heading)

    spec = load_spec(EXAMPLE)
    dims = sorted({t.embedding_dim for t in spec.tables})
    sizes = f"{len(spec.tables)} tables of {dims[0]} to {dims[-1]} columns, {len(spec.features)} features"
    say(f"[bold]1. A spec:[/] {EXAMPLE}, {sizes}")

    isa = default_archs("cpu")
    say("", f"[bold]2. One kernel for this CPU[/] ({isa[0]})")
    (cpu,) = emit(plans_for(spec, "cpu", isa, ["int64"], []), out)
    say(f"   {out / cpu['source']}")

    say("", "[bold]3. The same spec for eight GPU generations[/] (compiled by NVRTC; no GPU needed, none timed)")
    gpu: list[dict[str, Any]] = []
    try:
        plans = plans_for(spec, "cuda", default_archs("cuda"), ["int64"], [])
        gpu = emit(plans, out)
        started = perf_counter()
        build(plans[-1], ahead_of_time=True)
        taken = 1e3 * (perf_counter() - started)
        say(resource_table(gpu), f"   the next time, from the cache: {taken:.0f} ms per kernel")
    except ToolchainError as error:  # macOS has no NVRTC; the rest of the demo works there
        say(f"   left out: {error}")

    say("", "[bold]4. Checked[/] against the reference, bit for bit, and against torch.nn.EmbeddingBag")
    with stage_bar() as tell:
        checks = verify(spec, on="cpu", params=[params_of("cpu", [])], batch_sizes=(1, 64), progress=tell).rows
    say(check_table(checks))

    say("", "[bold]5. The CUDA kernels executed[/] on an emulated GPU: every access of every thread checked")
    try:
        with stage_bar() as tell:
            executed = verify(spec, on="simt", params=[params_of("simt", [])], progress=tell).rows
        say(check_table(executed))
    except ToolchainError as error:  # the emulated GPU needs Linux
        executed = ()
        say(f"   left out: {error}")
    for row in (*checks, *executed):
        if not row.passed:
            say(f"   {row.check}: {row.detail}")

    say("", "[bold]6. Timed[/], interleaved with what people use today (a short run: `make bench` is the long one)")
    with waiting(f"waiting for a quiet machine, then timing for about {SECONDS:g} s"):
        wait_until_quiet(PATIENCE)
        report = bench_spec(spec, on="cpu", workload=WORKLOAD, seconds=SECONDS)
    say(timing_table(report), *notes_of(report))

    say("", "[bold]7. Tuned[/] for this machine (a short run, not kept: `embforge tune dlrm` is the long one)")
    with waiting(f"tuning for about {TUNING_SECONDS:g} s"), TemporaryDirectory() as folder:
        tuned = tune(
            spec, workloads=[WORKLOAD], budget=TUNING_SECONDS, storage=str(Path(folder) / "studies.sqlite3"), store=None
        )
        tuning = report_of(tuned.study)
    say(*([comparison_table(tuning.finals, tuning.title)] if tuning.finals else []), f"   {headline(tuning)}")

    passed = all(row.passed for row in (*checks, *executed)) and not report.disagreeing
    say("", NEXT.format(out=out))
    if as_json:
        kernels = [cpu, *gpu]
        data = {"passed": passed, "directory": str(out), "kernels": kernels}
        data |= {"checks": [vars(row) for row in checks], "executed": [vars(row) for row in executed]}
        print_json(data | {"bench": report.to_json(), "tuned": result_json(tuning)})
    ctx.exit(OK if passed else CHECK_FAILED)
