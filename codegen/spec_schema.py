"""The JSON schema of a spec file, for editors, checks and the page about specs."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from embforge.codegen.dtypes import DTYPES, OUTPUT_DTYPES, TABLE_DTYPES
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
    feature["hotness"] = _count(feature["hotness"], 1, MAX_HOTNESS)
    feature["padding_idx"] = _count(feature["padding_idx"], -MAX_ID, MAX_ID)
    table["dtype"] = _dtype(table["dtype"], TABLE_DTYPES)
    features["allOf"] = [
        _if_pooling("concat", {"required": ["hotness"], "properties": {"hotness": {"type": ["integer", "string"]}}}),
        _if_pooling("max", {"properties": {"weighted": {"const": False}}}),
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
    """A whole number within bounds, or its text; null where that is the default."""
    options: list[dict[str, Any]] = [
        {"type": "integer", "minimum": low, "maximum": high},
        {"type": "string", "pattern": f"^{WHOLE_NUMBER_TEXT}$"},
    ]
    if "default" in schema:
        options.append({"type": "null"})
    return {key: schema[key] for key in ("title", "description", "default") if key in schema} | {"anyOf": options}


def _dtype(schema: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """One of the formats by our name, which comes first, or by another of its spellings."""
    others = [spelling for name in names for spelling in DTYPES[name].spellings if spelling != name]
    return schema | {"enum": [*names, *others]}


def _if_pooling(pooling: str, then: dict[str, Any]) -> dict[str, Any]:
    return {"if": {"required": ["pooling"], "properties": {"pooling": {"const": pooling}}}, "then": then}
