"""Runs a plan's forward kernels on the CPU by the SIMT executor, and raises the bugs that it finds.

The executor is slow, and its times say nothing about a GPU. It executes the text that a GPU would execute, with its
barriers, shared memory and races, in a schedule that a seed determines.
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
from embforge.launch.simt.run import WORD_BYTES, check_kernels, launch_kernel, raise_mistakes
from embforge.result_elements import divisor_location, pooled_location, sequence_location, winner_location

_KERNEL = KERNELS["forward_train"]
READ_ONLY = _KERNEL.used("read")
RESULTS = _KERNEL.used("result")
WRITTEN = _KERNEL.used("result", "space")
"""Arguments whose bytes must be written before they are read. All bytes of results must be written."""
MOST_SEEDS = 2**64
MOST_COPIED = 4 << 20
"""The most bytes of a table that is copied to guarded memory; larger tables are read where they are."""


@dataclass(frozen=True)
class SimtOptions:
    """How a call is executed. `seed` determines the schedule of blocks and warps; `count` turns on counting of memory
    instructions."""

    seed: int = 0
    count: bool = False


class SimtRun(NamedTuple):
    """The results of a call, and the counters of each kernel if they were requested."""

    pooled: Tensor
    sequence: Tensor | None
    divisors: Tensor | None
    winners: Tensor | None
    counters: tuple[KernelCounters, ...]


class _SimtLookup:
    """The kernels of a plan in a loaded image. Threads may share it; their launches take turns."""

    def __init__(self, plan: Plan, image: Path) -> None:
        self.plan = plan
        self._image = load_image(image)
        self._shape = shape_of(twin_of(plan))
        self._calls = count()
        check_kernels(self._image, plan.op, self._shape.symbols)

    def _next(self) -> SimtOptions:
        """The options of the next call. Every call has a different schedule, in the same order in every process."""
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
        """Runs a call with these options.

        Results, work space, and copies of the batch and of tables up to `MOST_COPIED` bytes are so far apart that an
        overrun of up to `guarded.GUARD` bytes does not reach another tensor. Larger tables stay where they are: an
        overrun of such a table is found unless it happens to reach another one.

        Raises what `raise_bad_input` raises, as the CPU backend does, and `KernelBugError` for a bug in a kernel, also
        if the kernels do not write all results.
        """
        guarded = [guarded_copy(rows) if spanned_bytes(rows) <= MOST_COPIED else rows for rows in tables]
        call = forward_call(
            self.plan, self._shape, _moved(metadata, tables, guarded), _copied(batch), sequence_elements, guarded_empty
        )
        status = guarded_empty((status_size(),), torch.int64, batch.values.device).zero_()
        memory = _Memory(self.plan, call, guarded, status)
        arguments = call.arguments(status)
        try:
            counters = [self._launch(kernel, arguments, memory, options) for kernel in call.work.kernels]
        except KernelBugError:
            if bounds_check == "unchecked":  # the kernel does not check ids, so a bad one is the caller's mistake
                raise_bad_input(self.plan.spec, batch.values, batch.offsets, batch.weights, batch.batch, "error")
            raise
        raise_mistakes(self.plan, status, batch, bounds_check)
        self._raise_unwritten(call, memory, batch, options)
        known = tuple(c for c in counters if c is not None)
        return SimtRun(call.pooled, call.sequence, call.divisors, call.winners, known)

    def check(self) -> None:
        """Does nothing: mistakes and bugs raise in the call that has them, so no error is ever pending."""

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
            missing, result = memory.unwritten(name), call.by_name[name]
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
        """Returns the pooled output, and the flat rows of `none` features if the spec has any. Raises as `run` does."""
        return self.run(metadata, tables, batch, sequence_elements, bounds_check, self._next())[:2]


class SimtForwardTrain(_SimtLookup):
    """A training forward: it returns what its backward needs, too."""

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> TrainResult:
        """Returns pooled output, rows of `none` features, divisors and winners: see `TrainKernel`.

        Raises as `run` does.
        """
        return self.run(metadata, tables, batch, sequence_elements, bounds_check, self._next())[:4]


class _Memory:
    """The regions of one call: the memory that kernels may read, may write, and have written so far."""

    def __init__(self, plan: Plan, call: ForwardCall, tables: Sequence[Tensor], status: Tensor) -> None:
        self._defined: dict[str, Tensor] = {}
        tensors = {name: value for name, value in call.by_name.items() if isinstance(value, Tensor)}
        read = [table_region(t.name, rows) for t, rows in zip(plan.spec.tables, tables, strict=True)]
        read += [_region(name, tensors[name]) for name in READ_ONLY if name in tensors]
        written = [self._written(name, tensors[name]) for name in WRITTEN if name in tensors]
        written.append(_region("status", status, writable=True))
        self.regions = [region for region in (*_apart(read), *written) if region.bytes]

    def unwritten(self, name: str) -> int | None:
        """The first byte of a result that no kernel wrote; None if all are written."""
        defined = self._defined.get(name)
        if defined is None or bool(defined.all()):
            return None
        return int(defined.argmin())

    def _written(self, name: str, tensor: Tensor) -> Region:
        defined = self._defined[name] = torch.zeros(tensor.nbytes, dtype=torch.uint8, device="cpu")
        if name == "queue":
            defined[: QUEUE_COUNTERS * WORD_BYTES] = 1  # the caller has written zeros
        return _region(name, tensor, writable=True, defined=defined.data_ptr())


def _region(name: str, tensor: Tensor, *, writable: bool = False, defined: int = 0) -> Region:
    return Region(name, tensor.data_ptr(), tensor.nbytes, defined, writable)


def table_region(name: str, rows: Tensor) -> Region:
    """The region of a table: its rows with the gaps after them, as `spanned_bytes` counts them."""
    return Region(f"{TABLE}{name}", rows.data_ptr(), spanned_bytes(rows))


def _moved(metadata: Metadata, tables: Sequence[Tensor], guarded: Sequence[Tensor]) -> Metadata:
    """The metadata for kernels that read guarded copies of the tables. Addresses are shifted and not replaced, so that
    a wrong address stays wrong."""
    words = guarded_copy(metadata.words)
    distances = [copy.data_ptr() - original.data_ptr() for original, copy in zip(tables, guarded, strict=True)]
    words[:, METADATA_WORDS.index("address")] += torch.tensor(distances, dtype=torch.int64, device="cpu")
    return Metadata(words, words.data_ptr())


def _copied(batch: Batch) -> Batch:
    weights = None if batch.weights is None else guarded_copy(batch.weights)
    return batch._replace(values=guarded_copy(batch.values), offsets=guarded_copy(batch.offsets), weights=weights)


def _apart(regions: list[Region]) -> list[Region]:
    """Merges regions that overlap into one, which has the names of all: tables may be views of the same tensor."""
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
    """The counters of a launch, by the names of its regions."""
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
