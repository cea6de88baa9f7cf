"""The operators modelled on SparseOperationKit, and what a training loop does with a sharded module between steps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.sharded.cases import (
    RULES,
    SAMPLES,
    Training,
    Variant,
    arguments_of,
    drawn_rows,
    feature_of,
    loss_of,
    one_kind,
    part_of,
    sharded_module,
    sizes_of,
    tables_of,
    whole_batch,
)
from support.sharded.ranks import run_ranks
from torch import Tensor

import embforge as ef
from embforge.codegen.errors import SpecError
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.tuner.workload.laws import Zipf

CLOSE = dict(rtol=0.0, atol=2e-6)
"""Numbers around 1, each a sum of some tens at most in another order: a few dozen units of 2^-24."""


# ---- All2AllDenseEmbedding --------------------------------------------------------------------------------------


def test_dense_rows_are_those_of_a_plain_embedding() -> None:
    run_ranks(3, dense)


def dense(rank: int, size: int) -> None:
    full = torch.randn(50, 10, generator=torch.Generator().manual_seed(1))
    for duplicates in ("merge", "keep"):
        module = ef.sharded.All2AllDenseEmbedding(
            50, 10, ef.optim.SGD(lr=0.1), duplicates=duplicates, padding_idx=3, backend="reference"
        )
        module.load_full(full)
        plain = torch.nn.Embedding(50, 10, _weight=full.clone(), padding_idx=3)
        shapes: list[tuple[int, ...]] = [(2, 3, 4), (5,), (0,), (2, 0, 3)]
        for step in range(4):
            ids = [_ids(shapes[(other + step) % 4], 10 * step + other) for other in range(size)]
            found = module(ids[rank])
            assert found.shape == (*ids[rank].shape, 10)
            if step == 0 or duplicates == "keep":
                assert torch.equal(found, plain(ids[rank]))
            (found * (found + 1)).sum().backward()
            wanted = torch.cat([plain(one).view(-1, 10) for one in ids])
            (wanted * (wanted + 1)).sum().backward()
            with torch.no_grad():
                assert plain.weight.grad is not None
                plain.weight -= 0.1 * plain.weight.grad
                plain.weight.grad = None
            torch.testing.assert_close(module.full(), plain.weight.detach(), **CLOSE)


def _ids(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(seed))


def test_frequent_ids_are_sent_once() -> None:
    """Zipf 1.05, as in recommender data: at most 60 % of the bytes of ids, rows and gradients."""
    for rank, (merged, kept) in enumerate(run_ranks(2, dense_bytes)):
        moved = {name: (merged[name], kept[name]) for name in ("ids", "vectors", "gradients")}
        share = sum(one for one, _ in moved.values()) / sum(other for _, other in moved.values())
        print(f"rank {rank}: {moved} bytes merged and kept: {share:.1%} of what duplicates would cost")
        assert all(one < other for one, other in moved.values())
        assert share <= 0.6


def dense_bytes(rank: int, size: int) -> list[dict[str, int]]:
    import numpy as np

    drawn = Zipf(1.05).draw(np.random.default_rng(rank), 4096, 10_000)
    found = []
    for duplicates in ("merge", "keep"):
        module = ef.sharded.All2AllDenseEmbedding(
            10_000, 16, ef.optim.SGD(lr=0.1), duplicates=duplicates, backend="reference"
        )
        module(torch.from_numpy(drawn).view(64, 8, 8)).sum().backward()
        found.append(module.counters())
    return found


# ---- DistributedSparseEmbedding ---------------------------------------------------------------------------------

FUSED = CollectionSpec(
    (TableSpec("a", 10, 8), TableSpec("b", 2, 8), TableSpec("c", 5, 3)),
    (
        FeatureSpec("f", "a"),
        FeatureSpec("g", "b", "mean", weighted=True),
        FeatureSpec("h", "c", "mean", padding_idx=2),
        FeatureSpec("i", "b", "sum", weighted=True),
    ),
    name="fused",
)


def test_sparse_pools_are_those_of_an_unsharded_collection() -> None:
    """Tables of equal width are stacked. This tests reduce-scatter and all-gather of unequal batches, and the
    gradients of weights."""
    for counters in run_ranks(3, sparse):
        assert set(counters) >= {"header", "ids", "vectors", "gradients", "weight_gradients"}


def sparse(rank: int, size: int) -> dict[str, int]:
    optimizer = ef.optim.Adagrad(lr=0.1)
    plain = ef.EmbeddingCollection(FUSED, optimizer=optimizer, backend="reference")
    module = ef.sharded.DistributedSparseEmbedding(FUSED, optimizer=optimizer, backend="reference")
    assert {table.num_embeddings for table in module.spec.tables} == {12, 5}
    _load(plain, drawn_rows(FUSED))
    module.load_full(drawn_rows(FUSED))
    for step in range(4):
        whole, sizes = whole_batch(FUSED, step), sizes_of(size, step)
        part = part_of(FUSED, whole, sizes, rank)
        (values, offsets, weights), (own_values, own_offsets, own_weights) = arguments_of(whole), arguments_of(part)
        wanted = plain(values, offsets, weights.requires_grad_())
        found = module(own_values, own_offsets, own_weights.requires_grad_())
        torch.testing.assert_close(found, wanted.split(sizes)[rank], **CLOSE)
        (wanted * (wanted + 1)).sum().backward()
        (found * (found + 1)).sum().backward()
        assert weights.grad is not None and own_weights.grad is not None
        own = _of_rank(FUSED, weights.grad, whole.lengths, sizes, rank)
        torch.testing.assert_close(own_weights.grad, own, **CLOSE)
        for table in FUSED.tables:
            torch.testing.assert_close(module.full(table.name), plain.weight(table.name), **CLOSE)
    return module.counters()


def _load(module: Any, rows: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, of_table in rows.items():
            module.weight(name).copy_(of_table)


def _of_rank(spec: CollectionSpec, numbers: Tensor, lengths: Tensor, sizes: list[int], rank: int) -> Tensor:
    """A rank's part of a tensor with numbers for all ids."""
    begin, end = sum(sizes[:rank]), sum(sizes[: rank + 1])
    of_features = numbers.split(lengths.sum(1).tolist())
    parts = zip(of_features, lengths, strict=True)
    return torch.cat([one[int(of[:begin].sum()) : int(of[:end].sum())] for one, of in parts])


