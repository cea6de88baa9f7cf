"""Kernels that `embforge gen` emitted are found by what a spec means, whatever the names in it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conformance.training import WITH_ROWS, draw

import embforge as ef
from embforge.cli.common import load_spec
from embforge.cli.main import main
from embforge.codegen.build import build, code_of, source_of
from embforge.codegen.manifest import find_kernel, kernel_record, write_manifest
from embforge.codegen.params import params_type
from embforge.codegen.plan import Plan
from embforge.codegen.plans import training_plans, update_named
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.targets.cuda.arch import DEFAULT_ARCH


def renamed(spec: CollectionSpec) -> CollectionSpec:
    """The same collection with other names, whose alphabetical order is the reverse of the old names' order."""
    tables = {table.name: f"z{len(spec.tables) - place}" for place, table in enumerate(spec.tables)}
    features = [
        replace(f, name=f"y{len(spec.features) - place}", table=tables[f.table])
        for place, f in enumerate(spec.features)
    ]
    return CollectionSpec([replace(t, name=tables[t.name]) for t in spec.tables], features, spec.output_dtype, "other")


def plans_of(spec: CollectionSpec, target: str) -> list[Plan]:
    """Everything that training by Adam may run."""
    arch = "avx2" if target == "cpu" else DEFAULT_ARCH
    params = params_type(target)()
    return list(training_plans(spec, target, arch, "int64", params, None, update_named("adam"), True).values())


def code(plan: Plan) -> str:
    """The source without comments, its symbol replaced by a word that does not depend on the plan."""
    return re.sub(r"\s*//[^\n]*", "", source_of(plan)).replace(plan.symbol, "symbol")


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_no_code_depends_on_a_name(target: str) -> None:
    mixed = load_spec("mixed")
    for plan, other in zip(plans_of(mixed, target), plans_of(renamed(mixed), target), strict=True):
        assert plan.uri != other.uri
        assert code(plan) == code(other) == code(plan.nameless)
        assert (plan.nameless, code_of(plan)) == (other.nameless, code_of(other))
        assert Plan.from_text(plan.text) == plan


def test_only_what_changes_code_changes_the_nameless_plan() -> None:
    spec = load_spec("mixed")
    (plan, *_) = plans_of(spec, "cpu")
    longer = replace(spec, features=[replace(f, hotness=7) if f.pooling != "concat" else f for f in spec.features])
    assert replace(plan, spec=longer).nameless == plan.nameless
    wider = replace(spec, tables=[replace(t, embedding_dim=t.embedding_dim + 1) for t in spec.tables])
    assert replace(plan, spec=wider).nameless != plan.nameless


@pytest.fixture(scope="module", params=["cpu", "simt"])
def emitted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A target, and a directory of what training WITH_ROWS takes on it."""
    folder = tmp_path_factory.mktemp("emitted")
    (folder / "spec.toml").write_text(WITH_ROWS.to_toml(), encoding="utf-8")
    rules = ["--train", "adam"] if request.param == "cpu" else []
    words = ["gen", str(folder / "spec.toml"), "--target", request.param, *rules, "--out", str(folder / "kernels")]
    assert CliRunner().invoke(main, words).exit_code == 0
    return request.param, folder / "kernels"


def module_of(spec: CollectionSpec, backend: Any, kernels: Path | None, train: bool) -> ef.EmbeddingCollection:
    torch.manual_seed(7)
    optimizer = ef.optim.Adam(lr=0.1) if train else None
    module = ef.EmbeddingCollection(spec, backend=backend, optimizer=optimizer, kernels=kernels)
    if train:
        module.seed(5)
    return module


def test_kernels_are_found_under_other_names(emitted: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    backend, kernels = emitted
    trains = backend == "cpu"
    batch = draw(spec=WITH_ROWS)
    truth = module_of(WITH_ROWS, "reference", None, trains)
    monkeypatch.setenv("EMBFORGE_JIT", "0")
    monkeypatch.setenv("EMBFORGE_CACHE_DIR", str(kernels / "no-cache"))
    module = module_of(renamed(WITH_ROWS), backend, kernels, trains)
    rows = {theirs.name: ours.name for theirs, ours in zip(truth.spec.tables, module.spec.tables, strict=True)}
    for _ in range(2 if trains else 1):
        with torch.set_grad_enabled(trains):
            results = [one.forward_dict(*batch) for one in (truth, module)]
        for ours, theirs in zip(*(result.values() for result in results), strict=True):
            assert torch.equal(ours, theirs)
        if trains:
            for result in results:
                sum(tensor.float().sum() for tensor in result.values()).backward()  # type: ignore[union-attr]
    for name, other in rows.items():
        assert torch.equal(truth.weight(name), module.weight(other))
    bad = (torch.full_like(batch[0], 10**6), *batch[1:])
    with pytest.raises(Exception, match="feature 'y"), torch.no_grad():  # its own name, not the emitted kernel's
        module.forward_dict(*bad)


def test_of_two_emitted_kernels_that_fit_the_one_with_the_same_names_is_taken(tmp_path: Path) -> None:
    spec = load_spec("llm_vocab")
    plan = Plan("forward", "cpu", "avx2", "int64", spec, params_type("cpu")())
    other = replace(plan, spec=renamed(spec))
    (tmp_path / "k.so").write_bytes(b"binary")
    write_manifest(
        tmp_path, [kernel_record(one, code_of(one), "", "k.cpp", b"binary", "k.so", []) for one in (other, plan)]
    )
    found = find_kernel(tmp_path, plan, code_of(plan))
    assert found is not None
    assert found["uri"] == plan.uri
    assert build(plan, kernels=tmp_path).plan == plan
    third = replace(plan, spec=replace(spec, name="third"))
    built = build(third, kernels=tmp_path)
    first = min(plan.symbol, other.symbol)  # a manifest is sorted
    assert (built.plan.symbol, built.plan.uri, built.plan.text) == (first, third.uri, third.text)
