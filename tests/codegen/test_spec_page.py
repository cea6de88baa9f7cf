"""docs/specs.md: its code runs, the errors that it quotes are raised, and its tables agree with the schema."""

from __future__ import annotations

import re
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any

import pytest

from embforge.codegen.dtypes import OUTPUT_DTYPES, TABLE_DTYPES
from embforge.codegen.errors import SpecError
from embforge.codegen.spec import NAME_RULE, CollectionSpec
from embforge.codegen.spec_schema import json_schema

PAGE = (Path(__file__).parents[2] / "docs" / "specs.md").read_text(encoding="utf-8")
(TOML,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
HEAD = ["| field | meaning | default | allowed |", "|---|---|---|---|"]


def rows_of(fields: dict[str, dict[str, Any]], required: list[str]) -> list[str]:
    """The fields of a schema as rows of the page."""
    lines = []
    for name, field in fields.items():
        default = "needed" if name in required else _code(field.get("default"))
        lines.append(f"| `{name}` | {' '.join(field['description'].split())} | {default} | {allowed(name, field)} |")
    return lines


def shown_tables() -> list[list[str]]:
    """The rows of each of the page's tables of fields."""
    lines = PAGE.splitlines()
    heads = [number for number in range(len(lines)) if lines[number : number + 2] == HEAD]
    return [list(takewhile(lambda line: line.startswith("|"), lines[number + 2 :])) for number in heads]


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


def test_tables_of_the_page_agree_with_the_schema() -> None:
    schema = json_schema()
    wanted = [rows_of({name: schema["properties"][name] for name in ("name", "output_dtype")}, [])]
    for kind in ("table", "feature"):
        entry = schema["properties"][kind]["items"]
        wanted.append(rows_of(entry["properties"], entry["required"]))
    for number, (want, have) in enumerate(zip(wanted, shown_tables(), strict=True), 1):
        for row, shown in zip_longest(want, have, fillvalue="no such row"):
            if row != shown:
                pytest.fail(f"docs/specs.md, table {number} of fields, has\n{shown}\nand needs\n{row}", pytrace=False)


def test_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shop.toml").write_text(TOML, encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "specs.md", "exec"), {})


def test_errors_that_the_page_quotes_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"^    (shop\.toml:\d+: .*)$", PAGE, re.MULTILINE)
    changes = [('dtype = "bf16"', 'dtype = "bf61"'), ('table = "items"', 'table = "item"')]
    for sentence, (old, new) in zip(shown, changes, strict=True):
        Path("shop.toml").write_text(TOML.replace(old, new, 1), encoding="utf-8")
        with pytest.raises(SpecError) as caught:
            CollectionSpec.from_toml("shop.toml")
        assert str(caught.value) == sentence
