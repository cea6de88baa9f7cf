"""generated/ holds what `embforge gen` emits today. After a wanted change: `make golden`, and read the diff."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from embforge.cli.common import plans_for, training_plans_for
from embforge.codegen.build import code_of, source_of
from embforge.codegen.cache import sha256_of
from embforge.codegen.manifest import kernel_record
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.target import target_named

ROOT = Path(__file__).parents[2]
SPECS = ("dlrm", "llm_vocab", "mixed")
KERNELS = (("cuda", "sm_90"), ("cuda", "sm_100"), ("cpu", "avx512"), ("cpu", "avx2"), ("cpu", "neon"))
TRAINED = {"dlrm": "rowwise_adagrad", "llm_vocab": "adam", "mixed": "sgd+l2"}
TRAINED_ON = (("cuda", "sm_90"), ("cpu", "avx512"))


every_kernel = pytest.mark.parametrize(
    ("spec", "kernel"),
    list(product(SPECS, KERNELS)),
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)


def plan_of(spec: str, target: str, arch: str) -> Plan:
    (plan,) = plans_for(CollectionSpec.from_toml(ROOT / f"examples/specs/{spec}.toml"), target, [arch], ["int64"], [])
    return plan


def training_plans_of(spec: str) -> list[Plan]:
    read = CollectionSpec.from_toml(ROOT / f"examples/specs/{spec}.toml")
    return [
        plan
        for target, arch in TRAINED_ON
        for plan in training_plans_for(read, target, [arch], ["int64"], [], [TRAINED[spec]], False)
        if plan.op != "forward"
    ]


@every_kernel
def test_generated_source_is_current(spec: str, kernel: tuple[str, str]) -> None:
    check_source(spec, plan_of(spec, *kernel))


@pytest.mark.parametrize("spec", SPECS)
def test_generated_training_source_is_current(spec: str) -> None:
    plans = training_plans_of(spec)
    weighted = any(feature.weighted for feature in plans[0].spec.features)
    assert {plan.op for plan in plans} >= {"backward", *(("weight_gradient",) if weighted else ())}
    for plan in plans:
        check_source(spec, plan)


def check_source(spec: str, plan: Plan) -> None:
    path = ROOT / "generated" / spec / f"{plan.uri}{target_named(plan.target).source_suffix}"
    assert path.exists(), f"{path.relative_to(ROOT)} is missing: its plan changed; run `make golden`"
    assert source_of(plan) == path.read_text(encoding="utf-8"), "the source changed; run `make golden`, read the diff"


@pytest.mark.parametrize("spec", SPECS)
def test_manifest_lists_exactly_the_files(spec: str) -> None:
    directory = ROOT / "generated" / spec
    manifest = json.loads((directory / "manifest.json").read_text())
    expected = {}
    for plan in [*(plan_of(spec, *kernel) for kernel in KERNELS), *training_plans_of(spec)]:
        source = f"{plan.uri}{target_named(plan.target).source_suffix}"
        record = kernel_record(plan, code_of(plan), source_of(plan), source, None, None, [])
        expected[plan.uri] = json.loads(json.dumps(record))
    assert {record["uri"]: record for record in manifest["kernels"]} == expected
    on_disk = {path.name for path in directory.iterdir()} - {"manifest.json"}
    assert on_disk == {record["source"] for record in manifest["kernels"]}
    for record in manifest["kernels"]:
        assert sha256_of((directory / record["source"]).read_bytes()) == record["source_sha256"]


@every_kernel
def test_a_plan_rebuilt_from_its_text_gives_the_same_source(spec: str, kernel: tuple[str, str]) -> None:
    plan = plan_of(spec, *kernel)
    again = Plan.from_text(plan.text)
    assert (again.uri, source_of(again)) == (plan.uri, source_of(plan))
    assert plan.uri in source_of(plan)
