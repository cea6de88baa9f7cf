"""Calls the C function of a CPU plan's forward by pointer, on torch's threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, get_num_threads

from embforge.codegen.errors import ToolchainError
from embforge.codegen.kernel import Outcome
from embforge.codegen.plan import Plan
from embforge.inputs import Batch, raise_bad_input
from embforge.launch.cpu.packing import packer_of
from embforge.launch.gradients import TrainResult
from embforge.launch.metadata import Metadata
from embforge.memory import SMALL, Results
from embforge.number_formats import torch_dtype

# As plain numbers, because comparing members of an enum takes too long for the checks of a small call.
OK, BAD_ID = int(Outcome.OK), int(Outcome.BAD_ID)


class _CpuLookup:
    """The loaded kernel of a plan. Several threads may call it at the same time."""

    def __init__(self, plan: Plan, library: Path) -> None:
        self.plan = plan
        self._has_sequence = bool(plan.layout.sequence_features)
        self._width = plan.layout.output_width
        self._results = Results(torch_dtype(plan.spec.output_dtype))
        self._new_empty = self._results.like.new_empty
        self._call = words_entry(ctypes.CDLL(str(library)), plan.symbol)
        self._pack = packer_of(plan.target, plan.op)
        self._parallel_for = torch_parallel_for()

    def check(self) -> None:
        """Does nothing: bad input raises in the call that gets it, so no error is ever pending."""

    def _raise(self, status: int, batch: Batch, bounds_check: str) -> None:
        if status == Outcome.NO_MEMORY:
            raise MemoryError(f"kernel {self.plan.uri}: not enough memory for the partial sums of a long bag")
        raise_bad_input(self.plan.spec, batch.values, batch.offsets, batch.weights, batch.batch, bounds_check)
        raise RuntimeError(
            f"kernel {self.plan.uri} reported bad input (status {status}), but the batch has none: was it changed by "
            "another thread during the call? If not, please report this error with the batch"
        )


class CpuForward(_CpuLookup):
    """A forward that keeps nothing for a backward."""

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the pooled output, and the rows of `none` features if the spec has any.

        Raises what `raise_bad_input` raises; for a bad id only if `bounds_check` is "error".
        """
        values, offsets, weights, size, _ = batch
        width = self._width
        pooled = self._new_empty(size, width) if size * width < SMALL else self._results.empty(size, width)
        sequence = self._results.empty(sequence_elements) if self._has_sequence else None
        status = self._call(
            self._pack(
                metadata=metadata.pointer,
                values=values.data_ptr(),
                offsets=offsets.data_ptr(),
                weights=0 if weights is None else weights.data_ptr(),
                pooled=pooled.data_ptr(),
                sequence=0 if sequence is None else sequence.data_ptr(),
                batch=size,
                num_values=values.numel(),
                parallel_for=self._parallel_for,
                threads=get_num_threads(),
            )
        )
        if status != OK and (status != BAD_ID or bounds_check == "error"):
            self._raise(status, batch, bounds_check)
        return pooled, sequence


class CpuForwardTrain(_CpuLookup):
    """A training forward: it returns what its backward needs, too."""

    def __init__(self, plan: Plan, library: Path) -> None:
        super().__init__(plan, library)
        self._divisors, self._divisor_width = Results(torch.float32), plan.layout.divisor_width
        self._winners, self._winner_width = Results(torch_dtype(plan.id_dtype)), plan.layout.winner_width

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> TrainResult:
        """Returns pooled output, rows of `none` features, divisors and winners: see `TrainKernel`.

        Raises what `CpuForward` raises.
        """
        values, offsets, weights, size, _ = batch
        pooled = self._results.empty(size, self._width)
        sequence = self._results.empty(sequence_elements) if self._has_sequence else None
        divisors = self._divisors.empty(size, self._divisor_width) if self._divisor_width else None
        winners = self._winners.empty(size, self._winner_width) if self._winner_width else None
        status = self._call(
            self._pack(
                metadata=metadata.pointer,
                values=values.data_ptr(),
                offsets=offsets.data_ptr(),
                weights=0 if weights is None else weights.data_ptr(),
                pooled=pooled.data_ptr(),
                sequence=0 if sequence is None else sequence.data_ptr(),
                divisors=0 if divisors is None else divisors.data_ptr(),
                winners=0 if winners is None else winners.data_ptr(),
                batch=size,
                num_values=values.numel(),
                parallel_for=self._parallel_for,
                threads=get_num_threads(),
            )
        )
        if status != OK and (status != BAD_ID or bounds_check == "error"):
            self._raise(status, batch, bounds_check)
        return pooled, sequence, divisors, winners


def words_entry(library: ctypes.CDLL, symbol: str) -> Callable[[bytes], int]:
    """The entry of a library's function that takes packed words. A call of it takes half the time that ctypes needs to
    pass the arguments one by one."""
    function = getattr(library, f"{symbol}_words")
    function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_char_p]
    entry: Callable[[bytes], int] = function
    return entry


@cache
def torch_parallel_for() -> int:
    """The address of the function that runs a loop on torch's thread pool. torch has it since 2.10."""
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
