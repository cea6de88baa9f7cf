"""What a sharded collection computes on two ranks, as digests; ranks are processes of a gloo group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import embforge as ef
from baseline.digests import Digests, digests_of
from baseline.drawing import Batch, Numbers
from baseline.internals import run_ranks
from baseline.specs import RULES

RANKS, STEPS = 2, 3
SIZES = ((3, 2), (0, 4), (5, 5))
"""Samples of each rank, step by step."""
SPEC = ef.CollectionSpec(
    [
        ef.TableSpec("modulo", 11, 6),
        ef.TableSpec("block", 13, 8),
        ef.TableSpec("columns", 9, 10),
        ef.TableSpec("whole", 7, 4),
        ef.TableSpec("copied", 5, 3),
        ef.TableSpec("grid", 10, 6, "bf16"),
    ],
    [
        ef.FeatureSpec("modulo_sum", "modulo", weighted=True),
        ef.FeatureSpec("modulo_rows", "modulo", "none"),
        ef.FeatureSpec("block_mean", "block", "mean", padding_idx=2),
        ef.FeatureSpec("block_max", "block", "max"),
        ef.FeatureSpec("columns_sqrtn", "columns", "sqrtn", weighted=True),
        ef.FeatureSpec("columns_concat", "columns", "concat", hotness=3),
        ef.FeatureSpec("whole_sum", "whole", padding_idx=-1),
        ef.FeatureSpec("copied_mean", "copied", "mean"),
        ef.FeatureSpec("grid_sum", "grid"),
    ],
    name="sharded",
)
LEAST = ef.CollectionSpec(
    [ef.TableSpec("modulo", 11, 6), ef.TableSpec("nodes", 13, 8, "fp8_e5m2"), ef.TableSpec("columns", 9, 10)],
    [
        ef.FeatureSpec("modulo_min", "modulo", "min"),
        ef.FeatureSpec("nodes_sum", "nodes", weighted=True),
        ef.FeatureSpec("nodes_min", "nodes", "min", padding_idx=-1),
        ef.FeatureSpec("columns_min", "columns", "min", padding_idx=2),
    ],
    name="least",
)
"""The pooling and the format that came after the first digests, and the kind that needs nodes."""


@dataclass(frozen=True)
class ShardedCase:
    """A module and its options."""

    name: str
    optimizer: str
    """A key of RULES."""
    options: tuple[tuple[str, Any], ...] = ()
    formats: tuple[str | None, str | None] = (None, None)
    """The number formats in which results and gradients travel between ranks."""
    spec: ef.CollectionSpec = SPEC
    weight_gradients: bool = False
    """Whether per-sample weights get gradients, too."""


CASES = (
    ShardedCase("sharded, by rowwise_adagrad", "rowwise_adagrad"),
    ShardedCase("sharded, by lamb", "lamb"),
    ShardedCase("sharded, by adam, duplicates merged", "adam", (("duplicates", "merge"), ("pools", "all"))),
    ShardedCase("sharded, by sgd, int8 and fp8 on the wire", "sgd", formats=("int8", "fp8")),
    ShardedCase("sharded, by sgd, fp16 and bf16 on the wire", "sgd", formats=("fp16", "bf16")),
    ShardedCase("minima of nodes, by adagrad", "adagrad", (("node_size", 1),), spec=LEAST, weight_gradients=True),
    ShardedCase("minima of nodes, accumulated", "sgd", (("node_size", 1), ("accumulate", True)), spec=LEAST),
)
QUICK = CASES[0].name


def shard_plan(spec: ef.CollectionSpec = SPEC) -> Any:
    """A table of every kind."""
    sharded = ef.sharded
    if spec == LEAST:
        return sharded.ShardPlan(
            {"modulo": sharded.RowWise(), "nodes": sharded.Hierarchical(), "columns": sharded.ColumnWise()}
        )
    return sharded.ShardPlan(
        {
            "modulo": sharded.RowWise(),
            "block": sharded.RowWise("block"),
            "columns": sharded.ColumnWise(),
            "whole": sharded.TableWise(1),
            "copied": sharded.DataParallel(),
            "grid": sharded.Grid(),
        }
    )


def sharded_results(case: ShardedCase, backend: str) -> Digests:
    """By rank and feature the results of every step; rows and states of whole tables after them."""
    found: Digests = {}
    for rank, digests in enumerate(run_ranks(RANKS, train_on_rank, case, backend)):
        for name, digest in digests.items():
            if name.startswith("after"):  # gathered from all ranks, so the same everywhere
                assert found.setdefault(name, digest) == digest, f"ranks hold different {name}"
            else:
                found[f"rank {rank}, {name}"] = digest
    return found


def sharded_module(case: ShardedCase, backend: Any) -> ef.sharded.ShardedEmbeddingCollection:
    """This rank's part of the collection, with drawn rows."""
    module = ef.sharded.ShardedEmbeddingCollection(
        case.spec,
        shard_plan(case.spec),
        optimizer=RULES[case.optimizer],
        backend=backend,
        formats=ef.sharded.Formats(*case.formats),  # type: ignore[arg-type]
        **dict(case.options),
    )
    numbers = Numbers(11)
    module.load_full({t.name: numbers.real(t.num_embeddings, t.embedding_dim) for t in case.spec.tables})
    module.seed(77)
    return module


def train_on_rank(rank: int, size: int, case: ShardedCase, backend: str) -> Digests:
    """Digests of the training of one rank."""
    module = sharded_module(case, backend)
    found = []
    for step in range(STEPS):
        found.append(sharded_step(module, rank, step, weight_gradients=case.weight_gradients))
        module.step()
    after: dict[str, Tensor] = {}
    for table in case.spec.tables:
        after[f"after: {table.name}"] = module.full(table.name)
        for name, state in module.full_optimizer_state(table.name).items():
            after[f"after: {table.name}.{name}"] = state
    return digests_of([*found, after])


def sharded_step(module: Any, rank: int, step: int, *, weight_gradients: bool = False) -> dict[str, Tensor]:
    """One training step; its results."""
    batch, numbers = batch_on_rank(rank, step, module.spec), Numbers(1000 + 10 * step + rank)
    weights = None if batch.weights is None else batch.weights.requires_grad_(weight_gradients)
    results = module.forward_dict(batch.values, batch.offsets, weights)
    torch.autograd.backward(list(results.values()), [numbers.real(*result.shape) for result in results.values()])
    found = {f"result: {name}": result.detach() for name, result in results.items()}
    if weights is not None and weights.grad is not None:
        found["gradient: weights"] = weights.grad
    return found


def batch_on_rank(rank: int, step: int, spec: ef.CollectionSpec) -> Batch:
    """Bags of none to three ids."""
    numbers, size = Numbers(100 * step + rank), SIZES[step][rank]
    lengths = numbers.whole(size * len(spec.features), 4)
    values = []
    for place, feature in enumerate(spec.features):
        count = int(lengths[place * size : (place + 1) * size].sum())
        values.append(numbers.whole(count, spec.table(feature.table).num_embeddings))
    joined = torch.cat(values)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return Batch(joined, offsets, numbers.real(joined.numel()))
