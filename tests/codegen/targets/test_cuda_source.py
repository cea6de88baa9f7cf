"""What a CUDA plan renders to: geometry, sizes and text. No compiler needed."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from embforge.codegen.build import source_of
from embforge.codegen.dtypes import TABLE_DTYPES
from embforge.codegen.errors import PlanError
from embforge.codegen.kernel import MISTAKES, STATUS_WORDS, arguments_of
from embforge.codegen.params import CudaBackwardParams, CudaParams
from embforge.codegen.plan import Plan
from embforge.codegen.rules import builtin
from embforge.codegen.rules.rule import Update
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.targets.cuda.arch import ARCHS, nearest_arch, resident_threads
from embforge.codegen.targets.cuda.geometry import geometry_of, min_blocks, run_of
from embforge.codegen.targets.cuda.launch import (
    QUEUE_COUNTERS,
    QUEUE_RECORD,
    UNIT,
    ForwardLaunch,
    main_symbols,
    scratch_width,
    shape_of,
    status_size,
)
from embforge.codegen.targets.cuda.launch import launch_of as launch_of_shape
from embforge.codegen.targets.cuda.long_bags import long_geometry

ROOT = Path(__file__).parents[3]


def spec_of(dim: int = 64, dtype: str = "fp32", pooling: str = "sum", **feature: object) -> CollectionSpec:
    table = TableSpec("t", 1000, dim, dtype)  # type: ignore[arg-type]
    return CollectionSpec((table,), (FeatureSpec("f", "t", pooling, **feature),), name="one")  # type: ignore[arg-type]


def plan_of(spec: CollectionSpec, arch: str = "sm_90", id_dtype: str = "int64", **params: object) -> Plan:
    return Plan("forward", "cuda", arch, id_dtype, spec, CudaParams(**params))  # type: ignore[arg-type]


def launch_of(plan: Plan, batch: int, num_values: int) -> ForwardLaunch:
    return launch_of_shape(shape_of(plan), batch, num_values)


def mixed() -> CollectionSpec:
    return CollectionSpec.from_toml(ROOT / "examples/specs/mixed.toml")


PRIMITIVES = {
    "load_row": "ld.global.nc",
    "load_own": "ld.global.",
    "read_only": "__ldg(",
    "half_to_float": "cvt.f32.f16",
    "to_halves": "cvt.rn.f16x2.",
    "float_to_fp16": "cvt.rn.f16.f32",
    "float_to_bf16": "cvt.rn.bf16.f32",
    "unhoisted": 'asm volatile("" :',
    "dynamic_shared": "extern __shared__",
}
"""For each function that no host compiler takes: the text in it that only compilers for GPUs understand."""
FUNCTION = re.compile(
    r"__device__ __forceinline__ [\w&<>]+ (\w+)(?:<\w+>)?\(([^{]*)\) \{(.*?)\}$", re.MULTILINE | re.DOTALL
)


def primitives_and_rest(plan: Plan) -> tuple[str, str]:
    head, rest = source_of(plan).split("// ==== primitives", 1)
    primitives, rest = rest.split("// ==== end of primitives", 1)
    return primitives, head + rest


def narrow_and_mixed(arch: str) -> list[Plan]:
    """Plans with every table type and every output type."""
    return [plan_of(replace(mixed(), output_dtype=dtype), arch) for dtype in ("fp32", "fp16", "bf16")]


def backwards(arch: str) -> list[Plan]:
    """Plans of every op of a backward."""
    plans = [
        Plan("backward", "cuda", arch, "int64", mixed(), CudaBackwardParams(), Update(rule))
        for rule in (builtin.adam(), builtin.rowwise_adagrad())
    ]
    return plans + [
        Plan(op, "cuda", arch, "int64", mixed(), CudaBackwardParams()) for op in ("reduce", "weight_gradient")
    ]


@pytest.mark.parametrize("arch", ARCHS)
def test_only_the_primitives_need_a_gpu(arch: str) -> None:
    for plan in (*narrow_and_mixed(arch), *backwards(arch)):
        primitives, rest = primitives_and_rest(plan)
        assert "asm" in primitives
        assert not re.search(r"\basm\b|__ldg|extern __shared__", rest)


@pytest.mark.parametrize("arch", ARCHS)
def test_primitives_are_one_instruction_each(arch: str) -> None:
    """Runs on a CPU replace this section, so nothing in it may need a run to be tested: no arithmetic, no loops."""
    for plan in (*narrow_and_mixed(arch), *backwards(arch)):
        primitives, _ = primitives_and_rest(plan)
        found = FUNCTION.findall(primitives)
        assert len(found) == primitives.count("__device__ __forceinline__")
        for name, _, body in found:
            assert name in PRIMITIVES, f"{name}: plain CUDA C++ belongs below the section, where it is run"
            assert body.count(PRIMITIVES[name]) == 1, name
            code = re.sub(r'"(?:\\.|[^"])*"|\*reinterpret_cast<T\*>', "", body)
            code = re.sub(r"static_assert\(.*\);", "", code)
            assert not re.search(r"\b(for|while|if|switch)\b|[-+*/%&|^~?!]|<<|>>|0x", code), f"{name}: {code}"
        types = re.findall(r"^(?:struct|union|class|enum) (\w+) \{", primitives, re.MULTILINE)
        assert types == ["Vector"]
        assert not re.search(r"\b(constexpr|#define)\b", primitives)


@pytest.mark.parametrize("arch", ARCHS)
def test_conversions_that_the_architecture_lacks_are_arithmetic_in_the_text(arch: str) -> None:
    number = int(arch.removeprefix("sm_"))
    for plan in narrow_and_mixed(arch):
        primitives, rest = primitives_and_rest(plan)
        names = {name for name, _, _ in FUNCTION.findall(primitives)}
        assert ("to_halves" in names) == (number >= 89) == ("No instruction of this architecture" not in rest)
        assert "half_to_float" in names
        assert ("float_to_fp16" in names) == (plan.spec.output_dtype == "fp16")
        bf16 = plan.spec.output_dtype == "bf16"
        assert ("float_to_bf16" in names) == (bf16 and number >= 80)
        assert ("round_to_bf16(in[e])" in rest) == (bf16 and number < 80)


def test_the_executor_has_the_same_primitives() -> None:
    text = (ROOT / "templates/emulator/primitives.h").read_text("utf-8")
    assert {name for name, _, _ in FUNCTION.findall(text)} == set(PRIMITIVES)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_every_plan_field_acts_on_the_text(arch: str) -> None:
    def body(plan: Plan) -> str:  # without what names the plan, and so differs anyway
        return "\n".join(line for line in source_of(plan).replace(plan.uri, "URI").splitlines() if "Plan:" not in line)

    default = plan_of(mixed(), arch)
    for item in fields(CudaParams):
        texts = set()
        for value in item.metadata["choices"]:
            try:
                texts.add(body(plan_of(mixed(), arch, **{item.name: value})))
            except PlanError as error:
                assert item.name in str(error)
        assert len(texts) > 1, item.name
    assert body(default) == body(plan_of(mixed(), arch))


@pytest.mark.parametrize(
    ("dim", "dtype", "arch", "vector"),
    [
        (128, "fp32", "sm_90", 16),
        (128, "fp32", "sm_100", 32),
        (20, "fp32", "sm_100", 16),
        (16, "fp8_e4m3", "sm_100", 16),
        (33, "fp32", "sm_90", 16),
        (33, "bf16", "sm_90", 8),
        (7, "fp32", "sm_90", 4),
        (7, "fp16", "sm_90", 2),
        (3, "fp8_e4m3", "sm_90", 1),
        (1, "fp32", "sm_90", 4),
    ],
)
def test_vector_is_the_widest_that_rows_allow(dim: int, dtype: str, arch: str, vector: int) -> None:
    (geometry,) = geometry_of(plan_of(spec_of(dim, dtype), arch))
    assert geometry.vector == vector


@pytest.mark.parametrize("block", [128, 256, 512])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "fp8_e4m3"])
def test_lanes_groups_and_tiles_cover_every_row(dtype: str, block: int) -> None:
    for dim in [*range(1, 70), 100, 127, 129, 260, 516, 1000, 1001, 1028, 4096, 16384]:
        (g,) = geometry_of(plan_of(spec_of(dim, dtype), block=block, bags_per_block=128))
        assert g.lanes * g.tiles >= g.vectors > g.lanes * (g.tiles - 1)
        assert g.groups * g.lanes <= block
        assert g.vectors * g.elements >= dim
        assert g.groups * g.lanes / block > 0.7
        assert g.window >= g.rows >= 1
        assert g.window % g.rows == 0
        assert g.run & (g.run - 1) == 0
        assert g.min_run & (g.min_run - 1) == 0


def test_stores_are_as_wide_as_columns_allow() -> None:
    tables = (TableSpec("a", 10, 16), TableSpec("b", 10, 3), TableSpec("c", 10, 16))
    aligned = CollectionSpec(tables[:1], (FeatureSpec("f", "a"),), name="x")
    shifted = CollectionSpec(tables, (FeatureSpec("f", "a"), FeatureSpec("g", "b"), FeatureSpec("h", "c")), name="x")
    assert geometry_of(plan_of(aligned))[0].store == 16
    assert geometry_of(plan_of(shifted))[0].store == 4
    assert geometry_of(plan_of(replace(aligned, output_dtype="bf16")))[0].store == 8
    sequence = CollectionSpec(tables[:2], (FeatureSpec("f", "a", "none"), FeatureSpec("g", "b", "none")), name="x")
    assert [g.store for g in geometry_of(plan_of(sequence))] == [4, 4]


def test_wide_buckets_get_their_own_kernel() -> None:
    plan = plan_of(mixed())
    assert main_symbols(plan) == (plan.uri, f"{plan.uri}_wide")
    assert main_symbols(plan_of(spec_of(64, "fp8_e4m3"))) == (plan_of(spec_of(64, "fp8_e4m3")).uri,)
    text = source_of(plan)
    for wide in (False, True):
        assert f"__launch_bounds__(THREADS, {min_blocks(plan, wide)})" in text
    assert min_blocks(plan_of(mixed(), block=128), False) == 8


def test_launch_of_counts_blocks_as_the_kernel_does() -> None:
    plan = plan_of(spec_of(64))
    (g,) = geometry_of(plan)
    for batch in (1, 15, 63, 64, 1000, 4096, 65536):
        run = run_of(g.min_run, g.run, batch)
        assert g.min_run <= run <= g.run
        assert run == g.min_run or run * 16 <= batch
        (kernel,) = launch_of(plan, batch, 10).kernels
        assert kernel.grid == -(-batch // run)
    concat = plan_of(spec_of(64, pooling="concat", hotness=5))
    (g,) = geometry_of(concat)
    assert launch_of(concat, 100, 50).kernels[0].grid == -(-500 // g.run)
    none = plan_of(spec_of(64, pooling="none"))
    (g,) = geometry_of(none)
    assert [launch_of(none, 10, n).kernels[0].grid for n in (0, g.run, g.run + 1)] == [1, 1, 2]
    assert launch_of(none, 0, 0).kernels == ()


def test_long_bags_are_launched_only_where_one_can_be() -> None:
    plan = plan_of(spec_of(64), long_bag=1024)
    assert [k.symbol for k in launch_of(plan, 8, 1024).kernels] == [plan.uri]
    assert launch_of(plan, 8, 1024).queue_words == launch_of(plan, 8, 1024).scratch_floats == 0
    work = launch_of(plan, 8, 1_000_000)
    assert [k.symbol for k in work.kernels] == [plan.uri, f"{plan.uri}_long", f"{plan.uri}_merge"]
    most_bags = 1_000_000 // 1025
    assert work.queue_words == QUEUE_COUNTERS + QUEUE_RECORD * most_bags
    assert work.scratch_floats == (1_000_000 // UNIT + most_bags) * scratch_width(plan)
    # However a million ids are split into long bags, there are no more bags and units than the buffers hold.
    for length in (1025, 4096, 4097, 8192, 500_000, 1_000_000):
        bags = 1_000_000 // length
        assert bags <= most_bags
        assert bags * -(-length // UNIT) <= 1_000_000 // UNIT + most_bags
    assert launch_of(plan_of(spec_of(64, pooling="none")), 8, 1_000_000).queue_words == 0


def test_the_kernel_for_long_bags_has_the_shared_memory_that_its_launch_gives() -> None:
    for spec in (mixed(), spec_of(16), spec_of(3, "fp16", weighted=True)):
        plan = plan_of(spec)
        main, *_, long, merge = launch_of(plan, 8, 1_000_000).kernels
        assert (main.shared, merge.shared) == (0, 0)
        assert long.shared == shape_of(plan).shared_of(long.symbol) > 0
        assert f"static_assert(sizeof(LongStage) == {long.shared}," in source_of(plan)
        assert not main.opts_in
    assert launch_of(plan_of(mixed()), 8, 1_000_000).kernels[-2].opts_in
    assert not launch_of(plan_of(spec_of(16)), 8, 1_000_000).kernels[-2].opts_in


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("block", [128, 256, 512])
def test_a_multiprocessor_holds_the_blocks_that_it_must_of_the_kernel_for_long_bags(arch: str, block: int) -> None:
    for dtype in ("fp32", "fp16", "fp8_e4m3"):
        for dim in (1, 16, 64, 96, 1000, 4096):
            for weighted in (False, True):
                plan = plan_of(spec_of(dim, dtype, weighted=weighted), arch, block=block)
                found = long_geometry(plan, geometry_of(plan))
                assert found.chunks <= 64 <= found.pitch
                assert all(kind.slots <= found.pitch for kind in found.kinds)
                blocks = min_blocks(plan, wide=True)
                assert found.shared <= ARCHS[arch].most_shared
                assert resident_threads(ARCHS[arch], block, 32, found.shared + 16) >= block * blocks


@pytest.mark.parametrize(
    ("arch", "kilobytes"),
    [("sm_75", 64), ("sm_80", 163), ("sm_86", 99), ("sm_89", 99), ("sm_90", 227), ("sm_100", 227), ("sm_120", 99)],
)
def test_shared_memory_that_a_block_may_ask_for(arch: str, kilobytes: int) -> None:
    assert ARCHS[arch].most_shared == kilobytes << 10


DIMS = (1, 3, 8, 16, 32, 33, 48, 64, 96, 128, 130, 256, 1000, 4096)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rows", [1000, 2**33])
def test_default_params_serve_every_dim_dtype_and_arch(arch: str, rows: int) -> None:
    for dtype in TABLE_DTYPES:
        for dim in DIMS:
            for pooling, weighted in (("sum", True), ("mean", False), ("max", False), ("none", True)):
                table = TableSpec("t", rows, dim, dtype)  # type: ignore[arg-type]
                feature = FeatureSpec("f", "t", pooling, weighted=weighted)  # type: ignore[arg-type]
                plan = plan_of(CollectionSpec((table,), (feature,), name="one"), arch)
                (g,) = geometry_of(plan)
                assert g.window >= g.rows or not g.pooled
                if ARCHS[arch].widest_load == 32 and dim * (g.vector // g.elements) % 32 == 0:
                    assert g.vector == 32
    every = CollectionSpec(
        tuple(TableSpec(f"t{d}_{t}", rows, d, t) for d in DIMS for t in ("fp32", "fp8_e4m3")),  # type: ignore[arg-type]
        tuple(
            FeatureSpec(f"f{d}_{t}", f"t{d}_{t}", "sqrtn", weighted=True) for d in DIMS for t in ("fp32", "fp8_e4m3")
        ),
        name="every",
    )
    assert source_of(plan_of(every, arch))


def test_too_much_shared_memory_is_a_plan_error_naming_the_cause() -> None:
    table = TableSpec("t", 1000, 64, "fp8_e4m3")
    many = tuple(FeatureSpec(f"f{i}", "t", "none") for i in range(2100))
    with pytest.raises(PlanError, match=r"bytes of shared memory.*for 2100 'none' features\); allowed: 49152.*split"):
        source_of(plan_of(CollectionSpec((table,), many, name="x")))


@pytest.mark.parametrize(
    ("capability", "name"),
    [((7, 5), "sm_75"), ((8, 7), "sm_86"), ((8, 9), "sm_89"), ((10, 1), "sm_100"), ((12, 1), "sm_120")],
)
def test_a_gpu_gets_the_newest_known_arch_that_it_runs(capability: tuple[int, int], name: str) -> None:
    assert nearest_arch(*capability) == name


@pytest.mark.parametrize("capability", [(7, 0), (6, 1), (11, 0), (13, 0)])
def test_a_gpu_that_runs_no_known_arch_is_refused(capability: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match=r"compute capability .*known: sm_75"):
        nearest_arch(*capability)


def test_unknown_arch_is_a_plan_error_naming_the_known() -> None:
    with pytest.raises(PlanError, match=r"arch='sm_61'.*allowed: sm_75"):
        source_of(plan_of(spec_of(), "sm_61"))


def test_rows_past_two_to_the_31_are_staged_in_64_bits() -> None:
    big = CollectionSpec((TableSpec("t", 2**31, 4),), (FeatureSpec("f", "t"),), name="x")
    assert re.search(r"using row_t = int64_t", source_of(plan_of(big)))
    assert re.search(r"using row_t = int32_t", source_of(plan_of(spec_of())))


def test_arguments_and_status_are_those_of_the_signature() -> None:
    text = source_of(plan_of(spec_of(), id_dtype="int32"))
    assert "using id_t = int32_t" in text
    struct = text.split("struct Arguments {")[1].split("}")[0]
    parameters = text.split("#define PARAMETERS")[1].split("#define ARGUMENTS")
    names = parameters[1].split("\n\n")[0]
    assert re.findall(r"(\w+);", struct) == [a.name for a in arguments_of("cuda")]
    assert re.findall(r"(\w+)(?:,|$)", parameters[0].rstrip(), re.MULTILINE) == [a.name for a in arguments_of("cuda")]
    assert re.findall(r"\w+", names) == [a.name for a in arguments_of("cuda")]
    assert f"enum Mistake {{ {', '.join(MISTAKES)} }}" in text
    assert status_size() == len(MISTAKES) * len(STATUS_WORDS)


def test_occupancy_follows_registers_shared_memory_and_limits() -> None:
    sm_90, sm_86 = ARCHS["sm_90"], ARCHS["sm_86"]
    assert resident_threads(sm_90, 256, 32, 0) == 2048
    assert resident_threads(sm_90, 256, 64, 0) == 1024
    assert resident_threads(sm_90, 256, 65, 0) == 768
    assert resident_threads(sm_90, 512, 62, 0) == 1024  # FBGEMM's kernel: 50 %
    assert resident_threads(sm_90, 256, 32, 48 * 1024) == 4 * 256
    assert resident_threads(sm_86, 256, 32, 0) == 1536
