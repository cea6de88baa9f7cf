"""Collections for tests of ranks: what is trained, on which batches, and how one rank trains its part of them.

A whole batch is made from a seed; a rank takes its samples of it, so that any number of ranks together see the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import embforge as ef
from embforge.codegen.rules.language import program_of
from embforge.codegen.sharding.geometry import SEQUENCE_POOLINGS
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
"""Of all ranks together, in a step."""
SIZES = {1: (6,), 2: (4, 2), 3: (2, 0, 4), 4: (2, 0, 1, 3), 8: (1, 0, 0, 2, 0, 1, 1, 1)}
"""Samples of each rank; step by step they go round, so that every rank has none at times."""
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
VARIANTS = (
    ("sum", False), ("mean", True), ("none", False), ("sqrtn", False), ("concat", True), ("max", False),
    ("sum", True), ("mean", False), ("none", True), ("sqrtn", True), ("concat", False),
)  # fmt: skip
"""Every pooling, with weights and without; a maximum has none."""
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
    """Tables, each with its kind, and the rule they are trained by."""

    name: str
    spec: CollectionSpec
    kinds: tuple[tuple[str, str], ...]
    """Of each table, a name of KINDS."""
    optimizer: ef.optim.Optimizer | dict[Any, ef.optim.Optimizer | None]
    """For all tables, or by table."""
    steps: int = 20
    options: dict[str, Any] = field(default_factory=dict)
    """Of the sharded module."""

    def plan(self, size: int) -> ShardPlan:
        return ShardPlan({table: KINDS[kind] for table, kind in self.kinds})

    def rule(self, table: str) -> ef.optim.Optimizer | None:
        """What trains a table."""
        if not isinstance(self.optimizer, dict):
            return self.optimizer
        named = [optimizer for names, optimizer in self.optimizer.items() if table in (names, *names)]
        return named[0] if named else self.optimizer["*"]

    def features(self, table: str) -> list[FeatureSpec]:
        return [feature for feature in self.spec.features if feature.table == table]

    def keeps_order(self, table: str, size: int) -> bool:
        """Whether every sum has its terms in the order of one rank's: then results and rows are the same bits.

        Sums of whole bags, of whole rows and of the occurrences of a row must each be made in one place. Maxima and
        rows that travel one by one have no order to lose.
        """
        placed = place(self.plan(size), self.spec, size, node_size_of(size)).by_name[table]
        if placed.replicated:
            return size == 1
        rule = self.rule(table)
        if placed.columns_split and rule is not None and has_reductions(rule):
            return False
        poolings = {feature.pooling for feature in self.features(table)}
        if poolings <= {*SEQUENCE_POOLINGS, "max"}:
            return True
        # What is added up inside nodes comes behind all else, so that features of such a table change their order.
        in_order = not placed.hierarchical or poolings.isdisjoint({*SEQUENCE_POOLINGS, "max"})
        return in_order and all(len(piece.owners) == 1 for piece in placed.pieces)


def node_size_of(size: int) -> int:
    """From four ranks on there are two nodes."""
    return size // 2 if size >= 4 else size


class Whole(NamedTuple):
    """A batch of all ranks together."""

    values: list[Tensor]
    """Of each feature."""
    lengths: Tensor
    """`[features, samples]`."""
    weights: list[Tensor]
    wanted: list[Tensor]
    """Of each feature, what the gradient of its result is made from."""


def whole_batch(spec: CollectionSpec, seed: int, samples: int = SAMPLES) -> Whole:
    """Bags of none to HOTNESS ids."""
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
    """The samples of one rank."""
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
    """What a module is called with: values, offsets, weights."""
    offsets = torch.nn.functional.pad(batch.lengths.reshape(-1).cumsum(0), (1, 0))
    return torch.cat(batch.values), offsets, torch.cat(batch.weights)


def loss_of(batch: Whole, results: dict[str, Tensor]) -> Tensor:
    """Gradients depend on results: what differs in a step makes a difference in the next."""
    pairs = zip(results.values(), batch.wanted, strict=True)
    return torch.stack([(result * (result + wanted)).sum() for result, wanted in pairs]).sum()


class Trained(NamedTuple):
    """What a training came to."""

    results: list[dict[str, Tensor]]
    """Of every step."""
    rows: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]


def drawn_rows(spec: CollectionSpec) -> dict[str, Tensor]:
    """The tables before the first step."""
    generator = torch.Generator().manual_seed(7)
    return {t.name: torch.randn(t.num_embeddings, t.embedding_dim, generator=generator) * 0.3 for t in spec.tables}


def train_unsharded(training: Training) -> Trained:
    """The truth: an unsharded collection on whole batches, by the reference."""
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
    """One rank's part of a training; rows and states are whole, and the same on all ranks."""
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
    """The results of all ranks as those of whole batches."""
    results = [
        {name: torch.cat([one[name] for one in of_ranks]) for name in of_ranks[0]}
        for of_ranks in zip(*(trained.results for trained in ranks), strict=True)
    ]
    return Trained(results, ranks[0].rows, ranks[0].states)


def tables_of(count: int) -> tuple[TableSpec, ...]:
    """Tables with fewer rows than ranks among them, and odd dims."""
    shapes = ((11, 9), (2, 5), (13, 8), (3, 7), (10, 12), (7, 9), (5, 6))
    return tuple(TableSpec(f"t{number}", *shapes[number % len(shapes)]) for number in range(count))


def feature_of(name: str, table: TableSpec, variant: int, padding_idx: int | None) -> FeatureSpec:
    """One of VARIANTS."""
    pooling, weighted = VARIANTS[variant % len(VARIANTS)]
    return FeatureSpec(name, table.name, pooling, weighted, HOTNESS, padding_idx)  # type: ignore[arg-type]


def every_kind(rule: str) -> Training:
    """A table of every kind, each looked up by two features, in one collection.

    Poolings go round with rules and kinds so that any two of kind, pooling with or without weights, and rule meet.
    """
    number, tables = list(RULES).index(rule), tables_of(len(KINDS))
    features = [
        feature_of(f"f{k}.{j}", table, number + 3 * k + 7 * j, padding_idx=1 if (k + j) % 2 else None)
        for k, table in enumerate(tables)
        for j in range(2)
    ]
    kinds = tuple(zip((table.name for table in tables), KINDS, strict=True))
    return Training(rule, CollectionSpec(tables, features, name="every_kind"), kinds, RULES[rule])


def one_kind(kind: str, rule: str = "adagrad") -> Training:
    """All tables of one kind: of some, ranks hold nothing."""
    tables = tables_of(2)
    features = (
        feature_of("pooled", tables[0], 1, None),
        feature_of("rows", tables[0], 2, 4),
        feature_of("few", tables[1], 5, 0),
    )
    kinds = tuple((table.name, kind) for table in tables)
    return Training(f"{kind} alone", CollectionSpec(tables, features, name="one_kind"), kinds, RULES[rule])


def by_table() -> Training:
    """A table of every kind, and optimizers by table: two of them reduce rows whose columns are split."""
    rules: dict[Any, ef.optim.Optimizer | None] = {
        "t5": RULES["lamb"], ("t0", "t4"): RULES["rowwise_adagrad"], "t3": None, "*": RULES["adam"],
    }  # fmt: skip
    return replace(every_kind("adam"), name="by table", optimizer=rules, steps=8)
