"""The gather limit reads every row of a batch exactly once; the update limit writes every distinct row once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.collection import EmbeddingCollection
from embforge.tuner.bench.limit import gather_limit
from embforge.tuner.bench.update_limit import distinct_rows, update_limit
from embforge.tuner.workload.workload import Batch, make_batch, parse

SPEC = CollectionSpec(
    (
        TableSpec("odd", 50, 3),
        TableSpec("narrow", 7, 1, "fp16"),
        TableSpec("line", 100, 16),
        TableSpec("wide", 30, 1000, "bf16"),
    ),
    (*(FeatureSpec(name, name) for name in ("odd", "narrow", "line", "wide")), FeatureSpec("again", "line")),
)


def xor_of_rows(module: EmbeddingCollection, batch: Batch) -> int:
    folded = 0
    for index, feature in enumerate(SPEC.features):
        rows = module.weight(feature.table).data[torch.from_numpy(batch.values[batch.feature(index)])]
        data = rows.contiguous().view(torch.uint8).numpy()
        padded = np.zeros((data.shape[0], -(-data.shape[1] // 8) * 8), np.uint8)
        padded[:, : data.shape[1]] = data
        folded ^= int(np.bitwise_xor.reduce(padded.view(np.uint64), axis=None))
    return folded


@pytest.fixture(scope="module")
def module() -> EmbeddingCollection:
    return EmbeddingCollection(SPEC, backend="reference")


@pytest.mark.parametrize("load", ["len=geo:5,batch=33", "len=fixed:1,batch=1", "batch=0"])
def test_xor_of_the_rows_whatever_the_prefetch_and_threads(module: EmbeddingCollection, load: str) -> None:
    limit = gather_limit(SPEC, [module.weight(t.name).data for t in SPEC.tables])
    batch = make_batch(SPEC, parse(load))
    prepared, expected = limit.prepare(batch), xor_of_rows(module, batch)
    for ahead_bytes in (0, 512, 32768):
        for level in (1, 2):
            for serial in (False, True):
                assert replace(limit, ahead_bytes=ahead_bytes, level=level, serial=serial).run(prepared) == expected


def test_the_sweep_returns_one_of_its_candidates(module: EmbeddingCollection) -> None:
    limit = gather_limit(SPEC, [module.weight(t.name).data for t in SPEC.tables])
    batches = [make_batch(SPEC, parse("batch=8"), seed) for seed in range(2)]
    best = limit.best(batches, seconds=0)
    assert best.run(best.prepare(batches[0])) == xor_of_rows(module, batches[0])


def test_tables_of_another_layout_are_refused() -> None:
    tables = [torch.zeros(t.num_embeddings, t.embedding_dim + 8)[:, : t.embedding_dim] for t in SPEC.tables]
    with pytest.raises(ValueError, match="'odd' has strides"):
        gather_limit(SPEC, tables)


@pytest.mark.parametrize("load", ["len=geo:5,batch=33", "len=fixed:1,batch=1", "batch=0"])
def test_every_distinct_row_is_added_to_once(load: str) -> None:
    module = EmbeddingCollection(SPEC, backend="reference")
    tables = [module.weight(t.name).data for t in SPEC.tables]
    batch = make_batch(SPEC, parse(load))
    limit = update_limit(SPEC, tables, addend=1)
    rows, work = distinct_rows(SPEC, batch), limit.prepare(batch)
    for ahead_bytes in (0, 512, 32768):
        for level in (1, 2):
            for serial in (False, True):
                before = [table.clone() for table in tables]
                changed = replace(limit, ahead_bytes=ahead_bytes, level=level, serial=serial).run(work)
                assert changed == sum(r.size for r in rows)
                for table, old, touched in zip(tables, before, rows, strict=True):
                    whole = old.dtype == torch.float32
                    numbers, expected = (t if whole else t.view(torch.int16) for t in (table, old.clone()))
                    expected[torch.from_numpy(touched)] += 1
                    assert torch.equal(numbers, expected)


def test_shared_tables_are_updated_once_and_adding_nothing_changes_nothing(module: EmbeddingCollection) -> None:
    batch = make_batch(SPEC, parse("len=geo:20,batch=50"))
    line = distinct_rows(SPEC, batch)[2]
    both = np.concatenate([batch.values[batch.feature(2)], batch.values[batch.feature(4)]])
    assert np.array_equal(line, np.unique(both))
    tables = [module.weight(t.name).data for t in SPEC.tables]
    before = [table.clone() for table in tables]
    best = update_limit(SPEC, tables).best([batch, batch], seconds=0)
    best.run(best.prepare(batch))
    assert all(torch.equal(table, old) for table, old in zip(tables, before, strict=True))
