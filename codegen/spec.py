"""What the user describes: tables, and the features that look them up. Pure data with every rule checked.

Contract: a spec that exists is valid. Every mistake raises one `SpecError` naming the table or
feature, the field, the value and what is allowed.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import asdict
from dataclasses import fields as dataclass_fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, dataclass_transform, get_args

from pydantic import ConfigDict, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from embforge.codegen.dtypes import OutputDtype, TableDtype
from embforge.codegen.errors import SpecError

Pooling = Literal["sum", "mean", "sqrtn", "max", "concat", "none"]
Storage = Literal["static"]

POOLINGS: tuple[str, ...] = get_args(Pooling)
MAX_DIM = 16384
MAX_ROWS = 2**40
MAX_HOTNESS = 2**20
NAME_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
NAME_RULE = "a letter or _ followed by letters, digits, '_', '-' or '.'"


@dataclass_transform(frozen_default=True)
def _spec_dataclass(cls: type[Any]) -> Any:
    """A frozen pydantic dataclass whose mistakes are `SpecError`s in one plain sentence."""
    made: Any = dataclass(frozen=True, config=ConfigDict(strict=True))(cls)
    construct = made.__init__
    kind = cls.__name__.removesuffix("Spec").lower()
    allowed = [f.name for f in dataclass_fields(made)]

    @wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(allowed, args, strict=False)) | kwargs
        where = f"{kind} {given['name']!r}" if isinstance(given.get("name"), str) else kind
        for key in kwargs:
            if key not in allowed:
                raise SpecError(f"{where}: unknown field {key!r}; allowed: {', '.join(allowed)}")
            if key in allowed[: len(args)]:
                raise SpecError(f"{where}: {key} is given twice, by position and by name; give it once")
        if len(args) > len(allowed):
            raise SpecError(f"{where}: {len(args)} positional values; allowed: {', '.join(allowed)}")
        try:
            construct(self, **given)
        except ValidationError as error:
            raise SpecError(_plain_sentence(where, error)) from None

    made.__init__ = __init__
    return made


@_spec_dataclass
class TableSpec:
    """Rows x dim of a dtype in a storage."""

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: TableDtype = "fp32"
    storage: Storage = "static"

    def __post_init__(self) -> None:
        _check_name("table", self.name)
        _check_range("table", self.name, "num_embeddings", self.num_embeddings, 1, MAX_ROWS)
        _check_range("table", self.name, "embedding_dim", self.embedding_dim, 1, MAX_DIM)


@_spec_dataclass
class FeatureSpec:
    """An input column looked up in a table and pooled. Several features may share a table."""

    name: str
    table: str
    pooling: Pooling = "sum"
    weighted: bool = False
    hotness: int | None = None
    """`concat`: the most ids a bag may hold (its output has hotness * dim columns).
    Other poolings: the usual bag length, from which verify, bench and tune make their batches."""
    padding_idx: int | None = None

    def __post_init__(self) -> None:
        _check_name("feature", self.name)
        if self.pooling == "concat" and self.hotness is None:
            raise SpecError(
                f"feature {self.name!r}: pooling 'concat' needs hotness (the most ids a bag may hold), "
                f"got hotness=None; give a whole number from 1 to {MAX_HOTNESS}"
            )
        if self.hotness is not None:
            _check_range("feature", self.name, "hotness", self.hotness, 1, MAX_HOTNESS)
        if self.weighted and self.pooling == "max":
            raise SpecError(
                f"feature {self.name!r}: weighted=True cannot go with pooling 'max'; "
                "allowed with weights: sum, mean, sqrtn, concat, none"
            )


@_spec_dataclass
class CollectionSpec:
    """Tables and features that one fused kernel per operation serves."""

    tables: Annotated[tuple[TableSpec, ...], Strict(False)]
    features: Annotated[tuple[FeatureSpec, ...], Strict(False)]
    output_dtype: OutputDtype = "fp32"
    name: str | None = None

    def __post_init__(self) -> None:
        if self.name is not None:
            _check_name("collection", self.name)
        if not self.tables:
            raise SpecError("collection: tables is empty; give at least one table ([[table]] in TOML)")
        if not self.features:
            raise SpecError("collection: features is empty; give at least one feature ([[feature]] in TOML)")
        _check_unique("table", [t.name for t in self.tables])
        _check_unique("feature", [f.name for f in self.features])
        by_name = {t.name: t for t in self.tables}
        for feature in self.features:
            table = by_name.get(feature.table)
            if table is None:
                raise SpecError(
                    f"feature {feature.name!r}: table={feature.table!r} does not exist; allowed: {', '.join(by_name)}"
                )
            if feature.padding_idx is not None and not 0 <= feature.padding_idx < table.num_embeddings:
                raise SpecError(
                    f"feature {feature.name!r}: padding_idx={feature.padding_idx} is not a row of table "
                    f"{table.name!r}; allowed: 0 to {table.num_embeddings - 1}"
                )
        used = {f.table for f in self.features}
        for table in self.tables:
            if table.name not in used:
                raise SpecError(
                    f"table {table.name!r}: no feature looks it up; add a feature with "
                    f"table={table.name!r} or remove the table"
                )

    @property
    def origin(self) -> Path | None:
        """The file it was read from; beside it lies the project's tuned store. No part of equality or of `to_dict`."""
        found: Path | None = self.__dict__.get("_origin")
        return found

    def table(self, name: str) -> TableSpec:
        """The table of that name; `SpecError` naming the known ones otherwise."""
        for candidate in self.tables:
            if candidate.name == name:
                return candidate
        raise SpecError(f"table {name!r} does not exist; known: {', '.join(t.name for t in self.tables)}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data without fields that hold their default; `from_dict` reads it back."""
        data: dict[str, Any] = {"name": self.name, "output_dtype": self.output_dtype}
        data["table"] = [_without_defaults(t) for t in self.tables]
        data["feature"] = [_without_defaults(f) for f in self.features]
        return {k: v for k, v in data.items() if v is not None}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CollectionSpec:
        """A spec from plain data with the field names of the TOML file."""
        known = {"name", "output_dtype", "table", "feature"}
        unknown = sorted(set(data) - known)
        if unknown:
            raise SpecError(f"collection: unknown field {unknown[0]!r}; allowed: {', '.join(sorted(known))}")
        tables = tuple(TableSpec(**entry) for entry in _entries(data, "table"))
        features = tuple(FeatureSpec(**entry) for entry in _entries(data, "feature"))
        rest = {k: v for k, v in data.items() if k in ("name", "output_dtype")}
        return cls(tables, features, **rest)

    @classmethod
    def from_toml(cls, path: str | Path) -> CollectionSpec:
        """Reads a spec file. `SpecError` names the file; a spec without a name takes the file's."""
        path = Path(path)
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise SpecError(f"{path}: no such spec file; see examples/specs/ for some") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SpecError(f"{path}: not a readable TOML file: {error}") from error
        if NAME_PATTERN.fullmatch(path.stem):
            data.setdefault("name", path.stem)
        try:
            spec = cls.from_dict(data)
        except SpecError as error:
            raise SpecError(f"{path}: {error}") from None
        object.__setattr__(spec, "_origin", path.absolute())
        return spec

    def to_toml(self) -> str:
        """The spec as TOML text that `from_toml` reads back to an equal spec."""
        data = self.to_dict()
        head = [f"{key} = {_toml(data[key])}" for key in ("name", "output_dtype") if key in data]
        blocks = ["\n".join(head)]
        for kind in ("table", "feature"):
            for entry in data[kind]:
                blocks.append("\n".join([f"[[{kind}]]", *(f"{k} = {_toml(v)}" for k, v in entry.items())]))
        return "\n\n".join(blocks) + "\n"


def json_schema() -> dict[str, Any]:
    """The JSON schema of a spec file (TOML and JSON share it)."""
    tables = TypeAdapter(TableSpec).json_schema()
    features = TypeAdapter(FeatureSpec).json_schema()
    output = TypeAdapter(OutputDtype).json_schema()
    tables["properties"]["num_embeddings"].update(minimum=1, maximum=MAX_ROWS)
    tables["properties"]["embedding_dim"].update(minimum=1, maximum=MAX_DIM)
    _bound(features["properties"]["hotness"], 1, MAX_HOTNESS)
    _bound(features["properties"]["padding_idx"], 0, MAX_ROWS - 1)
    features["allOf"] = [
        _if_pooling("concat", {"required": ["hotness"], "properties": {"hotness": {"type": "integer"}}}),
        _if_pooling("max", {"properties": {"weighted": {"const": False}}}),
    ]
    for schema in (tables, features):
        schema["additionalProperties"] = False
        schema["properties"]["name"]["pattern"] = f"^{NAME_PATTERN.pattern}$"
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "embforge collection spec",
        "type": "object",
        "additionalProperties": False,
        "required": ["table", "feature"],
        "properties": {
            "name": {"type": "string", "pattern": f"^{NAME_PATTERN.pattern}$"},
            "output_dtype": {**output, "default": "fp32"},
            "table": {"type": "array", "minItems": 1, "items": tables},
            "feature": {"type": "array", "minItems": 1, "items": features},
        },
    }


