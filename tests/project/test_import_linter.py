"""The import linter sees every module of the package once, and an import against the layers fails `make lint`."""

from __future__ import annotations

import configparser
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRACTS = ".importlinter"
FOLDERS = ("cli", "codegen", "runtime", "templates", "tuner", "examples/specs", "examples/topologies")
"""The folders of product code. Links in them lead to other folders of this list."""

LINT = "from importlinter.cli import lint_imports_command as lint; lint(['--no-cache', '--no-logo'])"
MODULES = """
import grimp, json
graph = grimp.build_graph("embforge", cache_dir=None)
packages = [module for module in graph.modules if graph.find_children(module)]
print(json.dumps({"modules": sorted(graph.modules), "packages": sorted(packages)}))
"""


def test_the_linter_sees_every_product_file_once() -> None:
    files = {path.relative_to(ROOT) for folder in FOLDERS for path in _python_files(ROOT / folder)}
    modules = _seen()["modules"]
    assert len(modules) == len(files)
    assert {"embforge.codegen.spec", "embforge.tuner.tune", "embforge.collection"} <= set(modules)


def test_every_package_has_an_exhaustive_list_of_layers() -> None:
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / CONTRACTS, encoding="utf-8")
    layered = [section for section in contracts.values() if section.get("type") == "layers"]
    assert [section.name for section in layered if not section.getboolean("exhaustive")] == []
    assert sorted(name for section in layered for name in section["containers"].split()) == _seen()["packages"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the linter reads, links as links."""
    for name in (*FOLDERS, "src"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / CONTRACTS, tmp_path)
    return tmp_path


def test_a_copy_of_the_tree_passes(tree: Path) -> None:
    linted = _lint(tree)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    assert " 0 broken" in linted.stdout


def test_imports_against_the_layers_are_refused(tree: Path) -> None:
    planted = {
        "codegen/dtypes.py": "from embforge.tuner.search.space import Space",
        "codegen/spec.py": "def late():\n    import torch",
        "runtime/launch/metadata.py": "if TYPE_CHECKING:\n    from embforge import collection",
        "runtime/input_forms.py": "def late():\n    import embforge as ef",
        "tuner/measure/timers.py": "from embforge.cli.common import console",
    }
    for file, line in planted.items():
        path = tree / file
        path.write_text(f"{path.read_text(encoding='utf-8')}\n\n{line}\n", encoding="utf-8")
    linted = _lint(tree)
    assert linted.returncode == 1, linted.stdout + linted.stderr
    for told in (
        "codegen.dtypes -> embforge.tuner.search.space (l.",
        "codegen.spec -> torch (l.",
        "launch.metadata -> embforge.collection (l.",
        "input_forms -> embforge (l.",
        "tuner.measure.timers -> embforge.cli.common",
    ):
        assert f" embforge.{told}" in linted.stdout, linted.stdout


def test_a_module_that_is_in_no_layer_is_refused(tree: Path) -> None:
    for folder in ("codegen", "runtime", "runtime/launch", "tuner"):
        (tree / folder / "surprise.py").write_text('"""In no layer."""\n', encoding="utf-8")
    linted = _lint(tree)
    assert linted.returncode == 1, linted.stdout + linted.stderr
    told = {line.strip("- ") for line in linted.stdout.splitlines() if line.endswith(".surprise")}
    assert told == {f"embforge.{room}surprise" for room in ("codegen.", "", "launch.", "tuner.")}


def _python_files(folder: Path) -> list[Path]:
    return [Path(at, name) for at, _, names in os.walk(folder) for name in names if name.endswith(".py")]


def _seen() -> dict[str, list[str]]:
    seen: dict[str, list[str]] = json.loads(_run(MODULES, ROOT).stdout)
    return seen


def _lint(tree: Path) -> subprocess.CompletedProcess[str]:
    return _run(LINT, tree)


def _run(program: str, tree: Path) -> subprocess.CompletedProcess[str]:
    """A program for which `embforge` is the tree's: a search path goes before what an editable install adds."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "COLUMNS": "200"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=300)
