"""The README, run in the folder that holds the clone: its Python runs, its commands exist, its number is measured."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from benchmarks import headline
from embforge.cli.main import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PIP = "python -m pip --disable-pip-version-check install --dry-run --no-deps --no-build-isolation"
"""What pip would do without the network. `benchmarks.footprint` installs for real."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    return [line.partition(" # ")[0].strip() for block in blocks("sh") for line in block.splitlines()]


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """A directory with a clone named embforge in it."""
    (tmp_path / "embforge").symlink_to(ROOT)
    return tmp_path


def run(parent: Path, *words: str) -> None:
    paths = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    answer = subprocess.run(
        words,
        cwd=parent,
        env={**os.environ, "PATH": paths, "SHELL": "/bin/sh"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, f"{words}\n{answer.stdout}\n{answer.stderr}"


def test_python_blocks_run_one_after_the_other(parent: Path) -> None:
    for block in blocks("python"):
        assert len([line for line in block.splitlines() if line.strip()]) <= 15
    (parent / "script.py").write_text("\n".join(blocks("python")), encoding="utf-8")
    run(parent, sys.executable, "script.py")


def test_no_line_is_wider_than_a_terminal() -> None:
    assert [line for line in README.splitlines() if len(line) > 80] == []


def test_links_lead_to_files() -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", README):
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize("command", [line for line in commands() if line.startswith("embforge ")])
def test_embforge_commands_are_parsed_without_an_error(command: str) -> None:
    """As click reads them, the spec loaded; they run in `make soak`."""
    command_line: click.Command = main
    words = shlex.split(command)[1:]
    while isinstance(command_line, click.Group):
        command_line = command_line.commands[words.pop(0)]
    with command_line.make_context(command, words) as context:
        assert not context.args


def test_commands_of_other_tools_would_run(parent: Path) -> None:
    """Directories and extras that pip takes exist, make prints what it would do, a script prints its help."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    others = [line for line in commands() if not line.startswith("embforge ")]
    assert {line.split()[0] for line in others} == {"pip", "cd", "make", "torchrun"}
    for line in others:
        tool, _, rest = line.partition(" ")
        if tool == "pip":
            directory, _, extra = shlex.split(rest)[1].rstrip("]").partition("[")
            assert (parent / directory / "pyproject.toml").exists() and (not extra or extra in extras)
        elif tool == "make":
            run(parent / "embforge", "make", "--dry-run", rest)
        elif tool == "torchrun":
            (script,) = re.findall(r"\S+\.py", rest)
            run(parent, sys.executable, script, "--help")
        else:
            assert (parent / rest).is_dir()


@pytest.mark.soak
@pytest.mark.parametrize("block", blocks("sh"))
def test_shell_blocks_run(parent: Path, block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unchanged, except that pip installs nothing and `make test` is a dry run, because it would run this test."""
    monkeypatch.setenv("EMBFORGE_STUDIES", str(parent / "studies.sqlite3"))
    block = block.replace("pip install", PIP).replace("make test", "make --dry-run test")
    run(parent, "sh", "-ec", block)


def test_number_and_chart_are_those_of_the_checked_in_results(tmp_path: Path) -> None:
    record = json.loads(headline.LATEST.read_text(encoding="utf-8"))
    (copy := tmp_path / "README.md").write_text(README, encoding="utf-8")
    headline.write_headline(record, copy, tmp_path / "speed.svg")
    assert copy.read_text(encoding="utf-8") == README
    assert record["overall"][0]["measured"] == f"{headline.geometric_mean(headline.batches(record)):.2f}x"
    assert (tmp_path / "speed.svg").read_bytes() == headline.CHART.read_bytes()
