"""Files of an earlier version load and mean what they meant. CHANGELOG.md names intended changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import embforge as ef
from baseline import internals
from baseline.fixture_files import (
    FOLDER,
    STUDIES,
    expected,
    exported_meaning,
    kernels_of_one,
    lookup_by_operator,
    plan_meaning,
    remapped_meaning,
    served_arguments,
    served_results,
    sharded_meaning,
    spec_meaning,
    state_meaning,
    study_file,
    trace_meaning,
    tuned_meaning,
)
from baseline.specs import ONE, RULES

NEWER_TORCH = "the exported program was written by a newer torch"
EXPECTED = expected()
PLANS: dict[str, Any] = json.loads((FOLDER / "plans.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", EXPECTED["specs"])
def test_a_spec_file_means_the_same(name: str) -> None:
    assert spec_meaning(FOLDER / "specs" / name) == EXPECTED["specs"][name]


@pytest.mark.parametrize("name", PLANS["plans"])
def test_a_plans_text_rebuilds_it(name: str) -> None:
    assert plan_meaning(PLANS["plans"][name]) == EXPECTED["plans"]["plans"][name]


def test_the_text_of_an_update_by_several_rules_lists_its_kernels() -> None:
    found = [list(part) for part in internals.parts_of_grouped(PLANS["grouped"])]
    assert found == EXPECTED["plans"]["grouped"]


@pytest.mark.parametrize("name", PLANS["exported"])
def test_an_exported_lookup_has_the_same_fields(name: str) -> None:
    assert exported_meaning(PLANS["exported"][name]) == EXPECTED["plans"]["exported"][name]


def test_torchs_operator_takes_the_texts_that_graphs_hold() -> None:
    texts = [*PLANS["programs"].values(), PLANS["exported"]["cpu"], PLANS["exported"]["reference"]]
    for text in texts:
        assert lookup_by_operator(text) == EXPECTED["plans"]["lookup"]


def test_an_exported_program_runs_with_the_same_results() -> None:
    if _numbers(torch.__version__) < _numbers(EXPECTED["serving"]["torch"]):
        pytest.skip(NEWER_TORCH)
    model = torch.export.load(FOLDER / "serving.pt2").module()
    assert served_results(model) == EXPECTED["serving"]["results"]
    ids, lengths, weights = served_arguments(0)
    ids[0] = 1000
    with pytest.raises(IndexError, match="feature 'sum': id 1000"):
        model(ids, lengths, weights)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def test_training_continues_from_a_state_dict() -> None:
    assert state_meaning(FOLDER / "state.pt") == EXPECTED["states"]


def test_files_of_a_remapped_module_mean_the_same() -> None:
    assert json.loads(json.dumps(remapped_meaning(FOLDER / "remapped"))) == EXPECTED["remapped"]


def test_sharded_training_continues_from_the_state_dicts_of_its_ranks() -> None:
    assert sharded_meaning(FOLDER) == EXPECTED["sharded_states"]


def test_the_same_tuned_results_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBFORGE_TUNED_DIR", str(FOLDER / "tuned"))
    found = {name: _without_words(choice) for name, choice in tuned_meaning().items()}
    assert found == {name: _without_words(choice) for name, choice in EXPECTED["tuned"].items()}


def _without_words(choice: dict[str, Any]) -> dict[str, Any]:
    """The words that explain a choice may change; whether a tuned result decided may not."""
    return {"params": choice["params"], "default": choice["why"].startswith("default")}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_resumed(name: str, tmp_path: Path) -> None:
    url = study_file(name, tmp_path)
    assert internals.study_outcomes(url) == EXPECTED["studies"]
    left = len(internals.study_space().points) - len(EXPECTED["studies"])
    assert internals.run_study(url, ONE) == left
    assert EXPECTED["studies"].items() <= internals.study_outcomes(url).items()


def test_an_oracle_has_the_same_contents() -> None:
    assert internals.oracle_in_file(FOLDER / "oracle.json") == EXPECTED["oracle"]


def test_a_trace_gives_the_same_batches() -> None:
    assert trace_meaning(FOLDER / "trace.npz") == EXPECTED["trace"]


def test_files_of_a_rule_and_of_a_shard_plan_mean_the_same() -> None:
    rule = internals.rule_in_file(FOLDER / "rule.json")
    assert rule == RULES["signum"].update and rule.to_dict() == _plain(EXPECTED["rule_and_shard_plan"]["rule"], rule)
    plan = ef.sharded.ShardPlan.from_dict(json.loads((FOLDER / "shard_plan.json").read_text(encoding="utf-8")))
    assert json.loads(json.dumps(plan.to_dict())) == EXPECTED["rule_and_shard_plan"]["plan"]


def _plain(data: Any, update: Any) -> Any:
    """JSON has no tuples."""
    assert json.loads(json.dumps(update.to_dict())) == data
    return update.to_dict()


def test_a_cache_entry_is_accepted(tmp_path: Path) -> None:
    wanted = EXPECTED["cache_entry"]
    entry = tmp_path / "entry"
    shutil.copytree(FOLDER / "cache_entry", entry)
    assert kernels_of_one()["cpu forward"].uri == wanted["uri"]
    assert internals.cache_entry_is_accepted(entry, wanted["key"])
    assert not internals.cache_entry_is_accepted(entry, "another key")
    with (entry / "kernel.so").open("ab") as file:
        file.write(b"x")
    assert not internals.cache_entry_is_accepted(entry, wanted["key"])


def test_a_manifest_is_read_and_added_to(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "manifest.json", tmp_path)
    plans = kernels_of_one()
    assert {name: plan.uri for name, plan in plans.items()} == EXPECTED["manifest"]
    records = {record["uri"]: record for record in internals.read_manifest(tmp_path)["kernels"]}
    for plan in plans.values():
        record = records[plan.uri]
        assert (record["symbol"], record["shape"], record["op"]) == (plan.symbol, plan.nameless.uri, plan.op)
    new = internals.kernel_plans(ONE, "cpu", "avx2")["forward"]
    internals.gen([new], tmp_path)
    listed = {record["uri"] for record in internals.read_manifest(tmp_path)["kernels"]}
    assert listed == {*records, new.uri}
