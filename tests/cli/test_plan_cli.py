"""`embforge plan` as scripts use it: text, JSON, plan files, plots, exit codes; and calibration by real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from embforge.cli.main import main
from embforge.codegen.sharding.kinds import ShardPlan
from embforge.codegen.planner.topology import calibrated_path, load_topology, save_calibrated

TINY = """
[[table]]
name = "big"
num_embeddings = 100_000
embedding_dim = 64

[[table]]
name = "small"
num_embeddings = 50
embedding_dim = 4

[[feature]]
name = "f"
table = "big"

[[feature]]
name = "g"
table = "small"
hotness = 9
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBFORGE_TUNED_DIR", str(tmp_path / "store"))


def run(*words: str | Path, code: int = 0, columns: int = 200) -> Result:
    result = CliRunner().invoke(main, ["plan", *map(str, words)], env={"COLUMNS": str(columns)})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def run_json(*words: str | Path, code: int = 0) -> Any:
    return json.loads(run(*words, "--json", code=code).stdout)


def test_help_teaches() -> None:
    text = run("--help").stdout
    for word in ("embforge plan dlrm --topology h100x8 --world-size 1024", "--calibrate", "--json", "Exit codes: 0"):
        assert word in text


@pytest.mark.parametrize("sizes", [[], ["--world-size", "8", "--world-size", "1024"]])
def test_tables_fit_80_columns(sizes: list[str]) -> None:
    text = run("dlrm", "--topology", "h100x8", *sizes, columns=80).stdout.partition("predicted, not measured")[0]
    lines = [line for line in text.splitlines() if not line.startswith("memory a rank")]
    assert "…" not in text  # nothing is cut off
    assert max(map(len, lines)) <= 80
    if not sizes:
        assert "why table_wise: whole bags on one rank: fewest bytes (t2, " in text


def test_a_plan_with_its_reasons_bytes_and_assumptions(tiny: str) -> None:
    text = run(tiny, "--topology", "h100x8", "--workload", "zipf:1.05").stdout
    for word in (
        "why",
        "next best",
        "vectors",
        "slowest rank",
        "memory a rank:",
        "imbalance",
        "predicted, not measured",
    ):
        assert word in text, word
    assert "numbers are assumed, not measured" in text and "ids zipf:1.05, rowwise_adagrad" in text


def test_json_has_the_plan_and_what_it_costs(tiny: str, tmp_path: Path) -> None:
    found = run_json(tiny, "--topology", "h100x8", "--world-size", "1024", "--out", tmp_path / "plan.json")
    (one,) = found["runs"]
    assert found["predicted"] and (one["world_size"], one["nodes"], one["fits"]) == (1024, 128, True)
    assert one["seconds"] == pytest.approx(sum(phase["high"] for phase in one["phases"].values()))
    assert one["prefetched_seconds"] <= one["seconds"]
    assert {table["table"] for table in one["tables"]} == {"big", "small"}
    plan = ShardPlan.from_dict(json.loads((tmp_path / "plan.json").read_text()))
    assert plan.to_dict() == ShardPlan.from_dict(one["plan"]).to_dict()
    again = run_json(tiny, "--topology", "h100x8", "--world-size", "1024", "--plan", tmp_path / "plan.json")
    assert again["runs"][0]["seconds"] == pytest.approx(one["seconds"])


def test_kinds_formats_and_optimizers_change_what_is_expected(tiny: str) -> None:
    def total(*words: str) -> dict[str, float]:
        (one,) = run_json(tiny, "--topology", "h100x8", "--kind", "row_wise", *words)["runs"]
        return {name: spread["mean"] for name, spread in one["node_bytes"].items()} | {"memory": one["memory"]["mean"]}

    plain, narrow, adam = total(), total("--forward", "bf16"), total("--optimizer", "adam")
    assert narrow["vectors"] == plain["vectors"] / 2 and narrow["gradients"] == plain["gradients"]
    assert adam["memory"] > 2 * plain["memory"]
    assert "gradients" not in total("--optimizer", "none")
    assert total("--batch-size", "4096")["ids"] == pytest.approx(2 * plain["ids"], rel=1e-3)


