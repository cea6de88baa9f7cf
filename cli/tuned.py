"""`embforge tuned`: lists tuned results, shows their evidence, and carries them to other machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embforge.cli.common import CHECK_FAILED, EXIT_CODES, OK, console, json_option, plain_table, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from embforge.codegen.tuned.record import Key, Record
    from embforge.codegen.tuned.stores import Problem, Stored


@click.group(epilog=EXIT_CODES)
def tuned() -> None:
    """List, show, export, import and remove tuned results.

    `embforge tune` writes results, and modules take the one that fits. A result is found by its meaning (op, shape of
    the spec, hardware, traffic, type of ids, warm or cold caches), never by a name. A module takes the first of: an
    exact match in the project's store (embforge-tuned/ next to the spec, or in the current directory), in the user's
    (EMBFORGE_TUNED_DIR, or by default the platform's data directory), or among those that ship with the package; the
    nearest match in any of them; the default. `ef.explain(module)` says what was taken and why.

    \b
      embforge tuned ls                      list all results
      embforge tuned show 1f0c2a9b           show one result with its evidence
      embforge tuned export results.json     write all results into one file
      embforge tuned import results.json     store them in this user's store
    """


def origin_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--spec",
        "origin",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Use the project store next to this spec file. Default: embforge-tuned/ in the current directory.",
    )(command)


def to_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--to",
        "where",
        type=click.Choice(["user", "project"]),
        default="user",
        show_default=True,
        help="Store to write into.",
    )(command)


@tuned.command("ls", epilog=EXIT_CODES, short_help="List all tuned results.")
@origin_option
@json_option
def list_(origin: Path | None, as_json: bool) -> None:
    """List all tuned results, and the files that were skipped with the reason."""
    from embforge.codegen.tuned.stores import read_stores, store_dirs

    available, problems = read_stores(origin=origin)
    if as_json:
        print_json(
            {
                "stores": {name: str(path) for name, path in store_dirs(origin).items()},
                "results": [_line(result) for result in available],
                "problems": [{"path": str(problem.path), "problem": problem.what} for problem in problems],
            }
        )
        return
    screen = console()
    if available:
        screen.print(result_table(available))
        if dropped := sorted({name for result in available for name in _dropped_here(result.record)}):
            taken = f"measured with {', '.join(dropped)}, which modules take only on the hardware of the measurement"
            screen.print(f"x default -: {taken}; their gain here is not known", markup=False)
    else:
        screen.print("no tuned results yet; `embforge tune SPEC` makes one")
    for name, path in store_dirs(origin).items():
        count = sum(result.store == name for result in available)
        screen.print(f"{name}: {count} in {path}", soft_wrap=True, markup=False)
    _print_problems(problems)


@tuned.command(epilog=EXIT_CODES, short_help="Show one result with its evidence.")
@click.argument("result")
@origin_option
@json_option
def show(result: str, origin: Path | None, as_json: bool) -> None:
    """Show what RESULT is for, its parameters and the evidence. RESULT is an id that `tuned ls` prints, or a file."""
    record, path = _record_of(result, origin)
    if as_json:
        from dataclasses import asdict

        print_json({"id": _id(record), "path": str(path), **asdict(record)})
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for label, value in _facts(record, path):
        table.add_row(f"[bold]{label}[/]", escape(value))
    console().print(table)


@tuned.command(epilog=EXIT_CODES, short_help="Write results into a file.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("results", nargs=-1)
@origin_option
@json_option
@click.pass_context
def export(ctx: click.Context, file: Path, results: Sequence[str], origin: Path | None, as_json: bool) -> None:
    """Write RESULTS with all their samples into FILE as one JSON document. RESULTS are ids; without them, all results.

    Exits with 1 if files in the stores had to be skipped.
    """
    from embforge.codegen.tuned.stores import read_stores
    from embforge.tuner import store

    available, problems = read_stores(origin=origin)
    chosen = [store.find(result, available) for result in results] if results else available
    count = store.export([result.record for result in chosen], file)
    if as_json:
        print_json({"file": str(file), "results": count, "problems": [str(problem) for problem in problems]})
    else:
        console().print(f"{_count(count)} in {file}", soft_wrap=True, markup=False)
    if problems and not results:
        _print_problems(problems)
        ctx.exit(CHECK_FAILED)
    ctx.exit(OK)


@tuned.command("import", epilog=EXIT_CODES, short_help="Store the results of a file.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@to_option
@origin_option
@json_option
def import_(file: Path, where: Any, origin: Path | None, as_json: bool) -> None:
    """Store the results of FILE, which `tuned export` wrote or which comes from another store.

    All results are checked before any is stored. One that has the same meaning is replaced, and its id is printed.
    """
    from embforge.codegen.tuned.stores import Problem
    from embforge.tuner import store

    written = store.import_(file, where, origin=origin)
    replaced = [result for result in written if result.replaced is not None]
    if as_json:
        print_json(
            {
                "directory": str(store.directory_of(where, origin)),
                "imported": [_id(result.record) for result in written],
                "replaced": [_id(result.record) for result in replaced],
            }
        )
        return
    screen = console()
    for result in replaced:
        old = result.replaced
        what = (
            f"a damaged file ({old.what})" if isinstance(old, Problem) else f"the one of {old.created}" if old else ""
        )
        screen.print(f"{_id(result.record)} of {result.record.created} replaced {what}", soft_wrap=True, markup=False)
    screen.print(f"{_count(len(written))} into {store.directory_of(where, origin)}", soft_wrap=True, markup=False)


@tuned.command("rm", epilog=EXIT_CODES, short_help="Remove results by their ids.")
@click.argument("results", nargs=-1, required=True)
@origin_option
@json_option
def remove(results: Sequence[str], origin: Path | None, as_json: bool) -> None:
    """Remove RESULTS, which are ids that `tuned ls` prints. Modules made later take the next best result."""
    from embforge.codegen.tuned.stores import read_stores
    from embforge.tuner import store

    available, _ = read_stores(origin=origin)
    chosen = [store.find(result, available) for result in results]
    for result in chosen:
        store.remove(result)
    if as_json:
        print_json({"removed": [str(result.path) for result in chosen]})
    else:
        console().print(f"removed {_count(len(chosen))}")


def result_table(available: Sequence[Stored]) -> Table:
    """A table with a few lines per result, so that ids and gains fit into 80 columns."""
    from rich.markup import escape

    table = plain_table()
    table.add_column("id", no_wrap=True)
    table.add_column("store", no_wrap=True)
    table.add_column("x default", justify="right", no_wrap=True)
    table.add_column("when", no_wrap=True)
    table.add_column("op, spec, hardware, workload, changed fields", overflow="fold")
    for place, result in enumerate(available):
        record, shape = result.record, result.record.key.shape
        lines = (
            " ".join(filter(None, (record.key.op, record.key.target, record.key.rule, *_unusual(record.key)))),
            f"{shape.features} x {shape.dim:.0f} {'/'.join(shape.dtypes)} on {record.key.hardware.name}",
            record.workload,
            _changed(record),
        )
        gain = "-" if _dropped_here(record) else f"{record.gain.median:.2f}"
        last = place == len(available) - 1
        cells = (_id(record), result.store, gain, record.created[:10], escape("\n".join(lines)))
        table.add_row(*cells, end_section=not last)
    return table


def _facts(record: Record, path: Path) -> list[tuple[str, str]]:
    from statistics import median

    key, gain = record.key, record.gain
    sizes = ", ".join(f"{name} {size:,}" for name, size in key.hardware.sizes.items())
    identity = ", ".join(f"{name} {value}" for name, value in key.hardware.identity.items())
    traffic = {"batch": key.traffic.batch, "bag length": key.traffic.bag_length, "skew": key.traffic.skew}
    known = ", ".join(f"{name} {'unknown' if n is None else f'{n:g}'}" for name, n in traffic.items())
    facts = [
        ("id", _id(record)),
        ("file", str(path)),
        ("op", f"{key.op} on {key.target}" + (f", rule {key.rule}" if key.rule else "")),
        (
            "spec",
            f"{key.shape.features} features, mean dim {key.shape.dim:.0f}, {key.shape.table_bytes:,} bytes of rows",
        ),
        ("", f"dtypes {', '.join(key.shape.dtypes)}; poolings {', '.join(key.shape.poolings)}"),
        ("hardware", f"{key.hardware.name}: {identity}"),
        ("", sizes),
        ("workload", record.workload),
        ("", known),
        ("", f"{key.id_dtype} ids, {key.cache} caches"),
        *(("parameters" if not i else "", f"{k} = {v}") for i, (k, v) in enumerate(record.params.items())),
        ("gain", f"{gain.median:.3f}x the default, 95 %: {gain.low:.3f} to {gain.high:.3f}"),
        *_only_where_measured(record),
        ("noise floor", f"{100 * record.noise_floor:.2f} %"),
    ]
    for number, (name, times) in enumerate(record.samples.items()):
        shown = f"{len(times)} of {name}" + (f", median {1e6 * median(times):,.1f} µs per call" if times else "")
        facts.append(("samples" if not number else "", shown))
    facts.append(("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())))
    facts += [("made", record.created), *([("study", record.study)] if record.study else [])]
    return [*facts, *(("note" if not i else "", note) for i, note in enumerate(record.notes))]


def _line(result: Stored) -> dict[str, Any]:
    record, dropped = result.record, _dropped_here(result.record)
    return {
        "id": _id(record),
        "store": result.store,
        "path": str(result.path),
        "op": record.key.op,
        "target": record.key.target,
        "rule": record.key.rule,
        "id_dtype": record.key.id_dtype,
        "cache": record.key.cache,
        "hardware": record.key.hardware.name,
        "workload": record.workload,
        "gain": None if dropped else {"median": record.gain.median, "low": record.gain.low, "high": record.gain.high},
        "dropped": dropped,
        "noise_floor": record.noise_floor,
        "params": record.params,
        "created": record.created,
    }


def _record_of(text: str, origin: Path | None) -> tuple[Record, Path]:
    from embforge.codegen.errors import TunedError
    from embforge.codegen.tuned.document import read_records
    from embforge.codegen.tuned.stores import read_stores
    from embforge.tuner.store import find

    if Path(text).is_file():
        try:
            records = read_records(Path(text))
        except TunedError as error:
            raise TunedError(f"{text}: {error}") from None
        if len(records) != 1:
            raise TunedError(
                f"{text}: holds {len(records)} results; store them with `embforge tuned import`, then show one of them"
            )
        return records[0], Path(text)
    available, _ = read_stores(origin=origin)
    stored = find(text, available)
    return stored.record, stored.path


def _dropped_here(record: Record) -> list[str]:
    """Tuned fields that modules on this machine do not take, because they are valid only where they were measured."""
    from embforge.codegen.tuned.choose import left_open
    from embforge.codegen.tuned.document import params_of
    from embforge.codegen.tuned.hardware import this_cpu

    left = left_open(params_of(record.key, record.params))
    if not left:
        return []
    here = this_cpu()
    same = (record.key.hardware.identity, record.key.hardware.sizes) == (here.identity, here.sizes)
    return [] if same else list(left)


def _only_where_measured(record: Record) -> list[tuple[str, str]]:
    from embforge.codegen.tuned.choose import left_open
    from embforge.codegen.tuned.document import params_of

    left = left_open(params_of(record.key, record.params))
    taken = f"with {', '.join(left)}, which modules take only on this hardware with a batch_size= like this batch"
    return [("", taken)] if left else []


def _changed(record: Record) -> str:
    """The fields that differ from the default."""
    from dataclasses import fields

    from embforge.codegen.params import params_type

    default = {f.name: f.default for f in fields(params_type(record.key.target, record.key.op))}
    changed = [f"{name}={value}" for name, value in record.params.items() if value != default.get(name)]
    return ", ".join(changed) or "none: the default is best"


def _unusual(key: Key) -> list[str]:
    """The type of ids and the state of caches, if they are not the usual ones."""
    return [word for word in (key.id_dtype, key.cache) if word in ("int32", "cold")]


def _id(record: Record) -> str:
    from embforge.codegen.tuned.shape import digest_of
    from embforge.tuner.store import SHORT

    return digest_of(record.key)[:SHORT]


def _count(number: int) -> str:
    return "1 result" if number == 1 else f"{number} results"


def _print_problems(problems: Sequence[Problem]) -> None:
    for problem in problems:
        click.echo(f"embforge: skipped {problem}", err=True)
