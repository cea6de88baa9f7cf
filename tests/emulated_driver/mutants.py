"""Mistakes put into the launcher on purpose: each must make a check fail. `main` prints which one did.

Run by `build.run`. Every mutant has a process of its own, forked from one that has imported all that is slow, because
a launch with wrong arguments may do anything.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import tempfile
import tomllib
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest

import embforge.launch

HERE = Path(__file__).parent
CHECKS = tuple(HERE / f"check_{part}.py" for part in ("launch", "bad_input", "refusals", "backward", "bad_backward"))
"""All checks of the launcher."""
LAUNCH = Path(embforge.launch.__file__).parent
LEFT_OUT = ("cacheprovider", "hypothesispytest", "xdist", "unraisableexception")
"""Plugins that take time and are switched off; the last one collects garbage twice per process."""
PYTEST = (
    *("-x", "-q", "--tb=no", "--noconftest", "--assert=plain", "-p", "emulated_driver.plugin"),
    *(word for name in LEFT_OUT for word in ("-p", f"no:{name}")),
)
FAILED = 1
"""pytest's exit code if tests ran and some failed."""
BROKEN = 99
"""The exit code for a mutant that cannot be made."""


class Mutant(NamedTuple):
    """A text in a module of `embforge.launch` (e.g. `cuda/forward`) and the text that replaces it."""

    what: str
    module: str
    old: str
    new: str
    seen_by: str
    """The check that is tried first; if it passes, all are."""


def mutants() -> list[Mutant]:
    """The mutants of all files mutants_*.toml."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(HERE.glob("mutants_*.toml"))]
    return [Mutant(**fields) for text in texts for fields in tomllib.loads(text)["mutant"]]


def mutate(mutant: Mutant) -> None:
    """Puts the changed text into the module, before the checks import names from it."""
    path, name = LAUNCH / f"{mutant.module}.py", f"embforge.launch.{mutant.module.replace('/', '.')}"
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise AssertionError(f"{mutant.what}: {mutant.old!r} stands {text.count(mutant.old)} times in {path.name}")
    module = importlib.import_module(name)
    exec(compile(text.replace(mutant.old, mutant.new), str(path), "exec"), module.__dict__)


def outcome(mutant: Mutant) -> tuple[bool, str]:
    """Whether the checks fail with the mutant, and the first that does."""
    failed, name = _run(mutant, mutant.seen_by)
    return (failed, name) if failed else _run(mutant)


def _run(mutant: Mutant | None, check: str = "") -> tuple[bool, str]:
    """Whether a check fails, or any of all, and which."""
    places = [_place(check)] if check else [str(path) for path in CHECKS]
    with tempfile.TemporaryFile("w+") as log:
        child = os.fork()
        if child == 0:
            os._exit(_checked(mutant, places, log.fileno()))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        log.seek(0)
        text = log.read()
    if status < 0:
        return True, f"signal {-status}"
    if status not in (0, FAILED):
        raise AssertionError(f"{mutant}: the checks did not run\n{text}")
    found = re.search(r"^(?:FAILED|ERROR) \S+::(\S+)", text, re.MULTILINE)
    return status == FAILED, found[1] if found else ""


def _checked(mutant: Mutant | None, places: list[str], log: int) -> int:
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        if mutant is not None:
            mutate(mutant)
    except BaseException:
        traceback.print_exc()
        return BROKEN
    return int(pytest.main([*PYTEST, *places]))


def _place(check: str) -> str:
    """Its name in pytest."""
    (path,) = (path for path in CHECKS if f"def {check}(" in path.read_text(encoding="utf-8"))
    return f"{path}::{check}"


def main(words: list[str]) -> int:
    """Prints a line per mutant, survivors first. Returns how many survived; 100 if checks fail without a mutant."""
    import cuda.core  # noqa: F401
    import torch

    from emulated_driver import cases, torch_device, trained  # noqa: F401

    torch.set_num_threads(1)  # a fork has one thread
    for plan in (cases.PLAN, *trained.PLANS):
        cases.image(plan)
    gc.disable()  # a mutant does not live long
    failed, name = _run(None)
    if failed:
        print(f"without a mutant: {name} fails")
        return 100
    wanted = [m for m in mutants() if not words or any(word in m.what for word in words)]
    results = {mutant: outcome(mutant) for mutant in wanted}
    for mutant, (killed, name) in sorted(results.items(), key=lambda item: item[1][0]):
        print(f"{'killed' if killed else 'SURVIVED'}\t{mutant.module}\t{mutant.what}\t{name}")
    return sum(not killed for killed, _ in results.values())
