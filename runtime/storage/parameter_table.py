"""A table that torch's own optimizers train: its rows are a parameter, its gradients are sparse or dense."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from embforge.codegen.layout import TableLayout
from embforge.codegen.spec import CollectionSpec
from embforge.memory import ask_for_huge_pages
from embforge.number_formats import torch_computes
from embforge.storage.remap import Remap
from embforge.storage.static import NO_TORCH_GRADIENT, StaticTable, note_made

Sparse = bool | Collection[str] | None


class ParameterTable(StaticTable, nn.Embedding):
    """A table without a fused optimizer. `sparse`: whether gradients are sparse, as in nn.Embedding.

    It is an nn.Embedding because DistributedDataParallel asks modules of that class, and no others, whether they have
    sparse gradients. A dense gradient takes as much memory as the table and is written anew in every backward pass.
    """

    def __init__(self, layout: TableLayout, device: torch.device, *, sparse: bool, remap: Remap | None = None) -> None:
        super().__init__(layout, device, remap=remap)
        self.num_embeddings, self.embedding_dim = layout.table.num_embeddings, layout.table.embedding_dim
        self.padding_idx = self.max_norm = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, sparse

    def reset_parameters(self) -> None:
        """Draws all rows anew, as `reset` does: torch calls it to fill modules that come from the meta device."""
        self.reset()


def sparse_tables(spec: CollectionSpec, sparse: Sparse, optimizer: Any) -> frozenset[str]:
    """The names of the tables whose gradients are sparse. `sparse` is the argument of `EmbeddingCollection`."""
    names = frozenset(table.name for table in spec.tables)
    if sparse is not None and optimizer is not None:
        raise ValueError(
            f"sparse={sparse!r} goes with optimizer=None only: a fused optimizer updates rows in the backward pass "
            "and makes no gradients of tables; leave out one of the two"
        )
    if sparse is None or isinstance(sparse, bool):
        return frozenset() if sparse is False else names
    allowed = f"True, False, or a list of names among {', '.join(map(repr, sorted(names)))}"
    if isinstance(sparse, str) or not isinstance(sparse, Collection):
        raise TypeError(f"sparse={sparse!r} is not allowed; allowed: {allowed}")
    unknown = [name for name in sparse if name not in names]
    if unknown:
        raise ValueError(f"sparse names {unknown[0]!r}, which is no table; allowed: {allowed}")
    return frozenset(sparse)


def gradient_of(parameter: Tensor, rows: Tensor, sums: Tensor, *, sparse: bool) -> Tensor:
    """The gradient of a table from the rows that occur, in order, and the sums of their gradients.

    Sparse and coalesced, or dense and contiguous, which is what autograd wants of a parameter with gaps between rows.
    """
    if not torch_computes(parameter.dtype):
        raise TypeError(NO_TORCH_GRADIENT)
    values = sums.to(parameter.dtype)
    if not sparse:
        return dense_gradient(parameter.shape, rows, values)
    made = torch.sparse_coo_tensor(rows[None], values, parameter.shape, is_coalesced=True, check_invariants=False)
    note_made(parameter, made)
    return made


def dense_gradient(shape: torch.Size, rows: Tensor, values: Tensor) -> Tensor:
    """Zeros but in the rows that occur."""
    made = torch.empty(shape, dtype=values.dtype, device=values.device)
    if made.is_cpu:
        ask_for_huge_pages(made)
    return made.zero_().index_copy_(0, rows, values)
