"""Calls a CPU plan's C function by pointer, on torch's own threads."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, get_num_threads

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.errors import ToolchainError
from embforge.codegen.plan import Plan
from embforge.codegen.signature import arguments_of
from embforge.inputs import Batch, raise_bad_input
from embforge.launch.gradients import TrainResult
from embforge.launch.metadata import Metadata
from embforge.memory import SMALL, Results

PACKED = (
    "metadata", "values", "offsets", "weights", "pooled", "sequence", "batch", "num_values", "parallel_for", "threads",
)  # fmt: skip
"""The arguments in the order in which a call packs them."""

PACKED_TRAIN = (*PACKED[:6], "divisors", "winners", *PACKED[6:])
"""The same of a forward whose backward will come."""

# What the kernel returns.
OK, BAD_OFFSETS, BAD_ID, NO_MEMORY = 0, 1, 2, 3


class _CpuLookup:
    """One plan's loaded kernel. Safe to call from several threads at once."""

    def __init__(self, plan: Plan, library: Path, packed: tuple[str, ...]) -> None:
        self.plan = plan
        self._has_sequence = bool(plan.layout.sequence_features)
        self._width = plan.layout.output_width
        self._results = Results(getattr(torch, DTYPES[plan.spec.output_dtype].torch_name))
        self._new_empty = self._results.like.new_empty
        # One pointer to packed words: half the time that ctypes takes for the arguments one by one.
        self._call: Any = getattr(ctypes.CDLL(str(library)), f"{plan.symbol}_words")
        self._call.restype = ctypes.c_int64
        self._call.argtypes = [ctypes.c_char_p]
        names = tuple(a.name for a in arguments_of("cpu", plan.op))
        if names != packed:
            raise AssertionError(f"the kernel takes {names}, this launcher packs {packed}")
        self._pack = struct.Struct(f"{len(packed)}q").pack  # native order: "=" packs byte by byte
        self._parallel_for = torch_parallel_for()

    def check(self) -> None:
        """Nothing is ever pending: a bad input raises in the call that has it."""

    def _raise(self, status: int, batch: Batch, bounds_check: str) -> None:
        if status == NO_MEMORY:
            raise MemoryError(f"kernel {self.plan.uri}: no memory for the partial sums of a long bag")
        raise_bad_input(self.plan.spec, batch.values, batch.offsets, batch.weights, batch.batch, bounds_check)
        raise RuntimeError(
            f"kernel {self.plan.uri} reported bad input (status {status}) but none was found: was the batch changed "
            "by another thread during the call? If not, please report this with the batch"
        )


class CpuForward(_CpuLookup):
    """A forward that nothing is to be learned from."""

    def __init__(self, plan: Plan, library: Path) -> None:
        super().__init__(plan, library, PACKED)

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> tuple[Tensor, Tensor | None]:
        """Pooled output, and the rows of `none` features if the spec has any.

        Raises what `raise_bad_input` raises; for a bad id only if `bounds_check` is "error".
        """
        values, offsets, weights, size, _ = batch
        width = self._width
        pooled = self._new_empty(size, width) if size * width < SMALL else self._results.empty(size, width)
        sequence = self._results.empty(sequence_elements) if self._has_sequence else None
        status = self._call(
            self._pack(
                metadata.pointer,
                values.data_ptr(),
                offsets.data_ptr(),
                0 if weights is None else weights.data_ptr(),
                pooled.data_ptr(),
                0 if sequence is None else sequence.data_ptr(),
                size,
                values.numel(),
                self._parallel_for,
                get_num_threads(),
            )
        )
        if status != OK and (status != BAD_ID or bounds_check == "error"):
            self._raise(status, batch, bounds_check)
        return pooled, sequence


class CpuForwardTrain(_CpuLookup):
    """A forward whose backward will come."""

    def __init__(self, plan: Plan, library: Path) -> None:
        super().__init__(plan, library, PACKED_TRAIN)
        self._divisors, self._divisor_width = Results(torch.float32), plan.layout.divisor_width
        self._winners, self._winner_width = Results(getattr(torch, plan.id_dtype)), plan.layout.winner_width

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> TrainResult:
        """Pooled output, rows of `none` features, divisors and winners, None for what the spec has no feature of.

        Raises what `CpuForward` raises.
        """
        values, offsets, weights, size, _ = batch
        pooled = self._results.empty(size, self._width)
        sequence = self._results.empty(sequence_elements) if self._has_sequence else None
        divisors = self._divisors.empty(size, self._divisor_width) if self._divisor_width else None
        winners = self._winners.empty(size, self._winner_width) if self._winner_width else None
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
                size,
                values.numel(),
                self._parallel_for,
                get_num_threads(),
            )
        )
        if status != OK and (status != BAD_ID or bounds_check == "error"):
            self._raise(status, batch, bounds_check)
        return pooled, sequence, divisors, winners


@cache
def torch_parallel_for() -> int:
    """The address of torch's thread pool entry (torch >= 2.10)."""
    folder = Path(torch.__file__).parent / "lib"
    library = next((p for p in (folder / "libtorch_cpu.so", folder / "libtorch_cpu.dylib") if p.exists()), None)
    entry = None if library is None else getattr(ctypes.CDLL(str(library)), "torch_parallel_for", None)
    address = ctypes.cast(entry, ctypes.c_void_p).value if entry is not None else None
    if address is None:
        raise ToolchainError(
            f"torch {torch.__version__} does not export torch_parallel_for; embforge's CPU kernels need torch >= 2.10; "
            "upgrade torch or use backend='reference'"
        )
    return address
