"""What the user describes: tables, and the features that look them up. Pure data with every rule checked.

Contract: a spec that exists is valid. Every mistake raises one `SpecError` naming the table or
feature, the field, the value and what is allowed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from dataclasses import fields as dataclass_fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, Strict, ValidationError
from pydantic.dataclasses import dataclass

from embforge.codegen.dtypes import DTYPE_SLIPS, OutputDtype, TableDtype, dtype_named
from embforge.codegen.errors import SpecError
from embforge.codegen.poolings import MEANINGS, POOLINGS, Pooling, PoolingName, Shape, pooling_named
from embforge.codegen.poolings import SYNONYMS as POOLING_SYNONYMS
from embforge.codegen.reading.documents import DocumentError, parse_toml, read_file, shown, text_of
from embforge.codegen.reading.numbers import WHOLE_NUMBER_FORMS, whole_number
from embforge.codegen.reading.suggestions import did_you_mean, listed
from embforge.codegen.reading.toml_lines import lines_of

Storage = Literal["static"]

MAX_DIM = 16384
MAX_ROWS = 2**40
MAX_HOTNESS = 2**20
MAX_ID = 2**63 - 1
NO_ROW = -1
"""The row number of an id that has no row."""
NAME_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
NAME_RULE = "a letter or _ followed by letters, digits, '_', '-' or '.'"
SYNONYMS = {
    "tables": "table",
    "features": "feature",
    "rows": "num_embeddings",
    "num_rows": "num_embeddings",
    "vocab_size": "num_embeddings",
    "dim": "embedding_dim",
    "columns": "embedding_dim",
    "width": "embedding_dim",
    "type": "dtype",
    "mode": "pooling",
    "combiner": "pooling",
    "weights": "weighted",
    "max_length": "hotness",
    "bag_size": "hotness",
    "padding": "padding_idx",
    "padding_id": "padding_idx",
    **POOLING_SYNONYMS,
    **DTYPE_SLIPS,
}
"""What other libraries and people call our fields, poolings and formats."""

FILE_FIELDS = ("name", "output_dtype", "table", "feature")
"""The fields at the top level of a spec file."""

Entry = TypeVar("Entry")
Count = Annotated[int, BeforeValidator(whole_number)]


@dataclass_transform(frozen_default=True)
def _spec_dataclass(cls: type[Any]) -> Any:
    """A frozen pydantic dataclass whose mistakes are `SpecError`s in one plain sentence."""
    made: Any = dataclass(frozen=True, config=ConfigDict(strict=True, use_attribute_docstrings=True))(cls)
    construct = made.__init__
    kind = cls.__name__.removesuffix("Spec").lower()
    allowed = [f.name for f in dataclass_fields(made)]

    @wraps(construct)
    def __init__(self: Any, /, *args: Any, **kwargs: Any) -> None:
        values = dict(zip(allowed, args, strict=False)) | kwargs
        where = f"{kind} {values['name']!r}" if isinstance(values.get("name"), str) else kind
        for key in kwargs:
            if key not in allowed:
                raise _unknown_field(where, key, allowed)
            if key in allowed[: len(args)]:
                raise SpecError(f"{where}: {key} is passed twice, by position and by name; pass it once")
        if len(args) > len(allowed):
            raise SpecError(f"{where}: {len(args)} positional values; allowed: {', '.join(allowed)}")
        try:
            construct(self, **values)
        except ValidationError as error:
            raise _spec_error(where, error) from None

    made.__init__ = __init__
    return made


@_spec_dataclass
class TableSpec:
    """A table: rows of numbers, each of which is found by an id."""

    name: str
    """The table's name in features, in errors and in the keys of state dicts."""
    num_embeddings: Count
    """The number of rows. Ids are 0 to num_embeddings - 1, unless `remap` is set."""
    embedding_dim: Count
    """The number of columns: how many numbers a row has."""
    dtype: Annotated[TableDtype, BeforeValidator(dtype_named)] = "fp32"
    """The number format in which rows are stored. Sums are always fp32."""
    storage: Storage = "static"
    """How the table keeps its rows. `static`: it has all of them from the start."""
    remap: Count | None = None
    """For a table whose ids are not its rows: the number of ids. The module takes or
    loads an int64 array with one entry per id: the row of the id, or -1 if it has
    none and is absent. Several ids may share a row. Without `remap`, ids are rows."""

    def __post_init__(self) -> None:
        _check_name("table", self.name)
        _check_range("table", self.name, "num_embeddings", self.num_embeddings, 1, MAX_ROWS)
        _check_range("table", self.name, "embedding_dim", self.embedding_dim, 1, MAX_DIM)
        if self.remap is not None:
            _check_range("table", self.name, "remap", self.remap, 1, MAX_ROWS)

    @property
    def ids_are_rows(self) -> bool:
        """Whether an id is a row's number, so that nothing must turn ids into rows before a lookup."""
        return self.remap is None

    @property
    def num_ids(self) -> int:
        """How many ids the table knows: ids 0 to num_ids - 1 are allowed."""
        return self.num_embeddings if self.remap is None else self.remap


