"""Options, exit codes, plans and output that several commands share."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from embforge.codegen.plan import Plan
    from embforge.codegen.spec import CollectionSpec

OK, CHECK_FAILED, USAGE_ERROR, TOOLCHAIN_ERROR = 0, 1, 2, 3
EXIT_CODES = (
    "Exit codes: 0 success; 1 a check failed, Ctrl-C or an unexpected error; 2 wrong usage or a wrong spec; "
    "3 a compiler or kernel is missing, a compilation failed or a file cannot be read or written."
)
JSON_ASKED, JSON_PRINTED = "embforge.json", "embforge.printed"
"""Keys of a context's `meta`: whether the user wrote --json, and whether the document is printed already."""


def load_spec(text: str) -> CollectionSpec:
    """The spec in a file, or the shipped example of that name; raises `SpecError` if there is neither."""
    from embforge.codegen.errors import SpecError
    from embforge.codegen.reading.suggestions import did_you_mean
    from embforge.codegen.spec import CollectionSpec

    shipped = {Path(item.name).stem: item for item in files("embforge.specs").iterdir() if item.name.endswith(".toml")}
    path = Path(text)
    if text in shipped and not path.is_file():  # `gen dlrm --out dlrm` makes a directory of that name, which is no spec
        # The spec forgets its file, so that no store of tuned results is looked for inside the package.
        return CollectionSpec.from_dict(CollectionSpec.from_toml(Path(str(shipped[text]))).to_dict())
    if not path.exists():
        beside = (item.name for item in path.parent.glob("*.toml"))
        hint = did_you_mean(text, shipped) or did_you_mean(path.name, beside)
        raise SpecError(f"{text}: no such spec file, and no such example{hint}; examples: {', '.join(sorted(shipped))}")
    return CollectionSpec.from_toml(path)


def spec_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the argument SPEC: the path of a spec file, or the name of an example that ships with embforge."""
    return click.argument("spec", callback=lambda ctx, param, value: load_spec(value))(command)


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    def remember(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
        ctx.meta[JSON_ASKED] = value
        return value

    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        is_eager=True,  # parsed before SPEC is read, so that errors of the spec are JSON too
        callback=remember,
        help='Print one JSON document instead of text; errors have the key "error" (see `embforge --help`).',
    )(command)


def param_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--param",
        "overrides",
        multiple=True,
        metavar="FIELD=VALUE",
        help="Set a plan field, e.g. prefetch_bytes=4096 or pipeline=8,2. It changes speed, never results. Repeatable.",
    )(command)


def plans_for(
    spec: CollectionSpec, target: str, archs: Iterable[str], id_dtypes: Iterable[str], overrides: Iterable[str]
) -> list[Plan]:
    """The forward plans of a spec: one for each combination of architecture and id type."""
    from embforge.codegen.plans import SERVING, training_plans

    params = params_of(target, overrides)
    plans = [training_plans(spec, target, arch, ids, params) for arch in archs for ids in id_dtypes]
    return [each[name] for each in plans for name in SERVING if name in each]


def training_plans_for(
    spec: CollectionSpec,
    target: str,
    archs: Iterable[str],
    id_dtypes: Iterable[str],
    overrides: Iterable[str],
    rules: Iterable[str],
    accumulate: bool,
) -> list[Plan]:
    """All plans that training a spec with each of the rules may run, without duplicates.

    Overrides set fields of forward plans or of backward plans, whichever have the field.
    """
    from embforge.codegen.plans import training_plans, update_named

    forward, backward = _split_overrides(target, overrides)
    forward_params, backward_params = params_of(target, forward), params_of(target, backward, "backward")
    by_uri: dict[str, Plan] = {}
    for update in [update_named(rule) for rule in rules]:
        for arch in archs:
            for ids in id_dtypes:
                plans = training_plans(
                    spec,
                    target,
                    arch,
                    ids,
                    forward_params,
                    backward_params,
                    update,
                    accumulate and update is not None,
                )
                by_uri |= {plan.uri: plan for plan in plans.values()}
    return list(by_uri.values())


def _split_overrides(target: str, overrides: Iterable[str]) -> tuple[list[str], list[str]]:
    """Overrides for forward plans and for backward plans.

    A field that both have is set in both; one that neither has is left to the forward, which then names it in an error.
    """
    from dataclasses import fields

    from embforge.codegen.params import params_type

    names = {op: {f.name for f in fields(params_type(target, op))} for op in ("forward", "backward")}
    by_field = [(text, text.partition("=")[0].strip()) for text in overrides]
    backward = [text for text, field in by_field if field in names["backward"]]
    return [text for text, field in by_field if field in names["forward"] or field not in names["backward"]], backward


def params_of(target: str, overrides: Iterable[str], op: str = "forward") -> Any:
    """The target's default params with `field=value` overrides applied; `PlanError` names a wrong field or value."""
    from embforge.codegen.params import params_from

    return params_from(target, fields_given(overrides, "--param"), op)


def fields_given(overrides: Iterable[str], option: str) -> dict[str, Any]:
    """The plan fields that texts of the form `field=value` set; `PlanError` names a text of another form."""
    from embforge.codegen.errors import PlanError

    values = {}
    for override in overrides:
        field, separator, text = override.partition("=")
        if not separator:
            raise PlanError(f"{option} {override!r} is not FIELD=VALUE, e.g. {option} prefetch_bytes=4096")
        if field.strip() in values:
            raise PlanError(f"{option} gives {field.strip()} twice; give it once")
        values[field.strip()] = _value(text.strip())
    return values


def print_json(data: Any) -> None:
    """Prints a command's answer as one JSON document. Infinities and NaN become null, because JSON has neither."""
    click.echo(json.dumps(finite(data), indent=2, allow_nan=False))
    ctx = click.get_current_context(silent=True)
    if ctx is not None:
        ctx.meta[JSON_PRINTED] = True


def console(*, stderr: bool = False) -> Console:
    """The screen. Progress goes to stderr, so that stdout holds only the command's answer."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def plain_table(*headings: str, title: str | None = None) -> Table:
    """A table without lines between columns, which cost three of 80 characters each."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    shown = None if title is None else escape(title)
    return Table(
        *headings, title=shown, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )


@contextmanager
def stage_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Shows a progress bar on stderr. Call the yielded function with the stage's name, the steps done and all steps."""
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), *Progress.get_default_columns()[:2], TimeElapsedColumn())
    screen = console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("")
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total)


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """Shows a spinner on stderr during work of unknown length."""
    screen = console(stderr=True)
    with screen.status(title) if screen.is_terminal else nullcontext():
        yield


def finite(data: Any) -> Any:
    """The data with null for every infinity and NaN."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    return [finite(value) for value in data] if isinstance(data, list | tuple) else data


def _value(text: str) -> Any:
    for candidate in (text, text.lower(), f"[{text.strip('()')}]"):
        try:
            return json.loads(candidate)
        except ValueError:
            continue
    return text
