"""`embforge tuned` and `gen --tuned`: what they print, write and refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import run, run_json
from support.tuned_records import FAST, FAST_BACKWARD, FASTER, SPEC, record_of, scaled, write_spec

from embforge.codegen.params import CpuParams, CudaParams
from embforge.codegen.tuned.hardware import gpu_hardware, this_cpu
from embforge.codegen.tuned.record import Traffic
from embforge.codegen.tuned.shape import digest_of
from embforge.collection import EmbeddingCollection
from embforge.tuner.store import save

ID = digest_of(record_of().key)[:8]


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EMBFORGE_TUNED_DIR", str(tmp_path / "user"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "user"


def test_every_subcommand_has_help_json_and_exit_codes() -> None:
    assert "embforge tuned export results.json" in run("tuned", "--help").stdout
    for command in ("ls", "show", "export", "import", "rm"):
        text = run("tuned", command, "--help").stdout
        assert "--json" in text and "Exit codes: 0" in text


def test_ls_of_empty_stores_says_how_to_make_a_result(user: Path, tmp_path: Path) -> None:
    assert "no tuned results yet; `embforge tune SPEC` makes one" in run("tuned", "ls").stdout
    answer = run_json("tuned", "ls")
    assert answer["results"] == answer["problems"] == []
    assert answer["stores"]["user"] == str(user) and answer["stores"]["project"] == str(tmp_path / "embforge-tuned")


def test_ls_lists_results_and_problems(user: Path, tmp_path: Path) -> None:
    spec = write_spec(tmp_path / "there" / "mine.toml")
    save(record_of(workload="uniform,[bold]batch=9"), "user")
    save(record_of(CpuParams()), "project", origin=spec)
    (user / "mine.json").write_text("{}")
    answer = run("tuned", "ls")
    assert ID in answer.stdout and "1.23" in answer.stdout and "[bold]" in answer.stdout
    assert "prefetch_bytes=1024" in answer.stdout and "2 x 16 fp32/fp32" in answer.stdout
    assert f"skipped {user / 'mine.json'}: not the name of a tuned result" in answer.stderr
    found = run_json("tuned", "ls", "--spec", spec)
    assert [(line["store"], line["id"]) for line in found["results"]] == [("project", ID), ("user", ID)]
    assert found["results"][1]["gain"] == {"median": 1.23, "low": 1.2, "high": 1.26}
    assert [problem["path"] for problem in found["problems"]] == [str(user / "mine.json")]
    assert "none: the default is best" in run("tuned", "ls", "--spec", spec).stdout


def test_ls_keeps_ids_gains_and_workloads_whole_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    save(record_of(workload="zipf:1.05,len=geo:20,batch=2048"), "user")
    text = run("tuned", "ls").stdout
    assert max(map(len, text.split("\nproject:")[0].splitlines())) <= 80 and "…" not in text
    for part in (ID, "user", "1.23", "2026-01-31", "zipf:1.05,len=geo:20,batch=2048", "prefetch_bytes=1024"):
        assert part in text


def test_show_by_id_and_by_file() -> None:
    path = save(record_of(notes=("rows of 66 bytes: 64 would be faster",), study="s-1"), "user")
    for name in (ID, ID[:3], ID.upper(), path):
        text = run("tuned", "show", name).stdout
        for part in (ID, str(path), "tile_vectors = 4", "1.230x the default, 95 %: 1.200 to 1.260", "0.80 %", "s-1"):
            assert part in text
        assert "2 of best, median 100.5 µs per call" in text and "rows of 66 bytes: 64" in text
        assert "embforge 0.1.0" in text
        assert "batch 2048, bag length 1, skew 1.05" in text and "int64 ids, warm caches" in text
    assert run_json("tuned", "show", ID)["samples"]["best"] == [1e-4, 1.01e-4]


def test_ls_and_show_name_ids_and_caches_that_are_not_the_usual_ones() -> None:
    save(record_of(), "user")
    usual = run("tuned", "ls").stdout
    assert "int64" not in usual and "warm" not in usual
    path = save(record_of(id_dtype="int32", cache="cold"), "user")
    assert "forward cpu int32 cold" in " ".join(run("tuned", "ls").stdout.replace("│", " ").split())
    lines = run_json("tuned", "ls")["results"]
    assert {(line["id_dtype"], line["cache"]) for line in lines} == {("int64", "warm"), ("int32", "cold")}
    assert "int32 ids, cold caches" in run("tuned", "show", path).stdout


def test_ls_shows_no_gain_of_fields_that_this_machine_does_not_take() -> None:
    here = save(record_of(replace(FAST, threads=2), hardware=this_cpu()), "user")
    shown = run("tuned", "ls").stdout
    assert "1.23" in shown and "here no gain is known" not in shown
    assert run_json("tuned", "ls")["results"][0]["gain"]["median"] == 1.23
    taken = "with threads, which modules take only on this hardware with a batch_size= like this batch"
    assert taken in run("tuned", "show", here).stdout
    here.unlink()
    cpu = this_cpu()
    elsewhere = replace(cpu, sizes={**cpu.sizes, "cores": 2 * cpu.sizes["cores"]})
    save(record_of(replace(FAST, threads=2), hardware=elsewhere), "user")
    shown = run("tuned", "ls").stdout
    assert "1.23" not in shown and "x default -: measured with threads" in shown
    (line,) = run_json("tuned", "ls")["results"]
    assert line["gain"] is None and line["dropped"] == ["threads"]
    save(record_of(FAST, hardware=elsewhere), "user")  # has no field that is dropped here
    assert run_json("tuned", "ls")["results"][0]["gain"]["median"] == 1.23


def test_wrong_names_teach(tmp_path: Path) -> None:
    save(record_of(), "user")
    answer = run("tuned", "show", "zz", code=2)
    assert f"no tuned result has the id 'zz'; known: {ID}; see `embforge tuned ls`" in answer.stderr
    others = [save(record_of(spec=scaled(SPEC, 2**n)), "user") for n in range(1, 18)]  # two of them begin alike
    starts = [path.name.split("-")[2][0] for path in others]
    twice = next(digit for digit in starts if starts.count(digit) > 1)
    assert "give more digits" in run("tuned", "show", twice, code=2).stderr
    (tmp_path / "bad.json").write_text("[]")
    failed = run_json("tuned", "import", "bad.json", code=2)["error"]
    assert "bad.json: not a file of tuned results" in failed["message"]
    assert "bad.json: not a file of tuned results" in run("tuned", "show", "bad.json", code=2).stderr


def test_export_import_and_rm(user: Path, tmp_path: Path) -> None:
    save(record_of(FAST), "user")
    other = save(record_of(FASTER, scaled(SPEC, 2)), "user")
    assert "2 results in all.json" in run("tuned", "export", "all.json").stdout
    assert run_json("tuned", "export", "one.json", ID)["results"] == 1
    (user / "mine.json").write_text("{}")
    assert "skipped" in run("tuned", "export", "rest.json", code=1).stderr and (tmp_path / "rest.json").exists()
    assert run_json("tuned", "rm", ID)["removed"] and not list(user.glob(f"*{ID}*"))
    answer = run("tuned", "import", "all.json")
    assert "2 results into" in answer.stdout and "replaced the one of 2026-01-31T12:00:00+00:00" in answer.stdout
    imported = run_json("tuned", "import", "all.json", "--to", "project")
    assert imported["directory"] == str(tmp_path / "embforge-tuned") and len(imported["imported"]) == 2
    assert imported["replaced"] == [] and (tmp_path / "embforge-tuned" / other.name).read_bytes() == other.read_bytes()


def test_env_lists_the_stores_with_their_counts(user: Path) -> None:
    save(record_of(), "user")
    (user / "mine.json").write_text("{}")
    facts = run_json("env")
    assert facts["tuned"]["user"] == f"{user} (1 results, 1 skipped)" and set(facts["tuned"]) >= {"project", "user"}
    assert facts["settings"]["EMBFORGE_TUNED_DIR"] == str(user)


def test_gen_tuned_emits_the_kernels_that_a_module_here_runs(tmp_path: Path) -> None:
    spec = write_spec(tmp_path / "mine.toml")
    save(record_of(FAST, traffic=Traffic(64), created="2030-01-01T00:00:00Z"), "project", origin=spec)
    save(record_of(FASTER, traffic=Traffic(4096)), "user")
    save(record_of(FAST_BACKWARD, op="backward", rule="sgd"), "user")
    words = ("gen", spec, "--target", "cpu", "--sources-only", "--out")
    answer = run_json(*words, tmp_path / "a", "--tuned")
    loaded = EmbeddingCollection(type(SPEC).from_toml(spec))
    assert [kernel["uri"] for kernel in answer["kernels"]] == [loaded.plan().uri]
    assert loaded.plan().params == FAST and "the module's batch is not known" in answer["tuned"][0]
    assert "forward: tuned on this hardware for" in answer["tuned"][0]
    large = run_json(*words, tmp_path / "b", "--tuned", "--batch-size", "4096", "--train", "sgd")
    params = {kernel["op"]: kernel["params"]["prefetch_bytes"] for kernel in large["kernels"]}
    assert params["forward"] == params["forward_train"] == 4096 and len(large["tuned"]) == 2
    assert {k["params"]["radix_bits"] for k in large["kernels"] if k["op"] == "backward"} == {8}
    assert "tuned on this hardware" in run(*words, tmp_path / "c", "--tuned").stdout
    plain = run_json(*words, tmp_path / "d")
    assert plain["kernels"][0]["params"]["prefetch_bytes"] == CpuParams().prefetch_bytes and "tuned" not in plain


def test_gen_tuned_chooses_for_each_id_dtype(tmp_path: Path) -> None:
    spec = write_spec(tmp_path / "mine.toml")
    save(record_of(FAST), "user")
    save(record_of(FASTER, id_dtype="int32"), "user")
    words = ("gen", spec, "--target", "cpu", "--sources-only", "--tuned", "--ids", "both", "--out", tmp_path / "a")
    answer = run_json(*words)
    loaded = EmbeddingCollection(type(SPEC).from_toml(spec))
    assert {kernel["uri"] for kernel in answer["kernels"]} == {loaded.plan(ids).uri for ids in ("int64", "int32")}
    assert {k["id_dtype"]: k["params"]["prefetch_bytes"] for k in answer["kernels"]} == {"int64": 1024, "int32": 4096}
    for line, ids in zip(answer["tuned"], ("int64", "int32"), strict=True):
        assert f" forward of {ids} ids: tuned on this hardware" in line


def test_gen_tuned_for_other_archs_says_which_result_it_took(tmp_path: Path) -> None:
    spec = write_spec(tmp_path / "mine.toml")
    gpu = gpu_hardware({"name": "G", "arch": "sm_90", "multiprocessors": 132, "memory_bytes": 2**36})
    save(record_of(CudaParams(block=512), target="cuda", hardware=gpu), "user")
    words = ("gen", spec, "--target", "cuda", "--arch", "sm_90", "--arch", "sm_80", "--sources-only", "--tuned")
    answer = run_json(*words, "--out", tmp_path / "a")
    assert {kernel["arch"]: kernel["params"]["block"] for kernel in answer["kernels"]} == {"sm_90": 512, "sm_80": 256}
    assert answer["tuned"][0].startswith(
        "sm_90 forward: taken from the nearest tuned result, distance 0 (for zipf:1.05,batch=2048 on G"
    )
    assert answer["tuned"][1].startswith("sm_80 forward: default: no tuned forward has these")
    simt = run_json("gen", spec, "--target", "simt", "--sources-only", "--tuned", "--out", tmp_path / "b")
    assert simt["tuned"] == ["sm_90 forward: default: nothing is tuned for simt"]


def test_gen_refuses_options_that_contradict_each_other(tmp_path: Path) -> None:
    words = ("gen", write_spec(tmp_path / "mine.toml"), "--target", "cpu", "--out", tmp_path / "a")
    answer = run(*words, "--tuned", "--param", "tile_vectors=4", code=2)
    assert "--tuned and --param both say" in answer.stderr
    assert "add --tuned" in run(*words, "--batch-size", "9", code=2).stderr


def test_an_example_spec_has_no_project_store_inside_the_package(tmp_path: Path) -> None:
    answer = run_json("gen", "mixed", "--target", "cpu", "--sources-only", "--tuned", "--out", tmp_path / "a")
    assert answer["tuned"][0].endswith("forward: default: no store has a tuned forward for cpu")
