"""The space has every point that is worth a trial exactly once: each point left out does the same as its stand-in."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cpu_plans import counted_tasks, forward, machine_code, one_table
from support.probes import probe_of
from support.spaces import RULES, SPECS, TWO_CORES, context_of, made
from support.strategies import examples

from embforge.codegen.build import build, source_of
from embforge.codegen.errors import PlanError
from embforge.codegen.machine import find_compiler, host_isa
from embforge.codegen.params import CpuBackwardParams, CpuParams, CudaParams, Params, params_type
from embforge.codegen.plan import Plan
from embforge.codegen.rules.rule import Update
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.targets.cpu.isa import ISAS
from embforge.codegen.targets.cuda.arch import arch_named
from embforge.codegen.tuned.hardware import any_gpu
from embforge.codegen.tuned.record import Hardware
from embforge.launch.cpu.forward import CpuForward
from embforge.tuner.search.constraints import Context
from embforge.tuner.search.space import (
    ENUMERATE_BELOW,
    LEAST_OCCUPANCY,
    SAME_WORK,
    Space,
    covering_points,
    decode,
    encode,
    resource_problem,
    settle,
    space_of,
)
from embforge.verify.cases import Case
from embforge.verify.probes import call_of


def text_of(plan: Plan) -> str:
    """The source without the kernel's name and the line that lists its fields."""
    lines = source_of(plan).replace(plan.uri, "kernel").splitlines()
    return "\n".join(line for line in lines if not line.startswith("// Plan: "))


