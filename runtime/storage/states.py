"""The optimizer states of a table.

A state is stored in the padding of the rows if it fits there, or in the section: a separate block of fp32 numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embforge.codegen.layout import STATE_BYTES, StateLayout, TableLayout
from embforge.memory import ask_for_huge_pages


def allocate_section(layout: TableLayout, device: torch.device) -> Tensor:
    """Zeros for the states that are not stored in the padding of rows: `[rows, numbers per row]`, maybe 0 per row."""
    shape = (layout.table.num_embeddings, layout.state_stride_bytes // STATE_BYTES)
    with torch.inference_mode(False):  # a tensor made in inference mode has no version, by which changes are known
        section = torch.empty(shape, dtype=torch.float32, device=device)
    if section.is_cpu:
        ask_for_huge_pages(section)
    return section if section.is_meta else section.zero_()


def state_views(layout: TableLayout, rows: Tensor, section: Tensor) -> dict[str, Tensor]:
    """A live view of every state, by name: `[rows, dim]` for a state per element, `[rows]` for a state per row."""
    return {state.name: _view(layout, state, rows, section) for state in layout.states}


def _view(layout: TableLayout, state: StateLayout, rows: Tensor, section: Tensor) -> Tensor:
    if state.placement == "section":
        first = state.offset // STATE_BYTES
        width = layout.table.embedding_dim if state.extent == "element" else 1
        columns = section[:, first : first + width]
        return columns if state.extent == "element" else columns[:, 0]
    begin = (rows.storage_offset() * rows.element_size() + state.offset) // STATE_BYTES
    if rows.is_meta:
        return torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
    empty = torch.empty(0, dtype=torch.float32, device=rows.device)
    stride = layout.stride_bytes // STATE_BYTES
    return empty.set_(rows.untyped_storage(), begin, (rows.shape[0],), (stride,))


def versioned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it was made in inference mode and so has no version, by which changes are known."""
    with torch.inference_mode(False):
        return tensor.clone() if tensor.is_inference() else tensor
