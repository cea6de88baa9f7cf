"""`embforge verify SPEC --on cuda`, which contributors with a GPU are asked to run, on an emulated GPU: with correct
and with broken kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from embforge.cli.main import main
from embforge.codegen.build import Built
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.targets.cuda.launch import long_symbols, main_symbols
from embforge.codegen.targets.simt.toolchain import compile_image
from embforge.launch import building, kernels
from emulated_driver import control

SPEC = CollectionSpec([TableSpec("t", 60, 4)], [FeatureSpec("f", "t", "mean", weighted=True)], name="small")
PLANS = 2
"""One per id dtype."""


def verified(directory: Path, code: int) -> dict[str, Any]:
    """The report file; what was printed says the same."""
    (directory / "small.toml").write_text(SPEC.to_toml(), encoding="utf-8")
    report = directory / "report.json"
    words = ["verify", str(directory / "small.toml"), "--on", "cuda", "--quick", "--report", str(report), "--json"]
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    assert result.exit_code == code, result.output
    printed, written = json.loads(result.stdout), json.loads(report.read_text(encoding="utf-8"))
    assert {name: written[name] for name in printed if name != "report"} == {
        name: value for name, value in printed.items() if name != "report"
    }
    assert written["device"]["name"] == "embforge emulated sm_90"
    assert written["device"]["driver"] == "CUDA 13.4"
    return dict(written)


def test_it_checks_the_kernels_and_writes_a_report(tmp_path: Path) -> None:
    report = verified(tmp_path, code=0)
    assert report["passed"]
    assert report["plans"] == PLANS
    for row in report["checks"]:
        assert row["passed"]
        assert not row["not_run"]
        if row["check"].startswith("reference bits"):
            assert row["cases"] <= PLANS  # a GPU has no thread count to vary


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Replaces the code of the plans' kernels by this body, or by no image at all if the body is empty."""

    def put(body: str) -> None:
        right = building.build

        def build(plan: Plan, **more: Any) -> Built:
            symbols = [*main_symbols(plan), *long_symbols(plan)]
            functions = [f'extern "C" __global__ void {symbol}() {{ {body} }}' for symbol in symbols]
            text = "\n".join(["// ==== primitives", "// ==== end of primitives", *functions])
            binary = tmp_path / plan.uri
            binary.write_bytes(compile_image(text, "broken.cu") if body else b"nothing that a driver knows")
            return replace(right(plan, **more), binary=binary)

        monkeypatch.setattr(kernels, "_LOADED", {})
        monkeypatch.setattr(building, "build", build)

    return put


def bits_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in report["checks"] if row["check"].startswith("reference bits")]


def test_wrong_bits_are_rows_of_the_report(tmp_path: Path, broken: Callable[[str], None]) -> None:
    broken(";")  # writes nothing
    empty, *others = bits_of(verified(tmp_path, code=1))
    assert empty["passed"]  # no samples, no launch
    for row in others:
        assert not row["passed"]
        assert "feature 'f', sample 0, column 0: expected" in row["detail"]
        assert not row["not_run"]


def test_code_that_the_driver_refuses_is_one_failed_row_per_plan(tmp_path: Path, broken: Callable[[str], None]) -> None:
    broken("")
    empty, *others = bits_of(verified(tmp_path, code=1))
    assert empty["passed"]
    for row in others:
        assert not row["passed"]
        assert "damaged or of another version" in row["detail"]
        assert "CUDA_ERROR_INVALID_IMAGE" in row["detail"]
        assert not row["not_run"]


def test_a_kernel_that_stops_the_device_ends_the_run_and_leaves_a_report(
    tmp_path: Path, broken: Callable[[str], None]
) -> None:
    broken("*reinterpret_cast<int*>(64) = 1;")
    before = control.launches()
    report = verified(tmp_path, code=1)
    assert not report["passed"]
    empty, failed, *others = report["checks"]
    assert (empty["passed"], empty["cases"], empty["not_run"]) == (True, 1, PLANS - 1)
    assert (failed["passed"], failed["cases"], failed["not_run"]) == (False, 1, PLANS - 1)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in failed["detail"]
    assert SPEC.name in failed["detail"]
    assert others
    for row in others:
        assert (row["passed"], row["cases"], row["detail"]) == (False, 0, "")
        assert row["not_run"]
    assert others[-1]["check"] == "torch.nn.EmbeddingBag"
    assert control.launches() == before + 1
    assert "out-of-bounds" in control.report()
    control.restart()
