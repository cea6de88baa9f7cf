"""`embforge plan`: its text, JSON, plan files, plots and exit codes; and a calibration that runs real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path

import pytest
import torch
from support import commands

from embforge.codegen.errors import PlanError
from embforge.codegen.planner.topology import calibrated_path, load_topology, save_calibrated
from embforge.codegen.sharding.kinds import ShardPlan

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


run, run_json = partial(commands.run, "plan", columns=200), partial(commands.run_json, "plan")


def test_help_has_examples_and_exit_codes() -> None:
    text = run("--help").stdout
    for word in ("embforge plan dlrm --topology h100x8 --world-size 1024", "--calibrate", "--json", "Exit codes: 0"):
        assert word in text


@pytest.mark.parametrize("sizes", [[], ["--world-size", "8", "--world-size", "1024"]])
def test_tables_fit_80_columns(sizes: list[str]) -> None:
    text = run("dlrm", "--topology", "h100x8", *sizes, columns=80).stdout.partition("predicted, not measured")[0]
    lines = [line for line in text.splitlines() if not line.startswith("memory per rank")]
    assert "…" not in text  # nothing is cut off
    assert max(map(len, lines)) <= 80
    if not sizes:
        assert "why table_wise: whole bags on one rank: fewest bytes (t2, " in text


def test_a_plan_is_shown_with_its_reasons_bytes_and_assumptions(tiny: str) -> None:
    text = run(tiny, "--topology", "h100x8", "--workload", "zipf:1.05").stdout
    for word in (
        "why",
        "next best",
        "vectors",
        "slowest rank",
        "memory per rank:",
        "imbalance",
        "predicted, not measured",
    ):
        assert word in text, word
    assert "numbers are assumed, not measured" in text and "ids zipf:1.05, rowwise_adagrad" in text


def test_json_has_the_plan_and_what_it_costs(tiny: str, tmp_path: Path) -> None:
    answer = run_json(tiny, "--topology", "h100x8", "--world-size", "1024", "--out", tmp_path / "plan.json")
    (one,) = answer["runs"]
    assert answer["predicted"] and (one["world_size"], one["nodes"], one["fits"]) == (1024, 128, True)
    assert one["seconds"] == pytest.approx(sum(phase["high"] for phase in one["phases"].values()))
    assert one["prefetched_seconds"] <= one["seconds"]
    assert {table["table"] for table in one["tables"]} == {"big", "small"}
    plan = ShardPlan.from_dict(json.loads((tmp_path / "plan.json").read_text()))
    assert plan.to_dict() == ShardPlan.from_dict(one["plan"]).to_dict()
    again = run_json(tiny, "--topology", "h100x8", "--world-size", "1024", "--plan", tmp_path / "plan.json")
    assert again["runs"][0]["seconds"] == pytest.approx(one["seconds"])


def test_formats_optimizers_and_batch_sizes_change_expected_bytes(tiny: str) -> None:
    def total(*words: str) -> dict[str, float]:
        (one,) = run_json(tiny, "--topology", "h100x8", "--kind", "row_wise", *words)["runs"]
        return {name: spread["mean"] for name, spread in one["node_bytes"].items()} | {"memory": one["memory"]["mean"]}

    plain, narrow, adam = total(), total("--forward", "bf16"), total("--optimizer", "adam")
    assert narrow["vectors"] == plain["vectors"] / 2 and narrow["gradients"] == plain["gradients"]
    assert adam["memory"] > 2 * plain["memory"]
    assert "gradients" not in total("--optimizer", "none")
    assert total("--batch-size", "4096")["ids"] == pytest.approx(2 * plain["ids"], rel=1e-3)


def test_several_world_sizes_are_a_table_and_a_picture(tiny: str, tmp_path: Path) -> None:
    words = (tiny, "--topology", "h100x8", "--world-size", "8", "--world-size", "64", "--world-size", "1024")
    text = run(*words, "--plot", tmp_path / "scaling.svg").stdout
    assert "1,024" in text and "by rail" in text
    picture = ElementTree.parse(tmp_path / "scaling.svg").getroot()
    shown = [element.text or "" for element in picture.iter() if element.tag.endswith("text")]
    assert {"Step, by phase (its slowest rank)", "8", "64", "1,024", "↑ 68 GB may be used"} <= set(shown)
    assert any("assumed, not measured" in line for line in shown)
    runs = run_json(*words)["runs"]
    assert {f"{1e3 * one['seconds']:.3g}" for one in runs} <= set(shown)  # each column shows its sum
    run(*words, "--plot", tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_drawn_says_why(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (tiny, "--topology", "h100x8", "--plot")
    failed = run(*words, tmp_path / "scaling.xyz", code=2).stderr
    assert "scaling.xyz: format 'xyz' is not known; allowed: " in failed and "svg" in failed
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'embforge[plots]'" in run(*words, tmp_path / "scaling.svg", code=3).stderr


def test_a_plan_that_does_not_fit_into_memory_is_exit_code_1_and_none_is_2(tiny: str, tmp_path: Path) -> None:
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
def test_each_mistake_is_exit_code_2_and_a_sentence(tiny: str, tmp_path: Path) -> None:
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

    stages: list[str] = []
    found = calibrate(2, table_bytes=2**22, repeats=2, progress=lambda stage, done, total: stages.append(stage))
    assert found.measured and found.ranks_per_node == 2 and "gloo" in found.source
    for number in (found.lookup_bandwidth, found.update_bandwidth, found.node_link.bandwidth, found.node_link.latency):
        assert 0 < number < 1e13
    assert "measuring on 2 processes" in stages
    assert save_calibrated(found) == calibrated_path() and load_topology() == load_topology("local")
    read = load_topology()  # gigabytes in the file, so the last bit may differ
    assert read.lookup_bandwidth == pytest.approx(found.lookup_bandwidth) and read.node_link.latency > 0
    assert (read.name, read.ranks_per_node, read.measured) == (found.name, found.ranks_per_node, found.measured)
    assert "numbers are measured" in run(tiny, "--world-size", "2").stdout


def test_a_machine_too_busy_to_be_measured_is_not_taken_for_a_fast_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from embforge.sharded import calibrate

    times = iter([3.0, 3.1, 3.0, 2.0, 1.0, 2.0])  # of a small and of a large exchange, in turn
    clock = calibrate._Clock(torch.device("cpu"), 4, None)
    monkeypatch.setattr(clock, "seconds", lambda call: next(times))
    assert calibrate._links(clock, 2) == {"small": 1.0, "large": 2.0} and clock.repeats == 16
    found = {"lookup": 1.0, "update": 1.0, "launch": 1.0, "small": 3.0, "large": 2.0}
    with pytest.raises(PlanError, match=r"of 4194304 bytes \(2 s\).*1024 \(3 s\).*when it is quiet"):
        calibrate._topology(found, 2, on_gpus=False)


def test_planning_loads_no_torch(tiny: str) -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom embforge.cli.main import main\n"
        f"result = CliRunner().invoke(main, ['plan', {tiny!r}, '--topology', 'h100x8'])\n"
        "assert result.exit_code == 0, result.output\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
