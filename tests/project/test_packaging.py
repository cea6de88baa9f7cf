"""What a user installs: the wheel's size and contents, its CLI in a clean environment, and a light import."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from benchmarks import footprint

ROOT = Path(__file__).parents[2]
SOURCES = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "cli",
    "codegen",
    "examples",
    "runtime",
    "src",
    "templates",
    "tuner",
)


def finished(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    answer = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, f"{command}\n{answer.stdout}\n{answer.stderr}"
    return answer


def run(*command: str | Path, cwd: Path | None = None) -> str:
    return finished(*command, cwd=cwd).stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=left_out)
        else:
            shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source)
    (found,) = out.glob("embforge-*.whl")
    return found


def test_wheel_is_small_and_complete(wheel: Path) -> None:
    assert wheel.stat().st_size < 1_000_000
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in ("py.typed", "__init__.py", "cli/main.py", "specs/dlrm.toml", "specs/mixed.toml"):
        assert f"embforge/{name}" in names
    data = [*ROOT.glob("templates/**/*"), *ROOT.glob("codegen/tuned/shipped/*.json")]
    for path in (p for p in data if p.is_file() and "__pycache__" not in p.parts):
        assert f"embforge/{path.relative_to(ROOT)}" in names
    modules = {"runtime": "", "cli": "cli/", "codegen": "codegen/", "templates": "templates/", "tuner": "tuner/"}
    for folder, package in modules.items():
        for path in (ROOT / folder).rglob("*.py"):
            assert f"embforge/{package}{path.relative_to(ROOT / folder)}" in names
    assert {name.split("/")[0] for name in names if not name.startswith("embforge-")} == {"embforge"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_a_clone_named_embforge_does_not_hide_the_package_from_a_script_next_to_it(tmp_path: Path) -> None:
    """Python looks in the script's own directory first, where the clone's folder could pass for a namespace package."""
    (tmp_path / "embforge").symlink_to(ROOT)
    (tmp_path / "script.py").write_text("import embforge, embforge.tuner\nprint(embforge.TableSpec('t', 2, 4).name)\n")
    assert run(sys.executable, "script.py", cwd=tmp_path) == "t\n"


@pytest.fixture(scope="module")
def venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean environment with the wheel in it, and what it depends on from here."""
    venv = tmp_path_factory.mktemp("clean") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel)
    # Dependencies are found in the environment of the tests. Python does not read .pth files of a directory that a
    # .pth file adds, so the editable embforge there is not found.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(python, "-c", "import embforge.codegen as c; print(c.__file__)", cwd=venv).strip()
    assert Path(where).is_relative_to(venv)
    return venv


def test_cli_works_from_the_wheel_in_a_clean_environment(venv: Path, tmp_path: Path) -> None:
    embforge = venv / "bin" / "embforge"
    assert "0." in run(embforge, "--version", cwd=tmp_path)
    assert json.loads(run(embforge, "schema", cwd=tmp_path))["title"] == "embforge collection spec"
    for target, arch in (("cpu", "avx2"), ("cuda", "sm_90")):
        out = tmp_path / "out" / target
        run(embforge, "gen", "mixed", "--target", target, "--arch", arch, "--sources-only", "--out", out, cwd=tmp_path)
        (kernel,) = json.loads((out / "manifest.json").read_text())["kernels"]
        assert (out / kernel["source"]).stat().st_size > 1000


LOOKUP_ON_SIMT = """
import torch
from embforge import CollectionSpec, EmbeddingCollection, FeatureSpec, TableSpec
tables = [TableSpec("t", 20, 4), TableSpec("h", 20, 4, "fp16")]
spec = CollectionSpec(tables, [FeatureSpec("f", "t"), FeatureSpec("g", "h")])
simt, truth = (EmbeddingCollection(spec, backend=name) for name in ("simt", "reference"))
truth.load_state_dict(simt.state_dict())
ids, offsets = torch.tensor([3, 1, 19, 0]), torch.tensor([0, 2, 3, 3, 4])
assert torch.equal(simt(ids, offsets), truth(ids, offsets))
"""


def test_simt_works_from_the_wheel(venv: Path, tmp_path: Path, fresh_cache: Path) -> None:
    """A new cache: the executor and an image are compiled from the headers that the wheel holds, which stderr says."""
    answer = finished(venv / "bin" / "python", "-c", LOOKUP_ON_SIMT, cwd=tmp_path)
    assert answer.stderr.count("embforge: compiling forward_simt") == answer.stderr.count("\n") == 1
    assert len(list(fresh_cache.rglob("kernel.so"))) == len(list(fresh_cache.rglob("simt_runtime/*/kernel.o"))) == 1


