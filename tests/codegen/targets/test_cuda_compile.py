"""Every CUDA claim that a compiler can settle: no spills, wide loads, bytes in flight, errors with their place."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.selections import SELECTIONS

from embforge.codegen.build import build, source_of
from embforge.codegen.errors import CompileError, ToolchainError
from embforge.codegen.params import CudaParams
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.targets.cuda import nvrtc, sass
from embforge.codegen.targets.cuda.arch import ARCHS
from embforge.codegen.targets.cuda.geometry import MOST_MADE_UP, geometry_of

SPECS = Path(__file__).parents[3] / "examples/specs"
EXAMPLES = ("dlrm", "llm_vocab", "mixed")
QUICK = (("dlrm", "sm_80"), ("dlrm", "sm_120"), ("llm_vocab", "sm_75"), ("llm_vocab", "sm_100"))
TARGET_BYTES = {"sm_80": 32 << 10, "sm_90": 32 << 10, "sm_100": 64 << 10, "sm_103": 64 << 10}
NEARLY = 15 / 16
"""Share of the target where there are no registers for rows that make up for a few idle lanes."""
FBGEMM_SM90 = (62, 0.5)


def plan_of(spec: CollectionSpec, arch: str, **params: Any) -> Plan:
    return Plan("forward", "cuda", arch, "int64", spec, CudaParams(**params))


def check_figures(plan: Plan) -> list[dict[str, Any]]:
    """Asserts everything that is promised of a plan's machine code, and returns its figures."""
    figures = build(plan, resources=True).resources
    loops = {g.name: g for g in geometry_of(plan)} | {g.long_kind: g for g in geometry_of(plan) if g.pooled}
    seen = set()
    for kernel in figures:
        assert kernel["spill_bytes"] == 0, kernel
        assert kernel["local_instructions"] == 0, kernel
        for load in kernel["loads"]:
            bucket = loops[load["bucket"]]
            seen.add(load["bucket"])
            assert load["load_bytes"] == bucket.vector, load
        least = TARGET_BYTES.get(plan.arch)
        if least and kernel["bytes_in_flight"] is not None:
            made_up = all(loops[load["bucket"]].elements <= MOST_MADE_UP for load in kernel["loads"])
            nearly = 1 if made_up or kernel["symbol"].endswith("_long") else NEARLY
            assert kernel["bytes_in_flight"] >= nearly * least, kernel
    assert seen == set(loops), "a loop's loads were not found in the machine code"
    for g in geometry_of(plan):
        for width in (32, 16):
            if width <= ARCHS[plan.arch].widest_load and g.bucket.row_bytes % width == 0:
                assert g.vector >= width
                break
    return figures


@pytest.mark.parametrize(("name", "arch"), QUICK)
def test_figures_of_example_specs(name: str, arch: str) -> None:
    check_figures(plan_of(CollectionSpec.from_toml(SPECS / f"{name}.toml"), arch))


@pytest.mark.soak
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_figures_of_all_example_specs_on_all_archs(name: str, arch: str) -> None:
    check_figures(plan_of(CollectionSpec.from_toml(SPECS / f"{name}.toml"), arch))


@pytest.mark.parametrize(
    ("dtype", "arch"),
    [
        ("fp16", "sm_100"),
        ("fp8_e4m3", "sm_90"),
        ("fp8_e4m3", "sm_100"),
        ("fp8_e5m2", "sm_90"),
        pytest.param("fp16", "sm_90", marks=pytest.mark.soak),
        pytest.param("fp8_e5m2", "sm_100", marks=pytest.mark.soak),
    ],
)
def test_figures_of_other_dims_and_narrow_outputs(dtype: str, arch: str) -> None:
    tables = tuple(TableSpec(f"t{dim}", 1000, dim, dtype) for dim in (1, 96, 1000))  # type: ignore[arg-type]
    features = [FeatureSpec(f"f{t.name}", t.name, "mean", weighted=True) for t in tables]
    features += [FeatureSpec(f"m{t.name}", t.name, "max", padding_idx=3) for t in tables]
    check_figures(plan_of(CollectionSpec(tables, tuple(features), output_dtype="bf16", name="other"), arch))


