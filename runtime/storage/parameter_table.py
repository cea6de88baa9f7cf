"""A table that torch's own optimizers train: its rows are a parameter, and its gradient is sparse or dense."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from embforge.codegen.layout import TableLayout
from embforge.codegen.spec import CollectionSpec
from embforge.memory import ask_for_huge_pages
from embforge.number_formats import torch_computes
from embforge.storage.common import NO_TORCH_GRADIENT
from embforge.storage.remap import Remap
from embforge.storage.static import StaticTable, note_coalesced

Sparse = bool | Collection[str] | None


class ParameterTable(StaticTable, nn.Embedding):
    """A table without a fused optimizer. `sparse`: whether its gradient is sparse, as in nn.Embedding.

    It is an nn.Embedding because DistributedDataParallel asks only modules of that class whether they have sparse
    gradients. A dense gradient takes as much memory as the table and is written completely in every backward pass.
    """

    def __init__(self, layout: TableLayout, device: torch.device, *, sparse: bool, remap: Remap | None = None) -> None:
        super().__init__(layout, device, remap=remap)
        self.num_embeddings, self.embedding_dim = layout.table.num_embeddings, layout.table.embedding_dim
        self.padding_idx = self.max_norm = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, sparse

    def reset_parameters(self) -> None:
        """Draws new values for all rows, as `reset` does. torch calls it to fill modules that come from the meta
        device."""
        self.reset()


def sparse_tables(spec: CollectionSpec, sparse: Sparse, optimizer: Any) -> frozenset[str]:
    """The names of the tables whose gradients are sparse.

    `sparse` and `optimizer` are the arguments of `EmbeddingCollection`. Raises ValueError or TypeError if `sparse` is
    not allowed.
    """
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
    """The gradient of a table, made from the rows that occur, in rising order, and the sums of their gradients.

    It is sparse and coalesced, or dense and contiguous, as autograd requires for a parameter with padding between rows.
    """
    if not torch_computes(parameter.dtype):
        raise TypeError(NO_TORCH_GRADIENT)
    values = sums.to(parameter.dtype)
    if not sparse:
        return dense_gradient(parameter.shape, rows, values)
    gradient = torch.sparse_coo_tensor(rows[None], values, parameter.shape, is_coalesced=True, check_invariants=False)
    note_coalesced(parameter, gradient)
    return gradient


def dense_gradient(shape: torch.Size, rows: Tensor, values: Tensor) -> Tensor:
    """A gradient of this shape that holds `values` in `rows` and zeros in all other rows."""
    gradient = torch.empty(shape, dtype=values.dtype, device=values.device)
    if gradient.is_cpu:
        ask_for_huge_pages(gradient)
    return gradient.zero_().index_copy_(0, rows, values)