@_spec_dataclass
class FeatureSpec:
    """An input column looked up in a table and pooled. Several features may share a table."""

    name: str
    """The feature's name in inputs and errors."""
    table: str
    """The name of the table in which its ids are looked up."""
    pooling: Annotated[PoolingName, Field(description=MEANINGS)] = "sum"
    """How the rows of a bag become its result: see `codegen/poolings.py`."""
    weighted: bool = False
    """Whether every id comes with a weight that its row is multiplied by."""
    hotness: Count | None = None
    """For pooling `concat`, which needs it: the most ids that a bag may hold; the result has hotness * embedding_dim
    columns. For any other pooling: the usual number of ids of a bag, from which verify, bench and tune make their
    batches; no kernel depends on it, and longer bags are allowed."""
    padding_idx: Count | None = None
    """The id that fills unused places of a bag. If it is a row of the table, pools leave it out, `concat` and `none`
    look up its row like any other, and this feature never trains that row. Any other whole number, e.g. -1, is an
    absent id: pools leave it out, `concat` and `none` give zeros, and it is not a mistake, whatever bounds_check says.
    The padding id of a table with `remap` is always absent."""

    def __post_init__(self) -> None:
        _check_name("feature", self.name)
        if self.kind.shape is Shape.CONCAT and self.hotness is None:
            raise SpecError(
                f"feature {self.name!r}: pooling {self.pooling!r} needs hotness (the most ids that a bag may hold), "
                f"got hotness=None; give a whole number from 1 to {MAX_HOTNESS}",
                field="pooling",
            )
        if self.hotness is not None:
            _check_range("feature", self.name, "hotness", self.hotness, 1, MAX_HOTNESS)
        if self.weighted and not self.kind.weightable:
            raise SpecError(
                f"feature {self.name!r}: weighted=True cannot go with pooling {self.pooling!r}; "
                f"allowed with weights: {', '.join(name for name, kind in POOLINGS.items() if kind.weightable)}",
                field="weighted",
            )

    @property
    def kind(self) -> Pooling:
        """The facts about its pooling."""
        return pooling_named(self.pooling)

    @property
    def slots(self) -> int:
        """How many rows the result of a bag has next to each other (`concat`); 0 for all other poolings."""
        return (self.hotness or 0) if self.kind.shape is Shape.CONCAT else 0


