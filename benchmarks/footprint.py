"""Measures how much a CPU-only install adds to torch's size: `python -m benchmarks.footprint`, or `make footprint`.

In a new virtual environment, torch is installed first, as requirements.lock pins it; then this clone and its other
requirements, at the versions of the lock; then a lookup runs there. Bytes downloaded are the sizes of the wheels, bytes
installed those of the files that pip recorded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOOKUP = """
import torch, embforge as ef
spec = ef.CollectionSpec([ef.TableSpec("t", 10, 4)], [ef.FeatureSpec("f", "t")])
print(*ef.EmbeddingCollection(spec)(torch.tensor([1, 2]), lengths=torch.tensor([2])).shape)
"""
INSTALLED = """
import json
from importlib.metadata import distributions
sizes = {}
for package in distributions():
    paths = {path for file in package.files or () if (path := file.locate()).is_file()}
    sizes[package.name.lower()] = sum(path.stat().st_size for path in paths)
print(json.dumps(sizes))
"""


@dataclass(frozen=True)
class Part:
    """Packages that are installed together, and their sizes in bytes."""

    title: str
    packages: tuple[str, ...]
    downloaded: int
    installed: int


def measure(scratch: Path) -> list[Part]:
    """Installs torch, then this clone and its other requirements, in an environment in `scratch`, and measures each."""
    venv, lock = scratch / "venv", ROOT / "requirements.lock"
    _run(sys.executable, "-m", "venv", venv)
    python = venv / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--quiet")
    (torch,) = (pin for pin in lock.read_text(encoding="utf-8").splitlines() if pin.startswith("torch=="))

    before = set(_installed(python))
    _run(*pip, "download", "--dest", scratch / "torch", torch)
    _run(*pip, "install", "--no-index", "--find-links", scratch / "torch", torch)
    with_torch = set(_installed(python))
    parts = [_part("torch and its requirements", python, with_torch - before, scratch / "torch")]

    _run(*pip, "wheel", "--no-deps", "--wheel-dir", scratch / "embforge", ROOT)
    (wheel,) = (scratch / "embforge").glob("embforge-*.whl")
    report = scratch / "report.json"
    _run(*pip, "install", "--dry-run", "--report", report, "--constraint", lock, wheel)
    chosen = [entry["metadata"] for entry in json.loads(report.read_text(encoding="utf-8"))["install"]]
    needed = [f"{package['name']}=={package['version']}" for package in chosen if package["name"] != "embforge"]
    _run(*pip, "download", "--no-deps", "--dest", scratch / "rest", *needed)
    _run(*pip, "install", "--no-index", "--find-links", scratch / "rest", wheel)
    _run(python, "-c", LOOKUP, cwd=scratch, env={**os.environ, "EMBFORGE_CACHE_DIR": str(scratch / "cache")})
    added = set(_installed(python)) - with_torch
    parts.append(_part("embforge", python, {"embforge"}, scratch / "embforge"))
    parts.append(_part("embforge's other requirements", python, added - {"embforge"}, scratch / "rest"))
    return parts


def _part(title: str, python: Path, names: set[str], wheels: Path) -> Part:
    sizes = _installed(python)
    downloaded = sum(path.stat().st_size for path in wheels.iterdir())
    return Part(title, tuple(sorted(names)), downloaded, sum(sizes[name] for name in names))


def _installed(python: Path) -> dict[str, int]:
    """The bytes on disk of each installed package."""
    sizes: dict[str, int] = json.loads(_run(python, "-c", INSTALLED))
    return sizes


def _run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    """Measures, and prints one line per part."""
    with tempfile.TemporaryDirectory() as scratch:
        parts = measure(Path(scratch))
    print(f"{'':34}{'packages':>9}{'bytes downloaded':>18}{'bytes installed':>18}")
    for part in parts:
        print(f"{part.title:34}{len(part.packages):9,}{part.downloaded:18,}{part.installed:18,}")


if __name__ == "__main__":
    main()
