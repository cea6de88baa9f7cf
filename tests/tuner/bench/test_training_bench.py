"""The training benchmark: who computes what, the check before the clock, the linear-cost table. No time is asserted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import embforge as ef
from benchmarks import linear
from benchmarks.page import FACTS
from benchmarks.workloads import TRAINING, read_workloads
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.collection import EmbeddingCollection
from embforge.tuner.bench.forward import filled_module
from embforge.tuner.bench.peers import PeerUnavailableError
from embforge.tuner.bench.training import OUR_RULES, UnknownRuleError, bench_training, our_trainee
from embforge.tuner.bench.training_peers import fbgemm_training_peer, torch_training_peer, training_peer_named
from embforge.tuner.bench.training_rules import RULES, Trainee, check, gradients_of
from embforge.tuner.measure.paired import Measurement
from embforge.tuner.workload.workload import Batch, make_batch, parse

SPEC = CollectionSpec(
    (TableSpec("a", 100, 8), TableSpec("b", 50, 16)),
    (FeatureSpec("x", "a"), FeatureSpec("y", "b", "mean"), FeatureSpec("z", "a", weighted=True)),
    name="small",
)
EVERY_POOLING = CollectionSpec(
    (TableSpec("t", 60, 5), TableSpec("narrow", 40, 8, "bf16")),
    (
        FeatureSpec("sum", "t", padding_idx=7),
        FeatureSpec("mean", "narrow", "mean", weighted=True),
        FeatureSpec("sqrtn", "t", "sqrtn"),
        FeatureSpec("max", "t", "max"),
        FeatureSpec("concat", "narrow", "concat", hotness=3, padding_idx=1),
        FeatureSpec("none", "t", "none", padding_idx=2),
    ),
)


@pytest.fixture(autouse=True)
def no_trial_of_dense_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embforge.tuner.bench.training_peers.DENSE_BYTES", 0)


def reference_module(spec: CollectionSpec, rule: str, device: str = "cpu") -> EmbeddingCollection:
    """Nothing to compile."""
    name, numbers = OUR_RULES[rule]
    return filled_module(spec, device=device, backend="reference", optimizer=getattr(ef.optim, name)(**numbers))


def steps_of(spec: CollectionSpec, load: str = "len=geo:4,batch=16") -> list[Batch]:
    return [make_batch(spec, parse(load), seed) for seed in range(2)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_torch_follows_the_formula_of_the_rule(rule: str, dtype: str) -> None:
    spec = replace(SPEC, tables=tuple(replace(t, dtype=dtype) for t in SPEC.tables))
    batches = steps_of(spec)
    peer = torch_training_peer(spec, rule, batches)
    assert check(peer, spec, batches).agrees
    assert ("nearest" in peer.note) == (rule == "rowwise_adagrad")


def test_small_tables_are_also_tried_with_dense_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embforge.tuner.bench.training_peers.DENSE_BYTES", 1 << 20)
    spec = CollectionSpec((TableSpec("t", 9, 4),), (FeatureSpec("f", "t"),))
    batches = steps_of(spec)
    timed: list[str] = []

    def slow_sparse(kinds: list[Trainee], *args: object, **options: object) -> Measurement:
        timed.extend(kind.name for kind in kinds)
        return Measurement({k.name: (2.0 if "sparse" in k.name else 1.0,) for k in kinds}, {})

    monkeypatch.setattr("embforge.tuner.bench.training_peers.measure", slow_sparse)
    peer = torch_training_peer(spec, "adagrad", batches)
    assert len(timed) == 2
    assert "dense gradients" in peer.note
    assert check(peer, spec, batches).agrees
    assert "sparse" in torch_training_peer(spec, "adam", batches).note  # dense Adam also moves rows that do not occur


@pytest.mark.parametrize("rule", RULES)
def test_embforge_follows_the_formula_with_every_pooling(rule: str) -> None:
    trainee = our_trainee(reference_module(EVERY_POOLING, rule), rule)
    assert check(trainee, EVERY_POOLING, steps_of(EVERY_POOLING, "len=fixed:3,batch=16")).agrees


def test_another_rule_another_rate_or_no_step_is_noticed() -> None:
    batches = steps_of(SPEC)
    module = reference_module(SPEC, "adagrad")
    assert not check(replace(our_trainee(module, "adagrad"), formula="rowwise_adagrad"), SPEC, batches).agrees
    other = filled_module(SPEC, backend="reference", optimizer=ef.optim.SGD(lr=0.0999))
    assert not check(our_trainee(other, "sgd"), SPEC, batches).agrees
    for dtype in ("fp32", "bf16"):
        spec = replace(SPEC, tables=tuple(replace(t, dtype=dtype) for t in SPEC.tables))
        peer = torch_training_peer(spec, "adagrad", batches)
        idle: Trainee = replace(peer, run=lambda prepared: None)
        assert not check(idle, spec, batches).agrees


def test_gradients_are_the_same_for_every_peer_and_exact_in_bf16() -> None:
    first, second = steps_of(SPEC)
    gradients = gradients_of(SPEC)
    assert gradients(first).joint is gradients(second).joint
    joint = gradients_of(SPEC)(first).joint
    assert torch.equal(joint, gradients(first).joint)
    assert torch.equal(joint, joint.bfloat16().float())
    assert [gradient.shape for gradient in gradients(first).by_feature] == [(16, 8), (16, 16), (16, 8)]


@pytest.mark.parametrize(
    ("spec", "rule", "named"),
    [
        (SPEC, "sgd", "same pooling"),
        (CollectionSpec((TableSpec("t", 9, 4),), (FeatureSpec("f", "t"),)), "adam", "no such peer.*adam on cpu"),
        (CollectionSpec((TableSpec("t", 9, 4, "bf16"),), (FeatureSpec("f", "t"),)), "sgd", "table 't'.*bf16"),
        (
            CollectionSpec(
                (TableSpec("t", 9, 4), TableSpec("u", 9, 4)),
                (FeatureSpec("f", "t"), FeatureSpec("g", "u"), FeatureSpec("h", "t")),
            ),
            "adagrad",
            "order of their tables",
        ),
    ],
)
def test_what_fbgemm_cannot_train_is_refused_with_the_reason(spec: CollectionSpec, rule: str, named: str) -> None:
    with pytest.raises(PeerUnavailableError, match=named):
        fbgemm_training_peer(spec, rule)


def test_what_torch_cannot_train_and_unknown_peers_are_refused() -> None:
    spec = CollectionSpec((TableSpec("t", 9, 4),), (FeatureSpec("f", "t", "max"),))
    with pytest.raises(PeerUnavailableError, match=r"feature 'f'.*'max'"):
        torch_training_peer(spec, "sgd", [])
    with pytest.raises(PeerUnavailableError, match=r"'tf'.*torch, fbgemm"):
        training_peer_named("tf", SPEC, "sgd", [])
    with pytest.raises(UnknownRuleError, match=r"'lion'.*rowwise_adagrad"):
        bench_training(SPEC, "lion")


def test_a_report_holds_both_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embforge.tuner.bench.training.our_module", reference_module)
    report = bench_training(SPEC, "rowwise_adagrad", workload="len=geo:3,batch=16", seconds=0)
    assert {t.name for t in report.timings} == {"embforge", "torch", "limit", "gather limit"}
    assert report.disagreeing == ()
    assert report.train == "rowwise_adagrad"
    assert "pooling" in report.skipped["fbgemm"]
    assert report.limit_share is not None
    assert report.both_share is not None
    assert report.both_share.median > report.limit_share.median
    assert json.loads(json.dumps(report.to_json()))["both_share"]["median"] == report.both_share.median


def test_a_type_that_torch_lacks_is_no_peer() -> None:
    spec = CollectionSpec((TableSpec("t", 99, 8, "fp16"),), (FeatureSpec("f", "t"), FeatureSpec("g", "t")))
    load = "len=fixed:2,batch=8"
    report = bench_training(spec, "sgd", against=("torch",), workload=load, seconds=0, ours=False, limit=False)
    assert report.skipped["torch"].startswith("no such peer: ")
    assert report.ratios == {}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_cpu_kernels_pass_the_check(dtype: str) -> None:
    spec = CollectionSpec((TableSpec("t", 300, 16, dtype),), (FeatureSpec("f", "t"),))
    report = bench_training(spec, "adagrad", against=(), workload="len=geo:8,batch=32", seconds=0, limit=False)
    assert report.disagreeing == ()


def test_the_training_workloads_cover_what_they_must() -> None:
    workloads = read_workloads(TRAINING)
    loads = [parse(w.load) for w in workloads]
    assert {w.train for w in workloads} == set(RULES)
    assert {w.group for w in workloads} == {"large", "cache", "overhead"}
    assert {t.dtype for w in workloads for t in w.spec.tables} == {"fp32", "bf16"}
    assert {str(load.ids) for load in loads} == {"uniform", "zipf:1.05"}
    assert {"fixed:1", "fixed:20", "geo:20"} == {str(load.lengths) for load in loads}
    batches = {load.batch for load, workload in zip(loads, workloads, strict=True) if workload.group != "overhead"}
    assert (min(batches), max(batches)) == (512, 4096)
    assert any(len({t.embedding_dim for t in w.spec.tables}) > 2 for w in workloads)
    assert len({w.spec.name for w in workloads}) == len(workloads)


def test_an_unknown_rule_in_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_text(
        '[[workload]]\nname = "w"\ngroup = "cache"\nrule = "lion"\ntables = 1\ndims = [4]\nrows = 9\nload = "batch=1"\n'
    )
    with pytest.raises(ValueError, match=r"'w': rule='lion'.*sgd"):
        read_workloads(path)


def test_the_exponent_tells_linear_from_not() -> None:
    sizes = (10_000, 100_000, 1_000_000)
    flat = [linear.Cost(n, n, n * 1e-7, n * 5e-8) for n in sizes]
    bent = [linear.Cost(n, n, n**1.2 * 1e-7, n * 5e-8) for n in sizes]
    assert linear.exponent(flat) == pytest.approx(1.0)
    assert [v.passed for v in linear.judge(flat)] == [True]
    assert [v.passed for v in linear.judge(bent)] == [False]
    assert linear.judge(flat[:1]) == []
    text = linear.costs_markdown(flat, linear.judge(flat), "sgd", 1000, dict.fromkeys((*FACTS, "date"), "x"))
    assert "| 10,000 | 10,000 | 1.00 | 100.0 | 0.50 | 50.0 |" in text


def test_costs_are_measured_size_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "our_module", reference_module)
    monkeypatch.setattr(linear, "SAMPLE_IDS", 100)
    costs = linear.measure_costs("sgd", 500, (40, 200), rounds=1)
    assert [cost.ids for cost in costs] == [40, 200]
    assert all(0 < cost.backward < cost.step for cost in costs)
    assert costs[1].distinct > costs[0].distinct