@_spec_dataclass
class CollectionSpec:
    """Tables and features that one fused kernel per operation serves."""

    tables: Annotated[tuple[TableSpec, ...], Strict(False)]
    features: Annotated[tuple[FeatureSpec, ...], Strict(False)]
    output_dtype: Annotated[OutputDtype, BeforeValidator(dtype_named)] = "fp32"
    """The number format of all results."""
    name: str | None = None
    """The collection's name in generated files and reports. A spec file that sets none is called after the file."""

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
        for index, feature in enumerate(self.features):
            table = by_name.get(feature.table)
            if table is None:
                raise SpecError(
                    f"feature {feature.name!r}: table={feature.table!r} does not exist"
                    f"{did_you_mean(feature.table, by_name)}; allowed: {listed(by_name)}",
                    entry=("feature", index),
                    field="table",
                )
            if feature.padding_idx is not None and abs(feature.padding_idx) > MAX_ID:
                raise SpecError(
                    f"feature {feature.name!r}: padding_idx={feature.padding_idx} is out of range; allowed: a row of "
                    f"table {table.name!r}, 0 to {table.num_embeddings - 1}, or an id that is absent, such as -1",
                    entry=("feature", index),
                    field="padding_idx",
                )
        used = {f.table for f in self.features}
        for index, table in enumerate(self.tables):
            if table.name not in used:
                raise SpecError(
                    f"table {table.name!r}: no feature looks it up; add a feature with "
                    f"table={table.name!r} or remove the table",
                    entry=("table", index),
                )

    @property
    def origin(self) -> Path | None:
        """The file that the spec was read from: the project's tuned store is in the same folder.

        It does not count in comparisons and is not in `to_dict`.
        """
        path: Path | None = self.__dict__.get("_origin")
        return path

    def table(self, name: str) -> TableSpec:
        """The table of that name. If there is none, `SpecError` names the known ones."""
        for candidate in self.tables:
            if candidate.name == name:
                return candidate
        names = [t.name for t in self.tables]
        raise SpecError(f"table {name!r} does not exist{did_you_mean(name, names)}; known: {listed(names)}")

    def without_names(self) -> CollectionSpec:
        """The spec as kernels see it: tables and features are numbered, and only `concat` features have a hotness."""
        numbers = {table.name: f"t{index}" for index, table in enumerate(self.tables)}
        features = []
        for index, feature in enumerate(self.features):
            hotness = feature.slots or None
            features.append(replace(feature, name=f"f{index}", table=numbers[feature.table], hotness=hotness))
        tables = tuple(replace(table, name=numbers[table.name]) for table in self.tables)
        return CollectionSpec(tables, tuple(features), self.output_dtype)

    @property
    def has_remaps(self) -> bool:
        """Whether ids of any table are not its rows, so that a step before every lookup turns ids into rows."""
        return not all(table.ids_are_rows for table in self.tables)

    @property
    def num_remapped(self) -> int:
        """The number of tables whose ids are not their rows."""
        return sum(not table.ids_are_rows for table in self.tables)

    @property
    def remap_bytes(self) -> int:
        """Bytes of the arrays that say which row each id of a remapped table has."""
        return 8 * sum(table.num_ids for table in self.tables if not table.ids_are_rows)

    def by_rows(self) -> CollectionSpec:
        """The spec as lookups see it after ids have been turned into rows: without remaps, with -1 for ids that have no
        row. It is the spec itself if the ids of all tables are rows."""
        if not self.has_remaps:
            return self
        remapped = {table.name for table in self.tables if not table.ids_are_rows}
        tables = tuple(replace(table, remap=None) for table in self.tables)
        features = tuple(replace(f, padding_idx=NO_ROW) if f.table in remapped else f for f in self.features)
        made = replace(self, tables=tables, features=features)
        object.__setattr__(made, "_origin", self.origin)
        return made

    def padding_row(self, feature: FeatureSpec) -> int | None:
        """The row of the feature's padding id; None if it has no padding id, or one that is not a row."""
        table = self.table(feature.table)
        padding, rows = feature.padding_idx, table.num_embeddings
        return padding if table.ids_are_rows and padding is not None and 0 <= padding < rows else None

    def absent_id(self, feature: FeatureSpec) -> int | None:
        """The id that lookups take as absent without reporting a mistake; None if there is no such id.

        It is the feature's padding id if that is not a row of its table; -1 if ids have been turned into rows.
        """
        if not self.table(feature.table).ids_are_rows:
            return NO_ROW
        return None if self.padding_row(feature) is not None else feature.padding_idx

    @property
    def has_absent_ids(self) -> bool:
        """Whether lookups of any feature take an id as absent without reporting a mistake."""
        return any(self.absent_id(feature) is not None for feature in self.features)

    def to_dict(self) -> dict[str, Any]:
        """Plain data without fields that hold their default; `from_dict` reads it back."""
        data: dict[str, Any] = {"name": self.name, "output_dtype": self.output_dtype}
        data["table"] = [_without_defaults(t) for t in self.tables]
        data["feature"] = [_without_defaults(f) for f in self.features]
        return {k: v for k, v in data.items() if v is not None}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CollectionSpec:
        """A spec from plain data with the field names of the TOML file."""
        if not isinstance(data, dict):
            raise SpecError(f"collection: got {shown(data)}; allowed: an object with {', '.join(FILE_FIELDS)}")
        for key in data:
            if key not in FILE_FIELDS:
                raise _unknown_field("collection", key, FILE_FIELDS)
        tables = _entries(data, "table", TableSpec)
        features = _entries(data, "feature", FeatureSpec)
        rest = {k: v for k, v in data.items() if k in ("name", "output_dtype")}
        return cls(tables, features, **rest)

    @classmethod
    def from_toml(cls, path: str | Path) -> CollectionSpec:
        """Reads a spec file. `SpecError` names the file and the
        line. A spec without a name is called after the file."""
        path = Path(path)
        try:
            text = text_of(read_file(path))
            data = parse_toml(text)
        except FileNotFoundError:
            raise SpecError(f"{path}: no such spec file; examples/specs/ has examples") from None
        except DocumentError as error:
            place = "" if error.line is None else f":{error.line}"
            raise SpecError(f"{path}{place}: cannot be read: {error}") from error
        if NAME_PATTERN.fullmatch(path.stem):
            data.setdefault("name", path.stem)
        try:
            spec = cls.from_dict(data)
        except SpecError as error:
            lines = lines_of(text)
            line = lines.get((error.entry, error.field), lines.get((error.entry, None)))
            place = "" if line is None else f":{line}"
            raise SpecError(f"{path}{place}: {error}", entry=error.entry, field=error.field) from None
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


