"""Collections for tests of ranks: what is trained, on which batches, and how one rank trains its part of them.

A whole batch is made from a seed, and each rank takes its samples of it, so that any number of ranks trains on the same
samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import embforge as ef
from embforge.codegen.dtypes import TABLE_DTYPES
from embforge.codegen.poolings import POOLINGS, PoolingName
from embforge.codegen.rules.language import program_of
from embforge.codegen.sharding.kinds import (
    ColumnWise,
    DataParallel,
    Grid,
    Hierarchical,
    Kind,
    RowWise,
    ShardPlan,
    TableWise,
)
from embforge.codegen.sharding.placement import place
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec

SAMPLES = 6
"""Samples of all ranks together in a step."""
SIZES = {1: (6,), 2: (4, 2), 3: (2, 0, 4), 4: (2, 0, 1, 3), 8: (1, 0, 0, 2, 0, 1, 1, 1)}
"""By the number of ranks: samples of each rank. They rotate by one rank per step, so that every rank sometimes has
none."""
HOTNESS = 3

KINDS: dict[str, Kind] = {
    "data_parallel": DataParallel(),
    "table_wise": TableWise(),
    "modulo": RowWise(),
    "block": RowWise("block"),
    "column_wise": ColumnWise(),
    "grid": Grid(),
    "hierarchical": Hierarchical(),
}
Variant = tuple[PoolingName, bool]
VARIANTS: tuple[Variant, ...] = tuple(
    (name, weighted) for name, kind in POOLINGS.items() for weighted in (False, True) if kind.weightable or not weighted
)
"""Every pooling without weights, and those that may have weights also with them."""
RULES: dict[str, ef.optim.Optimizer] = {
    "sgd": ef.optim.SGD(lr=0.1),
    "momentum": ef.optim.Momentum(lr=0.05, weight_decay=0.01),
    "nesterov": ef.optim.Nesterov(lr=0.05),
    "rowwise_adagrad": ef.optim.RowwiseAdagrad(lr=0.1),
    "adagrad": ef.optim.Adagrad(lr=0.1, max_row_norm=2.0),
    "adam": ef.optim.Adam(lr=0.02, weight_decay=0.1, decoupled=True),
    "rowwise_adam": ef.optim.RowwiseAdam(lr=0.02, max_row_norm=2.0),
    "rmsprop": ef.optim.RMSProp(lr=0.02),
    "ftrl": ef.optim.Ftrl(lr=0.1, l1=0.001, l2=0.001),
    "lamb": ef.optim.LAMB(lr=0.02, weight_decay=0.01),
    "lars": ef.optim.LARS(lr=2.0, weight_decay=0.01),
}


def has_reductions(optimizer: ef.optim.Optimizer) -> bool:
    """Whether a rule needs numbers of whole rows."""
    return bool(program_of(optimizer.update.rule).reductions)


@dataclass(frozen=True)
class Training:
    """Tables, each with its kind of sharding, and the rules that they are trained by."""

    name: str
    spec: CollectionSpec
    kinds: tuple[tuple[str, str], ...]
    """Each table's name with a name of KINDS."""
    optimizer: ef.optim.Optimizer | dict[Any, ef.optim.Optimizer | None]
    """For all tables, or by table."""
    steps: int = 20
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the sharded module."""

    def plan(self, size: int) -> ShardPlan:
        return ShardPlan({table: KINDS[kind] for table, kind in self.kinds})

    def rule(self, table: str) -> ef.optim.Optimizer | None:
        """The optimizer of a table."""
        if not isinstance(self.optimizer, dict):
            return self.optimizer
        named = [optimizer for names, optimizer in self.optimizer.items() if table in (names, *names)]
        return named[0] if named else self.optimizer["*"]

    def features(self, table: str) -> list[FeatureSpec]:
        return [feature for feature in self.spec.features if feature.table == table]

    def keeps_order(self, table: str, size: int) -> bool:
        """Whether every sum has its terms in the order that it has on one rank, so that results have the same bits.

        Sums over a bag, over a row and over the occurrences of a row must each be calculated on one rank. Selections,
        and rows that are sent one by one, do not depend on an order.
        """
        placement = place(self.plan(size), self.spec, size, node_size_of(size)).by_name[table]
        if placement.replicated:
            return size == 1
        rule = self.rule(table)
        if placement.columns_split and rule is not None and has_reductions(rule):
            return False
        sums = {feature.kind.sums for feature in self.features(table)}
        if sums == {False}:
            return True
        # What is added within nodes comes after all other features, so that such a table's features change their order.
        in_order = not placement.hierarchical or sums == {True}
        return in_order and all(len(piece.owners) == 1 for piece in placement.pieces)


def node_size_of(size: int) -> int:
    """The ranks per node: with four ranks or more there are two nodes."""
    return size // 2 if size >= 4 else size


class Whole(NamedTuple):
    """A batch of all ranks together. The lists have one tensor per feature."""

    values: list[Tensor]
    lengths: Tensor
    """`[features, samples]`."""
    weights: list[Tensor]
    wanted: list[Tensor]
    """The numbers from which the gradient of a feature's result is calculated."""


