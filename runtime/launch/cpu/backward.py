"""Calls the C functions of a CPU plan's backward by pointer, on torch's threads."""

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
        """Does nothing: bad input raises in the call that gets it, so no error is ever pending."""

    def _raise(self, status: int, batch: Batch, bounds_check: str) -> None:
        if status == Outcome.TOO_LARGE:
            raise ValueError(
                f"batch: {batch.values.numel()} ids in {batch.batch} samples are too many for one backward of these "
                "tables; split the batch"
            )
        raise_bad_input(self.plan.spec, batch.values, batch.offsets, batch.weights, batch.batch, bounds_check)
        raise RuntimeError(
            f"kernel {self.plan.uri} reported bad input (status {status}), but the batch has none: was it changed by "
            "another thread during the call? If not, please report this error with the batch"
        )


class _CpuSorting(_CpuGradient):
    """A kernel that sorts ids. It keeps the memory for that between calls; one call at a time can use it, and others
    allocate their own."""

    def __init__(self, plan: Plan, library: Path) -> None:
        super().__init__(plan, library)
        self._bytes_of: Any = getattr(self._library, f"{plan.symbol}_workspace")
        self._bytes_of.restype, self._bytes_of.argtypes = ctypes.c_int64, [ctypes.c_int64] * 3
        self._free: deque[Tensor] = deque(maxlen=1)  # its pop and append need no lock

    def _take(self, batch: Batch, threads: int) -> Tensor:
        """Returns memory for one call, which appends it to `_free` at its end. Nothing about it can fail later."""
        size = self._bytes_of(batch.batch, batch.values.numel(), threads)
        try:
            kept = self._free.pop()
        except IndexError:  # this is the first call, or another thread uses the memory
            return _allocated(size)
        if kept.numel() >= size:
            return kept
        del kept  # so that the old and the new memory are not held at the same time
        return _allocated(size)


class CpuBackward(_CpuSorting, UpdateKernel):
    """The loaded backward of a plan. Several threads may call it at the same time if no two of them train the same
    row."""

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
        """Updates rows and states. Returns 0, or infinity if a gradient is not finite and the loss was scaled.

        Raises what `raise_bad_input` raises (for a bad id only if `bounds_check` is "error"), ValueError if the batch
        is too large, and MemoryError, always before the first write.
        """
        threads = get_num_threads()
        verdict = torch.zeros(1, dtype=torch.float32, device="cpu")  # before the first write: it may fail
        workspace = self._take(batch, threads)
        status = self._call(
            self._pack(
                **read_arguments(metadata, batch, gradients),
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
        """Allocates the memory of a call with this batch. A call from another thread may still take it."""
        self._free.append(self._take(batch, get_num_threads()))


class CpuReduce(_CpuSorting):
    """The loaded reduction of a plan. Several threads may call it at the same time."""

    def __init__(self, plan: Plan, library: Path) -> None:
        super().__init__(plan, library)
        self._count = words_entry(self._library, f"{plan.symbol}_count")
        self._gradients = Results(torch.float32)

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, gradients: Gradients, bounds_check: str
    ) -> list[tuple[Tensor, Tensor]]:
        """Returns, for every table, the rows that occur in ascending order and their gradients `[n, D]`.

        Raises what `CpuBackward` raises.
        """
        threads = get_num_threads()
        counted = torch.zeros(len(self.plan.spec.tables), dtype=torch.int64, device="cpu")
        dims = [table.embedding_dim for table in self.plan.spec.tables]
        workspace = self._take(batch, threads)
        arguments = read_arguments(metadata, batch, gradients) | {
            "counts": counted.data_ptr(),
            "batch": batch.batch,
            "num_values": batch.values.numel(),
            "skip_bad_ids": bounds_check != "error",
            "workspace": workspace.data_ptr(),
            "parallel_for": self._parallel_for,
            "threads": threads,
        }
        status = self._count(self._pack(**arguments, rows=0, gradients=0))
        if status != OK:
            self._raise(status, batch, bounds_check)
        counts = counted.tolist()
        elements = [count * dim for count, dim in zip(counts, dims, strict=True)]
        rows = torch.empty(sum(counts), dtype=torch.int64, device="cpu")
        flat = self._gradients.empty(sum(elements))
        self._call(self._pack(**arguments, rows=rows.data_ptr(), gradients=flat.data_ptr()))
        self._free.append(workspace)
        ends = accumulate(elements)
        return [
            (of_table, flat[end - count : end].view(-1, dim))
            for of_table, count, end, dim in zip(rows.split(counts), elements, ends, dims, strict=True)
        ]


class CpuWeightGradient(_CpuGradient):
    """The loaded kernel of a plan that computes the gradients of per-sample weights. Several threads may call it at the
    same time."""

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, gradients: Gradients, bounds_check: str
    ) -> Tensor:
        """Returns the gradient of every weight, 0 where the feature is not weighted.

        Raises what `raise_bad_input` raises.
        """
        result = torch.empty(batch.values.numel(), dtype=torch.float32, device="cpu")
        status = self._call(
            self._pack(
                **read_arguments(metadata, batch, gradients),
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


def read_arguments(metadata: Metadata, batch: Batch, gradients: Gradients) -> dict[str, int]:
    """The arguments that every kernel of a backward reads, by name, as words."""
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


def _allocated(size: int) -> Tensor:
    """New host memory, not written to yet."""
    try:
        memory = torch.empty(size, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise MemoryError(
            f"not enough memory: a backward of this batch needs {size} bytes to sort ids; split the batch"
        ) from error
    ask_for_huge_pages(memory)
    return memory
