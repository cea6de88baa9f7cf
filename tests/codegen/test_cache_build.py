"""`build` looks in a directory of kernels, then in the cache, then compiles; EMBFORGE_JIT=0 forbids the last."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embforge.cli.common import params_of
from embforge.cli.gen import emit
from embforge.cli.main import main
from embforge.codegen import build as build_module
from embforge.codegen.build import Built, build, build_many, jit_allowed
from embforge.codegen.errors import CompileError, MissingKernelError, ToolchainError
from embforge.codegen.machine import find_compiler
from embforge.codegen.manifest import gen_command
from embforge.codegen.params import CpuBackwardParams, CpuParams, CudaBackwardParams, CudaParams
from embforge.codegen.plan import Plan
from embforge.codegen.plans import training_plans, update_named
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.targets import Source, Toolchain
from embforge.launch.building import build_here


def plan_of(dim: int = 4, **params: Any) -> Plan:
    spec = CollectionSpec((TableSpec("t", 10, dim),), (FeatureSpec("f", "t"),), name="tiny")
    return Plan("forward", "cpu", "generic", "int64", spec, CpuParams(**params))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the target's toolchain by one that counts its compilations and needs no compiler."""
    done: list[str] = []

    def compile_(plan: Plan, source: Path) -> bytes:
        done.append(plan.uri)
        if plan.layout.tables[0].table.embedding_dim == 13:
            raise CompileError(f"refused {source}")
        return b"binary of " + source.read_bytes()

    def figures(plan: Plan, binary: bytes) -> list[dict[str, Any]]:
        return [{"symbol": plan.uri, "registers": len(done), "occupancy": 0.5}]

    fake = Toolchain(
        sources={"forward": Source("cpu/forward/forward.cpp.j2", Plan, lambda plan: {})},
        compile=compile_,
        fingerprint=lambda plan: {"compiler": "fake 1.0"},
        resources=figures,
    )
    monkeypatch.setattr(build_module, "toolchain_of", lambda name: fake)
    monkeypatch.setattr(build_module, "render", lambda template, facts: "one source for all plans")
    return done


def test_compiled_once_then_from_the_cache(fresh_cache: Path, compiled: list[str]) -> None:
    first, second = build(plan_of()), build(plan_of())
    assert (first.cached, second.cached, compiled) == (False, True, [plan_of().uri])
    assert first.binary == second.binary and first.binary.read_bytes() == b"binary of one source for all plans"
    assert first.source.parent == first.binary.parent
    assert first.resources == []


