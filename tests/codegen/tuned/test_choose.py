"""Which tuned result a plan takes: precedence of stores, exact before nearest match, distances, what must be equal."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.tuned_records import FAST, FAST_BACKWARD, FASTER, SPEC, record_of, scaled, this_machine, write_spec

from embforge.codegen.params import CpuBackwardParams, CpuParams, CudaParams
from embforge.codegen.plans import update_named
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.tuned import stores
from embforge.codegen.tuned.choose import LIMIT, Choice, choose
from embforge.codegen.tuned.hardware import any_cpu, any_gpu, gpu_hardware
from embforge.codegen.tuned.record import Traffic
from embforge.codegen.tuned.shape import USUAL_BATCH, digest_of, file_name, rule_named, shape_of, usual_traffic
from embforge.tuner.store import save
from embforge.tuner.workload.workload import Workload

KNOWN = Traffic(2048)
UNKNOWN_BATCH = "the module's batch is not known (set it by batch_size=)"
SHOWN = "1.23x the default (95 %: 1.20 to 1.26), noise floor 0.8 %"


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three empty stores: the project's in the current directory, the user's, and what was shipped."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("EMBFORGE_TUNED_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(stores, "shipped_dir", lambda: tmp_path / "shipped")
    return tmp_path / "user"


def ask(spec: CollectionSpec = SPEC, **given: Any) -> Choice:
    return choose("forward", "cpu", spec, given.pop("hardware", this_machine()), **given)


def test_nothing_tuned_is_the_default() -> None:
    choice = ask()
    assert choice == Choice(CpuParams(), "default: no store has a tuned forward for cpu", None, None)
    assert choose("forward", "simt", SPEC, this_machine()).why == "default: nothing is tuned for simt"


def test_an_exact_match_says_on_what_evidence() -> None:
    path = save(record_of(), "user")
    choice = ask(traffic=KNOWN)
    assert choice.params == FAST and choice.path == path and choice.record == record_of()
    assert choice.why == f"tuned on this hardware for zipf:1.05,batch=2048: {SHOWN}; store: user"
    assert ask().params == FAST and ask().why == f"{choice.why}; {UNKNOWN_BATCH}"
    save(record_of(traffic=Traffic()), "project")
    assert ask().why.endswith("store: project")  # a batch would not tell more


def test_the_default_may_be_what_is_best() -> None:
    save(record_of(CpuParams()), "user")
    choice = ask()
    assert choice.params == CpuParams() and choice.record is not None
    assert re.fullmatch("default: tuned on this hardware for .*, nothing faster found; noise floor.*", choice.why)


def test_project_goes_before_user_before_shipped(tmp_path: Path) -> None:
    for store, params, year in (("shipped", FAST, 2029), ("user", FASTER, 2028), ("project", CpuParams(), 2027)):
        save(
            record_of(params, created=f"{year}-01-01T00:00:00Z"), tmp_path / "shipped" if store == "shipped" else store
        )
        choice = ask(traffic=KNOWN)
        assert choice.params == params and choice.why.endswith(f"store: {store}")


def test_the_project_store_is_next_to_the_spec_file(tmp_path: Path) -> None:
    path = write_spec(tmp_path / "elsewhere" / "mine.toml")
    spec = CollectionSpec.from_toml(path)
    assert spec.origin == path and "origin" not in spec.to_dict()
    assert replace(spec, name=None) == SPEC and replace(spec).origin is None
    saved = save(record_of(), "project", origin=spec.origin)
    assert saved.parent == tmp_path / "elsewhere" / "embforge-tuned"
    assert ask(spec).params == FAST and ask().params == CpuParams() and ask(origin=path).params == FAST


def test_exact_before_nearest_whatever_the_store() -> None:
    save(record_of(FASTER, scaled(SPEC, 2)), "project")
    save(record_of(FAST), "user")
    assert ask().params == FAST
    assert ask(scaled(SPEC, 2)).params == FASTER


def test_the_nearest_over_all_stores() -> None:
    save(record_of(FASTER, scaled(SPEC, 4)), "project")
    save(record_of(FAST, scaled(SPEC, 2)), "user")
    choice = ask(traffic=KNOWN)
    assert choice.params == FAST
    assert choice.why == (
        "taken from the nearest tuned result, distance 1 (for zipf:1.05,batch=2048 on "
        f"{this_machine().name} with table_bytes x2): {SHOWN}; store: user"
    )


@pytest.mark.parametrize("spec", [SPEC, scaled(SPEC, 2)], ids=["exact", "nearest"])
def test_of_equals_the_project_then_the_usual_batch_then_the_newest(spec: CollectionSpec) -> None:
    for number, (batch, params) in enumerate(
        [(8192, FASTER), (2048, FAST), (1024, FASTER), (16, FASTER), (None, FASTER)]
    ):
        save(record_of(params, spec, traffic=Traffic(batch), created=f"2026-01-0{1 + number}T00:00:00Z"), "user")
    assert ask().params == FAST
    save(record_of(FASTER, spec, traffic=Traffic(2048, 1), created="2026-01-09T00:00:00Z"), "user")
    assert ask().params == FASTER  # as usual, and newer
    save(record_of(FAST, spec, traffic=Traffic(16)), "project")
    assert ask().params == FAST


def test_the_usual_batch_is_that_of_a_workload() -> None:
    assert Workload().batch == USUAL_BATCH


def test_warm_and_cold_do_not_answer_for_each_other() -> None:
    save(record_of(FAST, cache="cold"), "user")
    assert ask().why == (
        "default: no tuned forward has these dtypes, poolings and rule on this kind of hardware with warm caches"
    )
    assert ask(cache="cold").params == FAST
    save(record_of(FASTER), "user")
    assert ask().params == FASTER and ask(cache="cold").params == FAST


def test_other_ids_are_a_doubling_away() -> None:
    save(record_of(FAST, id_dtype="int32"), "user")
    assert ask(id_dtype="int32", traffic=KNOWN).why.startswith("tuned on this hardware")
    choice = ask(traffic=KNOWN)
    assert choice.params == FAST
    assert choice.why.startswith("taken from the nearest tuned result, distance 1 (") and "id_bytes x0.5" in choice.why
    save(record_of(FASTER), "user")
    assert ask().params == FASTER and ask(id_dtype="int32").params == FAST
    assert ask(scaled(SPEC, 4), id_dtype="int32").params == FAST  # at distance 2; the other is at 2.2


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_threads_hold_only_where_they_were_measured(op: str) -> None:
    rest: Any = FAST if op == "forward" else FAST_BACKWARD
    rule = None if op == "forward" else "none"
    save(record_of(replace(rest, threads=2), op=op, rule=rule), "user")

    def asked(spec: CollectionSpec = SPEC, batch: int | None = 2048) -> Choice:
        return choose(op, "cpu", spec, this_machine(), rule=rule, traffic=Traffic(batch))

    left = "threads left to torch: 2 is valid only where it was measured, so the gain is not known"
    assert asked().params == replace(rest, threads=2) and "threads" not in asked().why
    assert SHOWN in asked().why
    for spec, batch, note in (
        (SPEC, None, f"{UNKNOWN_BATCH}; {left}"),
        (SPEC, 4096, left),
        (scaled(SPEC, 2), 2048, left),
    ):
        choice = asked(spec, batch)
        assert choice.params == rest and choice.why.endswith(f"; store: user; {note}")
        assert "x the default" not in choice.why  # that was measured with the threads
        assert choice.record is not None and choice.record.params["threads"] == 2


def test_a_result_whose_fields_are_all_dropped_is_the_default_with_the_reason() -> None:
    save(record_of(CpuParams(threads=1)), "user")
    choice = ask()
    assert choice.params == CpuParams()
    assert choice.why == (
        "default: nothing but threads differs in what is tuned on this hardware for zipf:1.05,batch=2048; store: user; "
        f"{UNKNOWN_BATCH}; threads left to torch: 1 is valid only where it was measured, so the gain is not known"
    )


def test_a_result_past_the_distance_limit_is_not_taken() -> None:
    save(record_of(FAST, scaled(SPEC, 4)), "user")
    assert LIMIT == 2.0 and ask().params == FAST
    choice = ask(
        hardware=replace(this_machine(), sizes={**this_machine().sizes, "cores": 2 * this_machine().sizes["cores"]})
    )
    assert choice.params == CpuParams() and choice.record is None
    assert choice.why.startswith(
        "default: no tuned result within distance 2 (nearest: 2.2; for zipf:1.05,batch=2048 on"
    )
    assert "table_bytes x4, cores x0.5" in choice.why


def different_specs() -> dict[str, CollectionSpec]:
    half = [TableSpec("t", 500, 16, "fp16")]
    return {
        "table dtype": CollectionSpec(half, SPEC.features),
        "output dtype": CollectionSpec(SPEC.tables, SPEC.features, "bf16"),
        "pooling": CollectionSpec(SPEC.tables, [FeatureSpec("f", "t"), FeatureSpec("g", "t", "max")]),
        "weights": CollectionSpec(SPEC.tables, [FeatureSpec("f", "t"), FeatureSpec("g", "t", weighted=True)]),
    }


@pytest.mark.parametrize("name", different_specs())
def test_what_changes_the_code_must_be_equal(name: str) -> None:
    save(record_of(), "user")
    assert ask(different_specs()[name]).why.startswith("default: no tuned forward has these dtypes, poolings and rule")


@pytest.mark.parametrize("name", ["vendor", "family", "model", "simd"])
def test_another_processor_is_no_neighbour(name: str) -> None:
    cpu = this_machine()
    save(record_of(hardware=replace(cpu, identity={**cpu.identity, name: "other"})), "user")
    assert ask().params == CpuParams()


def test_rules_of_a_backward_must_be_equal() -> None:
    save(record_of(FAST_BACKWARD, op="backward", rule="adam"), "user")

    def backward(rule: str | None) -> Any:
        return choose("backward", "cpu", SPEC, this_machine(), rule=rule).params

    assert backward("adam") == FAST_BACKWARD and backward("adam+l2") == backward(None) == CpuBackwardParams()
    save(record_of(FAST_BACKWARD, op="backward", rule="none"), "user")
    assert backward(None) == FAST_BACKWARD
    assert ask().params == CpuParams()


def test_traffic_chooses_among_results() -> None:
    for batch, params in ((64, FAST), (8192, FASTER), (1024, CpuParams())):
        save(record_of(params, traffic=Traffic(batch, 1, 0)), "user")
    assert ask(traffic=Traffic(70)).params == FAST
    assert ask(traffic=Traffic(20_000)).params == FASTER  # in no bucket: the nearest, at distance 1
    assert ask(traffic=Traffic(1000, 1.2)).params == CpuParams()
    assert ask(traffic=Traffic(1000, 64)).why.startswith("default: no tuned result within distance 2")


def test_a_better_known_traffic_is_preferred() -> None:
    save(record_of(FASTER, traffic=Traffic(), created="2030-01-01T00:00:00Z"), "user")
    save(record_of(FAST, traffic=Traffic(2048)), "user")
    assert ask(traffic=Traffic(2000)).params == FAST
    assert ask(traffic=Traffic(8192)).params == FASTER


def test_kernels_for_another_machine_take_what_its_arch_allows() -> None:
    far = replace(this_machine(), identity={"vendor": "ARM", "family": "8", "model": "0xd4f", "simd": "neon"}, sizes={})
    save(record_of(FAST, hardware=far), "user")
    assert choose("forward", "cpu", SPEC, any_cpu("neon")).params == FAST
    assert choose("forward", "cpu", SPEC, any_cpu("generic")).params == CpuParams()
    fast, gpu = CudaParams(block=512), gpu_hardware({"name": "G", "arch": "sm_90", "multiprocessors": 132})
    save(record_of(fast, target="cuda", hardware=gpu), "user")
    assert choose("forward", "cuda", SPEC, any_gpu("sm_90")).params == fast
    assert choose("forward", "cuda", SPEC, any_gpu("sm_80")).params == CudaParams()


def test_tuned_results_do_not_depend_on_names() -> None:
    other = CollectionSpec([TableSpec("x", 500, 16)], [FeatureSpec("a", "x"), FeatureSpec("b", "x", "mean")], name="n")
    assert shape_of(other) == shape_of(SPEC)
    assert file_name(record_of(spec=other).key) == file_name(record_of().key)
    longer = CollectionSpec(SPEC.tables, [replace(f, hotness=9) for f in SPEC.features])
    assert shape_of(longer) == shape_of(SPEC)  # no kernel depends on the usual bag length
    for changed in (scaled(SPEC, 2), CollectionSpec(SPEC.tables, SPEC.features[::-1]), *different_specs().values()):
        assert shape_of(changed).digest != shape_of(SPEC).digest


def test_the_digest_has_buckets_and_no_names() -> None:
    key = record_of().key
    same = [replace(key, traffic=Traffic(2000, 1.1, 0.99)), replace(key, hardware=replace(key.hardware, name="other"))]
    other = [
        replace(key, traffic=Traffic(4096, 1, 1.05)),
        replace(key, op="backward", rule="none"),
        replace(key, rule="x"),
    ]
    other += [replace(key, id_dtype="int32"), replace(key, cache="cold")]
    other += [replace(key, hardware=replace(key.hardware, sizes={"cores": 64}))]
    assert {digest_of(one) for one in same} == {digest_of(key)}
    assert len({digest_of(one) for one in (key, *other)}) == 1 + len(other)


def test_the_shape_of_a_spec_has_its_formats_poolings_and_sizes() -> None:
    tables = [TableSpec("a", 100, 4), TableSpec("b", 10, 64, "fp16")]
    features = [FeatureSpec("x", "a", "sqrtn", weighted=True), FeatureSpec("y", "b", "none"), FeatureSpec("z", "b")]
    shape = shape_of(CollectionSpec(tables, features, "bf16"))
    assert shape.dtypes == ("fp16", "fp32", "bf16") and shape.poolings == ("none", "sum", "sum+weighted")
    assert shape.features == 3 and shape.dim == pytest.approx((4 * 64 * 64) ** (1 / 3))
    assert shape.table_bytes == 100 * 4 * 4 + 10 * 64 * 2


def test_traffic_from_hotness_where_all_features_have_one() -> None:
    with_all = CollectionSpec(SPEC.tables, [replace(f, hotness=h) for f, h in zip(SPEC.features, (2, 6), strict=True)])
    assert usual_traffic(with_all, 512) == Traffic(512, 4.0)
    assert usual_traffic(CollectionSpec(SPEC.tables, [with_all.features[0], SPEC.features[1]])) == Traffic()


def test_a_built_in_rule_has_its_own_name_and_another_one_a_hash() -> None:
    assert rule_named(None) == "none" and rule_named(update_named("sgd+l2")) == "sgd+l2"
    adam = update_named("adam")
    assert adam is not None
    own = replace(adam, rule=replace(adam.rule, lines=(*adam.rule.lines, "row = row * 0.5")))
    assert re.fullmatch("adam:[0-9a-f]{8}", rule_named(own))


def test_hardware_of_this_machine_has_a_model_and_sizes() -> None:
    cpu = this_machine()
    assert cpu.kind == "cpu" and set(cpu.identity) == {"vendor", "family", "model", "simd"} and cpu.sizes["cores"] >= 1
    assert all(size > 0 for size in cpu.sizes.values())
    assert set(cpu.sizes) <= {"cores", "l1_bytes", "l2_bytes", "l3_bytes"}
