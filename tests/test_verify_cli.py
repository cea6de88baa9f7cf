"""`embforge verify` on simt and cuda: options, counters, and the report file for an issue."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from embforge.codegen.cli.main import main
from embforge.device import facts_of
from embforge.verify import VerifyReport, VerifyRow

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


def run(*words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["verify", *words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def run_json(*words: str, code: int = 0) -> Any:
    return json.loads(run(*words, "--json", code=code).stdout)


def test_on_simt_with_counters(tiny: str) -> None:
    words = (tiny, "--on", "simt", "--quick", "--counters", "--workload", "zipf:1.05,len=fixed:3,batch=16")
    answer = run_json(*words)
    assert answer["passed"] and (answer["on"], answer["arch"], answer["plans"]) == ("simt", "sm_90", 2)
    counted = answer["counters"]
    assert (counted["workload"], counted["ids"]) == ("zipf:1.05,len=fixed:3,batch=16", 48)
    kernel, everything = counted["kernels"]
    assert (kernel["name"], everything["name"], kernel["outputs"]) == ("forward", "all", 16)
    assert kernel["loads"]["rows"]["bytes"] == 48 * 32 and kernel["whole_sector_rows_efficiency"] == 1.0
    text = run(*words).stdout
    for expected in ("2 plans for sm_90 on simt", "Counted: zipf:1.05", "0.00 MB", "100.0%", "barriers", "atomics"):
        assert expected in text
    assert not list(Path().glob("embforge-verify*"))


def test_another_arch_and_a_report_on_request(tiny: str) -> None:
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
        (("--report", "nowhere/report.json"), "there is no directory nowhere"),
    ],
)
def test_wrong_usage(tiny: str, words: tuple[str, ...], message: str) -> None:
    assert message in run(tiny, *words, code=2).stderr


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[VerifyRow]:
    """`verify` as it would answer on a GPU: with these rows."""
    rows = [PASSED]

    def answer(spec: Any, *, on: str, **more: Any) -> VerifyReport:
        return VerifyReport(on, "sm_90", 38, 0, tuple(rows))

    monkeypatch.setattr("embforge.verify.verify", answer)
    monkeypatch.setattr("embforge.codegen.cli.verify._device_facts", lambda: FACTS)
    return rows


def test_on_cuda_facts_are_shown_and_written_for_an_issue(tiny: str, a_gpu: list[VerifyRow]) -> None:
    text = run(tiny, "--on", "cuda").stdout
    for expected in ("reference bits: B=1", "38 plans for sm_90 on cuda", "name NVIDIA H100", "multiprocessors 132"):
        assert expected in text
    (file,) = Path().glob("embforge-verify-*.json")
    assert file.name == "embforge-verify-tiny-cli-cuda-sm_90.json" and f"report: {file}" in text
    report = json.loads(file.read_text())
    assert report["passed"] and report["device"] == FACTS and report["plans"] == 38
    assert set(report) >= {"date", "spec", "on", "arch", "checks", "system", "packages", "collection"}


def test_on_cuda_a_failure_is_written_too(tiny: str, a_gpu: list[VerifyRow]) -> None:
    a_gpu.append(FAILED)
    text = run(tiny, "--on", "cuda", "--report", "here.json", code=1).stdout
    assert "FAILED" in text and "race: two threads [12]" in text
    report = json.loads(Path("here.json").read_text())
    assert not report["passed"] and report["checks"][1] == {**vars(FAILED), "max_abs_error": None}
    assert run_json(tiny, "--on", "cuda", code=1)["device"] == FACTS


def test_facts_of_a_device() -> None:
    properties = SimpleNamespace(name="NVIDIA L4", major=8, minor=9, multi_processor_count=58, total_memory=24 << 30)
    facts = facts_of(properties, (12, 8))
    assert facts["name"] == "NVIDIA L4" and facts["arch"] == "sm_89" and facts["multiprocessors"] == 58
    assert facts["memory_bytes"] == 24 << 30 and facts["driver"] == "CUDA 12.8" and facts["l2_bytes"] is None
    assert facts["torch"] == torch.__version__ and facts["nvidia-cuda-nvrtc"]