def whole_batch(spec: CollectionSpec, seed: int, samples: int = SAMPLES) -> Whole:
    """A batch from a seed, with bags of 0 to HOTNESS ids."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, HOTNESS + 1, (len(spec.features), samples))
    values, weights, wanted = [], [], []
    for feature, of_feature in zip(spec.features, lengths, strict=True):
        table, count = spec.table(feature.table), int(of_feature.sum())
        values.append(torch.from_numpy(rng.integers(0, table.num_embeddings, count)))
        weights.append(torch.from_numpy(rng.uniform(0.5, 1.5, count).astype(np.float32)))
        shape = (count if feature.pooling == "none" else samples, _width(spec, feature))
        wanted.append(torch.from_numpy(rng.standard_normal(shape).astype(np.float32)))
    return Whole(values, torch.from_numpy(lengths), weights, wanted)


def _width(spec: CollectionSpec, feature: FeatureSpec) -> int:
    dim = spec.table(feature.table).embedding_dim
    return dim * (feature.hotness or 1) if feature.pooling == "concat" else dim


def sizes_of(size: int, step: int) -> list[int]:
    """Samples of each rank in a step."""
    sizes = SIZES[size]
    return [sizes[(rank + step) % size] for rank in range(size)]


def part_of(spec: CollectionSpec, whole: Whole, sizes: Sequence[int], rank: int) -> Whole:
    """The part of a batch that has the samples of one rank."""
    begin = sum(sizes[:rank])
    end = begin + sizes[rank]
    values, weights, wanted = [], [], []
    for feature, ids, lengths, of_ids, of_result in zip(spec.features, *whole, strict=True):
        first, last = int(lengths[:begin].sum()), int(lengths[:end].sum())
        values.append(ids[first:last])
        weights.append(of_ids[first:last])
        wanted.append(of_result[first:last] if feature.pooling == "none" else of_result[begin:end])
    return Whole(values, whole.lengths[:, begin:end], weights, wanted)


def arguments_of(batch: Whole) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of a call: values, offsets, weights."""
    offsets = torch.nn.functional.pad(batch.lengths.reshape(-1).cumsum(0), (1, 0))
    return torch.cat(batch.values), offsets, torch.cat(batch.weights)


def loss_of(batch: Whole, results: dict[str, Tensor]) -> Tensor:
    """A loss whose gradients depend on the results, so that a difference in one step causes one in the next."""
    pairs = zip(results.values(), batch.wanted, strict=True)
    return torch.stack([(result * (result + wanted)).sum() for result, wanted in pairs]).sum()


class Trained(NamedTuple):
    """The results of a training."""

    results: list[dict[str, Tensor]]
    """The results of every step, by feature."""
    rows: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]


def drawn_rows(spec: CollectionSpec) -> dict[str, Tensor]:
    """The rows of all tables before the first step."""
    generator = torch.Generator().manual_seed(7)
    return {t.name: torch.randn(t.num_embeddings, t.embedding_dim, generator=generator) * 0.3 for t in spec.tables}


def train_unsharded(training: Training) -> Trained:
    """Trains the truth: an unsharded collection on whole batches, by the reference."""
    spec = training.spec
    module = ef.EmbeddingCollection(spec, optimizer=training.optimizer, backend="reference")
    with torch.no_grad():
        for name, rows in drawn_rows(spec).items():
            module.weight(name).copy_(rows)
    results = []
    for step in range(training.steps):
        batch = whole_batch(spec, step)
        found = module.forward_dict(*arguments_of(batch))
        results.append({name: result.detach() for name, result in found.items()})
        loss_of(batch, found).backward()
    rows = {table.name: module.weight(table.name).detach().clone() for table in spec.tables}
    states = {t.name: {n: s.clone() for n, s in module.optimizer_state(t.name).items()} for t in spec.tables}
    return Trained(results, rows, states)


def sharded_module(training: Training, size: int, **options: Any) -> ef.sharded.ShardedEmbeddingCollection:
    """The module of a rank, with the drawn rows."""
    options = {"backend": "reference", "node_size": node_size_of(size), **training.options, **options}
    module = ef.sharded.ShardedEmbeddingCollection(
        training.spec, training.plan(size), optimizer=training.optimizer, **options
    )
    module.load_full(drawn_rows(training.spec))
    return module


def train_rank(rank: int, size: int, training: Training, **options: Any) -> Trained:
    """Trains one rank's part. Rows and states of the result are whole, and the same on all ranks."""
    module = sharded_module(training, size, **options)
    results = []
    for step in range(training.steps):
        batch = part_of(training.spec, whole_batch(training.spec, step), sizes_of(size, step), rank)
        found = module.forward_dict(*arguments_of(batch))
        results.append({name: result.detach() for name, result in found.items()})
        loss_of(batch, found).backward()
    names = [table.name for table in training.spec.tables]
    return Trained(
        results, {name: module.full(name) for name in names}, {n: module.full_optimizer_state(n) for n in names}
    )


