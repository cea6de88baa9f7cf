"""What benchmarks print and write: tables, verdicts, result files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import output
from benchmarks.criteria import Verdict
from benchmarks.output import Sheet, print_verdicts, write_record

SHEET = Sheet(("case", "plan", "ms"), [("small", "row-wise", "1.25"), ("large", "table-wise", "**12.00**")], words=2)


def shown(what: object) -> str:
    screen = Console(file=io.StringIO(), width=80)
    screen.print(what)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_a_page_has_the_cells_of_the_screen() -> None:
    assert SHEET.markdown().splitlines() == [
        "| case | plan | ms |",
        "| --- | --- | --: |",
        "| small | row-wise | 1.25 |",
        "| large | table-wise | **12.00** |",
    ]
    text = shown(SHEET.screen("times"))
    assert text.startswith("times") and "│  1.25 │" in text and "│ 12.00 │" in text and "*" not in text


def test_verdicts_are_shown_with_their_names() -> None:
    screen = Console(file=io.StringIO(), width=80)
    verdicts = Verdict("2x", "2.10x", True), Verdict("3x", "2.10x", False)
    print_verdicts(screen, zip(("here: ", ""), verdicts, strict=True))
    assert isinstance(screen.file, io.StringIO)
    assert screen.file.getvalue().splitlines() == ["pass here: 2x: 2.10x", "FAIL 3x: 2.10x"]


@pytest.mark.parametrize("page", [True, False])
def test_results_of_a_busy_machine_do_not_become_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: bool
) -> None:
    monkeypatch.setattr(output, "ROOT", tmp_path)
    monkeypatch.setattr(output, "RESULTS", tmp_path / "results")
    screen = Console(file=io.StringIO(), width=200)
    write_record("suite", "latest.json", {"machine": "m"}, {"runs": [{"ms": 1}, {"ms": 2}]}, screen, page=page)
    (dated,) = (tmp_path / "results").glob("*-suite.json")
    text = dated.read_text()
    assert '\n{"ms": 1},\n{"ms": 2}\n' in text
    assert json.loads(text) == {"date": json.loads(text)["date"], "machine": "m", "runs": [{"ms": 1}, {"ms": 2}]}
    latest = tmp_path / "results" / "latest.json"
    assert (latest.read_text() == text) if page else not latest.exists()
    assert isinstance(screen.file, io.StringIO)
    assert ("other processes used the machine" in screen.file.getvalue()) is not page