def test_a_compilation_is_said_on_stderr_once_and_on_request_not_at_all(
    fresh_cache: Path, compiled: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not build_here(plan_of(), None).cached
    assert capsys.readouterr() == (
        "",
        f"embforge: compiling {plan_of().uri} (takes seconds, once: the cache keeps it) ...\n",
    )
    assert build_here(plan_of(), None).cached
    monkeypatch.setenv("EMBFORGE_QUIET", "1")
    assert not build_here(plan_of(5), None).cached
    assert capsys.readouterr() == ("", "")


def test_fingerprint_decides_the_key(fresh_cache: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = build(plan_of())
    newer = replace(build_module.toolchain_of("cpu"), fingerprint=lambda plan: {"compiler": "fake 2.0"})
    monkeypatch.setattr(build_module, "toolchain_of", lambda name: newer)
    after = build(plan_of())
    assert not after.cached and after.binary != before.binary


def test_resources_are_measured_once(fresh_cache: Path, compiled: list[str]) -> None:
    assert build(plan_of(), resources=True).resources[0]["registers"] == 1
    compiled.append("something else")
    assert build(plan_of(), resources=True).resources[0]["registers"] == 1


def test_build_many_keeps_the_order_and_reports_each(fresh_cache: Path, compiled: list[str]) -> None:
    plans = [plan_of(dim) for dim in (1, 2, 3, 4, 5)]
    seen: list[Built] = []
    built = build_many(plans, progress=seen.append, workers=3)
    assert [b.plan for b in built] == plans
    assert sorted(b.plan.uri for b in seen) == sorted(p.uri for p in plans) == sorted(compiled)


def test_build_many_raises_the_first_failure(fresh_cache: Path, compiled: list[str]) -> None:
    with pytest.raises(CompileError, match="refused"):
        build_many([plan_of(13), *(plan_of(dim) for dim in range(20, 60))], workers=1)
    assert len(compiled) < 41


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_directory_of_kernels_comes_first(
    fresh_cache: Path, tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    emit([plan_of()], tmp_path / "kernels")
    build_module.cache.clear()
    monkeypatch.setenv("EMBFORGE_JIT", "0")
    if how == "environment":
        monkeypatch.setenv("EMBFORGE_KERNELS", str(tmp_path / "kernels"))
    built = build(plan_of(), kernels=tmp_path / "kernels" if how == "argument" else None, resources=True)
    assert built.binary.parent == tmp_path / "kernels" and built.cached
    assert built.resources[0]["registers"] == 1
    assert len(compiled) == 1


def test_without_jit_the_missing_kernel_and_the_remedy_are_named(
    fresh_cache: Path, tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    emit([plan_of(5)], tmp_path / "kernels")
    monkeypatch.setenv("EMBFORGE_JIT", "0")
    with pytest.raises(MissingKernelError, match=rf"{plan_of().uri}.*EMBFORGE_JIT=0.*embforge gen .*--target cpu"):
        build(plan_of(), kernels=tmp_path / "kernels")
    with pytest.raises(MissingKernelError, match=plan_of().uri):
        build(plan_of())
    assert build(plan_of(5)).cached


@pytest.mark.parametrize(
    ("value", "allowed"), [("0", False), ("false", False), ("No", False), ("off", False), ("1", True), ("", True)]
)
def test_every_spelling_of_off_forbids_compiling(monkeypatch: pytest.MonkeyPatch, value: str, allowed: bool) -> None:
    monkeypatch.setenv("EMBFORGE_JIT", value)
    assert jit_allowed() == allowed


def test_the_command_in_the_error_makes_exactly_that_plan(tmp_path: Path) -> None:
    plan = replace(
        plan_of(), target="cuda", arch="sm_90", id_dtype="int32", params=CudaParams(pipeline=(8, 2), block=128)
    )
    command = gen_command([plan], tmp_path / "a b")
    wanted = "--target cuda --arch sm_90 --ids int32 --param block=128 --param pipeline=8,2 --out "
    assert command == f"embforge gen SPEC {wanted}'{tmp_path / 'a b'}'"
    overrides = [word for word in command.split() if "=" in word]
    assert params_of("cuda", overrides) == plan.params


def commands_for(forward: Any, backward: Any, *rules: str, accumulate: bool = False) -> list[str]:
    """The `embforge gen` commands that make the kernels of a module trained by these rules."""
    target = "cuda" if isinstance(forward, CudaParams) else "cpu"
    arch, spec, plans = "sm_90" if target == "cuda" else "generic", plan_of().spec, []
    for rule in rules:
        update = update_named(rule)
        made = training_plans(spec, target, arch, "int32", forward, backward, update, accumulate)
        plans += made.values()
    return gen_command(plans, None).split(" && ")


def test_one_command_makes_all_kernels_of_a_module() -> None:
    given = CpuParams(rows_unrolled=2), CpuBackwardParams(radix_bits=8)
    (command,) = commands_for(*given, "adam+decoupled", "sgd", accumulate=True)
    assert command == (
        "embforge gen SPEC --target cpu --arch generic --ids int32 --train adam+decoupled --train sgd --accumulate "
        "--param rows_unrolled=2 --param radix_bits=8 --out DIR"
    )
    (command,) = commands_for(CpuParams(), CpuBackwardParams(), "none")
    assert command == "embforge gen SPEC --target cpu --arch generic --ids int32 --train none --out DIR"
    (command,) = commands_for(CudaParams(block=128), CudaBackwardParams(block=128), "sgd")
    assert command.count("--param") == 1


def test_two_commands_where_one_would_set_a_field_for_both() -> None:
    first, second = commands_for(CudaParams(block=512), CudaBackwardParams(), "sgd")
    assert "--train sgd --param block=512 --out" in first and "--train sgd --out" in second


@pytest.mark.parametrize("accumulate", [False, True])
def test_without_jit_a_training_module_names_all_that_is_missing(
    fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: bool
) -> None:
    """The command in the message makes all of them, so that the next call needs no compiler."""
    import torch

    import embforge as ef

    table, path = TableSpec("t", 10, 4), tmp_path / "tiny.toml"
    spec = CollectionSpec((table, replace(table, name="u")), (FeatureSpec("f", "t"), FeatureSpec("g", "u", "max")))
    path.write_text(spec.to_toml())
    optimizer = {"t": ef.optim.Adam(), "u": ef.optim.SGD()}
    monkeypatch.setenv("EMBFORGE_JIT", "0")

    def step(kernels: Path | None = None) -> ef.EmbeddingCollection:
        module = ef.EmbeddingCollection(spec, optimizer=optimizer, accumulate=accumulate, kernels=kernels)
        values, offsets = torch.tensor([1, 2]), torch.tensor([0, 1, 2])
        module(values, offsets).sum().backward()
        module.step()
        return module

    with pytest.raises(MissingKernelError, match="and EMBFORGE_JIT=0 forbids compiling them") as raised:
        step()
    needed = ef.EmbeddingCollection(spec, optimizer=optimizer, accumulate=accumulate).plans().values()
    ops = ["forward", "forward_train", "backward_adam", "backward_sgd"] + ["reduce"] * accumulate
    uris = str(raised.value).split(" are not in ")[0].removeprefix("kernels ").split(", ")
    assert sorted(uris) == sorted({plan.uri for plan in needed}) and uris[0].startswith("forward_")
    assert all(any(uri.startswith(f"{op}_cpu_") for uri in uris) for op in ops)
    (command,) = re.findall(r"`embforge (gen .*)`", str(raised.value))
    words = command.replace("SPEC", str(path)).replace("DIR", str(tmp_path / "kernels")).split()
    assert "--train adam --train sgd" in command and ("--accumulate" in words) == accumulate
    main(words, standalone_mode=False)
    build_module.cache.clear()
    step(tmp_path / "kernels")
    other = ef.EmbeddingCollection(plan_of().spec, optimizer=ef.optim.RowwiseAdagrad())
    both = r"^kernels forward_\S+, backward_rowwise_adagrad_\S+ are not in"
    with pytest.raises(MissingKernelError, match=both), torch.no_grad():  # with an optimizer it is going to train
        other(torch.tensor([1, 2]), torch.tensor([0, 2]))


def test_explain_says_that_a_kernel_is_missing(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import embforge as ef

    module = ef.EmbeddingCollection(plan_of().spec)
    assert "compiled by the first call" in ef.explain(module)
    monkeypatch.setenv("EMBFORGE_JIT", "0")
    assert re.search(r"missing, and EMBFORGE_JIT forbids.*embforge gen .*--ids int32", ef.explain(module, "int32"))
    with pytest.raises(TypeError, match="EmbeddingCollection, got a int"):
        ef.explain(3)


def test_a_compiler_command_of_several_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = find_compiler()
    monkeypatch.setenv("CXX", f"env {plain.path}")
    several = find_compiler()
    assert several.command == (several.path, plain.path) and several.version == plain.version
    assert Path(several.path).name == "env"
    with pytest.raises(ToolchainError, match="No closing quotation"):
        find_compiler("g++ 'odd")


def test_without_jit_and_compiler_the_answer_is_the_same(
    fresh_cache: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(plan: Plan) -> dict[str, str]:
        raise ToolchainError("no C++ compiler")

    toolchain = replace(build_module.toolchain_of("cpu"), fingerprint=no_compiler)
    monkeypatch.setattr(build_module, "toolchain_of", lambda name: toolchain)
    monkeypatch.setenv("EMBFORGE_JIT", "0")
    with pytest.raises(MissingKernelError, match=plan_of().uri):
        build(plan_of())


def _flip_binary(directory: Path, record: dict[str, Any]) -> None:
    (directory / record["binary"]).write_bytes(b"something else")


def _lose_binary(directory: Path, record: dict[str, Any]) -> None:
    (directory / record["binary"]).unlink()


def _other_source(directory: Path, record: dict[str, Any]) -> None:
    record["code_sha256"] = "0" * 64


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip_binary, "not what its manifest says"),
        (_lose_binary, "cannot be read"),
        (_other_source, "generated by embforge"),
    ],
)
def test_stale_or_damaged_kernels_are_refused(
    fresh_cache: Path,
    tmp_path: Path,
    compiled: list[str],
    damage: Callable[[Path, dict[str, Any]], None],
    message: str,
) -> None:
    emit([plan_of()], tmp_path)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    damage(tmp_path, manifest["kernels"][0])
    path.write_text(json.dumps(manifest))
    with pytest.raises(MissingKernelError, match=rf"{message}.*embforge gen"):
        build(plan_of(), kernels=tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "not json",
        "[]",
        "{}",
        '{"schema": 999, "kernels": []}',
        '{"schema": 1}',
        '{"schema": 1, "embforge": "0", "kernels": [{"uri": "x"}]}',
        '{"schema": 1, "embforge": "0", "kernels": [3]}',
    ],
)
def test_directory_without_a_manifest_is_refused(
    fresh_cache: Path, tmp_path: Path, compiled: list[str], text: str | None
) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(MissingKernelError, match=r"manifest\.json.*embforge gen"):
        build(plan_of(), kernels=tmp_path)


def test_real_kernel_compiles_and_loads(fresh_cache: Path) -> None:
    built = build(plan_of())
    assert not built.cached
    assert getattr(ctypes.CDLL(str(built.binary)), built.plan.uri)
    assert build(plan_of()).cached
