"""`All2AllDenseEmbedding`: a lookup without pooling in a table whose rows are split over ranks, like the one of
SparseOperationKit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from embforge.codegen.dtypes import OutputDtype, TableDtype
from embforge.codegen.poolings import EACH_ROW
from embforge.codegen.sharding.kinds import ShardPlan
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.sharded.collection import ShardedEmbeddingCollection
from embforge.training.fused_optimizer import FusedOptimizer
from embforge.training.rule_groups import Optimizers

BAGS = 4096
"""The number of bags in which ids are passed to kernels, so that the blocks of a GPU share the work."""


class All2AllDenseEmbedding(nn.Module):
    """Looks up ids of any shape, `[...] ids -> [..., dim]`, by an all-to-all of ids, a local gather, and an all-to-all
    of rows; the backward has an all-to-all of gradients.

    Rank `id % ranks` holds row `id`. An id that occurs several times on a rank is sent once, its row is received once,
    and its gradients are added up before they are sent; `duplicates="keep"` sends all of them, so that training has the
    same bits as on one rank. The other keywords are those of `ShardedEmbeddingCollection`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        optimizer: Optimizers = None,
        process_group: object = None,
        *,
        dtype: TableDtype = "fp32",
        output_dtype: OutputDtype = "fp32",
        padding_idx: int | None = None,
        duplicates: str = "merge",
        **options: Any,
    ) -> None:
        super().__init__()
        table = TableSpec("weight", num_embeddings, embedding_dim, dtype)
        feature = FeatureSpec("ids", "weight", pooling=EACH_ROW, padding_idx=padding_idx)
        spec = CollectionSpec((table,), (feature,), output_dtype, "dense")
        self.collection = ShardedEmbeddingCollection(
            spec, ShardPlan.row_wise(spec), process_group, optimizer, duplicates=duplicates, **options
        )

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of ids of any shape, e.g. `[batch, slots, nnz]` or `[N]`. Ranks may have different shapes, also
        without ids."""
        if not isinstance(ids, Tensor):
            raise TypeError(f"ids: got {type(ids).__name__}; allowed: a tensor of int32 or int64, of any shape")
        flat = ids.reshape(-1)
        count = flat.numel()
        bags = max(1, min(count, BAGS))
        borders = torch.arange(bags + 1, dtype=torch.int64, device=ids.device) * count // bags
        rows = self.collection.forward_dict(flat, borders.to(flat.dtype) if flat.dtype in _IDS else borders)["ids"]
        return rows.view(*ids.shape, rows.shape[1])

    @property
    def optimizer(self) -> FusedOptimizer | None:
        """The optimizer of the collection, see `ShardedEmbeddingCollection.optimizer`."""
        return self.collection.optimizer

    def load_full(self, weight: Tensor) -> None:
        """Copies this rank's rows from a whole table."""
        self.collection.load_full({"weight": weight})

    def full(self) -> Tensor:
        """The whole table, on every rank. All ranks must call."""
        return self.collection.full("weight")

    def counters(self) -> dict[str, int]:
        """The bytes that were sent to other ranks, by kind."""
        return self.collection.counters()


_IDS = (torch.int32, torch.int64)