@pytest.mark.parametrize(
    ("arch", "op"),
    [
        ("sm_75", "forward_train"),
        ("sm_90", "forward"),
        ("sm_100", "forward_train"),
        pytest.param("sm_75", "forward", marks=pytest.mark.soak),
        pytest.param("sm_90", "forward_train", marks=pytest.mark.soak),
        pytest.param("sm_100", "forward", marks=pytest.mark.soak),
    ],
)
def test_all_selections_in_one_launch_keep_the_promised_figures(arch: str, op: str) -> None:
    """Every selection, of wide, half and narrow formats, and sums, in one launch."""
    tables = tuple(TableSpec(f"t{dtype}", 1000, 40, dtype) for dtype in ("fp32", "bf16", "fp8_e4m3"))  # type: ignore[arg-type]
    poolings = ("sum", *SELECTIONS)
    features = [FeatureSpec(f"{p}{t.name}", t.name, p, padding_idx=3) for t in tables for p in poolings]
    plan = plan_of(CollectionSpec(tables, tuple(features), name="selections"), arch)
    check_figures(replace(plan, op=op))


def test_the_usual_table_takes_no_more_registers_than_fbgemm(record_property: Any) -> None:
    spec = CollectionSpec((TableSpec("t", 100_000, 128),), (FeatureSpec("f", "t"),), name="d128")
    plan = plan_of(spec, "sm_90")
    kernel = next(k for k in check_figures(plan) if k["symbol"] == plan.uri)
    record_property("sm_90 fp32 D=128 sum", f"{kernel['registers']} registers, {kernel['occupancy']:.1%} occupancy")
    print(
        f"sm_90 fp32 D=128 sum: {kernel['registers']} registers, occupancy {kernel['occupancy']:.1%}; FBGEMM: 62, 50 %"
    )
    assert kernel["registers"] <= FBGEMM_SM90[0]
    assert kernel["occupancy"] >= FBGEMM_SM90[1]


@pytest.mark.parametrize("hint", ["evict_last", "default"])
def test_row_loads_are_found_whatever_the_cache_hint(hint: str) -> None:
    spec = CollectionSpec((TableSpec("t", 1000, 64),), (FeatureSpec("f", "t"),), name="hint")
    check_figures(plan_of(spec, "sm_90", cache_hint=hint))


@pytest.mark.parametrize("hint", ["evict_last", "default"])
def test_int32_ids_and_every_block_size_compile(hint: str) -> None:
    spec = CollectionSpec(
        (TableSpec("t", 1000, 24),),
        (FeatureSpec("f", "t", "mean"), FeatureSpec("c", "t", "concat", hotness=3), FeatureSpec("n", "t", "none")),
        output_dtype="fp16",
        name="blocks",
    )
    for block in (128, 512):
        plan = Plan("forward", "cuda", "sm_89", "int32", spec, CudaParams(block=block, cache_hint=hint))
        assert build(plan).binary.stat().st_size > 0


def test_loads_before_the_first_use_are_counted() -> None:
    source = "void load_row(\n" * 1 + "\n" * 10 + "case 0: pool_run<bucket>(a);\n"
    chain = '\t//## File "x.cu", line 2 inlined at "x.cu", line 12\n\t//## File "x.cu", line 12\n'
    code = f""".text.kernel:
{chain}        /*0000*/               @P1 LDG.E.NA.128.CONSTANT R16, desc[UR8][R42.64] ;
        /*0010*/                   IADD3 R42, P5, R40, R42, RZ ;
{chain}        /*0020*/               @P1 LDG.E.NA.128.CONSTANT R20, desc[UR8][R42.64] ;
\t//## File "x.cu", line 12
        /*0030*/                   FADD R8, R8, R17 ;
{chain}        /*0040*/               @P1 LDG.E.NA.ENL2.256.CONSTANT R20, R28, desc[UR8][R42.64] ;
\t//## File "x.cu", line 12
        /*0050*/                   STL.64 [R1+0x8], R31 ;
        /*0060*/                   LDG.E.128.CONSTANT R4, desc[UR8][R2.64] ;
        /*0070*/                   EXIT ;
"""
    kernel = sass.read_code(code, source)["kernel"]
    assert [(g.struct, g.widths) for g in kernel.groups] == [("bucket", [16, 16]), ("bucket", [32])]
    assert (kernel.local_instructions, kernel.local_store_bytes) == (1, 8)


