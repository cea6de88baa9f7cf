"""The commands as scripts use them: output, JSON, files and exit codes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.commands import run, run_json

from embforge.cli.common import load_spec, params_of, print_json
from embforge.codegen import cache
from embforge.codegen.errors import PlanError
from embforge.codegen.params import CpuParams, CudaParams
from embforge.codegen.poolings import RESULTS
from embforge.codegen.spec_schema import json_schema
from embforge.verify.lookups import VerifyReport, VerifyRow

TINY = """
[[table]]
name = "t"
num_embeddings = 50
embedding_dim = 4

[[feature]]
name = "f"
table = "t"
pooling = "mean"
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)


COMMANDS = (
    ["gen"],
    ["verify"],
    ["bench"],
    ["tune"],
    *(["tuned", command] for command in ("ls", "show", "export", "import", "rm")),
    ["plan"],
    ["record"],
    ["env"],
    ["cache", "ls"],
    ["cache", "clear"],
    ["schema"],
    ["demo"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_and_the_option_json(command: list[str]) -> None:
    text = run(*command, "--help").stdout
    assert "--json" in text and "Usage:" in text


def test_exit_codes_are_documented() -> None:
    for command in ([], ["gen"], ["verify"], ["bench"], ["tune"], ["tuned"], ["demo"]):
        assert "Exit codes: 0" in run(*command, "--help").stdout


def test_gen_cpu_emits_source_binary_and_manifest(tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answer = run_json("gen", tiny, "--target", "cpu", "--arch", "generic", "--ids", "both", "--out", out)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["kernels"] == sorted(answer["kernels"], key=lambda kernel: kernel["uri"])
    assert {kernel["id_dtype"] for kernel in manifest["kernels"]} == {"int32", "int64"}
    for kernel in manifest["kernels"]:
        assert "forward" in kernel["op"] and kernel["target"] == "cpu" and kernel["arch"] == "generic"
        assert not os.path.isabs(kernel["source"]) and not os.path.isabs(kernel["binary"])
        assert kernel["symbol"] in (out / kernel["source"]).read_text()
        assert cache.sha256_of((out / kernel["binary"]).read_bytes()) == kernel["binary_sha256"]
        assert kernel["params"]["prefetch_bytes"] == CpuParams().prefetch_bytes


def test_gen_cuda_reports_resources(tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("gen", tiny, "--target", "cuda", "--arch", "sm_80", "--out", out)
    (kernel,) = json.loads((out / "manifest.json").read_text())["kernels"]
    assert (out / kernel["binary"]).read_bytes()[:4] == b"\x7fELF"
    assert kernel["registers"] > 0 and kernel["spill_bytes"] == 0 and 0 < kernel["occupancy"] <= 1
    assert kernel["shared_bytes"] >= 0
    for words in ("sm_80", "registers", "occupancy", "1 kernel in"):
        assert words in result.stdout


def test_gen_adds_to_kernels_that_the_directory_has(tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for arch in ("avx2", "neon", "avx2"):
        run("gen", tiny, "--target", "cpu", "--arch", arch, "--sources-only", "--out", out)
    kernels = json.loads((out / "manifest.json").read_text())["kernels"]
    assert sorted(kernel["arch"] for kernel in kernels) == ["avx2", "neon"]
    assert all(kernel["binary"] is None and kernel["registers"] is None for kernel in kernels)


def test_gen_with_one_bad_arch_writes_nothing(tiny: str, tmp_path: Path) -> None:
    words = ("gen", tiny, "--target", "cpu", "--arch", "avx2", "--arch", "sse9", "--sources-only")
    run(*words, "--out", tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()


def test_gen_sets_the_plan_fields_of_param(tiny: str, tmp_path: Path) -> None:
    words = ("gen", tiny, "--target", "cuda", "--arch", "sm_90", "--sources-only", "--out", tmp_path / "out")
    (kernel,) = run_json(*words, "--param", "pipeline=8,2", "--param", "block=128")["kernels"]
    assert kernel["params"]["pipeline"] == [8, 2] and kernel["params"]["block"] == 128


def test_emitted_kernels_run_without_a_compiler(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_cache: Path
) -> None:
    import torch

    import embforge as ef

    run("gen", tiny, "--target", "cpu", "--out", tmp_path / "kernels")
    cache.clear()
    monkeypatch.setenv("EMBFORGE_JIT", "0")
    monkeypatch.setenv("CXX", "no-such-compiler")
    spec = ef.CollectionSpec.from_toml(tiny)
    module = ef.EmbeddingCollection(spec, kernels=tmp_path / "kernels")
    with torch.no_grad():
        out = module(torch.tensor([1, 2]), lengths=torch.tensor([2]))
        torch.testing.assert_close(out[0], (module.weight("t")[1] + module.weight("t")[2]) / 2)
        with pytest.raises(ef.MissingKernelError, match=r"forward_cpu_.*_int32_.*embforge gen"):
            module(torch.tensor([1, 2], dtype=torch.int32), lengths=torch.tensor([2], dtype=torch.int32))


def test_emitted_kernels_train_without_a_compiler(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_cache: Path
) -> None:
    import torch

    import embforge as ef

    run("gen", tiny, "--target", "cpu", "--train", "sgd+l2", "--accumulate", "--out", tmp_path / "kernels")
    cache.clear()
    monkeypatch.setenv("EMBFORGE_JIT", "0")
    monkeypatch.setenv("CXX", "no-such-compiler")
    spec, batch = ef.CollectionSpec.from_toml(tiny), (torch.tensor([1, 2]), torch.tensor([0, 2]))
    for accumulate in (False, True):
        optimizer = ef.optim.SGD(lr=1.0, weight_decay=0.5)
        module = ef.EmbeddingCollection(spec, optimizer=optimizer, accumulate=accumulate, kernels=tmp_path / "kernels")
        before = module.weight("t").clone()
        module(*batch).sum().backward()
        module.step()
        torch.testing.assert_close(module.weight("t")[1:3], before[1:3] * 0.5 - 0.5)
    adam = ef.EmbeddingCollection(spec, optimizer=ef.optim.Adam(), kernels=tmp_path / "kernels")
    with pytest.raises(ef.MissingKernelError, match=r"backward_adam_cpu_.*embforge gen SPEC .*--train adam"):
        adam(*batch).sum().backward()


OWN_RULE = {
    "rule": {"name": "own", "lines": ["w -= lr * beta * g"], "states": [], "hyper": ["beta"]},
    "rounding": "nearest",
}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("rule/lines", [5], "5 among lines or hyper numbers"),
        ("rule/lines", ["w -= exp(g)"], "line 1 .*same bits"),
        ("rule/lines", "w -= g", "'lines' is 'w -= g'; it must be a list"),
        ("rule/states", ["m"], "'name' is missing in 'm'; it must be a text"),
        ("rule/states", [{"name": "m", "extent": "all"}], "state 'm' is per 'all'"),
        ("rule/hyper", {"beta": 1}, "'hyper' is .*it must be a list"),
        ("rule/name", None, "'name' is None; it must be a text"),
        ("rule", None, "'rule' is None; it must be an object"),
        ("rounding", "up", "rounding='up' is not allowed; allowed: stochastic, nearest"),
        ("hyper_values", {"gamma": 1}, "hyper_values has 'gamma'; the rule's are beta"),
        ("hyper_values", [1], "hyper_values=.*an object of numbers"),
    ],
)
def test_a_wrong_rule_file_is_refused_with_its_mistake(
    tiny: str, tmp_path: Path, path: str, value: object, message: str
) -> None:
    data: Any = json.loads(json.dumps(OWN_RULE))
    *parents, last = path.split("/")
    for parent in parents:
        data[parent][last] = value
    if not parents:
        data[last] = value
    file = tmp_path / "own.json"
    file.write_text(json.dumps(data))
    assert re.search(rf"{file}: .*{message}", run("verify", tiny, "--train", file, code=2).stderr)


def test_verify_trains_by_a_rule_file_and_by_none(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(json.dumps(OWN_RULE | {"hyper_values": {"beta": 0.5}}))
    words = ("--on", "reference", "--quick", "--train", str(tmp_path / "own.json"), "--train", "none")
    rows = [row for row in run_json("verify", tiny, *words)["checks"] if "training" in row["check"]]
    assert [row["passed"] for row in rows] == [True, True]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gen", "mixed", "--target", "cpu", "--train", "lamb+decoupled"], r"lamb\+decoupled.*use lamb\+l2"),
        (["gen", "mixed", "--target", "cpu", "--accumulate"], "--accumulate works with --train only"),
        (["gen", "nowhere.toml", "--target", "cpu"], "nowhere.toml.*dlrm, llm_vocab, mixed"),
        (["gen", "mixed", "--target", "cpu", "--arch", "sse9"], "sse9.*avx512"),
        (["gen", "mixed", "--target", "cuda", "--arch", "sm_10"], "sm_10.*sm_75"),
        (["gen", "mixed", "--target", "cpu", "--param", "nothing=1"], "nothing.*prefetch_bytes"),
        (["gen", "mixed", "--target", "cpu", "--param", "prefetch_bytes=3"], "prefetch_bytes=3.*allowed: 0, "),
        (["gen", "mixed", "--target", "cpu", "--param", "prefetch_bytes"], "FIELD=VALUE"),
        (["gen", "mixed", "--target", "tpu"], "tpu"),
        (["bench", "mixed", "--workload", "often"], "often"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_one_sentence(tmp_path: Path, words: list[str], message: str) -> None:
    out = ["--out", str(tmp_path / "out")] if words[0] == "gen" else []
    result = run(*words, *out, code=2)
    assert result.stdout == "" and "Traceback" not in result.stderr
    assert re.search(message, result.stderr)
    assert not (tmp_path / "out").exists()


def test_wrong_spec_is_exit_code_2_with_and_without_json(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(TINY.replace("embedding_dim = 4", "embedding_dim = 0"))
    result = run("verify", path, code=2)
    assert result.stderr.count("\n") == 1 and "embedding_dim=0" in result.stderr
    answer = run_json("verify", path, code=2)
    assert answer["error"]["type"] == "SpecError" and "embedding_dim=0" in answer["error"]["message"]


def test_missing_compiler_is_exit_code_3(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = run("gen", tiny, "--target", "cpu", "--out", tmp_path / "out", code=3)
    assert "no-such-compiler" in result.stderr and "Traceback" not in result.stderr


def test_verify_passes_and_reports(tiny: str) -> None:
    answer = run_json("verify", tiny, "--quick")
    assert answer["passed"] and answer["on"] == "cpu" and len(answer["checks"]) > 1
    assert "passed" in run("verify", tiny, "--param", "prefetch_bytes=0").stdout


def test_verify_that_fails_is_exit_code_1(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [VerifyRow("fine", 1, 0.0, True), VerifyRow("bits", 3, 0.5, False, "feature 'f', sample 2: 1.0 is not 1.5")]
    report = VerifyReport("cpu", "avx2", 2, 0, tuple(rows))
    monkeypatch.setattr("embforge.verify.lookups.verify", lambda *args, **kwargs: report)
    result = run("verify", tiny, code=1)
    assert "FAILED" in result.stdout and "feature 'f', sample 2" in result.stdout
    assert run_json("verify", tiny, code=1)["passed"] is False


def test_bench_times_embforge_and_torch(tiny: str) -> None:
    words = ("bench", tiny, "--against", "torch", "--workload", "zipf:1.05,len=fixed:3,batch=8", "--seconds", "0.2")
    answer = run_json(*words)
    assert {timing["name"] for timing in answer["timings"]} >= {"embforge", "torch"}
    assert answer["disagreeing"] == []


@pytest.mark.parametrize(("others", "shown"), [(0.0, True), (1.5, False)])
def test_a_disturbed_run_shows_no_ratio(tiny: str, monkeypatch: pytest.MonkeyPatch, others: float, shown: bool) -> None:
    from embforge.tuner.bench import forward as tuner_bench
    from embforge.tuner.bench.report import BenchReport, Timing
    from embforge.tuner.measure.paired import Ratio

    report = BenchReport(
        spec="tiny",
        workload="uniform",
        on="cpu",
        batches=4,
        ids=8,
        row_bytes=128,
        table_bytes=800,
        timings=tuple(Timing(name, "", 2.0, 1.0, 3.0, 1, (2.0,)) for name in ("embforge", "torch")),
        ratios={"torch": Ratio(26.61, 26.0, 27.0)},
        limit_share=None,
        differences={"torch": 0.0},
        disagreeing=(),
        skipped={},
        others=others,
        machine={},
    )
    monkeypatch.setattr(tuner_bench, "bench_spec", lambda *args, **kwargs: report)
    text = run("bench", tiny).stdout
    assert ("26.61" in text) == shown
    assert ("cannot be compared" in text) == (not shown)


def test_env_has_versions_devices_and_the_cache_directory() -> None:
    facts = run_json("env")
    assert facts["packages"]["torch"] and facts["system"]["isa"] and facts["gpus"]["count"] >= 0
    assert facts["cache"]["directory"] == os.environ["EMBFORGE_CACHE_DIR"]
    assert "packages" in run("env").stdout


def unfolded(text: str) -> str:
    """Printed text without spaces and line breaks. Asserts that no line is cut or wider than 80 columns."""
    assert all(len(line) <= 80 for line in text.splitlines()) and "…" not in text
    return "".join(text.split())


def test_nothing_is_lost_on_a_narrow_screen(
    tiny: str, tmp_path: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("EMBFORGE_KERNELS", f"{tmp_path}/[bold]/{'kernels' * 20}")
    long = Path(tiny).with_name("long.toml")
    long.write_text(f'name = "{"collection" * 8}"\n{TINY}')
    run("gen", long, "--target", "cpu", "--arch", "generic", "--out", tmp_path / "out")
    (kernel,) = run_json("cache", "ls")["kernels"]
    shown = unfolded(run("cache", "ls").stdout)
    assert all(text in shown for text in (kernel["uri"], kernel["key"], str(fresh_cache)))
    shown = unfolded(run("env").stdout)
    for section in run_json("env").values():
        for label, value in section.items():
            assert label in shown and (value is None or "".join(str(value).split()) in shown)
    assert str(fresh_cache) in unfolded(run("cache", "clear").stdout)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("gen", "--target", "cuda", "--out", "out", "--arch", "sm90"), "sm_90"),
        (("gen", "--target", "cuda", "--out", "out", "--arch", "9.0"), "sm_90"),
        (("gen", "--target", "simt", "--out", "out", "--arch", "compute_100"), "sm_100"),
        (("gen", "--target", "cpu", "--out", "out", "--arch", "avx-512"), "avx512"),
        (("verify", "--on", "simt", "--arch", "SM_80"), "sm_80"),
        (("tune", "--on", "cuda", "--list", "--arch", "sm75"), "sm_75"),
        (("tune", "--on", "cuda", "--static", "--arch", "sm75"), "sm_75"),
        (("plan", "--topology", "labtop"), "laptop"),
        (("plan", "--topology", "h100"), "h100x8"),
        (("plan", "--topology", "locl"), "local"),
        (("plan", "--topology", "clutser.toml"), "cluster.toml"),
        (("bench", "--against", "torch,fbgem"), "fbgemm"),
        (("bench", "--train", "adagrab"), "adagrad"),
    ],
)
def test_a_misspelt_value_of_an_option_gets_a_suggestion(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], meant: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.toml").write_text("")
    assert f"(did you mean '{meant}'?)" in " ".join(run(words[0], tiny, *words[1:], code=2).stderr.split())


def test_cache_lists_and_clears(tiny: str, tmp_path: Path, fresh_cache: Path) -> None:
    assert run_json("cache", "ls")["kernels"] == []
    run("gen", tiny, "--target", "cpu", "--arch", "generic", "--out", tmp_path / "out")
    (kernel,) = run_json("cache", "ls")["kernels"]
    assert kernel["uri"].startswith("forward_cpu_generic_tiny") and kernel["bytes"] > 0
    assert kernel["uri"] in run("cache", "ls").stdout
    assert run_json("cache", "clear")["freed_bytes"] > kernel["bytes"]
    assert run_json("cache", "ls")["kernels"] == []


def test_a_misspelt_example_gets_a_suggestion_and_a_directory_is_no_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = run("gen", "dlmr", "--target", "cpu", "--out", "out", code=2).stderr
    assert "dlmr: no such spec file, and no such example (did you mean 'dlrm'?); examples: dlrm, " in message
    Path("shop.toml").write_text(TINY)
    assert "(did you mean 'shop.toml'?)" in run("gen", "shpo.toml", "--target", "cpu", "--out", "out", code=2).stderr
    Path("llm_vocab").mkdir()
    assert load_spec("llm_vocab").name == "llm_vocab"


def test_schema_prints_the_json_schema_of_specs() -> None:
    assert json.loads(run("schema").stdout) == run_json("schema") == json_schema()


def test_examples_have_the_tables_that_their_descriptions_promise() -> None:
    dlrm, vocab, mixed = (load_spec(name) for name in ("dlrm", "llm_vocab", "mixed"))
    assert len(dlrm.tables) == 26 and max(t.num_embeddings for t in dlrm.tables) == 1_000_000
    assert {t.embedding_dim for t in dlrm.tables} == {8, 16, 32, 64, 128}
    assert {f.pooling for f in dlrm.features} >= {"sum", "mean"} and max(f.hotness or 0 for f in dlrm.features) > 1
    assert [(t.num_embeddings, t.embedding_dim, t.dtype) for t in vocab.tables] == [(128256, 4096, "bf16")]
    assert {t.embedding_dim for t in mixed.tables} == {1, 3, 7, 16, 33, 64, 128, 1000, 4096}
    assert {t.dtype for t in mixed.tables} == {"fp32", "fp16", "bf16", "fp8_e4m3"}
    assert {f.kind.result for f in mixed.features} == set(RESULTS)
    assert any(f.weighted for f in mixed.features) and any(f.padding_idx is not None for f in mixed.features)
    assert len({f.table for f in mixed.features}) < len(mixed.features)


def test_param_values_are_read_with_and_without_spaces_and_brackets() -> None:
    for text in ("prefetch_level=1", "prefetch_level = 1"):
        assert params_of("cpu", [text]) == CpuParams(prefetch_level=1)
    expected = CudaParams(pipeline=(8, 2), cache_hint="default")
    assert params_of("cuda", ["pipeline=(8,2)", "cache_hint=default"]) == expected
    with pytest.raises(PlanError, match="prefetch_level='maybe'"):
        params_of("cpu", ["prefetch_level=maybe"])


def test_verify_without_a_gpu_is_exit_code_3(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("verify", tiny, "--on", "cuda", code=3)
    assert result.stderr.count("\n") == 1 and "use --on simt" in result.stderr
    assert run_json("verify", tiny, "--on", "cuda", code=3)["error"]["type"] == "ToolchainError"


def test_gen_ignores_the_kernels_that_it_replaces(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other commands name `gen` as the remedy, so no variable of the environment may keep it from working."""
    out = tmp_path / "kernels"
    words = ("gen", tiny, "--target", "cpu", "--arch", "generic", "--out", out)
    monkeypatch.setenv("EMBFORGE_KERNELS", str(out))
    monkeypatch.setenv("EMBFORGE_JIT", "0")
    run(*words)
    (kernel,) = json.loads((out / "manifest.json").read_text())["kernels"]
    (out / kernel["binary"]).write_bytes(b"damaged")
    run(*words)
    assert cache.sha256_of((out / kernel["binary"]).read_bytes()) == kernel["binary_sha256"]


@pytest.mark.parametrize("text", ["[]", "nonsense", '{"schema": 1}', '{"schema": 0, "kernels": []}'])
def test_gen_replaces_a_damaged_manifest(tiny: str, tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    words = ("gen", tiny, "--target", "cpu", "--arch", "avx2", "--sources-only", "--out", tmp_path)
    assert "wrote a new manifest, because" in run(*words).stderr
    assert len(json.loads((tmp_path / "manifest.json").read_text())["kernels"]) == 1
    assert run(*words).stderr == ""


def test_a_file_that_cannot_be_written_is_exit_code_3(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = ("gen", tiny, "--target", "cpu", "--arch", "avx2", "--sources-only", "--out", tmp_path / "file" / "out")
    result = run(*words, code=3)
    assert result.stderr.count("\n") == 1 and str(tmp_path / "file") in result.stderr
    assert run_json(*words, code=3)["error"]["type"] == "NotADirectoryError"


def test_unknown_peer_is_exit_code_2_with_and_without_json(tiny: str) -> None:
    words = ("bench", tiny, "--against", "torch,bogus")
    assert re.search("'bogus' is not known; allowed: torch, fbgemm", run(*words, code=2).stderr)
    assert "'bogus'" in run_json(*words, code=2)["error"]["message"]


@pytest.mark.parametrize("command", ["ls", "clear"])
def test_a_cache_directory_that_is_a_file_is_an_error_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EMBFORGE_CACHE_DIR", str(tmp_path / "file"))
    assert f"{tmp_path / 'file'} is not a directory" in run("cache", command, code=3).stderr


def test_json_has_no_infinities(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": (float("inf"), 1.5), "b": [{"c": float("nan")}]})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": [{"c": None}]}
