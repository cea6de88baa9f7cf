"""`embforge verify` on simt and cuda: its options, its counters, and the report file that users attach to an issue."""

from __future__ import annotations

import errno
import json
import re
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import commands

from embforge.codegen.errors import KernelBugError
from embforge.device_facts import facts_of
from embforge.verify.lookups import VerifyReport, VerifyRow

TINY = """
name = "tiny-cli"
[[table]]
name = "t"
num_embeddings = 500
embedding_dim = 8

[[feature]]
name = "f"
table = "t"
"""
PASSED = VerifyRow("reference bits: B=1", 4, 0.0, True)
FAILED = VerifyRow("reference bits: B=2", 4, float("inf"), False, "kernel k: race: two threads [12]\n  block 0")
FACTS = {"name": "NVIDIA H100", "arch": "sm_90", "multiprocessors": 132, "driver": "CUDA 13.0"}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    return "tiny.toml"


run, run_json = partial(commands.run, "verify"), partial(commands.run_json, "verify")


def test_verify_on_simt_counts_memory_accesses(tiny: str) -> None:
    words = (tiny, "--on", "simt", "--quick", "--counters", "--workload", "zipf:1.05,len=fixed:3,batch=16")
    answer = run_json(*words)
    assert answer["passed"] and (answer["on"], answer["arch"], answer["plans"]) == ("simt", "sm_90", 2)
    counted = answer["counters"]
    assert (counted["workload"], counted["ids"]) == ("zipf:1.05,len=fixed:3,batch=16", 48)
    kernel, everything = counted["kernels"]
    assert (kernel["name"], everything["name"], kernel["outputs"]) == ("forward", "all", 16)
    assert kernel["loads"]["rows"]["bytes"] == 48 * 32 and kernel["whole_sector_rows_efficiency"] == 1.0
    text = run(*words).stdout
    for expected in ("2 plans for sm_90 on simt", "Counted: zipf:1.05", " kB", "100.0%", "barriers", "atomics"):
        assert expected in text
    for what in ("load", "store"):
        for line in (f"global {what} bytes requested", f"global {what} sectors", f"global {what} efficiency"):
            assert line in text
        assert f"mean active lanes, {what}s" in text
    assert "shared loads" in text and "shared bytes loaded" in text
    for total, parts in (("all_loads", "loads"), ("all_stores", "stores")):
        for figure in ("bytes", "sectors", "instructions", "lanes"):
            assert kernel[total][figure] == sum(kind[figure] for kind in kernel[parts].values()) > 0
    assert not list(Path().glob("embforge-verify*"))