def _check_name(kind: str, name: str) -> None:
    if not NAME_PATTERN.fullmatch(name):
        raise SpecError(f"{kind} {shown(name)}: name={shown(name)} is not allowed; allowed: {NAME_RULE}", field="name")


def _check_range(kind: str, name: str, field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise SpecError(
            f"{kind} {name!r}: {field}={shown(value)} is out of range; allowed: {low} to {high}", field=field
        )


def _check_unique(kind: str, names: list[str]) -> None:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            raise SpecError(
                f"{kind} {name!r}: name={name!r} is used twice; every {kind} needs its own name",
                entry=(kind, index),
                field="name",
            )
        seen.add(name)


def _entries(data: dict[str, Any], kind: str, make: Callable[..., Entry]) -> tuple[Entry, ...]:
    entries = data.get(kind, [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise SpecError(f"collection: {kind} must be a list of [[{kind}]] entries, got {shown(entries)}", field=kind)
    made = []
    for index, entry in enumerate(entries):
        try:
            made.append(make(**entry))
        except SpecError as error:
            raise SpecError(str(error), entry=(kind, index), field=error.field) from None
    return tuple(made)


def _unknown_field(where: str, key: str, allowed: Iterable[str]) -> SpecError:
    allowed = list(allowed)
    hint = did_you_mean(key, allowed, SYNONYMS)
    return SpecError(f"{where}: unknown field {shown(key)}{hint}; allowed: {', '.join(allowed)}", field=key)


def _spec_error(where: str, error: ValidationError) -> SpecError:
    """The first of pydantic's errors as one plain sentence."""
    first: Any = error.errors()[0]
    if first["type"] == "value_error":  # one of our own rules, already a whole sentence
        own: SpecError = first["ctx"]["error"]
        return own
    field, value = ".".join(str(part) for part in first["loc"]), shown(first["input"])
    if first["type"] in ("missing", "missing_argument"):
        return SpecError(f"{where}: field {field!r} is missing; it has no default")
    if first["type"] == "literal_error":
        allowed = first["ctx"]["expected"]
        hint = did_you_mean(first["input"], re.findall(r"'(.*?)'", allowed), SYNONYMS)
        return SpecError(f"{where}: {field}={value} is not known{hint}; allowed: {allowed}", field=field)
    if first["type"] == "int_type":
        return SpecError(f"{where}: {field}={value} is not allowed; allowed: {WHOLE_NUMBER_FORMS}", field=field)
    return SpecError(f"{where}: {field}={value}: {first['msg'][0].lower()}{first['msg'][1:]}", field=field)


def _without_defaults(item: Any) -> dict[str, Any]:
    defaults = {f.name: f.default for f in dataclass_fields(item)}
    return {k: v for k, v in asdict(item).items() if v != defaults[k]}


def _toml(value: Any) -> str:
    # TOML's basic strings, whole numbers and booleans are spelled as JSON's.
    return json.dumps(value)
