"""`ef.sharded`: collections whose tables are split over ranks. Names are loaded when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "All2AllDenseEmbedding": "embforge.sharded.dense",
    "ColumnWise": "embforge.codegen.sharding.kinds",
    "DataParallel": "embforge.codegen.sharding.kinds",
    "DistributedSparseEmbedding": "embforge.sharded.sparse",
    "Formats": "embforge.sharded.exchange.formats",
    "Grid": "embforge.codegen.sharding.kinds",
    "Hierarchical": "embforge.codegen.sharding.kinds",
    "PrefetchedBatches": "embforge.sharded.stages.prefetch",
    "RankError": "embforge.codegen.errors",
    "RowWise": "embforge.codegen.sharding.kinds",
    "ShardPlan": "embforge.codegen.sharding.kinds",
    "ShardedEmbeddingCollection": "embforge.sharded.collection",
    "TableWise": "embforge.codegen.sharding.kinds",
    "Topology": "embforge.codegen.planner.topology",
    "VocabParallelEmbedding": "embforge.sharded.vocab_parallel",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'embforge.sharded' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
