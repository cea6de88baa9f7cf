"""What kernels know about the tables: one int64 tensor, which is made again only when storage moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from embforge.codegen.kernel import METADATA_WORDS, REMAP_WORDS, UPDATE_METADATA_WORDS
from embforge.codegen.layout import CollectionLayout
from embforge.codegen.spec import CollectionSpec
from embforge.number_formats import torch_dtype

UNCHECKED_ROWS = -1
"""The number of rows of a table whose ids are not checked. As an unsigned number it is larger than every id."""
FIRST_CALL = (
    "the first call with these tables, this device, bounds_check and kind of batch copies addresses to the device and "
    "loads kernels, which a graph capture does not allow; call the module once before capturing"
)
"""Why a call is refused while a CUDA graph is captured."""


# Looked up once, because every dot in the path to a function is a look-up and small calls take microseconds.
_address, _size = Tensor.data_ptr, Tensor.numel


@dataclass(frozen=True, eq=False)
class Metadata:
    """The metadata array of a kernel.

    An instance is equal only to itself, so that it can be a key for what is made from it.
    """

    words: Tensor
    """int64 `[tables, METADATA_WORDS]`, or `[tables, UPDATE_METADATA_WORDS]` for a backward, on the tables' device."""
    pointer: int
    """The address of `words`."""


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    """The addresses and sizes of tensors. They change when a tensor is moved or replaced."""
    return [*map(_address, tensors), *map(_size, tensors)]


def metadata_of(tables: Sequence[Tensor], bounds_check: str) -> Metadata:
    """The metadata of tables at their present addresses. The same facts give the same object, without another copy to
    the device."""
    checked = bounds_check != "unchecked"
    facts = tuple((t.data_ptr(), t.shape[0] if checked else UNCHECKED_ROWS) for t in tables)
    return _metadata(facts, tables[0].device)


def update_metadata_of(
    tables: Sequence[Tensor], states: Sequence[Tensor], trainable: Sequence[bool], bounds_check: str
) -> Metadata:
    """The metadata of a backward: `UPDATE_METADATA_WORDS` per table."""
    assert UPDATE_METADATA_WORDS == ("address", "rows", "state", "trainable")
    checked = bounds_check != "unchecked"
    facts = tuple(
        (t.data_ptr(), t.shape[0] if checked else UNCHECKED_ROWS, s.data_ptr(), int(trained))
        for t, s, trained in zip(tables, states, trainable, strict=True)
    )
    return _metadata(facts, tables[0].device)


def check_remaps(spec: CollectionSpec, remaps: Sequence[Tensor], device: torch.device) -> None:
    """Raises ValueError if a kernel cannot read the entries of a remap by pointer."""
    remapped = [table for table in spec.tables if not table.ids_are_rows]
    for table, entries in zip(remapped, remaps, strict=True):
        readable = entries.is_contiguous() and not entries.is_neg() and entries.device == device
        if entries.dtype != torch.int64 or entries.shape != (table.remap,) or not readable:
            raise ValueError(
                f"remap of table {table.name!r}: its storage was replaced by {entries.dtype} {tuple(entries.shape)} on "
                f"{entries.device}; its kernel needs a contiguous torch.int64 tensor of shape ({table.remap},) on "
                f"{device}: use set_remap(name, entries)"
            )


def remap_metadata_of(spec: CollectionSpec, remaps: Sequence[Tensor]) -> Metadata:
    """The metadata of a step that turns ids into rows: `REMAP_WORDS` per table, zeros where ids are rows."""
    assert REMAP_WORDS == ("address", "ids", "rows")
    arrays = iter(remaps)
    facts = tuple(
        (0, 0, 0) if table.ids_are_rows else (next(arrays).data_ptr(), table.remap, table.num_embeddings)
        for table in spec.tables
    )
    return _metadata(facts, remaps[0].device)


@lru_cache(maxsize=256)
def metadata_to_train(metadata: Metadata, tables: tuple[int, ...]) -> Metadata:
    """The metadata of a backward that trains only these tables, and of these only the ones that `metadata` trains."""
    _refuse_capture(metadata.words.device)
    mask = torch.zeros_like(metadata.words[:, 0])
    mask[list(tables)] = 1
    words = metadata.words.clone()
    words[:, UPDATE_METADATA_WORDS.index("trainable")] *= mask
    return Metadata(words, words.data_ptr())


def trainable_of(metadata: Metadata) -> tuple[bool, ...]:
    """Which tables a backward trains, from its metadata."""
    return tuple(bool(word) for word in metadata.words[:, UPDATE_METADATA_WORDS.index("trainable")].tolist())


def check_tables(layout: CollectionLayout, tables: Sequence[Tensor]) -> None:
    """Raises ValueError for a table whose dtype, shape or strides are not those of the layout, which are compiled into
    kernels."""
    for table_layout, table in zip(layout.tables, tables, strict=True):
        spec = table_layout.table
        dtype = torch_dtype(spec.dtype)
        strides = (table_layout.stride_elements, 1)
        fits = table.dim() == 2 and (table.stride() == strides or table.shape[0] == 1)
        shape = (spec.num_embeddings, spec.embedding_dim)
        if table.dtype != dtype or not fits or table.shape != shape or table.is_neg():
            negated = ", lazily negated" if table.is_neg() else ""
            raise ValueError(
                f"table {spec.name!r}: its storage was replaced by {table.dtype} {tuple(table.shape)} with strides "
                f"{table.stride()}{negated}; its kernel needs {dtype} {shape} with strides {strides}: "
                "copy into module.weight(name) instead of replacing it"
            )


@lru_cache(maxsize=256)
def _metadata(facts: tuple[tuple[int, ...], ...], device: torch.device) -> Metadata:
    assert METADATA_WORDS == ("address", "rows")
    _refuse_capture(device)
    words = torch.tensor(facts, dtype=torch.int64, device="cpu").to(device)
    return Metadata(words, words.data_ptr())


def _refuse_capture(device: torch.device) -> None:
    """Raises RuntimeError while a CUDA graph is captured: metadata made then would be undefined until the graph is
    replayed."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(FIRST_CALL)
