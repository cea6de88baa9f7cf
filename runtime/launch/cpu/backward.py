"""Calls the C functions of a CPU plan's backward by pointer, on torch's own threads."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, get_num_threads

from embforge.codegen.kernel import Outcome
from embforge.codegen.plan import Plan
from embforge.inputs import Batch, raise_bad_input
from embforge.launch.cpu.forward import BAD_ID, OK, torch_parallel_for, words_entry
from embforge.launch.cpu.packing import packer_of
from embforge.launch.gradients import Gradients
from embforge.launch.metadata import Metadata
from embforge.launch.update_kernel import UpdateKernel
from embforge.memory import Results, ask_for_huge_pages


class _CpuGradient:
    """What the kernels of a backward have in common."""

    def __init__(self, plan: Plan, library: Path) -> None:
        self.plan = plan
        self._library = ctypes.CDLL(str(library))
        self._pack = packer_of(plan.target, plan.op)
        self._call = words_entry(self._library, plan.symbol)
        self._parallel_for = torch_parallel_for()

    def check(self) -> None:
        """Nothing is ever pending: a bad input raises in the call that has it."""

    def _raise(self, status: int, batch: Batch, bounds_check: str) -> None:
        if status == Outcome.TOO_LARGE:
            raise ValueError(
                f"batch: {batch.values.numel()} ids in {batch.batch} samples are too many for one backward of these "
                "tables; split the batch"
            )
        raise_bad_input(self.plan.spec, batch.values, batch.offsets, batch.weights, batch.batch, bounds_check)
        raise RuntimeError(
            f"kernel {self.plan.uri} reported bad input (status {status}) but none was found: was the batch changed "
            "by another thread during the call? If not, please report this with the batch"
        )


class _CpuSorting(_CpuGradient):
    """A kernel that sorts ids, for which it needs memory: kept between calls, and lent to one of them at a time."""

    def __init__(self, plan: Plan, library: Path) -> None:
        super().__init__(plan, library)
        self._bytes_of: Any = getattr(self._library, f"{plan.symbol}_workspace")
        self._bytes_of.restype, self._bytes_of.argtypes = ctypes.c_int64, [ctypes.c_int64] * 3
        self._free: deque[Tensor] = deque(maxlen=1)  # its pop and append need no lock

    def _take(self, batch: Batch, threads: int) -> Tensor:
        """Memory for one call, which gives it back to `_free`. All that can fail of it is done."""
        size = self._bytes_of(batch.batch, batch.values.numel(), threads)
        try:
            kept = self._free.pop()
        except IndexError:  # the first call, or another thread is at work in it
            return _block(size)
        if kept.numel() >= size:
            return kept
        del kept  # or both would be held at once
        return _block(size)


class CpuBackward(_CpuSorting, UpdateKernel):
    """One plan's loaded backward. Safe to call from several threads at once, if no row is trained by two of them."""

    def __call__(
        self,
        metadata: Metadata,
        tables: Sequence[Tensor],
        states: Sequence[Tensor | None],
        batch: Batch,
        gradients: Gradients,
        hyper: Tensor,
        counters: Tensor,
        bounds_check: str,
    ) -> Tensor:
        """Updates rows and states. The verdict: 0, or infinity if a gradient is not finite and the loss was scaled.

        Raises what `raise_bad_input` raises (for a bad id only if `bounds_check` is "error"), ValueError for a batch
        too large, MemoryError: all before the first write.
        """
        threads = get_num_threads()
        verdict = torch.zeros(1, dtype=torch.float32, device="cpu")  # before the first write, as all that can fail
        workspace = self._take(batch, threads)
        status = self._call(
            self._pack(
                **read_by(metadata, batch, gradients),
                hyper=hyper.data_ptr(),
                counters=counters.data_ptr(),
                batch=batch.batch,
                num_values=batch.values.numel(),
                skip_bad_ids=bounds_check != "error",
                workspace=workspace.data_ptr(),
                parallel_for=self._parallel_for,
                threads=threads,
            )
        )
        self._free.append(workspace)
        if status == OK:
            return verdict
        if status == Outcome.NOT_FINITE:
            return verdict.fill_(torch.inf)
        self._raise(status, batch, bounds_check)
        raise AssertionError

    def reserve(self, batch: Batch) -> None:
        """Another thread's call with this kernel may still take what is laid ready here."""
        self._free.append(self._take(batch, get_num_threads()))