def test_several_world_sizes_are_a_table_and_a_picture(tiny: str, tmp_path: Path) -> None:
    sizes = ("--world-size", "8", "--world-size", "64", "--world-size", "1024")
    text = run(tiny, "--topology", "h100x8", *sizes, "--plot", tmp_path / "scaling.svg").stdout
    assert "1,024" in text and "by rail" in text
    picture = ElementTree.parse(tmp_path / "scaling.svg").getroot()
    words = " ".join(element.text or "" for element in picture.iter() if element.tag.endswith("text"))
    assert "Step, by phase" in words and "1,024" in words and "assumed, not measured" in words
    bars = [element for element in picture.iter() if element.tag.endswith("rect")]
    assert all(float(bar.get("height", "0")) >= 0 for bar in bars) and len(bars) > 3 * 11


def test_what_does_not_fit(tiny: str, tmp_path: Path) -> None:
    narrow = tmp_path / "narrow.toml"
    text = load_topology("laptop").to_toml()
    narrow.write_text(text.replace("memory_gb = 4.0", "memory_gb = 0.02"))
    found = run(tiny, "--topology", narrow, "--kind", "table_wise", "--batch-size", "16", code=1)
    assert "does not fit into memory" in found.stdout
    assert run_json(tiny, "--topology", narrow, "--batch-size", "16")["runs"][0]["fits"]
    narrow.write_text(text.replace("memory_gb = 4.0", "memory_gb = 0.005"))
    failed = run_json(tiny, "--topology", narrow, "--batch-size", "16", code=2)
    assert "table 'big' does not fit" in failed["error"]["message"] and failed["error"]["type"] == "PlanError"


@pytest.mark.usefixtures("own_store")
def test_mistakes_are_sentences(tiny: str, tmp_path: Path) -> None:
    assert "this machine has not been measured" in run(tiny, code=2).stderr
    assert "give one of them" in run(tiny, "--kind", "grid", "--plan", tiny, code=2).stderr
    assert "Missing argument 'SPEC'" in run(code=2).stderr
    assert "12 ranks on nodes of 8" in run(tiny, "--topology", "h100x8", "--world-size", "12", code=2).stderr
    assert "TABLE=KIND" in run(tiny, "--topology", "h100x8", "--only", "big", code=2).stderr
    assert "'rows' is not known" in run(tiny, "--topology", "h100x8", "--only", "big=rows", code=2).stderr
    (tmp_path / "broken.json").write_text("[1]")
    broken = run(tiny, "--topology", "h100x8", "--plan", tmp_path / "broken.json", code=2)
    assert "not the JSON of a shard plan" in broken.stderr


@pytest.mark.usefixtures("own_store")
def test_calibration_measures_real_processes_and_is_used_from_then_on(tiny: str) -> None:
    from embforge.sharded.calibrate import calibrate

    told: list[str] = []
    found = calibrate(2, table_bytes=2**22, repeats=2, tell=lambda stage, done, total: told.append(stage))
    assert found.measured and found.ranks_per_node == 2 and "gloo" in found.source
    for number in (found.lookup_bandwidth, found.update_bandwidth, found.node_link.bandwidth, found.node_link.latency):
        assert 0 < number < 1e13
    assert "measuring on 2 processes" in told
    assert save_calibrated(found) == calibrated_path() and load_topology() == load_topology("local")
    read = load_topology()  # gigabytes in the file, so the last bit may differ
    assert read.lookup_bandwidth == pytest.approx(found.lookup_bandwidth) and read.node_link.latency > 0
    assert (read.name, read.ranks_per_node, read.measured) == (found.name, found.ranks_per_node, found.measured)
    assert "numbers are measured" in run(tiny, "--world-size", "2").stdout


def test_planning_loads_no_torch(tiny: str) -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom embforge.cli.main import main\n"
        f"result = CliRunner().invoke(main, ['plan', {tiny!r}, '--topology', 'h100x8'])\n"
        "assert result.exit_code == 0, result.output\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
