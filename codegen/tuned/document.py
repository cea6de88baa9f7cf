"""Tuned results as JSON: the format of a store's files (one result) and of `embforge tuned export` (many).

    {"embforge_tuned": 1, "records": [...]}

A file is either read completely and is valid, or raises one `TunedError` that says what is wrong and what to do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from embforge.codegen.dtypes import ID_DTYPES
from embforge.codegen.errors import PlanError, TunedError
from embforge.codegen.params import params_from
from embforge.codegen.reading.documents import DocumentError, parse_json, read_file
from embforge.codegen.target import TUNED, target_named
from embforge.codegen.tuned.record import NOISE_LIMIT, RECORD_SCHEMA, Hardware, Key, Record, Shape, Traffic

SCHEMA = "embforge_tuned"
OPS = ("forward", "backward")
TARGETS = {name: target_named(name).hardware for name in TUNED}
"""Targets that are tuned, and the kind of hardware each runs on."""
CACHE_STATES = ("warm", "cold")
LARGEST = 2.0**63
AGAIN = "measure again by `embforge tune`"


@dataclass(config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, defer_build=True))
class _Document:
    embforge_tuned: int
    records: tuple[Record, ...]


def to_json(records: Iterable[Record]) -> str:
    """The records as one JSON document; `TunedError` for a record that could not be read back."""
    listed = list(records)
    for record in listed:
        check(record)
    try:
        text = json.dumps({SCHEMA: RECORD_SCHEMA, "records": [asdict(r) for r in listed]}, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TunedError(f"a tuned result cannot be written as JSON: {error}; {AGAIN}") from error
    return text + "\n"


def read_records(path: Path) -> tuple[Record, ...]:
    """The records of a file, all of them valid. `TunedError` says what is wrong, without the file's name.

    `FileNotFoundError` if there is no such file.
    """
    try:
        data = read_file(path)
    except DocumentError as error:
        raise TunedError(f"cannot be read: {error}; allow yourself to read it, or remove it and {AGAIN}") from error
    return records_from(data)


def records_from(text: bytes | str) -> tuple[Record, ...]:
    """The records of a document, all of them valid. `TunedError` says what is wrong, without the file's name."""
    try:
        data: Any = parse_json(text)
    except DocumentError as error:
        raise TunedError(f"{error}, so it is damaged or not a file of embforge; {AGAIN}") from None
    schema = data.get(SCHEMA) if isinstance(data, dict) else None
    if type(schema) is not int:
        raise TunedError(f"not a file of tuned results: it has no whole number {SCHEMA!r}; remove it or {AGAIN}")
    if schema != RECORD_SCHEMA:
        remedy = "newer: update embforge, or" if schema > RECORD_SCHEMA else "older:"
        raise TunedError(f"schema {schema}, this embforge reads {RECORD_SCHEMA}; the file is {remedy} {AGAIN}")
    try:
        document = _reader().validate_json(text)
    except ValidationError as error:
        raise TunedError(f"{_sentence(error)}; {AGAIN}") from None
    # JSON has no tuples, and params have no lists.
    records = tuple(replace(r, params={k: _as_tuple(v) for k, v in r.params.items()}) for r in document.records)
    for record in records:
        check(record)
    return records


def check(record: Record) -> None:
    """`TunedError` for a record whose types are right but whose values are not."""
    key = record.key
    if key.op not in OPS:
        raise _wrong("key.op", key.op, ", ".join(OPS))
    if key.target not in TARGETS:
        raise _wrong("key.target", key.target, ", ".join(TARGETS))
    if (key.rule is None) != (key.op == "forward"):
        raise _wrong("key.rule", key.rule, "null for a forward, a rule's name or 'none' for a backward")
    if key.id_dtype not in ID_DTYPES:
        raise _wrong("key.id_dtype", key.id_dtype, ", ".join(ID_DTYPES))
    if key.cache not in CACHE_STATES:
        raise _wrong("key.cache", key.cache, ", ".join(CACHE_STATES))
    _check_numbers(key.shape, key.hardware, key.traffic)
    if key.hardware.kind != TARGETS[key.target]:
        raise _wrong("key.hardware.kind", key.hardware.kind, f"{TARGETS[key.target]} for target {key.target}")
    gain = record.gain
    if not 0 < gain.low <= gain.median <= gain.high < math.inf:
        raise _wrong("gain", f"{gain.low} .. {gain.median} .. {gain.high}", "0 < low <= median <= high")
    if not 0 <= record.noise_floor <= NOISE_LIMIT:
        raise _wrong("noise_floor", record.noise_floor, f"0 to {NOISE_LIMIT:g}; with more noise, samples say nothing")
    if len({len(times) for times in record.samples.values()}) > 1:
        raise _wrong("samples", {k: len(v) for k, v in record.samples.items()}, "equally many of each, paired by round")
    if not all(0 < seconds < math.inf for times in record.samples.values() for seconds in times):
        raise _wrong("samples", "a time not above 0", "seconds above 0")
    if not _is_utc(record.created):
        raise _wrong("created", record.created, "a time in UTC, such as 2026-01-31T12:00:00+00:00")
    params_of(key, record.params)


def params_of(key: Key, values: dict[str, Any]) -> Any:
    """The plan fields of a record as params of this version; `TunedError` if this version does not allow its values."""
    try:
        return params_from(key.target, values, key.op)
    except PlanError as error:
        raise TunedError(f"params: {error}; {AGAIN}") from None


def _check_numbers(shape: Shape, hardware: Hardware, traffic: Traffic) -> None:
    least_one: dict[str, float] = {"features": shape.features, "dim": shape.dim, "table_bytes": shape.table_bytes}
    for name, size in least_one.items():
        if not 1 <= size <= LARGEST:
            raise _wrong(f"key.shape.{name}", size, "1 to 2^63")
    for name, size in hardware.sizes.items():
        if not 1 <= size <= LARGEST:
            raise _wrong(f"key.hardware.sizes.{name}", size, "1 to 2^63")
    for name, number in asdict(traffic).items():
        if number is not None and not 0 <= number <= LARGEST:
            raise _wrong(f"key.traffic.{name}", number, "0 to 2^63, or null if it is not known")


def _wrong(field: str, value: Any, allowed: str) -> TunedError:
    return TunedError(f"{field}={str(value)[:80]!r} is not allowed; allowed: {allowed}; {AGAIN}")


def _is_utc(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).utcoffset() == timedelta(0)
    except ValueError:
        return False


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@cache
def _reader() -> TypeAdapter[_Document]:
    return TypeAdapter(_Document)


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "the document"
    return f"{place}: {first['msg'][0].lower()}{first['msg'][1:]}, got {str(first['input'])[:80]!r}"