class CpuReduce(_CpuSorting):
    """One plan's loaded reduction. Safe to call from several threads at once."""

    def __init__(self, plan: Plan, library: Path) -> None:
        super().__init__(plan, library)
        self._count = words_entry(self._library, f"{plan.symbol}_count")
        self._gradients = Results(torch.float32)

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, gradients: Gradients, bounds_check: str
    ) -> list[tuple[Tensor, Tensor]]:
        """For every table the rows that occur, in order, and their gradients `[n, D]`. Raises what a backward does."""
        threads = get_num_threads()
        counts = torch.zeros(len(self.plan.spec.tables), dtype=torch.int64, device="cpu")
        dims = [table.embedding_dim for table in self.plan.spec.tables]
        workspace = self._take(batch, threads)
        given = read_by(metadata, batch, gradients) | {
            "counts": counts.data_ptr(),
            "batch": batch.batch,
            "num_values": batch.values.numel(),
            "skip_bad_ids": bounds_check != "error",
            "workspace": workspace.data_ptr(),
            "parallel_for": self._parallel_for,
            "threads": threads,
        }
        status = self._count(self._pack(**given, rows=0, gradients=0))
        if status != OK:
            self._raise(status, batch, bounds_check)
        found = counts.tolist()
        elements = [count * dim for count, dim in zip(found, dims, strict=True)]
        rows = torch.empty(sum(found), dtype=torch.int64, device="cpu")
        flat = self._gradients.empty(sum(elements))
        self._call(self._pack(**given, rows=rows.data_ptr(), gradients=flat.data_ptr()))
        self._free.append(workspace)
        ends = accumulate(elements)
        return [
            (of_table, flat[end - count : end].view(-1, dim))
            for of_table, count, end, dim in zip(rows.split(found), elements, ends, dims, strict=True)
        ]


class CpuWeightGradient(_CpuGradient):
    """One plan's loaded gradient of per-sample weights. Safe to call from several threads at once."""

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, gradients: Gradients, bounds_check: str
    ) -> Tensor:
        """The gradient of every weight, 0 where its feature is not weighted. Raises what `raise_bad_input` raises."""
        result = torch.empty(batch.values.numel(), dtype=torch.float32, device="cpu")
        status = self._call(
            self._pack(
                **read_by(metadata, batch, gradients),
                weight_gradient=result.data_ptr(),
                batch=batch.batch,
                num_values=batch.values.numel(),
                parallel_for=self._parallel_for,
                threads=get_num_threads(),
            )
        )
        if status != OK and (status != BAD_ID or bounds_check == "error"):
            self._raise(status, batch, bounds_check)
        return result


def read_by(metadata: Metadata, batch: Batch, gradients: Gradients) -> dict[str, int]:
    """What every kernel of a backward reads, as words by the names of arguments."""
    values, offsets, weights, _, _ = batch
    pooled, sequence, divisors, winners = gradients
    return {
        "metadata": metadata.pointer,
        "values": values.data_ptr(),
        "offsets": offsets.data_ptr(),
        "weights": 0 if weights is None else weights.data_ptr(),
        "grad_pooled": pooled.data_ptr(),
        "grad_sequence": 0 if sequence is None else sequence.data_ptr(),
        "divisors": 0 if divisors is None else divisors.data_ptr(),
        "winners": 0 if winners is None else winners.data_ptr(),
    }


def _block(size: int) -> Tensor:
    """Host memory that is not written to yet."""
    try:
        block = torch.empty(size, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise MemoryError(f"no memory for the {size} bytes that a backward of this batch sorts in") from error
    ask_for_huge_pages(block)
    return block
