"""The facts about targets: every folder that knows targets has one table, keyed by a target's name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from embforge.backends import DEVICES_OF, USUAL, BackendName, arch_of, backend_on, device_of
from embforge.codegen.build import source_of
from embforge.codegen.errors import PlanError, ToolchainError
from embforge.codegen.kernel import KERNELS, OPS, kernels_of, records_of
from embforge.codegen.params import PARAMS, params_from, params_type
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.stages import STAGES, StagePlan
from embforge.codegen.target import BACKENDS, TARGETS, TUNED, target_named
from embforge.codegen.targets import TOOLCHAINS, check_plan, toolchain_of
from embforge.codegen.tuned.document import TARGETS as RECORDED
from embforge.launch.cpu.packing import packer_of
from embforge.launch.launchers import LAUNCHERS, launchers_of
from embforge.tuner.search.targets import OPS as TUNED_OPS
from embforge.tuner.search.targets import TUNINGS

SPEC = CollectionSpec((TableSpec("t", 10, 4),), (FeatureSpec("f", "t"),), name="tiny")
FORMATS = ("int64", "int32", "fp32", "bf16", "fp16")


def test_every_table_has_every_target() -> None:
    assert list(TOOLCHAINS) == list(TARGETS) == list(TUNINGS)
    assert list(PARAMS) == list(LAUNCHERS) == list(DEVICES_OF) == list(BACKENDS) == [*TARGETS, "reference"]
    assert set(get_args(BackendName)) == set(BACKENDS)
    assert set(RECORDED) == set(TUNED) <= set(TARGETS)
    assert set(USUAL) == {device for target in TARGETS.values() for device in target.devices}


def test_every_target_has_every_kernel() -> None:
    for name in TARGETS:
        assert set(toolchain_of(name).sources) == {*OPS, StagePlan.op}
        assert set(TUNINGS[name].rules) == set(TUNED_OPS)
    for name in BACKENDS:
        assert set(launchers_of(name).kernels) == set(OPS)


def test_a_misspelt_target_is_an_error_everywhere() -> None:
    said = r"target 'cudaa' is not known; allowed: cpu, cuda, simt, reference"
    for ask in (target_named, toolchain_of, launchers_of, params_type, device_of):
        with pytest.raises(PlanError, match=said):
            ask("cudaa")
    with pytest.raises(PlanError, match=said):
        params_from("cudaa", {})
    with pytest.raises(PlanError, match=r"plan field target='cudaa' is not known; allowed: cpu, cuda, simt, reference"):
        Plan("forward", "cudaa", "sm_90", "int64", SPEC, params_type("cuda")())
    with pytest.raises(PlanError, match=r"stage plan field target='cudaa' is not known; allowed: cpu, cuda"):
        StagePlan("cudaa", "sm_90", *FORMATS)
    for wrong in ((), ("sum",), ("max", "max")):
        with pytest.raises(
            PlanError, match=r"stage plan field selecting=\(.*\) is not known; allowed: at least one of max"
        ):
            StagePlan("cuda", "sm_90", *FORMATS, wrong)
    with pytest.raises(ToolchainError, match=r"target 'reference' has no kernels to compile; allowed: cpu, cuda, simt"):
        toolchain_of("reference")


def test_facts_agree_with_each_other() -> None:
    for target in TARGETS.values():
        twin = target_named(target.text_of)
        assert not twin.emulates and twin.source_suffix == target.source_suffix and twin.split == target.split
        assert params_type(target.name) is params_type(twin.name)
        assert target.is_generated and target.binary_suffix and target.split
    reference = BACKENDS["reference"]
    assert not (reference.is_generated or reference.emulates or reference.needs_gpu or reference.is_native)
    check_plan(Plan("forward", "reference", "torch", "int64", SPEC, params_type("reference")()))


def test_devices_and_archs_follow_from_the_facts() -> None:
    cpu = device_of("cpu")
    assert [backend_on(cpu), backend_on(device_of("cuda"))] == ["cpu", "cuda"]
    assert [arch_of(name, cpu) for name in ("simt", "reference")] == ["sm_90", "torch"]


def test_a_plan_of_another_kind_is_refused_by_a_source() -> None:
    with pytest.raises(PlanError, match=r"is not a Plan, as plans of op 'forward' are"):
        toolchain_of("cpu").sources["forward"].facts(_Odd("cpu", "avx2", *FORMATS))


class _Odd(StagePlan):
    op = "forward"


def test_a_packer_takes_arguments_by_their_names() -> None:
    pack = packer_of("cpu", "forward")
    names = [argument.name for argument in KERNELS["forward"].on("cpu")]
    words = pack(**{name: number for number, name in enumerate(names)})
    assert list(memoryview(words).cast("q")) == list(range(len(names)))
    with pytest.raises(TypeError, match="status"):
        pack(**dict.fromkeys(names, 0), status=0)
    with pytest.raises(TypeError, match="threads"):
        pack(**dict.fromkeys(names[:-1], 0))


def test_a_library_of_stages_has_all_of_them() -> None:
    assert kernels_of("stages") == tuple(STAGES.values())
    assert [kernel.name for op in OPS for kernel in kernels_of(op)] == list(OPS)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_generated_code_names_the_words_of_records(target: str) -> None:
    """An enum for each record, and no other number of words than its."""
    arch = "generic" if target == "cpu" else "sm_90"
    plans = [Plan("forward", target, arch, "int64", SPEC, params_type(target)()), StagePlan(target, arch, *FORMATS)]
    for plan in plans:
        text = source_of(plan)
        arguments = [argument for kernel in kernels_of(plan.op) for argument in kernel.on(target)]
        for record in records_of(arguments):
            words = ", ".join(f"{record.name}_{word.upper()}" for word in record.words)
            assert f"enum {{ {words}, {record.name}_WORDS }};" in text


def test_templates_count_no_words() -> None:
    """Words of arrays of records are named, never counted."""
    arrays = r"metadata|status|mistake|hyper|counters|table_words\(\w+, \w+\)|read_only\(words"
    counted = re.compile(rf"({arrays}) *(\[|\+ )\d")
    for path in (Path(__file__).parents[2] / "templates").rglob("*.j2"):
        assert not counted.search(path.read_text(encoding="utf-8")), path
