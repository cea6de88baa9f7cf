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

EXIT_STATUS = "The exit code is the script's, or 1 if the script succeeds and nothing was recorded."


@click.command(
    epilog=EXIT_STATUS,
    short_help="Run a script and save the batches that it looks up.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="Trace file to write, .npz. Batches of the script's second collection go to NAME-2.npz, and so on.",
)
@click.option(
    "--batches", type=click.IntRange(min=1), default=100, show_default=True, help="Batches to save per collection."
)
@json_option
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def record(
    ctx: click.Context, out: Path, batches: int, as_json: bool, script: Path, arguments: tuple[str, ...]
) -> None:
    """Run a Python SCRIPT with its ARGUMENTS and save the first batches that every EmbeddingCollection in it looks up,
    to tune for real traffic instead of random ids:

    \b
        embforge record --out trace.npz train.py --epochs 1
        embforge tune SPEC --workload trace:trace.npz

    The script runs as usual, except that its torch.compile'd functions run eagerly, because calls within compiled code
    cannot be recorded. Files are written as soon as enough batches are recorded, or when the script ends, also by an
    exception or by Ctrl-C. In your own program, `ef.record(module, "trace.npz")` does the same for one module.
    """
    from embforge.trace.file_format import BATCHES_VARIABLE, FILE_VARIABLE, checked_target, read_trace

    out = checked_target(out, batches)
    before = _files(out)
    environment = {**os.environ, FILE_VARIABLE: str(out), BATCHES_VARIABLE: str(batches)}
    # With --json, stdout holds one document only, so what the script prints goes to stderr.
    status = _run([sys.executable, str(script), *arguments], environment, sys.stderr if as_json else None)
    traces = {path: read_trace(path) for path, stamp in _files(out).items() if before.get(path) != stamp}
    if as_json:
        saved = [
            {"file": str(path), "batches": len(t), "samples": t.samples, "ids": t.values.size, "features": t.features}
            for path, t in traces.items()
        ]
        print_json({"status": status, "traces": saved})
    for path, trace in traces.items():
        sizes = f"{len(trace)} batches, {trace.samples:,} samples, {trace.values.size:,} ids"
        click.echo(f"embforge: {path}: {sizes}", err=True)
    if not traces:
        click.echo(f"embforge: nothing was recorded: {script} called no EmbeddingCollection", err=True)
    ctx.exit(status if traces or status else CHECK_FAILED)


def _run(command: list[str], environment: dict[str, str], stdout: IO[str] | None) -> int:
    """The exit code as a shell reports it. Ctrl-C reaches the script too, which then writes its files and ends."""
    process = subprocess.Popen(command, env=environment, stdout=stdout)
    while True:
        try:
            status = process.wait()
            return status if status >= 0 else 128 - status
        except KeyboardInterrupt:
            continue


def _files(out: Path) -> dict[Path, tuple[int, int]]:
    """The trace files of that name in their order, each with a stamp that changes when the file is written."""
    named = re.compile(rf"{re.escape(out.stem)}(?:-(\d+))?{re.escape(out.suffix)}")
    numbered = [(int(match[1] or 1), path) for path in out.parent.iterdir() if (match := named.fullmatch(path.name))]
    return {path: ((facts := path.stat()).st_ino, facts.st_mtime_ns) for _, path in sorted(numbered)}
