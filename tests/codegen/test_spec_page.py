"""docs/specs.md: its blocks run, its sentences are ours, and its tables say what the schema says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from embforge.codegen.dtypes import OUTPUT_DTYPES, TABLE_DTYPES
from embforge.codegen.errors import SpecError
from embforge.codegen.spec import NAME_RULE, CollectionSpec
from embforge.codegen.spec_schema import json_schema

PAGE = (Path(__file__).parents[1] / "docs" / "specs.md").read_text(encoding="utf-8")
(TOML,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


def table_of(fields: dict[str, dict[str, Any]], required: list[str]) -> str:
    """The fields of a schema as the page shows them."""
    lines = ["| field | meaning | default | allowed |", "|---|---|---|---|"]
    for name, field in fields.items():
        default = "needed" if name in required else _code(field.get("default"))
        lines.append(f"| `{name}` | {' '.join(field['description'].split())} | {default} | {allowed(name, field)} |")
    return "\n".join(lines)


def _code(default: Any) -> str:
    return "none" if default is None else f"`{str(default).lower()}`"


def allowed(name: str, field: dict[str, Any]) -> str:
    if name == "name":
        return NAME_RULE.replace("'", "`")
    if name == "table":
        return "the name of a table"
    if name.endswith("dtype"):
        return ", ".join(f"`{dtype}`" for dtype in (OUTPUT_DTYPES if name == "output_dtype" else TABLE_DTYPES))
    if "anyOf" in field:
        return f"{field['anyOf'][0]['minimum']} to {field['anyOf'][0]['maximum']}"
    if field["type"] == "boolean":
        return "`true`, `false`"
    return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))


def test_its_tables_are_the_schema() -> None:
    schema = json_schema()
    top = {name: schema["properties"][name] for name in ("name", "output_dtype")}
    assert table_of(top, []) in PAGE
    for kind in ("table", "feature"):
        entry = schema["properties"][kind]["items"]
        assert table_of(entry["properties"], entry["required"]) in PAGE


def test_its_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shop.toml").write_text(TOML, encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 1
    for block in blocks:
        exec(compile(block, "specs.md", "exec"), {})


def test_its_errors_are_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"^    (shop\.toml:\d+: .*)$", PAGE, re.MULTILINE)
    changes = [('dtype = "bf16"', 'dtype = "bf61"'), ('table = "items"', 'table = "item"')]
    for sentence, (old, new) in zip(shown, changes, strict=True):
        Path("shop.toml").write_text(TOML.replace(old, new, 1), encoding="utf-8")
        with pytest.raises(SpecError) as caught:
            CollectionSpec.from_toml("shop.toml")
        assert str(caught.value) == sentence
