"""Runs a plan's CUDA kernels on the CPU by the SIMT executor, and raises what it finds wrong with them.

Slow, and no measure of speed. It executes the text that a GPU would, with its barriers, its shared memory and its
races, in a schedule that a seed decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from embforge.codegen.errors import KernelBugError
from embforge.codegen.kernel import KERNELS, METADATA_WORDS
from embforge.codegen.plan import Plan
from embforge.codegen.targets.cuda.launch import QUEUE_COUNTERS, KernelLaunch, shape_of, status_size
from embforge.codegen.targets.simt.toolchain import twin_of
from embforge.inputs import Batch, raise_bad_input
from embforge.launch.gpu.forward_call import ForwardCall, Value, forward_call
from embforge.launch.gradients import TrainResult
from embforge.launch.metadata import Metadata
from embforge.launch.simt.abi import Counted, Region, SimtTraffic, load_image
from embforge.launch.simt.counters import SINGLE, TABLE, KernelCounters, Traffic
from embforge.launch.simt.guarded import guarded_copy, guarded_empty, spanned_bytes
from embforge.launch.simt.run import WORD_BYTES, launch_kernel, raise_mistakes
from embforge.result_elements import divisor_location, pooled_location, sequence_location, winner_location

_KERNEL = KERNELS["forward_train"]
READ_ONLY = _KERNEL.used("read")
RESULTS = _KERNEL.used("result")
WRITTEN = _KERNEL.used("result", "space")
"""Whose bytes nobody may read before they are written; results must be written whole."""
MOST_SEEDS = 2**64
MOST_COPIED = 4 << 20
"""Bytes of a table that is copied to where nothing lies near it; larger ones are read where they are."""


@dataclass(frozen=True)
class SimtOptions:
    """How a call is executed. `seed` decides the schedule of blocks and warps; `count` counts what memory costs."""

    seed: int = 0
    count: bool = False


class SimtRun(NamedTuple):
    """A call's results, and a kernel's counters each if they were asked for."""

    pooled: Tensor
    sequence: Tensor | None
    divisors: Tensor | None
    winners: Tensor | None
    counters: tuple[KernelCounters, ...]


class _SimtLookup:
    """One plan's kernels in an image. Threads may share it; their launches take turns."""

    def __init__(self, plan: Plan, image: Path) -> None:
        self.plan = plan
        self._image = load_image(image)
        self._shape = shape_of(twin_of(plan))
        self._calls = count()
        wanted = (WORD_BYTES,) * len(KERNELS[plan.op].in_blocks)
        for symbol in self._shape.symbols:
            kernel = self._image.kernels.get(symbol)
            if kernel is None or kernel.argument_bytes != wanted:
                raise AssertionError(f"the launcher passes {wanted} to {symbol}, image {image} has {kernel}")

    def _next(self) -> SimtOptions:
        """Every call has another schedule, the same ones in every process."""
        return SimtOptions(seed=next(self._calls) % MOST_SEEDS)

    def run(
        self,
        metadata: Metadata,
        tables: Sequence[Tensor],
        batch: Batch,
        sequence_elements: int,
        bounds_check: str,
        options: SimtOptions,
    ) -> SimtRun:
        """One call under these options.

        Results, work space, and copies of the batch and of tables up to `MOST_COPIED` lie so far apart that an
        overrun of up to `guarded.GUARD` bytes meets nothing. Larger tables stay where they are: an overrun of one of
        these is caught unless another of them happens to lie there.

        Raises what `raise_bad_input` raises, as the CPU backend does; `KernelBugError` for what a kernel does wrong,
        results that it never wrote included.
        """
        placed = [guarded_copy(rows) if spanned_bytes(rows) <= MOST_COPIED else rows for rows in tables]
        call = forward_call(
            self.plan, self._shape, _moved(metadata, tables, placed), _copied(batch), sequence_elements, guarded_empty
        )
        status = guarded_empty((status_size(),), torch.int64, batch.values.device).zero_()
        memory = _Memory(self.plan, call, placed, status)
        arguments = call.arguments(status)
        try:
            counters = [self._launch(kernel, arguments, memory, options) for kernel in call.work.kernels]
        except KernelBugError:
            if bounds_check == "unchecked":  # the kernel trusts its ids, so a bad one is the caller's mistake
                raise_bad_input(self.plan.spec, batch.values, batch.offsets, batch.weights, batch.batch, "error")
            raise
        raise_mistakes(self.plan, status, batch, bounds_check)
        self._raise_unwritten(call, memory, batch, options)
        known = tuple(c for c in counters if c is not None)
        return SimtRun(call.pooled, call.sequence, call.divisors, call.winners, known)

    def check(self) -> None:
        """Nothing is ever pending: whatever is wrong raises in the call that has it."""

    def _launch(
        self, kernel: KernelLaunch, arguments: Sequence[Value], memory: _Memory, options: SimtOptions
    ) -> KernelCounters | None:
        counted = launch_kernel(
            self.plan, self._image, kernel, arguments, memory.regions, seed=options.seed, count=options.count
        )
        return None if counted is None else kernel_counters(kernel.symbol, memory.regions, counted)

    def _raise_unwritten(self, call: ForwardCall, memory: _Memory, batch: Batch, options: SimtOptions) -> None:
        layout = self.plan.layout
        places: dict[str, Callable[[int], str]] = {
            "pooled": lambda element: pooled_location(layout, element),
            "sequence": lambda element: sequence_location(layout, batch.offsets, batch.batch, element),
            "divisors": lambda element: divisor_location(layout, element),
            "winners": lambda element: winner_location(layout, element),
        }
        for name in RESULTS:
            missing, result = memory.unwritten(name), call.given[name]
            if missing is None or not isinstance(result, Tensor):
                continue
            place = places[name](missing // result.element_size())
            raise KernelBugError(
                f"kernels of {self.plan.uri}: unwritten: no kernel wrote {place} of the {name} output\n"
                f"  schedule seed {options.seed}; the same seed gives the same schedule"
            )


class SimtForward(_SimtLookup):
    """A forward that keeps nothing for a backward."""

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> tuple[Tensor, Tensor | None]:
        """Pooled output, and the flat rows of `none` features if the spec has any. Raises as `run` does."""
        return self.run(metadata, tables, batch, sequence_elements, bounds_check, self._next())[:2]


class SimtForwardTrain(_SimtLookup):
    """A forward whose backward will come."""

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> TrainResult:
        """Pooled output, rows of `none` features, divisors and winners, None for what the spec has no feature of.

        Raises as `run` does.
        """
        return self.run(metadata, tables, batch, sequence_elements, bounds_check, self._next())[:4]


class _Memory:
    """The regions of one call: what kernels may read, what they may write, and what was written so far."""

    def __init__(self, plan: Plan, call: ForwardCall, tables: Sequence[Tensor], status: Tensor) -> None:
        self._defined: dict[str, Tensor] = {}
        given = {name: value for name, value in call.given.items() if isinstance(value, Tensor)}
        read = [table_region(t.name, rows) for t, rows in zip(plan.spec.tables, tables, strict=True)]
        read += [_region(name, given[name]) for name in READ_ONLY if name in given]
        written = [self._written(name, given[name]) for name in WRITTEN if name in given]
        written.append(_region("status", status, writable=True))
        self.regions = [region for region in (*_apart(read), *written) if region.bytes]

    def unwritten(self, name: str) -> int | None:
        """The first byte of a result that nobody wrote."""
        defined = self._defined.get(name)
        if defined is None or bool(defined.all()):
            return None
        return int(defined.argmin())

    def _written(self, name: str, tensor: Tensor) -> Region:
        defined = self._defined[name] = torch.zeros(tensor.nbytes, dtype=torch.uint8, device="cpu")
        if name == "queue":
            defined[: QUEUE_COUNTERS * WORD_BYTES] = 1  # zeros that the caller wrote
        return _region(name, tensor, writable=True, defined=defined.data_ptr())


def _region(name: str, tensor: Tensor, *, writable: bool = False, defined: int = 0) -> Region:
    return Region(name, tensor.data_ptr(), tensor.nbytes, defined, writable)


def table_region(name: str, rows: Tensor) -> Region:
    """Rows with the gaps between them, and the gap behind the last as far as there is memory for it."""
    return Region(f"{TABLE}{name}", rows.data_ptr(), spanned_bytes(rows))


def _moved(metadata: Metadata, tables: Sequence[Tensor], placed: Sequence[Tensor]) -> Metadata:
    """The metadata for kernels that find tables elsewhere. What it says wrongly of an address stays wrong."""
    words = guarded_copy(metadata.words)
    distances = [there.data_ptr() - here.data_ptr() for here, there in zip(tables, placed, strict=True)]
    words[:, METADATA_WORDS.index("address")] += torch.tensor(distances, dtype=torch.int64, device="cpu")
    return Metadata(words, words.data_ptr())


def _copied(batch: Batch) -> Batch:
    weights = None if batch.weights is None else guarded_copy(batch.weights)
    return batch._replace(values=guarded_copy(batch.values), offsets=guarded_copy(batch.offsets), weights=weights)


def _apart(regions: list[Region]) -> list[Region]:
    """Regions that overlap as one, under the names of all: tables may be views of one tensor."""
    merged: list[Region] = []
    for region in sorted(regions, key=lambda r: r.begin):
        last = merged[-1] if merged else None
        if last is not None and region.begin < last.begin + last.bytes:
            end = max(last.begin + last.bytes, region.begin + region.bytes)
            merged[-1] = Region(f"{last.name}/{region.name.removeprefix(TABLE)}", last.begin, end - last.begin)
        else:
            merged.append(region)
    return merged


def kernel_counters(symbol: str, regions: Sequence[Region], counted: Counted) -> KernelCounters:
    """A launch's counters by the names of its regions."""
    names = [region.name for region in regions]
    return KernelCounters(
        symbol,
        dict(zip(names, map(_traffic, counted.loads), strict=True)),
        dict(zip(names, map(_traffic, counted.stores), strict=True)),
        _traffic(counted.counters.shared_loads),
        _traffic(counted.counters.shared_stores),
        **{name: getattr(counted.counters, name) for name in SINGLE},
    )


def _traffic(words: SimtTraffic) -> Traffic:
    return Traffic(*(getattr(words, field.name) for field in fields(Traffic)))
