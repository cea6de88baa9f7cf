"""`embforge record`: runs a script and saves the batches that its collections serve."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import IO

import click

from embforge.cli.common import CHECK_FAILED, json_option, print_json

EXIT_STATUS = "Exits as the script does; with 1 if the script succeeds and nothing was recorded."


@click.command(
    epilog=EXIT_STATUS,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="Trace file, .npz. A script's second collection goes to NAME-2.npz beside it, and so on.",
)
@click.option("--batches", type=click.IntRange(min=1), default=100, show_default=True, help="To save of a collection.")
@json_option
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def record(
    ctx: click.Context, out: Path, batches: int, as_json: bool, script: Path, arguments: tuple[str, ...]
) -> None:
    """Run a Python SCRIPT with its ARGUMENTS and save the first batches that every EmbeddingCollection in it is
    asked for, to tune for real traffic instead of drawn ids:

    \b
        embforge record --out trace.npz train.py --epochs 1
        embforge tune SPEC --workload trace:trace.npz

    The script runs as ever, but torch.compile'd functions in it run eagerly: a recording sees nothing of compiled code.
    Files are written when the batches are there, or when the script ends, also by an exception or by Ctrl-C. In a
    program of your own, `ef.record(module, "trace.npz")` does the same for one module.
    """
    from embforge.trace.file_format import BATCHES_VARIABLE, FILE_VARIABLE, checked_target, read_trace

    out = checked_target(out, batches)
    before = _files(out)
    environment = {**os.environ, FILE_VARIABLE: str(out), BATCHES_VARIABLE: str(batches)}
    # With --json, stdout holds one document and nothing of the script.
    status = _run([sys.executable, str(script), *arguments], environment, sys.stderr if as_json else None)
    traces = {path: read_trace(path) for path, stamp in _files(out).items() if before.get(path) != stamp}
    if as_json:
        found = [
            {"file": str(path), "batches": len(t), "samples": t.samples, "ids": t.values.size, "features": t.features}
            for path, t in traces.items()
        ]
        print_json({"status": status, "traces": found})
    for path, trace in traces.items():
        sizes = f"{len(trace)} batches, {trace.samples:,} samples, {trace.values.size:,} ids"
        click.echo(f"embforge: {path}: {sizes}", err=True)
    if not traces:
        click.echo(f"embforge: nothing was recorded: {script} called no EmbeddingCollection", err=True)
    ctx.exit(status if traces or status else CHECK_FAILED)


def _run(command: list[str], environment: dict[str, str], stdout: IO[str] | None) -> int:
    """The status as a shell has it. Ctrl-C reaches the script too, which then ends by itself and writes its files."""
    process = subprocess.Popen(command, env=environment, stdout=stdout)
    while True:
        try:
            status = process.wait()
            return status if status >= 0 else 128 - status
        except KeyboardInterrupt:
            continue


def _files(out: Path) -> dict[Path, tuple[int, int]]:
    """The trace files of that name in their order, and what tells that one is not what it was."""
    named = re.compile(rf"{re.escape(out.stem)}(?:-(\d+))?{re.escape(out.suffix)}")
    found = [(int(match[1] or 1), path) for path in out.parent.iterdir() if (match := named.fullmatch(path.name))]
    return {path: ((facts := path.stat()).st_ino, facts.st_mtime_ns) for _, path in sorted(found)}