@pytest.mark.soak
def test_a_cpu_only_install_adds_little_to_torch(tmp_path: Path) -> None:
    """From the package index, in a new environment, where a lookup then runs."""
    torch, own, needed = footprint.measure(tmp_path)
    assert own.packages == ("embforge",) and own.downloaded < 1_000_000
    assert not [name for name in needed.packages if name.startswith(("cuda", "nvidia"))]
    assert needed.downloaded < 60_000_000 < torch.downloaded


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted(sys.modules))"
    return set(run(sys.executable, "-c", code).split())


def test_import_loads_nothing_heavy() -> None:
    loaded = loaded_after("import embforge")
    assert not loaded & {"torch", "pydantic", "cuda", "numpy", "jinja2", "click", "rich"}


def test_help_loads_nothing_heavy() -> None:
    loaded = loaded_after(
        "from embforge.cli.main import main\n"
        "for words in (['--help'], ['gen', '--help'], ['bench', '--help']):\n"
        "    try: main(words)\n"
        "    except SystemExit: pass"
    )
    assert not loaded & {"torch", "pydantic", "cuda", "numpy", "jinja2"}


def test_generating_code_loads_no_torch(tmp_path: Path) -> None:
    loaded = loaded_after(
        "from embforge.cli.main import main\n"
        f"words = 'gen mixed --target cpu --arch avx2 --sources-only --out {tmp_path}'\n"
        "try: main(words.split())\n"
        "except SystemExit: pass"
    )
    assert "jinja2" in loaded and not loaded & {"torch", "cuda"}


def test_public_names_load_on_use() -> None:
    import embforge

    for name in embforge.__all__:
        assert getattr(embforge, name) is not None
        assert name in dir(embforge)
    assert {name for name in dir(embforge) if not name.startswith("__")} == {*embforge.__all__} - {"__version__"}
    with pytest.raises(AttributeError, match=r"no attribute 'Missing'.*EmbeddingCollection"):
        embforge.Missing  # noqa: B018


def test_make_shell_opens_a_shell_with_the_environment_active(tmp_path: Path) -> None:
    """In an environment that make takes for a finished one, so that nothing is installed here."""
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    make = ("make", "--silent", f"VENV={venv}", f"PYTHON={sys.executable}")
    Path(run(*make, "--eval=stamp: ; @echo $(READY)", "stamp", cwd=ROOT).strip()).touch()
    asked = subprocess.run(
        [*make, "shell"],
        cwd=ROOT,
        input="command -v python; echo $VIRTUAL_ENV",
        env={**os.environ, "SHELL": "/bin/sh"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout.splitlines()[-2:] == [f"{venv}/bin/python", str(venv)]


SKIPPING = """
import pytest
def test_allowed(): pytest.skip("no GPU on this machine")
def test_not_allowed(): pytest.skip("not today")
@pytest.mark.xfail
def test_expected(): assert False
"""


@pytest.mark.parametrize(("ci", "failed"), [("true", 1), ("", 0)])
def test_a_skip_fails_in_ci_unless_its_reason_is_listed(tmp_path: Path, ci: str, failed: int) -> None:
    (tmp_path / "support").mkdir()
    for name in ("conftest.py", "support/precompiled_headers.py", "allowed_skips.txt"):
        shutil.copy(ROOT / "tests" / name, tmp_path / name)
    (tmp_path / "test_skips.py").write_text(SKIPPING)
    (tmp_path / "test_module.py").write_text("import pytest\npytest.skip('never here', allow_module_level=True)\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(tmp_path),
        "--continue-on-collection-errors",
    ]
    answer = subprocess.run(
        command, env={**os.environ, "CI": ci, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert answer.returncode == (1 if failed else 0), answer.stdout
    assert ("'not today' is not in" in answer.stdout) == ("'never here' is not in" in answer.stdout) == bool(failed)
    assert "1 xfailed" in answer.stdout and "no GPU on this machine' is not" not in answer.stdout


def test_nothing_checked_in_names_this_machine() -> None:
    tracked = run("git", "ls-files", cwd=ROOT).split() if (ROOT / ".git").exists() else []
    home = str(Path.home())
    for name in tracked:
        path = ROOT / name
        if path.is_file() and home != "/":
            assert home + "/" not in path.read_text(encoding="utf-8", errors="replace"), name