def test_sparse_refuses_what_cannot_be_added() -> None:
    spec = CollectionSpec((TableSpec("a", 4, 4),), (FeatureSpec("f", "a", "max"),))
    with pytest.raises(SpecError, match="'f': pooling='max' cannot be reduced and scattered; allowed: sum, mean"):
        ef.sharded.DistributedSparseEmbedding(spec, optimizer=ef.optim.SGD())


def test_fused_tables_keep_the_users_names() -> None:
    spec = CollectionSpec((TableSpec("t", 5, 4), TableSpec("u", 7, 4)), (FeatureSpec("f", "t"), FeatureSpec("g", "u")))
    module = ef.sharded.DistributedSparseEmbedding(spec, optimizer=ef.optim.Adagrad(lr=0.1), backend="reference")
    values, offsets = torch.tensor([4, 6]), torch.tensor([0, 1, 2])
    with pytest.raises(IndexError, match=r"id 7 .* is not a row of table 'u'; allowed: 0 to 6 \(7 rows\)"):
        module(values + 1 - torch.tensor([1, 0]), offsets)
    with pytest.raises(ValueError, match=r"table 't': a rank holds every n-th row of 't', 'u' together; .*full\(\)"):
        module.weight("t")
    with pytest.raises(ValueError, match="frozen together or not at all"):
        module.freeze("t")
    with pytest.raises(SpecError, match="'v' does not exist"):
        module.freeze("v")
    module(values, offsets).sum().backward()
    states = {name: module.full_optimizer_state(name) for name in ("t", "u")}
    assert [list(found) for found in states.values()] == [list(states["t"])] * 2
    (of_t,), (of_u,) = (found.values() for found in states.values())
    assert of_t.shape == (5, 4) and of_u.shape == (7, 4)
    assert of_t.nonzero()[:, 0].unique().tolist() == [4] and of_u.nonzero()[:, 0].unique().tolist() == [6]
    module.freeze("u", "t")
    before = module.full("t")
    module(values, offsets)
    assert not module(values, offsets).requires_grad and torch.equal(module.full("t"), before)
    module.unfreeze()
    module(values, offsets).sum().backward()
    assert not torch.equal(module.full("t"), before)


