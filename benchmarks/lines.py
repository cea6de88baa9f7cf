"""Counts the code per folder: `python -m benchmarks.lines [COMMIT ...]`.

Python is counted in statements without docstrings; templates, C++, CUDA, scripts and styles are counted in lines
without comments and blanks. Generated files and fixtures are left out.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import click
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (".j2", ".cu", ".cuh", ".cpp", ".h", ".js", ".css")
LEFT_OUT = ("generated", "fixtures")
COMMENT = re.compile(r"\{#.*?#\}|/\*.*?\*/|<!--.*?-->|(?<![:\w\"'])//[^\n]*", re.DOTALL)
KINDS = ("statements", "template lines")


def statements(text: str) -> int:
    """The number of Python statements, without docstrings of modules, classes, functions and fields."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    return sum(not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)) for n in nodes)


def source_lines(text: str) -> int:
    """The number of lines that hold more than comments and blanks."""
    return sum(bool(line.strip()) for line in COMMENT.sub("", text).splitlines())


def count(files: Iterator[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """The counts by folder (at most two levels deep) and kind. A folder's count includes the folders within it."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, text in files:
        path = PurePosixPath(name)
        python = path.suffix == ".py"
        number = statements(text) if python else source_lines(text)
        for level in {1, min(2, len(path.parts) - 1)}:
            counts["/".join(path.parts[:level]), KINDS[not python]] += number
        counts["all", KINDS[not python]] += number
    return counts


def files_of(commit: str | None) -> Iterator[tuple[str, str]]:
    """The names and texts of the sources of a commit, or of the working tree if `commit` is None."""
    if commit is None:
        names = _git("ls-files", "--cached", "--others", "--exclude-standard").decode().splitlines()
        paths = ((name, ROOT / name) for name in names if _counts(name))
        yield from ((name, path.read_text("utf-8")) for name, path in paths if path.is_file())
        return
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as archive:
        for member in archive:
            if member.isfile() and _counts(member.name) and (content := archive.extractfile(member)):
                yield member.name, content.read().decode()


def _counts(name: str) -> bool:
    path = PurePosixPath(name)
    return len(path.parts) > 1 and path.suffix in (".py", *SOURCES) and not set(path.parts) & set(LEFT_OUT)


def _git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


@click.command()
@click.argument("commits", nargs=-1)
def main(commits: tuple[str, ...]) -> None:
    """Prints the counts of every folder of each COMMIT, or of the working tree if no commit is named."""
    counts = [count(files_of(commit)) for commit in commits or (None,)]
    table = Table("folder", box=None)
    for title in (f"{kind}\n{commit}" for kind in KINDS for commit in commits or ("now",)):
        table.add_column(title, justify="right")
    for folder in ["all", *sorted({folder for each in counts for folder, _ in each} - {"all"})]:
        cells = [each[folder, kind] for kind in KINDS for each in counts]
        table.add_row(folder, *(f"{number:,}" if number else "" for number in cells))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