def _bound(schema: dict[str, Any], low: int, high: int) -> None:
    """Bounds the whole number in an optional field's schema."""
    for option in schema["anyOf"]:
        if option["type"] == "integer":
            option.update(minimum=low, maximum=high)


def _if_pooling(pooling: str, then: dict[str, Any]) -> dict[str, Any]:
    return {"if": {"required": ["pooling"], "properties": {"pooling": {"const": pooling}}}, "then": then}


def _check_name(kind: str, name: str) -> None:
    if not NAME_PATTERN.fullmatch(name):
        raise SpecError(f"{kind} {name!r}: name={name!r} is not allowed; allowed: {NAME_RULE}")


def _check_range(kind: str, name: str, field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise SpecError(f"{kind} {name!r}: {field}={value} is out of range; allowed: {low} to {high}")


def _check_unique(kind: str, names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SpecError(f"{kind} {name!r}: name={name!r} is used twice; every {kind} needs its own name")
        seen.add(name)


def _entries(data: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    entries = data.get(kind, [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise SpecError(f"collection: {kind} must be a list of [[{kind}]] entries, got {entries!r}")
    return entries


def _plain_sentence(where: str, error: ValidationError) -> str:
    first: Any = error.errors()[0]
    if first["type"] == "value_error":  # one of our own rules, already a whole sentence
        return str(first["ctx"]["error"])
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] in ("missing", "missing_argument"):
        return f"{where}: field {field!r} is missing; it has no default"
    if first["type"] == "literal_error":
        return f"{where}: {field}={first['input']!r} is not known; allowed: {first['ctx']['expected']}"
    return f"{where}: {field}={first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _without_defaults(item: Any) -> dict[str, Any]:
    defaults = {f.name: f.default for f in dataclass_fields(item)}
    return {k: v for k, v in asdict(item).items() if v != defaults[k]}


def _toml(value: Any) -> str:
    # TOML's basic strings, whole numbers and booleans are spelled as JSON's.
    return json.dumps(value)