# ---- Gradients of weights ---------------------------------------------------------------------------------------

WITH_WEIGHTS: tuple[Variant, ...] = (
    ("mean", True), ("concat", True), ("sum", True), ("none", True), ("sqrtn", True), ("sum", False)
)  # fmt: skip
WEIGHTED = CollectionSpec(
    tables_of(2),
    tuple(feature_of(f"f{n}", tables_of(2)[n % 2], variant, 1) for n, variant in enumerate(WITH_WEIGHTS)),
    name="weighted",
)
"""Every pooling that has weights, and one feature without."""
PLANS = (
    ("modulo", "column_wise"), ("data_parallel", "block"), ("grid", "hierarchical"), ("table_wise", "data_parallel")
)  # fmt: skip


def test_weights_get_the_gradients_of_an_unsharded_collection() -> None:
    run_ranks(2, weight_gradients)


def weight_gradients(rank: int, size: int) -> None:
    whole, sizes = whole_batch(WEIGHTED, 3), sizes_of(size, 0)
    values, offsets, weights = arguments_of(whole)
    plain = ef.EmbeddingCollection(WEIGHTED, optimizer=RULES["sgd"], backend="reference")
    _load(plain, drawn_rows(WEIGHTED))
    loss_of(whole, plain.forward_dict(values, offsets, weights.requires_grad_())).backward()
    assert weights.grad is not None
    wanted = _of_rank(WEIGHTED, weights.grad, whole.lengths, sizes, rank)
    for kinds in PLANS:
        for duplicates in ("keep", "merge"):
            training = Training("weights", WEIGHTED, tuple(zip(("t0", "t1"), kinds, strict=True)), RULES["sgd"])
            module = sharded_module(training, size, duplicates=duplicates)
            part = part_of(WEIGHTED, whole, sizes, rank)
            own_values, own_offsets, own_weights = arguments_of(part)
            loss_of(part, module.forward_dict(own_values, own_offsets, own_weights.requires_grad_())).backward()
            torch.testing.assert_close(
                own_weights.grad, wanted, rtol=0.0, atol=1e-5, msg=lambda m, k=kinds: f"{k}: {m}"
            )
            for table in WEIGHTED.tables:
                torch.testing.assert_close(module.full(table.name), plain.weight(table.name), **CLOSE)


# ---- Training loops ---------------------------------------------------------------------------------------------

IN_TURN: tuple[Variant, ...] = (("sum", False), ("mean", True), ("none", False), ("max", False))
MIXED = Training(
    "mixed",
    CollectionSpec(
        tables_of(4), [feature_of(f"f{n}", table, IN_TURN[n], None) for n, table in enumerate(tables_of(4))]
    ),
    (("t0", "modulo"), ("t1", "data_parallel"), ("t2", "column_wise"), ("t3", "table_wise")),
    RULES["adam"],
)
"""A module with all parts that it may have: sharded tables and replicas."""


