"""The step that turns ids into rows, which a module with remapped tables runs before every lookup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from embforge.codegen.spec import CollectionSpec
from embforge.inputs import Batch, resolved
from embforge.launch.kernels import ResolveKernel, kernel_of
from embforge.launch.metadata import Metadata, check_remaps, places_of, remap_metadata_of
from embforge.operators import resolve as operator
from embforge.operators.exported import ExportedLookup
from embforge.operators.visibility import leaves_process, must_be_seen
from embforge.storage.remap import Remap

INT32_ROWS = 2**31 - 1
"""From so many rows on, rows and the numbers that stand for unknown ids do not fit into int32."""


@dataclass
class _Kept:
    """The metadata of the remaps as they lay in the last call, kept here because kernels read it."""

    places: list[int] = field(default_factory=list)
    metadata: Metadata | None = None


@dataclass(frozen=True)
class ResolveStep:
    """Turns the ids of a batch into rows; -1 stands for ids that have none. It is called before all other work."""

    spec: CollectionSpec
    remaps: Mapping[str, Remap]
    """The remaps by table, in the order of the tables."""
    programs: Mapping[torch.dtype, str]
    """The kernel's text, by the dtype of ids."""
    exported: Mapping[torch.dtype, str]
    """The text in graphs that leave the process."""
    others: Mapping[torch.dtype, Sequence[str]]
    """The programs that the module will run too, which an error about a missing kernel names."""
    widens: bool
    """Whether rows may need int64 where ids are int32."""
    _kept: _Kept = field(default_factory=_Kept, compare=False, repr=False)

    def __call__(self, batch: Batch) -> Batch:
        """RuntimeError if the rows of the ids are not known yet. Unknown ids are left for the lookup to find."""
        entries = []
        for remap in self.remaps.values():
            remap.check()
            entries.append(remap.entries)
        if self.widens and batch.values.dtype == torch.int32:
            batch = batch._replace(values=batch.values.long(), offsets=batch.offsets.long())
        dtype = batch.values.dtype
        if must_be_seen(batch.values) or batch.values.is_meta:
            program = (self.exported if leaves_process() else self.programs)[dtype]
            rows: Tensor = operator.resolve(batch.values, batch.offsets, entries, program)
        else:
            batch = resolved(batch)
            kernel: ResolveKernel = kernel_of(self.programs[dtype], self.others.get(dtype, ()))
            rows = kernel(self._metadata(entries, batch.values.device), entries, batch)
        return batch._replace(values=rows)

    def _metadata(self, entries: Sequence[Tensor], device: torch.device) -> Metadata:
        places, kept = places_of(entries), self._kept
        if kept.metadata is None or kept.places != places:
            check_remaps(self.spec, entries, device)
            kept.places, kept.metadata = places, remap_metadata_of(self.spec, entries)
        return kept.metadata


def resolve_step(
    spec: CollectionSpec,
    backend: str,
    programs: Mapping[torch.dtype, str],
    remaps: Mapping[str, Remap],
    others: Mapping[torch.dtype, Sequence[str]],
    *,
    widens: bool = False,
) -> ResolveStep | None:
    """The step of a module; None where ids are rows. With `widens` rows are int64 whatever ids are."""
    if not remaps:
        return None
    exported = {
        dtype: ExportedLookup(backend, str(dtype).removeprefix("torch."), spec, op="resolve").text for dtype in programs
    }
    large = any(table.num_embeddings >= INT32_ROWS for table in spec.tables if not table.ids_are_rows)
    return ResolveStep(spec, remaps, programs, exported, others, widens or large)