def some(points: Sequence[Params], count: int) -> Sequence[Params]:
    """About `count` of the points, from all over the space."""
    return points[:: max(1, len(points) // count)]


def differing(params: Params, space: Space) -> set[str]:
    """Fields in which a removed point and its stand-in differ."""
    stands = asdict(space.stands_for[params])
    return {name for name, value in asdict(params).items() if value != stands[name]}


ALL = [(t, s, r) for t in ("cpu", "cuda") for s in ("usual", "rich") for r in (None, "none", "adam")]


@pytest.mark.parametrize(("target", "spec", "rule"), ALL)
def test_points_and_removed_points_add_up_to_the_size_of_the_space(target: str, spec: str, rule: str | None) -> None:
    space = made(target, spec, rule)
    assert space.size == prod(map(len, space.fields.values()))
    assert len(space.points) + sum(removed.points for removed in space.removed) == space.size
    assert space.default in space.points and space.default == params_type(target, space.op)()
    assert len(set(space.points)) == len(space.points)
    assert not space.stands_for.keys() & set(space.points)
    assert set(space.stands_for.values()) <= set(space.points)
    assert all(removed.points and removed.why for removed in space.removed)


@pytest.mark.parametrize(
    ("spec", "rule"),
    [("usual", None), ("rich", None), ("copied", None), ("rich", "none"), ("rich", "adam"), ("rich", "sgd")],
)
def test_a_removed_cuda_point_is_the_same_source_and_kept_ones_are_not(spec: str, rule: str | None) -> None:
    """Except for `long_bag` if nothing is pooled: kernels of long bags are never launched then."""
    space, context = made("cuda", spec, rule), context_of("cuda", spec, rule)
    removed = some([p for p in space.stands_for if getattr(p, "long_bag", 1024) == 1024], 60)
    assert len(removed) > 20
    for params in removed:
        stands = space.stands_for[params]
        assert text_of(context.plan(params)) == text_of(context.plan(stands)), f"{params} is not {stands}"
    assert spec != "usual" or SAME_WORK in [removed.constraint for removed in space.removed]
    kept = some(space.points, 60)
    assert len({text_of(context.plan(params)) for params in kept}) == len(kept) > 20


def test_long_bag_does_nothing_to_short_bags() -> None:
    """The claim of `longest_bag`: such points differ in one number, which no bag of that traffic reaches."""
    short = space_of("forward", "cuda", "sm_90", SPECS["usual"], any_gpu("sm_90"), longest_bag=256)
    assert {p.long_bag for p in short.points if isinstance(p, CudaParams)} == {1024}
    assert len(made("cuda").points) == 3 * len(short.points)
    context = context_of("cuda")
    assert settle(short, CudaParams(block=512, long_bag=256)) == CudaParams(block=512)
    lines = [text_of(context.plan(CudaParams(long_bag=n))).splitlines() for n in (256, 1024)]
    changed = [pair for pair in zip(*lines, strict=True) if pair[0] != pair[1]]
    assert [[line.replace(n, "N") for line, n in zip(pair, ("256", "1024"), strict=True)] for pair in changed] == [
        [changed[0][0].replace("256", "N")] * 2
    ]


def test_blocks_that_shared_memory_does_not_hold_together_are_left_out() -> None:
    """On the arch with the least of it; the compiled kernel shows that fewer are resident than `pipeline` asks for."""
    space, context = made("cuda", arch="sm_75"), context_of("cuda", arch="sm_75")
    assert "shared memory of a multiprocessor" in [removed.constraint for removed in space.removed]
    params = CudaParams(block=128, id_tile=2048)
    assert params not in space.points and params not in space.stands_for
    main = build(context.plan(params), resources=True).resources[0]
    arch = arch_named("sm_75")
    wanted, by_registers = params.pipeline[1] * 256 // params.block, arch.registers // main["registers"] // params.block
    assert main["occupancy"] * arch.threads / params.block < min(wanted, by_registers)
    assert settle(space, params) in space.points


@pytest.mark.parametrize("rule", [None, "sgd", "none"])
def test_a_removed_cpu_point_is_the_same_source_where_no_number_is_left_idle_in_it(rule: str | None) -> None:
    """Rows requested ahead and streamed results are worked out before the source is written."""
    for spec in ("usual", "copied", "cached"):
        space, context = made("cpu", spec, rule), context_of("cpu", spec, rule)
        for params in some([p for p in space.stands_for if differing(p, space) <= {"prefetch_bytes", "stores"}], 20):
            assert text_of(context.plan(params)) == text_of(context.plan(space.stands_for[params]))
    wide = CollectionSpec([TableSpec("t", 100_000, 8192, "fp16")], [FeatureSpec("f", "t")])
    context = Context("backward" if rule else "forward", "cpu", host_isa(), wide, TWO_CORES, RULES[rule])
    space = space_of(context.op, "cpu", host_isa(), wide, TWO_CORES, context.update)
    assert "prefetch_bytes" in [removed.constraint for removed in space.removed]
    changed = [params for params in space.stands_for if differing(params, space) == {"prefetch_bytes"}]
    assert changed
    for params in some(changed, 20):
        mine, other = text_of(context.plan(params)), text_of(context.plan(space.stands_for[params]))
        if rule == "none":  # rows are never touched, so no code reads how many rows ahead are requested
            mine, other = (re.sub(r" *\d+, +(\d+, +\d+},  // t)", r"\1", source) for source in (mine, other))
        assert mine == other


def test_kept_cpu_points_are_different_sources() -> None:
    for rule in (None, "sgd", "none"):
        space, context = made("cpu", "rich", rule), context_of("cpu", "rich", rule)
        kept = some(space.points, 60)
        assert len({text_of(context.plan(params)) for params in kept}) == len(kept)


@pytest.mark.soak
def test_tiles_and_unrolled_rows_that_do_nothing_are_the_same_machine_code(tmp_path: Path) -> None:
    isa = ISAS[host_isa()]
    spec = CollectionSpec([TableSpec("t", 100_000, 5 * isa.width)], [FeatureSpec("f", "t")])
    context = Context("forward", "cpu", host_isa(), spec, TWO_CORES)
    space = space_of("forward", "cpu", host_isa(), spec, TWO_CORES)
    idle = CpuParams(tile_vectors=16, rows_unrolled=4)
    stands = settle(space, idle)
    assert isinstance(stands, CpuParams) and stands.tile_vectors == 8
    assert machine_code(context.plan(idle), tmp_path) == machine_code(context.plan(stands), tmp_path)


UNPREFETCHED = [CpuBackwardParams(prefetch_bytes=0, prefetch_level=level) for level in (1, 2)]


def test_a_row_to_be_updated_is_always_requested() -> None:
    """So `prefetch_level` acts in an update whatever `prefetch_bytes` says, but neither in a reduction nor a lookup."""
    assert set(UNPREFETCHED) <= set(made("cpu", "usual", "sgd").points)
    assert settle(made("cpu", "usual", "none"), UNPREFETCHED[0]) == UNPREFETCHED[1]
    assert settle(made("cpu"), CpuParams(prefetch_bytes=0, prefetch_level=1)) == CpuParams(prefetch_bytes=0)


@pytest.mark.soak
def test_an_update_requests_rows_whatever_the_distance(tmp_path: Path) -> None:
    code = [machine_code(context_of("cpu", "usual", "sgd").plan(params), tmp_path) for params in UNPREFETCHED]
    assert code[0] != code[1]


def test_a_kernel_sees_the_threads_that_the_space_says() -> None:
    """On three cores: 4 and more are the same as 0, and the grain of one thread does nothing."""
    three, spec = Hardware("cpu", "three cores", {"simd": host_isa()}, {"cores": 3}), one_table(4)
    space = space_of("forward", "cpu", host_isa(), SPECS["usual"], three)
    probe = probe_of(spec, Case(4000, "usual"), 1)

    def tasks(params: CpuParams) -> list[int]:
        plan = forward(spec, **asdict(params))
        kernel = CpuForward(plan, build(plan).binary)
        with counted_tasks(kernel) as asked:  # of three threads
            kernel(*call_of(plan, probe))
        return asked

    assert settle(space, CpuParams(threads=64)) == CpuParams()
    assert tasks(CpuParams(threads=64)) == tasks(CpuParams()) == [3]
    assert CpuParams(threads=2) in space.points and tasks(CpuParams(threads=2)) == [2]
    assert settle(space, CpuParams(threads=1, grain_bytes=16384)) == CpuParams(threads=1)
    assert tasks(CpuParams(threads=1, grain_bytes=16384)) == tasks(CpuParams(threads=1)) == []
    one = Hardware("cpu", "one core", {"simd": host_isa()}, {"cores": 1})
    alone = space_of("forward", "cpu", host_isa(), SPECS["usual"], one)
    assert {(p.threads, p.grain_bytes) for p in alone.points if isinstance(p, CpuParams)} == {(0, 65536)}
    unknown = space_of("forward", "cpu", host_isa(), SPECS["usual"], Hardware("cpu", "any", {}, {}))
    assert {p.threads for p in unknown.points if isinstance(p, CpuParams)} == {0, 1, 2, 4, 8, 16, 32, 64}


def test_digits_that_the_space_takes_for_equal_are_chosen_equally(tmp_path: Path) -> None:
    """By the sort's own function, cut out of the kernel: for every table size and any number of ids."""
    digits = {}
    for bits in (8, 11):
        plan = Context("backward", "cpu", host_isa(), SPECS["usual"], TWO_CORES).plan(
            CpuBackwardParams(radix_bits=bits)
        )
        source = source_of(plan)
        code = source[source.index("constexpr int RADIX_BITS") : source.index("// Calls visit(row)")]
        export = 'extern "C" int choose(int64_t w, int k) { auto d = digits_of(w, k); return d.passes * 100 + d.bits; }'
        file, library = tmp_path / f"{bits}.cpp", tmp_path / f"{bits}.so"
        file.write_text(f"#include <cstdint>\n{code}\n{export}\n")
        subprocess.run([*find_compiler().command, "-std=c++17", "-shared", "-fPIC", file, "-o", library], check=True)
        digits[bits] = ctypes.CDLL(str(library)).choose
        digits[bits].argtypes = [ctypes.c_int64, ctypes.c_int]
    found = set()
    for key_bits in (0, 1, 7, 8, 9, 11, 12, 16, 17, 21, 22, 24, 25, 32):
        spec = CollectionSpec([TableSpec("t", 2**key_bits, 8)], [FeatureSpec("f", "t")])
        space = space_of("backward", "cpu", host_isa(), spec, TWO_CORES)
        idle = "radix_bits" in [removed.constraint for removed in space.removed]
        chosen = [[digits[bits](2**n, key_bits) for n in range(34)] for bits in (8, 11)]
        assert not idle or chosen[0] == chosen[1], key_bits
        found.add((idle, chosen[0] == chosen[1]))
    assert found == {(True, True), (False, False)}  # and digits that differ are kept as two choices


@pytest.mark.parametrize(("target", "rule"), [("cpu", None), ("cpu", "adam"), ("cuda", None), ("cuda", "adam")])
def test_settling_a_point_gives_its_stand_in(target: str, rule: str | None) -> None:
    space = made(target, "usual", rule)
    for params in some(space.points, 20):
        assert settle(space, params) == params
    for params, stands in list(space.stands_for.items())[:: max(1, len(space.stands_for) // 20)]:
        assert settle(space, params) == stands in space.points


def test_an_idle_field_keeps_its_default() -> None:
    """If points differ in an idle field only, the one with its default is kept, so that stored plans have it."""
    space = made("cpu", "cached")
    assert {p.prefetch_bytes for p in space.points if isinstance(p, CpuParams)} == {CpuParams().prefetch_bytes}
    assert {p.prefetch_level for p in space.points if isinstance(p, CpuParams)} == {CpuParams().prefetch_level}


def test_the_reference_has_one_point() -> None:
    space = space_of("forward", "reference", "any", SPECS["usual"], TWO_CORES)
    assert space.size == len(space.points) == 1 and space.removed == () and covering_points(space) == ()


@pytest.mark.parametrize(("target", "rule"), [("cpu", None), ("cuda", "adam")])
def test_covering_points_are_few_allowed_and_meet_most_pairs(target: str, rule: str | None) -> None:
    space = made(target, "usual", rule)
    points = covering_points(space)
    assert set(points) <= set(space.points) and len(set(points)) == len(points) < ENUMERATE_BELOW / 10

    def pairs(of: Sequence[Params]) -> set[Any]:
        rows = [list(asdict(p).items()) for p in of]
        return {(a, b) for row in rows for i, a in enumerate(row) for b in row[i + 1 :]}

    assert len(pairs(points)) > 0.85 * len(pairs(space.points))


@given(st.data(), st.sampled_from([("cpu", None), ("cpu", "sgd"), ("cuda", None), ("cuda", "sgd")]))
@examples(60)
def test_points_are_read_back_from_what_optuna_keeps(data: st.DataObject, which: tuple[str, str | None]) -> None:
    space = made(which[0], "usual", which[1])
    chosen = {name: data.draw(st.sampled_from(choices)) for name, choices in space.fields.items()}
    params = params_type(space.target, space.op)(**chosen)
    encoded = encode(params)
    assert decode(space, encoded) == params
    assert all(isinstance(value, int | str) for value in encoded.values())
    partly = data.draw(st.sets(st.sampled_from(list(encoded))))
    want = replace(space.default, **{name: chosen[name] for name in partly})
    assert decode(space, {name: encoded[name] for name in partly}) == want


def test_what_a_space_does_not_have_is_refused_with_what_is_allowed() -> None:
    space = made("cuda")
    with pytest.raises(
        PlanError, match=r"'blocks' is not known .did you mean 'block'..; allowed: block, pipeline, vector_bytes"
    ):
        decode(space, {"blocks": 256})
    with pytest.raises(PlanError, match=r"pipeline='9x9' is not allowed; allowed: 2x4, 2x5"):
        decode(space, {"pipeline": "9x9"})
    spec, gpu = SPECS["usual"], any_gpu("sm_90")
    with pytest.raises(PlanError, match=r"op='sideways' is not known; allowed: forward, backward"):
        space_of("sideways", "cuda", "sm_90", spec, gpu)
    with pytest.raises(PlanError, match=r"target='tpu' is not known; allowed: cpu, cuda, simt, reference"):
        space_of("forward", "tpu", "sm_90", spec, gpu)
    with pytest.raises(PlanError, match=r"arch='sm_1' is not known for target cuda; allowed: sm_75"):
        space_of("forward", "cuda", "sm_1", spec, gpu)
    with pytest.raises(PlanError, match=r"arch='sse' is not known for target cpu; allowed: avx512"):
        space_of("backward", "cpu", "sse", spec, TWO_CORES)


def figures(**changes: Any) -> dict[str, Any]:
    good = {"symbol": "k", "registers": 64, "spill_bytes": 0, "local_instructions": 0, "shared_bytes": 1 << 14}
    return good | {"occupancy": 0.5} | changes


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"spill_bytes": 8},
            r"k spills: 0 accesses to local memory, 8 bytes stored, 64 registers per thread; allowed: none",
        ),
        ({"local_instructions": 3}, "k spills: 3 accesses"),
        ({"shared_bytes": 232_449}, "k takes 232449 bytes of shared memory per block; allowed on sm_90: 232448"),
        ({"occupancy": 0.124}, "k keeps 12.4% of a multiprocessor's threads resident .* at least 12.5% are needed"),
    ],
)
def test_kernels_not_worth_a_launch_are_refused(changes: dict[str, Any], why: str) -> None:
    plan = context_of("cuda").plan(CudaParams())
    limits = figures(shared_bytes=232_448, occupancy=LEAST_OCCUPANCY)
    assert resource_problem(plan, [figures(), limits]) is None
    problem = resource_problem(plan, [figures(), figures(**changes)])
    assert problem is not None
    assert re.search(why, problem)


def test_a_real_kernel_is_judged_by_its_binary() -> None:
    plan = context_of("cuda").plan(CudaParams())
    real = build(plan, resources=True).resources
    assert resource_problem(plan, real) is None
    assert resource_problem(plan, [real[0] | {"spill_bytes": 4}]) is not None  # the keys are those of real figures
    cpu = forward(one_table(4))
    assert resource_problem(cpu, build(cpu, resources=True).resources) is None


def test_a_rule_with_states_has_a_smaller_space() -> None:
    """States take registers, so fewer blocks are promised and fewer points are left."""
    update: Update | None = RULES["adam"]
    assert update is not None and len(made("cuda", "usual", "adam").points) < len(made("cuda", "usual", "none").points)
