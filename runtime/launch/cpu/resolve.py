"""Calls the kernel of a CPU plan that turns ids into rows, on torch's threads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, get_num_threads

from embforge.codegen.plan import Plan
from embforge.inputs import Batch
from embforge.launch.cpu.forward import torch_parallel_for, words_entry
from embforge.launch.cpu.packing import packer_of
from embforge.launch.metadata import Metadata


class CpuResolve:
    """The loaded kernel of a plan. Several threads may call it at the same time."""

    def __init__(self, plan: Plan, library: Path) -> None:
        self.plan = plan
        self._call = words_entry(ctypes.CDLL(str(library)), plan.symbol)
        self._pack = packer_of(plan.target, plan.op)
        self._parallel_for = torch_parallel_for()

    def __call__(self, metadata: Metadata, remaps: Sequence[Tensor], batch: Batch) -> Tensor:
        """Returns the rows of the batch's ids: see `ResolveKernel`."""
        values, offsets, _, size, _ = batch
        rows = torch.empty_like(values)
        self._call(
            self._pack(
                metadata=metadata.pointer,
                values=values.data_ptr(),
                offsets=offsets.data_ptr(),
                rows=rows.data_ptr(),
                batch=size,
                num_values=values.numel(),
                parallel_for=self._parallel_for,
                threads=get_num_threads(),
            )
        )
        return rows

    def check(self) -> None:
        """Does nothing: the lookup finds mistakes in a batch, so no error is ever pending."""