def test_arch_and_report_are_taken_from_the_options(tiny: str) -> None:
    words = ("--on", "simt", "--param", "block=128", "--arch", "sm_100", "--counters", "--report", "simt.json")
    answer = run_json(tiny, *words)
    assert answer["arch"] == "sm_100" and answer["report"] == "simt.json"
    report = json.loads(Path("simt.json").read_text())
    assert report["passed"] and report["checks"] == answer["checks"] and report["device"] is None
    assert report["counters"] == answer["counters"] and report["counters"]["arch"] == "sm_100"
    assert report["collection"]["name"] == "tiny-cli" and "torch" in report["packages"]
    assert str(Path.cwd()) not in Path("simt.json").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--arch", "sm_90"), "--arch works with --on simt only"),
        (("--on", "cuda", "--counters"), "--counters works with --on simt only"),
        (("--on", "simt", "--arch", "sm_42"), "arch='sm_42' is not known"),
        (("--on", "simt", "--quick", "--counters", "--workload", "sometimes"), "ids='sometimes' is not known"),
        (("--on", "simt", "--workload", "uniform,batch=8"), "--workload names the batch that --counters counts"),
        (("--report", "nowhere/report.json"), "no file can be written to directory nowhere (No such file"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_the_reason(tiny: str, words: tuple[str, ...], message: str) -> None:
    assert message in run(tiny, *words, code=2).stderr


@pytest.mark.parametrize("words", [("--on", "cuda"), ("--quick", "--report", "here.json")])
def test_a_directory_without_write_access_is_refused_before_the_run(
    tiny: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**more: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    monkeypatch.setattr("embforge.verify.lookups.verify", None)
    assert "directory . (Read-only file system); name a file elsewhere" in run(tiny, *words, code=2).stderr


# ---- Counting comes after the verdict


COUNTING = ("--on", "simt", "--quick", "--counters", "--report", "simt.json")


@pytest.fixture
def verify_on_simt(monkeypatch: pytest.MonkeyPatch) -> list[VerifyRow]:
    """Replaces `verify` on simt: it returns these rows, and counting raises the error of FAILED."""
    rows = [PASSED]

    def count(*words: Any, **more: Any) -> None:
        assert json.loads(Path("simt.json").read_text())["passed"], "the verdict is not written yet"
        raise KernelBugError(FAILED.detail)

    monkeypatch.setattr(
        "embforge.verify.lookups.verify", lambda spec, **more: VerifyReport("simt", "sm_90", 2, 0, tuple(rows))
    )
    monkeypatch.setattr("embforge.cli.display.counters.count_spec", count)
    return rows


def test_a_bug_that_counting_finds_is_a_failed_check(tiny: str, verify_on_simt: list[VerifyRow]) -> None:
    text = run(tiny, *COUNTING, code=1).stdout
    assert text.index("2 plans for sm_90") < text.index("counted batch: uniform,len=geo:20,batch=256: kernel k: race")
    report = json.loads(Path("simt.json").read_text())
    assert not report["passed"] and [row["passed"] for row in report["checks"]] == [True, False]
    answer = run_json(tiny, *COUNTING, code=1)
    assert not answer["passed"] and answer["checks"] == report["checks"] and "counters" not in answer


def test_nothing_is_counted_after_a_failed_check(
    tiny: str, verify_on_simt: list[VerifyRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    verify_on_simt.append(FAILED)
    monkeypatch.setattr("embforge.cli.display.counters.count_spec", None)
    assert "Not counted, because a check failed." in run(tiny, *COUNTING, code=1).stdout
    assert not run_json(tiny, *COUNTING, code=1)["passed"]


# ---- On a GPU


@pytest.fixture
def verify_on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[VerifyRow]:
    """Replaces `verify` on a GPU: it returns these rows."""
    rows = [PASSED]

    def answer(spec: Any, *, on: str, **more: Any) -> VerifyReport:
        return VerifyReport(on, "sm_90", 38, 0, tuple(rows), FACTS)

    monkeypatch.setattr("embforge.verify.lookups.verify", answer)
    return rows


def test_on_cuda_device_facts_are_shown_and_written_to_the_report(tiny: str, verify_on_gpu: list[VerifyRow]) -> None:
    text = run(tiny, "--on", "cuda").stdout
    for expected in ("reference bits: B=1", "38 plans for sm_90 on cuda", "name NVIDIA H100", "multiprocessors 132"):
        assert expected in text
    (file,) = Path().glob("embforge-verify-*.json")
    assert re.fullmatch(r"embforge-verify-tiny-cli-cuda-sm_90-\d{8}T\d{6}Z\.json", file.name)
    assert f"report: {file}" in text
    report = json.loads(file.read_text())
    assert report["passed"] and report["device"] == FACTS and report["plans"] == 38
    assert datetime.fromisoformat(report["date"]).strftime("%Y%m%dT%H%M%SZ") in file.name
    assert set(report) >= {"date", "spec", "on", "arch", "checks", "system", "packages", "collection"}


def test_on_cuda_a_failure_is_written_to_the_report(tiny: str, verify_on_gpu: list[VerifyRow]) -> None:
    verify_on_gpu.append(FAILED)
    text = run(tiny, "--on", "cuda", "--report", "here.json", code=1).stdout
    assert "FAILED" in text and "race: two threads [12]" in text
    report = json.loads(Path("here.json").read_text())
    assert not report["passed"] and report["checks"][1] == {**vars(FAILED), "max_abs_error": None}
    assert run_json(tiny, "--on", "cuda", code=1)["device"] == FACTS


def test_checks_that_a_stopped_gpu_did_not_run_are_shown_as_not_run(tiny: str, verify_on_gpu: list[VerifyRow]) -> None:
    lost = VerifyRow("reference bits: B=3", 0, 0.0, passed=False, not_run=2)
    verify_on_gpu[:] = [replace(PASSED, not_run=1), FAILED, lost]
    text = run(tiny, "--on", "cuda", "--report", "here.json", code=1).stdout
    assert "passed, 1 not run" in text and "A kernel has stopped the device" in text
    assert [line.split("│")[-2].strip() for line in text.splitlines() if "B=3" in line] == ["not run"]
    assert json.loads(Path("here.json").read_text())["checks"][2] == vars(lost)


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_results_are_shown_even_if_the_report_cannot_be_written(
    tiny: str, verify_on_gpu: list[VerifyRow], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    def refuse(path: Path, data: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("embforge.cli.report.write_report", refuse)
    result = run(tiny, "--on", "cuda", *words, code=3)
    assert "reference bits: B=1" in result.stdout and "No space left on device" in result.stderr
    assert not words or json.loads(result.stdout)["passed"]


def test_facts_of_a_gpu_come_from_its_properties() -> None:
    properties = SimpleNamespace(name="NVIDIA L4", major=8, minor=9, multi_processor_count=58, total_memory=24 << 30)
    facts = facts_of(properties, (12, 8))
    assert facts["name"] == "NVIDIA L4" and facts["arch"] == "sm_89" and facts["multiprocessors"] == 58
    assert facts["memory_bytes"] == 24 << 30 and facts["driver"] == "CUDA 12.8" and facts["l2_bytes"] is None
    assert facts["torch"] == torch.__version__ and facts["nvidia-cuda-nvrtc"]
