"""`embforge verify SPEC --on cuda`, what whoever has a GPU is asked to run, on an emulated one."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from embforge.codegen.cli.main import main
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec

SPEC = CollectionSpec([TableSpec("t", 60, 4)], [FeatureSpec("f", "t", "mean", weighted=True)], name="small")


def test_it_checks_the_kernels_and_writes_a_report(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SPEC.to_toml(), encoding="utf-8")
    report = tmp_path / "report.json"
    words = ["verify", str(tmp_path / "small.toml"), "--on", "cuda", "--quick", "--report", str(report), "--json"]
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    printed, written = json.loads(result.stdout), json.loads(report.read_text(encoding="utf-8"))
    assert printed["passed"]
    for data in (printed, written):
        assert data["device"]["name"] == "embforge emulated sm_90"
        assert data["device"]["driver"] == "CUDA 13.4"