def joined(ranks: Sequence[Trained]) -> Trained:
    """Joins the results of all ranks to those of whole batches."""
    results = [
        {name: torch.cat([one[name] for one in of_ranks]) for name in of_ranks[0]}
        for of_ranks in zip(*(trained.results for trained in ranks), strict=True)
    ]
    return Trained(results, ranks[0].rows, ranks[0].states)


def tables_of(count: int) -> tuple[TableSpec, ...]:
    """Tables with odd dims, some with fewer rows than there are ranks."""
    shapes = ((11, 9), (2, 5), (13, 8), (3, 7), (10, 12), (7, 9), (5, 6))
    return tuple(TableSpec(f"t{number}", *shapes[number % len(shapes)]) for number in range(count))


def feature_of(name: str, table: TableSpec, variant: Variant, padding_idx: int | None) -> FeatureSpec:
    """A feature with one of VARIANTS."""
    pooling, weighted = variant
    return FeatureSpec(name, table.name, pooling, weighted, HOTNESS, padding_idx)


def variants_of(rule: str, kind: str, variants: Sequence[Variant] = VARIANTS) -> Sequence[Variant]:
    """The variants by which a table of this kind is looked up in the collection of this rule.

    Variants are divided into lots, at most as many as there are kinds and as there are rules. The kinds of a rule take
    one lot after the other, and each rule starts with the next lot, so that every lot is combined with every rule and
    with every kind, for any number of variants. Variants that are next to each other share a lot and so a table: if
    none of a table's poolings adds, all of its numbers can be compared as bits.
    """
    size = ceil(len(variants) / min(len(KINDS), len(RULES)))
    lots = [variants[first : first + size] for first in range(0, len(variants), size)]
    return lots[(list(RULES).index(rule) + list(KINDS).index(kind)) % len(lots)]


def every_kind(rule: str) -> Training:
    """A collection with a table of every kind, each looked up by several features.

    Each pair of a kind, a pooling with or without weights, and a rule occurs in one of these collections.
    """
    tables = tables_of(len(KINDS))
    features = [
        feature_of(f"f{k}.{j}", table, variant, padding_idx=1 if (k + j) % 2 else None)
        for k, (table, kind) in enumerate(zip(tables, KINDS, strict=True))
        for j, variant in enumerate(variants_of(rule, kind))
    ]
    kinds = tuple(zip((table.name for table in tables), KINDS, strict=True))
    return Training(rule, CollectionSpec(tables, features, name="every_kind"), kinds, RULES[rule])


def one_kind(kind: str, rule: str = "adagrad") -> Training:
    """A collection whose tables are all of one kind; of some tables, some ranks hold nothing."""
    tables = tables_of(2)
    features = (
        feature_of("pooled", tables[0], ("mean", True), None),
        feature_of("rows", tables[0], ("none", False), 4),
        feature_of("few", tables[1], ("max", False), 0),
    )
    kinds = tuple((table.name, kind) for table in tables)
    return Training(f"{kind} alone", CollectionSpec(tables, features, name="one_kind"), kinds, RULES[rule])


def every_format(dtypes: Sequence[str] = TABLE_DTYPES) -> Training:
    """Two tables of each number format, sharded so that sums keep their order.

    They are rounded to nearest, because the random numbers of stochastic rounding depend on a row's place in its shard.
    No maximum is taken over several shards: the narrower a format, the more numbers are equally large.
    """
    tables, features, kinds = [], [], []
    for dtype in dtypes:
        rows, columns = (TableSpec(f"{dtype}_{name}", 11, 9, dtype) for name in ("rows", "columns"))  # type: ignore[arg-type]
        tables += [rows, columns]
        features += [
            FeatureSpec(f"{dtype}_none", rows.name, "none", True),
            FeatureSpec(f"{dtype}_mean", columns.name, "mean", True),
            FeatureSpec(f"{dtype}_max", columns.name, "max"),
        ]
        kinds += [(rows.name, "modulo"), (columns.name, "column_wise")]
    spec = CollectionSpec(tables, features, name="every_format")
    return Training("every format", spec, tuple(kinds), ef.optim.Adagrad(lr=0.1, rounding="nearest"), steps=8)


def by_table() -> Training:
    """A table of every kind, with optimizers by table: two of them reduce rows whose columns are split."""
    rules: dict[Any, ef.optim.Optimizer | None] = {
        "t5": RULES["lamb"], ("t0", "t4"): RULES["rowwise_adagrad"], "t3": None, "*": RULES["adam"],
    }  # fmt: skip
    return replace(every_kind("adam"), name="by table", optimizer=rules, steps=8)
