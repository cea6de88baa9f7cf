"""`tune` and its command: found, stored, used by the next process, resumed; and every option acts or says why not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import embforge as ef
from embforge.cli.main import main
from embforge.cli.tune import MODES
from embforge.cli.tune import tune as tune_command
from embforge.codegen.params import CpuParams
from embforge.codegen.plan import Plan
from embforge.tuner.judge.bench_judge import BenchJudge
from embforge.tuner.report.data import report_of
from embforge.tuner.tune import tune

SPEC = """
name = "small"
[[table]]
name = "t"
num_embeddings = 3000
embedding_dim = 8
[[feature]]
name = "f"
table = "t"
"""
WORKLOAD = "uniform,len=fixed:4,batch=32"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A spec in a folder of its own, with a user's store that is empty."""
    monkeypatch.setenv("EMBFORGE_TUNED_DIR", str(tmp_path / "user"))
    monkeypatch.delenv("EMBFORGE_STUDIES", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["tune", "spec.toml", *words])


def document_of(*words: str) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    data: dict[str, Any] = json.loads(result.stdout)
    return data


@pytest.fixture
def slow_default(quiet_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finals whose rounds are run, but in which the default takes twice the time of anything else."""
    take = BenchJudge.rounds

    def rounds(self: BenchJudge, plans: Sequence[Plan], *given: Any, **options: Any) -> Any:
        taken = take(self, plans, *given, **options)
        if isinstance(taken, dict):
            return taken
        row = tuple(2e-3 if plan.params == type(plan.params)() else 1e-3 for plan in plans)
        return [row] * len(taken)

    monkeypatch.setattr(BenchJudge, "rounds", rounds)


@pytest.mark.usefixtures("slow_default")
def test_a_result_is_stored_used_by_a_fresh_process_and_its_study_continues(project: Path) -> None:
    first = document_of("--trials", "3", "--workload", WORKLOAD, "--store", "project", "--report", "out.html")
    assert first["finished"] == 3 and first["outcomes"]["timed"] == 3
    assert sum(first["seconds"].values()) > 0 and 0 < first["work_share"] <= 1
    assert first["decision"]["ships"] and first["best"] != first["default"] and first["unstored"] == ""
    (stored,) = first["stored"]
    assert Path(stored).parent == project / "embforge-tuned"
    record = json.loads(Path(stored).read_text())["records"][0]
    assert record["workload"] == WORKLOAD and record["params"] == first["best"]
    assert {"default", "duplicate"} < set(record["samples"]) and record["versions"]["compiler"]
    assert first["study"] in (project / "out.html").read_text()

    text = "m = ef.EmbeddingCollection(ef.CollectionSpec.from_toml('spec.toml')); print(ef.explain(m))"
    command = [sys.executable, "-c", f"import embforge as ef; {text}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"tuned on this hardware for {WORKLOAD}" in shown
    assert all(f"  {field} = {value}: " in shown for field, value in first["best"].items()), shown

    again = document_of("--trials", "2", "--workload", WORKLOAD, "--store", "none")
    assert again["study"] == first["study"] and again["stored"] == [] and Path(stored).exists()
    assert again["finished"] == 2 and sum(again["outcomes"].values()) == 5  # none of them twice

    shown_only = document_of("--trials", "0", "--workload", WORKLOAD)
    assert shown_only["finished"] == 0 and shown_only["outcomes"] == again["outcomes"]
    assert shown_only["decision"] == again["decision"] and shown_only["stored"] == []
    lines = run("--trials", "0", "--workload", WORKLOAD).output.splitlines()
    assert f"study: {first['study']} in sqlite:///{project / 'user' / 'studies.sqlite3'}" in lines
    assert f"not stored: {shown_only['unstored']}" in lines


@pytest.mark.usefixtures("quiet_machine")
def test_the_backward_is_tuned_for_its_rule(project: Path) -> None:
    spec = ef.CollectionSpec.from_toml(project / "spec.toml")
    events: list[Any] = []
    result = tune(
        spec,
        train="adagrad",
        workloads=[WORKLOAD],
        trials=2,
        budget=None,
        baseline={"threads": 1, "prefetch_bytes": 0},
        progress=events.append,
    )
    report = report_of(result.study)
    assert report.anchor == "the baseline" and "(adagrad)" in report.title
    assert report.trials[0].params["threads"] == 1 and report.trials[0].params["prefetch_bytes"] == 0
    assert "--train adagrad" in report.command and "--baseline threads=1" in report.command
    key = result.task.key(WORKLOAD)
    assert (key.op, key.rule) == ("backward", "adagrad") and all(record.key == key for record in result.records)
    assert [path.parent for path in result.paths] == [project / "user"] * len(result.records)
    assert bool(result.unstored) != bool(result.paths)
    assert [type(event).__name__ for event in events][:2] == ["Started", "Building"]
    assert type(events[-1]).__name__ == "Racing"


def test_the_list_names_the_space_and_what_was_removed(project: Path) -> None:
    space = document_of("--list")
    assert space["default"] == vars(CpuParams())
    assert space["size"] == space["points"] + sum(removed["points"] for removed in space["removed"])
    text = run("--list").output
    assert f"{space['points']:,} worth a" in text and all(name in text for name in space["fields"])
    gpu = document_of("--list", "--on", "cuda", "--arch", "sm_80", "--train", "adam")
    assert (gpu["op"], gpu["arch"]) == ("backward", "sm_80")


def test_without_a_gpu_cuda_is_refused_and_estimated(project: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("a CUDA device is present")
    refused = run("--on", "cuda", "--trials", "1")
    assert refused.exit_code == 3 and "--static" in refused.output and "Nothing was tuned" in refused.output
    found = document_of("--on", "cuda", "--static", "--arch", "sm_90", "--trials", "4", "--workload", WORKLOAD)
    assert found["estimate"] is True and "never a time" in found["formula"]
    assert [row["rank"] for row in found["rows"]] == list(range(1, len(found["rows"]) + 1))
    assert Path(found["file"]).parent == project / "user" / "estimates"
    Path(found["file"]).unlink()
    unkept = ["--on", "cuda", "--static", "--trials", "2", "--workload", WORKLOAD, "--store", "none"]
    assert document_of(*unkept)["file"] is None
    shown = run(*unkept).output
    assert not list((project / "user" / "estimates").iterdir())
    assert "Estimate, no measurement" in shown and "an estimate, which no module uses" in shown.replace("\n", " ")
    module = ef.EmbeddingCollection(ef.CollectionSpec.from_toml("spec.toml"))
    assert "no store has a tuned forward" in module.choices()["forward"].why


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--static"], "add --on cuda"),
        (["--list", "--static", "--on", "cuda"], "give one of them"),
        (["--arch", "sm_90"], "--arch works with"),
        (["--list", "--report", "x.html"], "--report shows measured trials"),
        (["--report", "nowhere/x.html"], "there is no folder nowhere"),
        (["--static", "--on", "cuda", "--store", "project"], "allowed: --store user"),
        (["--static", "--on", "cuda", "--trials", "0"], "--trials of at least 1"),
        (["--list", "--trials", "0"], "--trials does nothing with --list"),
        (["--static", "--on", "cuda", "--workload", "uniform", "--workload", "zipf:1"], "takes one --workload"),
        (["--budget", "3"], "did you mean 3s or 3m?"),
        (["--budget", "0s"], "is not above zero"),
        (["--baseline", "threads"], "not FIELD=VALUE"),
        (["--baseline", "treads=1"], "allowed"),
        (["--baseline", "threads=3"], "allowed: 0, 1, 2, 4"),
        (["--workload", "zip:1.05"], "allowed: uniform, zipf:S"),
        (["--train", "adamm"], "adamm"),
        (["--storage", "postgresq://here/there"], "study storage"),
        (["--workload", "trace:nowhere.npz"], "nowhere.npz"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(project: Path, words: list[str], says: str) -> None:
    result = run(*words)
    assert result.exit_code in (2, 3) and says in result.output, result.output
    assert "Traceback" not in result.output and not (project / "user").exists()


GIVEN = {
    "--on": ["cuda"],
    "--train": ["sgd"],
    "--workload": [WORKLOAD],
    "--budget": ["3m"],
    "--trials": ["3"],
    "--baseline": ["threads=1"],
    "--cache": ["warm"],  # also what is so by default does nothing
    "--ids": ["int64"],
    "--seed": ["0"],
    "--store": ["user"],
    "--storage": ["studies.sqlite3"],
}
MODE_WORDS = {"--list": ["--list"], "--static": ["--static", "--on", "cuda"], "--trials 0": ["--trials", "0"]}


def test_the_table_of_modes_names_every_option() -> None:
    options = {param.opts[0] for param in tune_command.params if isinstance(param, click.Option)}
    assert {option for takes in MODES.values() for option in takes} == options - {"--list", "--static", "--json"}
    assert MODES.keys() == {*MODE_WORDS, "a measured run"}
    assert options - GIVEN.keys() == {"--list", "--static", "--json", "--report", "--arch"}  # these are checked above


@pytest.mark.parametrize("mode", MODE_WORDS)
def test_an_option_that_would_do_nothing_is_refused(project: Path, mode: str) -> None:
    own = set(MODE_WORDS[mode])
    idle = {option: words for option, words in GIVEN.items() if option not in {*MODES[mode], *own}}
    assert idle
    for option, words in idle.items():
        result = run(*MODE_WORDS[mode], option, *words)
        assert result.exit_code == 2, (option, result.output)
        assert f"Error: {option} does nothing with {mode}, which takes {', '.join(MODES[mode])}\n" in result.output
    together = run(*MODE_WORDS[mode], *(word for option, words in idle.items() for word in [option, *words]))
    assert f"Error: {', '.join(idle)} do nothing with {mode}" in together.output and together.exit_code == 2
    assert not (project / "user").exists()


def test_an_interrupted_command_says_how_to_continue(project: Path) -> None:
    """After Ctrl-C in the middle, finished trials are kept and the message says how to continue."""
    words = [str(Path(sys.executable).with_name("embforge")), "tune", "spec.toml", "--workload", WORKLOAD]
    process = subprocess.Popen([*words, "--budget", "10m"], stderr=subprocess.PIPE, text=True, env=os.environ)
    assert process.stderr is not None
    while "trial 0" not in (line := process.stderr.readline()):
        assert line, "it ended before its first trial"
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=600)
    assert process.returncode == 130 and "the same command continues" in rest, rest
    shown = document_of("--trials", "0", "--workload", WORKLOAD)
    assert shown["outcomes"]["timed"] >= 1
