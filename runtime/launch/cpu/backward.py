"""Calls the C functions of a CPU plan's backward by pointer, on torch's own threads."""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, get_num_threads

from embforge.codegen.plan import Plan
from embforge.codegen.signature import arguments_of
from embforge.inputs import Batch, raise_bad_input
from embforge.launch.cpu.forward import BAD_ID, OK, torch_parallel_for
from embforge.launch.gradients import Gradients
from embforge.launch.metadata import Metadata
from embforge.launch.update_kernel import UpdateKernel
from embforge.memory import Results, ask_for_huge_pages

GRADIENTS = (
    "metadata", "values", "offsets", "weights", "grad_pooled", "grad_sequence", "divisors", "winners",
)  # fmt: skip
"""The arguments that all kernels of a backward begin with, in the order in which a call packs them."""
SIZES = ("batch", "num_values")
POOL = ("parallel_for", "threads")
SORTING = (*SIZES, "skip_bad_ids", "workspace", *POOL)

# What a kernel returns beside what a forward does.
NOT_FINITE, TOO_LARGE = 4, 5


class _CpuGradient:
    """What the kernels of a backward have in common."""

    def __init__(self, plan: Plan, library: Path, packed: tuple[str, ...]) -> None:
        self.plan = plan
        self._library = ctypes.CDLL(str(library))
        names = tuple(a.name for a in arguments_of("cpu", plan.op))
        if names != packed:
            raise AssertionError(f"the kernel takes {names}, this launcher packs {packed}")
        self._pack = struct.Struct(f"{len(packed)}q").pack
        self._call = self._entry(plan.symbol)
        self._parallel_for = torch_parallel_for()

    def check(self) -> None:
        """Nothing is ever pending: a bad input raises in the call that has it."""

    def _entry(self, name: str) -> Any:
        entry = getattr(self._library, f"{name}_words")
        entry.restype, entry.argtypes = ctypes.c_int64, [ctypes.c_char_p]
        return entry

    def _raise(self, status: int, batch: Batch, bounds_check: str) -> None:
        if status == TOO_LARGE:
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

    def __init__(self, plan: Plan, library: Path, packed: tuple[str, ...]) -> None:
        super().__init__(plan, library, packed)
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

    def __init__(self, plan: Plan, library: Path) -> None:
        super().__init__(plan, library, (*GRADIENTS, "hyper", "counters", *SORTING))

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
        values, offsets, weights, size, _ = batch
        pooled, sequence, divisors, winners = gradients
        threads = get_num_threads()
        verdict = torch.zeros(1, dtype=torch.float32, device="cpu")  # before the first write, as all that can fail
        workspace = self._take(batch, threads)
        status = self._call(
            self._pack(
                metadata.pointer,
                values.data_ptr(),
                offsets.data_ptr(),
                0 if weights is None else weights.data_ptr(),
                pooled.data_ptr(),
                0 if sequence is None else sequence.data_ptr(),
                0 if divisors is None else divisors.data_ptr(),
                0 if winners is None else winners.data_ptr(),
                hyper.data_ptr(),
                counters.data_ptr(),
                size,
                values.numel(),
                bounds_check != "error",
                workspace.data_ptr(),
                self._parallel_for,
                threads,
            )
        )
        self._free.append(workspace)
        if status == OK:
            return verdict
        if status == NOT_FINITE:
            return verdict.fill_(torch.inf)
        self._raise(status, batch, bounds_check)
        raise AssertionError

    def reserve(self, batch: Batch) -> None:
        """Another thread's call with this kernel may still take what is laid ready here."""
        self._free.append(self._take(batch, get_num_threads()))


class CpuReduce(_CpuSorting):
    """One plan's loaded reduction. Safe to call from several threads at once."""

    def __init__(self, plan: Plan, library: Path) -> None:
        super().__init__(plan, library, (*GRADIENTS, "counts", "rows", "gradients", *SORTING))
        self._count = self._entry(f"{plan.symbol}_count")
        self._gradients = Results(torch.float32)

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, gradients: Gradients, bounds_check: str
    ) -> list[tuple[Tensor, Tensor]]:
        """For every table the rows that occur, in order, and their gradients `[n, D]`. Raises what a backward does."""
        values, offsets, weights, size, _ = batch
        pooled, sequence, divisors, winners = gradients
        threads = get_num_threads()
        counts = torch.zeros(len(self.plan.spec.tables), dtype=torch.int64, device="cpu")
        dims = [table.embedding_dim for table in self.plan.spec.tables]
        workspace = self._take(batch, threads)
        given = (
            metadata.pointer,
            values.data_ptr(),
            offsets.data_ptr(),
            0 if weights is None else weights.data_ptr(),
            pooled.data_ptr(),
            0 if sequence is None else sequence.data_ptr(),
            0 if divisors is None else divisors.data_ptr(),
            0 if winners is None else winners.data_ptr(),
            counts.data_ptr(),
        )
        sizes = (size, values.numel(), bounds_check != "error", workspace.data_ptr(), self._parallel_for, threads)
        status = self._count(self._pack(*given, 0, 0, *sizes))
        if status != OK:
            self._raise(status, batch, bounds_check)
        found = counts.tolist()
        elements = [count * dim for count, dim in zip(found, dims, strict=True)]
        rows = torch.empty(sum(found), dtype=torch.int64, device="cpu")
        flat = self._gradients.empty(sum(elements))
        self._call(self._pack(*given, rows.data_ptr(), flat.data_ptr(), *sizes))
        self._free.append(workspace)
        ends = accumulate(elements)
        return [
            (of_table, flat[end - count : end].view(-1, dim))
            for of_table, count, end, dim in zip(rows.split(found), elements, ends, dims, strict=True)
        ]


class CpuWeightGradient(_CpuGradient):
    """One plan's loaded gradient of per-sample weights. Safe to call from several threads at once."""

    def __init__(self, plan: Plan, library: Path) -> None:
        super().__init__(plan, library, (*GRADIENTS, "weight_gradient", *SIZES, *POOL))

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, gradients: Gradients, bounds_check: str
    ) -> Tensor:
        """The gradient of every weight, 0 where its feature is not weighted. Raises what `raise_bad_input` raises."""
        values, offsets, weights, size, _ = batch
        pooled, sequence, divisors, winners = gradients
        result = torch.empty(values.numel(), dtype=torch.float32, device="cpu")
        status = self._call(
            self._pack(
                metadata.pointer,
                values.data_ptr(),
                offsets.data_ptr(),
                0 if weights is None else weights.data_ptr(),
                pooled.data_ptr(),
                0 if sequence is None else sequence.data_ptr(),
                0 if divisors is None else divisors.data_ptr(),
                0 if winners is None else winners.data_ptr(),
                result.data_ptr(),
                size,
                values.numel(),
                self._parallel_for,
                get_num_threads(),
            )
        )
        if status != OK and (status != BAD_ID or bounds_check == "error"):
            self._raise(status, batch, bounds_check)
        return result


def _block(size: int) -> Tensor:
    """Host memory that is not written to yet."""
    try:
        block = torch.empty(size, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise MemoryError(f"no memory for the {size} bytes that a backward of this batch sorts in") from error
    ask_for_huge_pages(block)
    return block
