"""The resolve step: turns ids into rows before every lookup of a module that has remapped tables.

"Resolve" has this meaning only in the runtime: the op, the kernel, its plan and the operator of this name do the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from embforge.codegen.spec import CollectionSpec
from embforge.inputs import Batch, with_negation_applied
from embforge.launch.kernels import ResolveKernel, kernel_of
from embforge.launch.metadata import Metadata, addresses_of, check_remaps, remap_metadata_of
from embforge.operators import resolve as operator
from embforge.operators.dispatch import leaves_process, must_dispatch
from embforge.operators.exported import ExportedLookup
from embforge.storage.remap import Remap

INT32_ROWS = 2**31 - 1
"""The number of rows from which rows, and the numbers that represent unknown ids, do not fit into int32."""


class _CachedMetadata(NamedTuple):
    """The metadata of the remaps in the last call. It is replaced as a whole, because calls may run in threads."""

    addresses: list[int]
    """The addresses and sizes of the remaps' entries, for which the metadata is valid."""
    metadata: Metadata


@dataclass(frozen=True)
class ResolveStep:
    """Turns the ids of a batch into rows, before anything else is done with it. An id without row becomes -1."""

    spec: CollectionSpec
    remaps: Mapping[str, Remap]
    """The remaps by table, in the order of the tables."""
    programs: Mapping[torch.dtype, str]
    """The program of the kernel, by the dtype of ids."""
    exported: Mapping[torch.dtype, str]
    """The text of the step in exported graphs, by the dtype of ids."""
    others: Mapping[torch.dtype, Sequence[str]]
    """The other programs that the module runs, by the dtype of ids. An error about a missing kernel names them too."""
    widens: bool
    """Whether rows may need int64 although ids are int32."""
    _cached: list[_CachedMetadata] = field(default_factory=list, compare=False, repr=False)
    """The metadata of the last call; empty before the first call."""

    def __call__(self, batch: Batch) -> Batch:
        """The batch with rows in the place of ids. RuntimeError if a remap has no entries yet.

        An id outside the entries of its remap is no error here: the bounds check of the lookup finds it.
        """
        entries = []
        for remap in self.remaps.values():
            remap.check()
            entries.append(remap.entries)
        if self.widens and batch.values.dtype == torch.int32:
            batch = batch._replace(values=batch.values.long(), offsets=batch.offsets.long())
        dtype = batch.values.dtype
        if must_dispatch(batch.values) or batch.values.is_meta:
            program = (self.exported if leaves_process() else self.programs)[dtype]
            rows: Tensor = operator.resolve(batch.values, batch.offsets, entries, program)
        else:
            batch = with_negation_applied(batch)
            kernel: ResolveKernel = kernel_of(self.programs[dtype], self.others.get(dtype, ()))
            rows = kernel(self._metadata(entries, batch.values.device), entries, batch)
        return batch._replace(values=rows)

    def _metadata(self, entries: Sequence[Tensor], device: torch.device) -> Metadata:
        addresses, last_calls = addresses_of(entries), self._cached[:]
        if last_calls and last_calls[0].addresses == addresses:
            return last_calls[0].metadata
        check_remaps(self.spec, entries, device)
        metadata = remap_metadata_of(self.spec, entries)
        self._cached[:] = [_CachedMetadata(addresses, metadata)]
        return metadata


def resolve_step(
    spec: CollectionSpec,
    backend: str,
    programs: Mapping[torch.dtype, str],
    remaps: Mapping[str, Remap],
    others: Mapping[torch.dtype, Sequence[str]],
    *,
    widens: bool = False,
) -> ResolveStep | None:
    """The resolve step of a module; None if the ids of all tables are rows.

    `programs`: the resolve kernel's program by the dtype of ids. `others`: the other programs of the module. With
    `widens`, rows are int64 whatever the dtype of ids is.
    """
    if not remaps:
        return None
    exported = {
        dtype: ExportedLookup(backend, str(dtype).removeprefix("torch."), spec, op="resolve").text for dtype in programs
    }
    large = any(table.num_embeddings >= INT32_ROWS for table in spec.tables if not table.ids_are_rows)
    return ResolveStep(spec, remaps, programs, exported, others, widens or large)
