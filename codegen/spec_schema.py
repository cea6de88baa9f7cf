"""The JSON schema of a spec file, for editors, checks and the page about specs."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from embforge.codegen.dtypes import DTYPES, OUTPUT_DTYPES, TABLE_DTYPES
from embforge.codegen.poolings import POOLINGS, Shape
from embforge.codegen.reading.numbers import WHOLE_NUMBER_TEXT
from embforge.codegen.spec import (
    MAX_DIM,
    MAX_HOTNESS,
    MAX_ID,
    MAX_ROWS,
    NAME_PATTERN,
    CollectionSpec,
    FeatureSpec,
    TableSpec,
)

NAME = {"type": "string", "pattern": f"^{NAME_PATTERN.pattern}$"}


def json_schema() -> dict[str, Any]:
    """The JSON schema of a spec file (TOML and JSON share it), with the meaning of every field."""
    collection, tables, features = (
        TypeAdapter(spec).json_schema() for spec in (CollectionSpec, TableSpec, FeatureSpec)
    )
    top, table, feature = (schema["properties"] for schema in (collection, tables, features))
    table["num_embeddings"] = _count(table["num_embeddings"], 1, MAX_ROWS)
    table["embedding_dim"] = _count(table["embedding_dim"], 1, MAX_DIM)
    table["remap"] = _count(table["remap"], 1, MAX_ROWS)
    feature["hotness"] = _count(feature["hotness"], 1, MAX_HOTNESS)
    feature["padding_idx"] = _count(feature["padding_idx"], -MAX_ID, MAX_ID)
    table["dtype"] = _dtype(table["dtype"], TABLE_DTYPES)
    needs_hotness = {"required": ["hotness"], "properties": {"hotness": {"type": ["integer", "string"]}}}
    unweighted = {"properties": {"weighted": {"const": False}}}
    features["allOf"] = [
        *(_if_pooling(name, needs_hotness) for name, kind in POOLINGS.items() if kind.shape is Shape.CONCAT),
        *(_if_pooling(name, unweighted) for name, kind in POOLINGS.items() if not kind.weightable),
    ]
    for schema in (tables, features):
        schema["additionalProperties"] = False
        schema["properties"]["name"] |= NAME
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "embforge collection spec",
        "description": collection["description"],
        "type": "object",
        "additionalProperties": False,
        "required": ["table", "feature"],
        "properties": {
            "name": NAME | {"description": top["name"]["description"]},
            "output_dtype": _dtype(top["output_dtype"], OUTPUT_DTYPES),
            "table": {"type": "array", "minItems": 1, "items": tables},
            "feature": {"type": "array", "minItems": 1, "items": features},
        },
    }


def _count(schema: dict[str, Any], low: int, high: int) -> dict[str, Any]:
    """The schema of a whole number within bounds, or of its text; null is allowed if it is the default."""
    options: list[dict[str, Any]] = [
        {"type": "integer", "minimum": low, "maximum": high},
        {"type": "string", "pattern": f"^{WHOLE_NUMBER_TEXT}$"},
    ]
    if "default" in schema:
        options.append({"type": "null"})
    return {key: schema[key] for key in ("title", "description", "default") if key in schema} | {"anyOf": options}


def _dtype(schema: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The schema of a number format: our names come first, then other spellings."""
    others = [spelling for name in names for spelling in DTYPES[name].spellings if spelling != name]
    return schema | {"enum": [*names, *others]}


def _if_pooling(pooling: str, then: dict[str, Any]) -> dict[str, Any]:
    return {"if": {"required": ["pooling"], "properties": {"pooling": {"const": pooling}}}, "then": then}
