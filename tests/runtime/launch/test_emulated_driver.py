"""From a call to the CUDA driver where there is none: the launchers as they are, through the real cuda.core.

The checks are in `emulated_driver/`; each test here runs some of them in a process that has the emulated driver.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulated_driver import build, mutants
from emulated_driver.lines import MODULES

pytest.importorskip("cuda.core")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"),
    pytest.mark.skipif(any(map(os.path.exists, build.SIGNS)), reason="a CUDA device is present"),
]

PYTEST = ("-q", "--tb=short", "-p", "no:cacheprovider", "-p", "emulated_driver.plugin")
VERIFY = "check_verify.py::test_it_checks_the_kernels_and_writes_a_report"
LEAST_COVERED = 0.9
BEYOND = {
    "opcheck": "torch.compile sees through no tensor of ours",
    "test_a_lookup_compiles": "torch.compile sees through no tensor of ours",
    "test_compiled": "torch.compile sees through no tensor of ours",
    "test_every_form_of_input": "no nested tensors",
    "test_a_pickled_module": "no pickles",
    "test_a_module_saved_by_torch": "no pickles",
    "test_bits": "takes long: its checks of the launcher are in emulated_driver/",
    "test_training": "takes long: see check_module.py; all of it is in the soak",
}
"""Tests of the conformance suite that need what the stand-in for torch's CUDA device does not have, each with what is
missing. The keys are parts of names, as for pytest's -k."""
OF_CONFORMANCE = " and ".join(["cuda", *(f"not {name}" for name in BEYOND)])
BEYOND_IN_TRAINING = {
    "opcheck": "torch.compile sees through no tensor of ours",
    "test_clipping_by_the_norm_of_all_gradients": "no sparse tensors",
    "test_gradients_are_sparse": "no sparse tensors",
    "test_dense_gradients_are_the_sparse_ones": "no sparse tensors",
    "test_batches_without_samples_or_ids and None": "no sparse tensors",
    "test_autocast": "autocast knows no device of ours",
    "test_one_checkpointed_call_is_right and False": "its saved tensors say that they are on a CPU",
}


def passes(module: str, *words: str) -> str:
    """Runs a module in a process that must succeed, and returns what it printed."""
    ended = build.run(module, *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_driver_works_and_what_stands_on_the_launcher() -> None:
    """In one process: the driver by itself, `verify`, a module that trains, the resolve step and the stages. Bad input
    and guards are tested here too, because a launcher decides when and how a mistake is reported."""
    checks = ("check_driver.py", VERIFY, "check_module.py", "check_resolve.py", "check_stages.py")
    files = (*(f"emulated_driver/{check}" for check in checks), "conformance/test_bad_input.py")
    printed = passes("pytest", *PYTEST, *files, "conformance/test_guards.py", "-k", f"check_ or ({OF_CONFORMANCE})")
    assert "skipped" not in printed


@pytest.mark.soak
def test_verify_reports_kernels_that_are_wrong() -> None:
    passes("pytest", *PYTEST, "emulated_driver/check_verify.py")


def test_the_launcher_works_and_nearly_all_of_it_runs() -> None:
    printed = passes("emulated_driver.lines", *PYTEST, *map(str, mutants.CHECKS))
    covered = [line.split("\t")[1:] for line in printed.splitlines() if line.startswith("covered\t")]
    assert {name for name, *_ in covered} == set(MODULES)
    for name, ran, lines, missing in covered:
        assert int(ran) >= LEAST_COVERED * int(lines), f"{name}: lines {ast.literal_eval(missing)} never ran"


@pytest.mark.soak
def test_mistakes_in_the_launcher_are_found() -> None:
    printed = passes("emulated_driver.mutants")
    assert printed.count("killed\t") == len(mutants.mutants()) > 50, printed


@pytest.mark.soak
def test_the_conformance_suite_on_emulated_devices() -> None:
    printed = passes("pytest", *PYTEST, "conformance", "-k", OF_CONFORMANCE)
    assert "skipped" not in printed


@pytest.mark.soak
def test_all_bits_on_emulated_devices() -> None:
    passes("pytest", *PYTEST, "conformance/test_bits.py", "-k", "cuda")


@pytest.mark.soak
def test_training_on_emulated_devices() -> None:
    wanted = " and ".join(["cuda", "test_training", *(f"not ({name})" for name in BEYOND_IN_TRAINING)])
    passes("pytest", *PYTEST, "conformance", "-k", wanted)


# ---- Never by accident


def started(environment: dict[str, str], *lines: str) -> subprocess.CompletedProcess[str]:
    code = "\n".join(["import ctypes, os", *lines])
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_the_emulated_driver_starts_only_on_request() -> None:
    library = build.driver_library()
    lines = (f"driver = ctypes.CDLL({str(library)!r})", "print(driver.cuInit(0), driver.cuInit(0))")
    without = {name: value for name, value in os.environ.items() if name != build.CONSENT}
    no_device = "100 100\n"
    ended = started(without, *lines)
    assert ended.stdout == no_device
    assert f"refuses to start: it is for tests, and {build.CONSENT} is not set" in ended.stderr
    ended = started({**without, build.CONSENT: "yes"}, *lines)
    assert ended.stdout == no_device
    assert 'EMBFORGE_EMULATED_DRIVER="yes" does not describe a device' in ended.stderr
    assert started({**without, build.CONSENT: build.devices_of("sm_90")}, *lines).stdout == "0 0\n"


def test_no_loader_finds_the_emulated_driver() -> None:
    """Not even in a process that may use it: its file has another name, and is in a folder that no loader searches."""
    library = build.driver_library()
    assert "cuda" not in library.name
    ended = started(build.environment(), "ctypes.CDLL('libcuda.so.1')")
    assert ended.returncode != 0
    assert "libcuda.so.1: cannot open shared object file" in ended.stderr


def test_the_emulated_driver_is_no_part_of_the_package() -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert "emulated" not in project