def test_loads_are_not_counted_together_across_jumps_and_labels_or_into_the_same_register() -> None:
    source = "void load_row(\n" + "\n" * 10 + "case 0: pool_run<bucket>(a);\n"
    chain = '\t//## File "x.cu", line 2 inlined at "x.cu", line 12\n\t//## File "x.cu", line 12\n'
    load = chain + "        /*0000*/               @P1 LDG.E.NA.128.CONSTANT R{}, [R42.64] ;\n"
    between = {
        "        /*0010*/               @P0 BRA `(.L_x_1) ;\n": 20,
        "        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;\n": 20,
        ".L_x_1:\n": 20,
        "        /*0010*/                   NOP ;\n": 16,
    }
    for text, second in between.items():
        code = ".text.kernel:\n" + load.format(16) + text + load.format(second)
        assert [g.widths for g in sass.read_code(code, source)["kernel"].groups] == [[16], [16]], text


def test_idle_threads_have_no_bytes_in_flight() -> None:
    spec = CollectionSpec((TableSpec("t", 1000, 16),), (FeatureSpec("f", "t"),), name="idle")
    plan = plan_of(spec, "sm_100")  # two lanes per row: the 64 chunks of a unit occupy half of a block
    kernels = {k["symbol"]: k for k in check_figures(plan)}
    main, long = kernels[plan.uri]["loads"][0], kernels[f"{plan.uri}_long"]["loads"][0]
    threads = ARCHS["sm_100"].threads
    assert main["bytes"] == main["loads"] * 32 * kernels[plan.uri]["occupancy"] * threads
    assert long["bytes"] == long["loads"] * 32 * kernels[f"{plan.uri}_long"]["occupancy"] * threads / 2


def test_thousands_of_features_compile() -> None:
    features = tuple(FeatureSpec(f"f{i}", "t") for i in range(3000))
    plan = plan_of(CollectionSpec((TableSpec("t", 1000, 8),), features, name="many"), "sm_90")
    assert "__device__ const Feature FEATURES[]" in source_of(plan)
    assert build(plan).binary.stat().st_size > 0


def test_a_compile_error_shows_the_log_beside_numbered_lines(tmp_path: Path) -> None:
    path = tmp_path / "broken.cu"
    path.write_text('// one\n// two\nextern "C" __global__ void k() { undefined_name = 1; }\n// four\n')
    with pytest.raises(CompileError) as caught:
        nvrtc.compile_cubin(path, "sm_90")
    message = str(caught.value)
    assert str(path) in message
    assert "undefined_name" in message
    assert '>     3 | extern "C"' in message
    assert "      2 | // two" in message


def test_binaries_do_not_depend_on_where_the_source_lies(tmp_path: Path) -> None:
    spec = CollectionSpec((TableSpec("t", 1000, 4),), (FeatureSpec("f", "t", "none"),), name="place")
    binaries = set()
    for folder in ("a", "b"):
        path = tmp_path / folder / "same.cu"
        path.parent.mkdir()
        path.write_text(source_of(plan_of(spec, "sm_90")))
        binaries.add(nvrtc.compile_cubin(path, "sm_90"))
    assert len(binaries) == 1


def test_a_compiler_newer_than_the_driver_is_refused_with_what_to_install() -> None:
    nvrtc.check_driver((13, 0), (13, 4))
    nvrtc.check_driver((14, 0), (13, 4))
    with pytest.raises(ToolchainError, match=r"NVRTC 13\.4.*CUDA 12\.8.*update the driver.*nvidia-cuda-nvrtc.* 12\.x"):
        nvrtc.check_driver((12, 8), (13, 4))


def test_the_compilers_version_is_known_without_loading_it() -> None:
    assert nvrtc.installed_nvrtc() == nvrtc.nvrtc_version()


def test_without_cuda_packages_the_message_has_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("cuda.core", "cuda.pathfinder"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it is an ImportError
    with pytest.raises(ToolchainError, match=r"cuda\.core.*pip install 'embforge\[cuda\]'.*macOS"):
        nvrtc.compile_cubin(tmp_path / "x.cu", "sm_90")
    with pytest.raises(ToolchainError, match=r"cuda\.pathfinder.*pip install 'embforge\[cuda\]'"):
        sass._run("nvdisasm", "-c")
