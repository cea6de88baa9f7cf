"""Every path that a page or a docstring names exists: any path in backquotes, in plain text a file with its folder."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))),
]
PART = r"[\w*.{},-]+"
SUFFIXES = "py|md|toml|j2|json|txt|lock|svg|cpp|cu|h"
QUOTED = re.compile(rf"`({PART}(?:/{PART})+/?|{PART}/|{PART}\.(?:{SUFFIXES}))`")
PLAIN = re.compile(rf"(?<![\w/.:`*<-]){PART}(?:/{PART})+\.(?:{SUFFIXES})\b")
EXCEPTIONS = {
    "README.md": {"embforge/examples/train_dlrm.py"},  # the clone is in a folder of that name
    "CONTRIBUTING.md": {"cli/NAME.py", "runtime/storage/NAME.py"},  # files to add
    "docs/benchmarks.md": {"latest-linear.json", "latest-training.json"},  # files that `make bench` writes
    "docs/planning.md": {"topologies/local.toml"},  # a file of the user
    "docs/sharding.md": {"../examples/train_dlrm.py", "first.py"},  # a link; a file of the user
    "docs/tuning.md": {"embforge-tuned/"},  # a folder of the user
    "codegen/tuned/stores.py": {"embforge-tuned/"},
    "examples/train_dlrm.py": {"curves.svg"},  # a file of the user
    "tests/support/precompiled_headers.py": {"immintrin.h"},  # a header of the compiler
    "tuner/estimate/seeds.py": {"estimates/"},  # a folder of the store
}


@pytest.fixture(scope="module")
def paths() -> str:
    """The files and folders of the repository, one per line, each after a slash."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [PurePosixPath(line) for line in answer.stdout.splitlines()]
    folders = {folder for file in files for folder in file.parents}
    return "\n".join(f"/{path}" for path in (*files, *folders))


def alternatives(path: str) -> Iterator[str]:
    """The paths that a path with `{a,b}` names."""
    braces = re.search(r"\{([^{}]*)\}", path)
    if braces is None:
        yield path
    else:
        for word in braces[1].split(","):
            yield from alternatives(path[: braces.start()] + word + path[braces.end() :])


def missing(text: str, paths: str) -> set[str]:
    """The paths in a text that no file or folder has. A path may begin at any folder, and `*` matches within a name."""
    named = {match[1] for match in QUOTED.finditer(text)} | {match[0] for match in PLAIN.finditer(text)}
    return {
        path
        for path in named
        for name in alternatives(path.rstrip("/"))
        if not re.search(re.escape(f"/{name}").replace(r"\*", "[^/\n]*") + "$", paths, re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES)
def test_paths_that_a_page_names_exist(page: str, paths: str) -> None:
    assert missing((ROOT / page).read_text(encoding="utf-8"), paths) == EXCEPTIONS.get(page, set())


def test_paths_that_docstrings_name_exist(paths: str) -> None:
    found = {}
    for line in paths.splitlines():
        if line.endswith(".py") and (ROOT / line[1:]).is_file():
            tree = ast.parse((ROOT / line[1:]).read_text(encoding="utf-8"))
            nodes = (n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef)))
            if absent := missing("\n".join(ast.get_docstring(node) or "" for node in nodes), paths):
                found[line[1:]] = absent
    assert found == {name: names for name, names in EXCEPTIONS.items() if name.endswith(".py")}


def test_a_path_that_does_not_exist_is_found(paths: str) -> None:
    present = "See `codegen/{spec,plan}.py`, `spec.py`, `templates/*/forward/`, `a / b` and docs/specs.md."
    assert missing(present, paths) == set()
    text = f"{present} See `codegen/{{spec,gone}}.py`, `gone.py`, `gone/` and docs/gone.md."
    assert missing(text, paths) == {"codegen/{spec,gone}.py", "gone.py", "gone/", "docs/gone.md"}