class Pair:
    """A sharded module, and an unsharded one that gets the samples of all ranks."""

    def __init__(self, rank: int, size: int, training: Training = MIXED, **options: Any) -> None:
        accumulate = options.get("accumulate", False)
        self.rank, self.size, self.training = rank, size, training
        self.plain = ef.EmbeddingCollection(
            training.spec, optimizer=training.optimizer, backend="reference", accumulate=accumulate
        )
        _load(self.plain, drawn_rows(training.spec))
        self.module = sharded_module(training, size, **options)

    def backward(self, step: int, scale: Callable[[Tensor, bool], Tensor] = lambda loss, sharded: loss) -> None:
        """Runs a forward and a backward of both modules; `scale` may change their losses."""
        spec = self.training.spec
        whole = whole_batch(spec, step)
        part = part_of(spec, whole, sizes_of(self.size, step), self.rank)
        scale(loss_of(whole, self.plain.forward_dict(*arguments_of(whole))), False).backward()
        scale(loss_of(part, self.module.forward_dict(*arguments_of(part))), True).backward()

    def check(self, what: str) -> None:
        """Whether the rows of both modules are the same."""
        for table in self.training.spec.tables:
            torch.testing.assert_close(
                self.module.full(table.name), self.plain.weight(table.name).detach(), **CLOSE,
                msg=lambda m, name=table.name: f"{what}: {name}: {m}",
            )  # fmt: skip


def test_what_training_loops_use_works_on_ranks() -> None:
    """Prefetched ids, accumulation, averages, frozen tables, schedulers, scaled losses, evaluation, whole tables."""
    for failures in run_ranks(2, loops):
        assert not failures


def loops(rank: int, size: int) -> list[str]:
    for check in (prefetches, accumulates, averages, freezes, schedules, skips_what_is_not_finite, evaluates, reloads):
        check(rank, size)
    return []


def prefetches(rank: int, size: int) -> None:
    modules = [sharded_module(MIXED, size) for _ in range(2)]
    parts = [part_of(MIXED.spec, whole_batch(MIXED.spec, s), sizes_of(size, s), rank) for s in range(4)]
    for part in parts:
        loss_of(part, modules[0].forward_dict(*arguments_of(part))).backward()
    seen: Iterable[Any] = ef.sharded.PrefetchedBatches(modules[1], parts, arguments_of)
    for part, done in seen:
        loss_of(part, modules[1].forward_dict(done)).backward()
    for table in MIXED.spec.tables:
        assert torch.equal(modules[0].full(table.name), modules[1].full(table.name)), table.name


def accumulates(rank: int, size: int) -> None:
    pair = Pair(rank, size, accumulate=True)
    before = pair.module.full("t0")
    for step in range(4):
        pair.backward(step)
        if step == 1:
            assert torch.equal(pair.module.full("t0"), before)
        if step % 2:
            pair.plain.step()
            pair.module.step()
    pair.check("accumulated")
    assert not torch.equal(pair.module.full("t0"), before)


def averages(rank: int, size: int) -> None:
    """As DistributedDataParallel does: the mean over ranks, of every part of a module. The rule is one that does
    not divide gradients by their own size."""
    pair = Pair(rank, size, replace(MIXED, optimizer=RULES["sgd"]), average_gradients=True)
    for step in range(3):
        pair.backward(step, lambda loss, sharded: loss if sharded else loss / size)
    pair.check("averaged")


def freezes(rank: int, size: int) -> None:
    """Frozen rows do not change. Tables that are trained again continue as if all ranks had counted all steps."""
    pair = Pair(rank, size)
    for frozen in (("t0", "t1"), ("t2", "t3"), ("t0", "t1", "t2"), ("t1",)):
        before = {table.name: pair.module.full(table.name) for table in MIXED.spec.tables}
        for module in (pair.plain, pair.module):
            module.freeze(*frozen)
        pair.backward(len(frozen))
        for module in (pair.plain, pair.module):
            module.unfreeze()
        for name, rows in before.items():
            assert torch.equal(pair.module.full(name), rows) == (name in frozen), name
        pair.check(f"frozen {frozen}")


