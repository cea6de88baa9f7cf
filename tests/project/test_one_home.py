"""What docs/architecture.md prints of searches in the repository is what they find."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"


def printed() -> dict[str, list[str]]:
    """Every `$ git grep` of the page, and the lines after it."""
    found: dict[str, list[str]] = {}
    command = None
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        text = line.removeprefix("    ")
        if text == line:
            command = None
        elif text.startswith("$ git grep"):
            command = text.removeprefix("$ ")
            found[command] = []
        elif command is not None:
            found[command].append(text)
    return found


def test_names_of_poolings_and_formats_are_only_where_the_page_says() -> None:
    commands = printed()
    assert len(commands) == 2
    for command, lines in commands.items():
        answer = subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True, text=True, check=False)
        assert answer.stdout.splitlines() == lines, command


def test_only_storage_names_kinds_of_tables() -> None:
    """Other code uses the protocol `Table` of runtime/storage/table.py."""
    command = ("git", "grep", "-lwE", "StaticTable|ParameterTable", "--", "cli", "codegen", "runtime", "tuner")
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    named = answer.stdout.splitlines()
    assert named
    assert all(Path(path).parent == Path("runtime/storage") for path in named), named
