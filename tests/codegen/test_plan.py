"""Plans: their text rebuilds them, their URI tells them apart, and bad fields are named."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import examples, specs

from embforge.codegen.errors import PlanError
from embforge.codegen.kernel import KERNELS, arguments_of
from embforge.codegen.params import CpuParams, CudaParams, params_from, params_type
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.target import BACKENDS

SPEC = CollectionSpec([TableSpec("t", 10, 4)], [FeatureSpec("f", "t")], name="tiny")
PLAN = Plan("forward", "cpu", "avx2", "int64", SPEC, CpuParams())


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    target = draw(st.sampled_from(["cpu", "cuda", "simt"]))
    kind = params_type(target)
    params = kind(**{f.name: draw(st.sampled_from(f.metadata["choices"])) for f in fields(kind)})
    arch = "avx512" if target == "cpu" else "sm_90"
    return Plan("forward", target, arch, draw(st.sampled_from(["int32", "int64"])), draw(specs()), params)


@given(plan=plans())
@examples(100)
def test_text_rebuilds_the_plan(plan: Plan) -> None:
    again = Plan.from_text(plan.text)
    assert again == plan and again.text == plan.text and again.uri == plan.uri


def test_text_rebuilds_the_plan_in_a_fresh_process() -> None:
    """Not even the hash seed matters."""
    code = "import sys; from embforge.codegen.plan import Plan; print(Plan.from_text(sys.stdin.read()).uri)"
    run = subprocess.run([sys.executable, "-c", code], input=PLAN.text, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == PLAN.uri


def test_uri_is_a_readable_identifier() -> None:
    assert PLAN.uri.startswith("forward_cpu_avx2_tiny_1t_1f_int64_")
    assert PLAN.uri.isidentifier()
    named = replace(SPEC, name="a.b-c")
    assert replace(PLAN, spec=named).uri.isidentifier()


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAN, arch="avx512"),
        replace(PLAN, id_dtype="int32"),
        replace(PLAN, params=CpuParams(grain_bytes=16384)),
        replace(PLAN, spec=replace(SPEC, output_dtype="fp16")),
        replace(PLAN, spec=replace(SPEC, name="other")),
        replace(PLAN, spec=replace(SPEC, tables=(TableSpec("t", 11, 4),))),
        replace(PLAN, spec=replace(SPEC, features=(FeatureSpec("f", "t", "mean"),))),
    ],
)
def test_uri_differs_when_anything_does(other: Plan) -> None:
    assert other.uri != PLAN.uri and other.text != PLAN.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(op="sideways"), "plan field op='sideways' is not known; allowed: forward"),
        (dict(target="tpu"), "plan field target='tpu' is not known; allowed: cpu, cuda, simt"),
        (dict(id_dtype="int8"), "plan field id_dtype='int8' is not known; allowed: int32, int64"),
        (dict(params=CudaParams()), "plan field params=.* does not fit target 'cpu'"),
    ],
)
def test_a_bad_field_of_a_plan_is_an_error_that_names_it(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(PLAN, **changes)


@pytest.mark.parametrize("text", ["", "{}", "[1]", "nonsense"])
def test_text_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not a plan's canonical text"):
        Plan.from_text(text)


def test_text_of_another_schema_is_refused() -> None:
    data = json.loads(PLAN.text) | {"schema": 0}
    with pytest.raises(PlanError, match="plan text of schema 0"):
        Plan.from_text(json.dumps(data))


@pytest.mark.parametrize("kind", [params_type(name) for name in BACKENDS])
def test_defaults_are_among_the_choices_and_others_are_refused(kind: type[Any]) -> None:
    for field in fields(kind):
        assert field.default in field.metadata["choices"]
        assert len(set(field.metadata["choices"])) == len(field.metadata["choices"]) > 1
        assert field.metadata["doc"]
        with pytest.raises(PlanError, match=f"plan field {field.name}='odd' is not allowed; allowed: "):
            kind(**{field.name: "odd"})


def test_simt_is_called_as_cuda_is() -> None:
    assert arguments_of("simt") == arguments_of("cuda") and params_type("simt") is params_type("cuda")
    simt = Plan("forward", "simt", "sm_90", "int64", SPEC, CudaParams())
    assert simt.symbol == replace(simt, target="cuda").uri != simt.uri
    assert PLAN.symbol == PLAN.uri


def test_an_unknown_param_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(PlanError, match=r"plan field 'speed' does not exist for target cpu; allowed: .*grain_bytes"):
        params_from("cpu", {"speed": 9})


@pytest.mark.parametrize("target", ["cpu", "cuda", "simt"])
def test_arguments_are_those_of_the_op_in_its_order(target: str) -> None:
    names = [a.name for a in arguments_of(target)]
    assert names == [a.name for a in KERNELS["forward"].arguments if a.name in names]


@pytest.mark.parametrize(
    ("target", "field", "value"),
    [
        ("cpu", "prefetch_bytes", 4096.0),
        ("cpu", "prefetch_level", True),
        ("cuda", "pipeline", (8.0, 2)),
        ("cuda", "pipeline", (8, 2, 1)),
    ],
)
def test_a_number_of_another_type_is_refused(target: str, field: str, value: Any) -> None:
    """In Python 1.0 equals the choice 1, but it would appear as 1.0 in generated code."""
    with pytest.raises(PlanError, match=f"plan field {field}="):
        params_type(target)(**{field: value})