def schedules(rank: int, size: int) -> None:
    """A torch scheduler of the module's one optimizer affects all parts."""
    pair = Pair(rank, size)
    assert pair.plain.optimizer is not None and pair.module.optimizer is not None
    schedulers = [torch.optim.lr_scheduler.StepLR(m.optimizer, 1, 0.25) for m in (pair.plain, pair.module)]
    for step in range(3):
        pair.backward(step)
        for module, scheduler in zip((pair.plain, pair.module), schedulers, strict=True):
            module.optimizer.step()  # type: ignore[union-attr]
            scheduler.step()
        pair.check("scheduled")


def skips_what_is_not_finite(rank: int, size: int) -> None:
    """If one rank's gradient is infinite, no rank updates, and every rank's scale is reduced."""
    pair = Pair(rank, size)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for module, scaler in zip((pair.plain, pair.module), scalers, strict=True):
        module.use_grad_scaler(scaler)
    for step in range(4):
        before = pair.module.full("t2")
        infinite = step == 1

        def scaled(loss: Tensor, sharded: bool, infinite: bool = infinite) -> Tensor:
            bad = infinite and (rank == 1 or not sharded)
            return scalers[sharded].scale(loss * (torch.inf if bad else 1.0))

        pair.backward(step, scaled)
        for module, scaler in zip((pair.plain, pair.module), scalers, strict=True):
            scaler.step(module.optimizer)
            scaler.update()
        assert torch.equal(pair.module.full("t2"), before) == infinite
        assert scalers[True].get_scale() == scalers[False].get_scale() == (1024.0 if step < 1 else 512.0)
        pair.check(f"scaled, step {step}")


def evaluates(rank: int, size: int) -> None:
    """Without gradients, results are the same, nothing is kept for a backward, and nothing is updated."""
    pair = Pair(rank, size)
    part = part_of(MIXED.spec, whole_batch(MIXED.spec, 0), sizes_of(size, 0), rank)
    with torch.no_grad():
        quiet = pair.module.forward_dict(*arguments_of(part))
    loud = pair.module.forward_dict(*arguments_of(part))
    assert all(torch.equal(quiet[name], loud[name]) for name in quiet)
    assert not any(result.requires_grad for result in quiet.values())
    assert all(result.requires_grad for result in loud.values())
    before = pair.module.counters()
    assert "gradients" not in before
    loss_of(part, loud).backward()
    assert pair.module.counters()["vectors"] == before["vectors"]
    assert pair.module.counters()["gradients"] > 0


def reloads(rank: int, size: int) -> None:
    """Whole tables can be moved from one plan to another; a module cannot be copied away from its ranks."""
    pair = Pair(rank, size)
    pair.backward(0)
    other = sharded_module(one_kind_of(MIXED, "block"), size)
    rows = {table.name: pair.module.full(table.name) for table in MIXED.spec.tables}
    other.load_full(rows)
    assert all(torch.equal(other.full(name), of_table) for name, of_table in rows.items())
    for (held, columns), shard in pair.module.shards("t2").items():
        assert torch.equal(shard, rows["t2"][held.start : held.stop : held.step, columns.start : columns.stop])
    for away in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            away(pair.module)


def one_kind_of(training: Training, kind: str) -> Training:
    kinds = tuple((table.name, kind) for table in training.spec.tables)
    return Training(training.name, training.spec, kinds, training.optimizer)


def test_a_process_alone_needs_no_group() -> None:
    """Without torch.distributed, a sharded module is one rank."""
    training = one_kind("modulo")
    module = sharded_module(training, 1)
    whole = whole_batch(training.spec, 0)
    plain = ef.EmbeddingCollection(training.spec, optimizer=training.optimizer, backend="reference")
    _load(plain, drawn_rows(training.spec))
    wanted, found = plain.forward_dict(*arguments_of(whole)), module.forward_dict(*arguments_of(whole))
    assert len(found["pooled"]) == SAMPLES
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for results in (wanted, found):
        loss_of(whole, results).backward()
    assert all(torch.equal(module.full(t.name), plain.weight(t.name)) for t in training.spec.tables)
    assert sum(module.counters().values()) == 0
