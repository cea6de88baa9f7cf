"""One call of a stage's CUDA kernels, for all GPU launchers: work space, arguments, and the steps in stream order.

A step is a launch, or an operation of torch on tensors of the call. Nothing waits for the device: grids and work space
follow from the sizes of tensors and from the numbers that the caller passes. Work whose amount only the device knows
(shards of a bucketing, ids of a feature, words of a run) is divided there among a number of blocks that fits the
average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embforge.codegen.stages import STAGES, STREAM_WORDS, StagePlan
from embforge.codegen.targets.cuda.arch import WARP
from embforge.codegen.targets.cuda.launch import KernelLaunch
from embforge.codegen.targets.cuda.stages import (
    MOST_STREAMS,
    SAMPLES,
    THREADS,
    symbol_of,
)
from embforge.launch.gpu.forward_call import Value

WARPS = THREADS // WARP
IDS_PER_WARP = 128
"""The least number of ids that a warp distributes, on average."""
WORDS_PER_THREAD = 8
BYTES_PER_THREAD = 64
"""How much each thread gathers: as many vectors as it loads at the same time."""
MOST_PARTS = 64
"""The most blocks that share a bucketing or segment."""
MOST_GATHERING = 1024
"""The most blocks that share a pick: enough to fill a GPU, because there may be only one pick."""
MOST_IDS = 2**31 - 64
"""The most ids of a batch: positions have 31 bits, and a warp looks one window past the last."""
MOST_BLOCKS = 2**31 - 1
"""The largest grid."""

Empty = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]
"""A function that makes a tensor of a shape, dtype and device, with any content."""

Step = KernelLaunch | Callable[[], None]


@dataclass
class StageCall:
    """What a call launches, and with which tensors."""

    stage: str
    by_name: dict[str, Value]
    """Every argument by name."""
    steps: list[Step]
    space: set[str] = field(default_factory=set)
    """The names of work space that is undefined until a kernel writes it. Tensors that torch writes are not among
    them."""
    prepared: set[str] = field(default_factory=set)
    """The names of work space that torch fills before kernels write to it."""

    def arguments(self) -> list[Value]:
        """The arguments of the kernels, in call order."""
        return [self.by_name[name] for name in STAGES[self.stage].in_blocks]


def stage_call(plan: StagePlan, stage: str, arguments: dict[str, Value], empty: Empty) -> StageCall:
    """The call of a stage with arguments by name. `empty` makes work space.

    Raises AssertionError for arguments that the stage does not take, and ValueError for more ids than kernels can
    count.
    """
    expected = set(STAGES[stage].used("read", "result", "changed"))
    if set(arguments) != expected:
        raise AssertionError(f"stage {stage} takes {sorted(expected)}, got {sorted(arguments)}")
    return _StageCallBuilder(plan, stage, arguments, empty).call()


class _Distribution(NamedTuple):
    """How the work on ids is divided among blocks."""

    bucketings: int
    blocks_of_runs: int
    """Blocks whose warps take a run of samples of a bucketing each."""
    blocks_of_parts: int
    """Blocks that take a part of a bucketing's ids each."""


class _StageCallBuilder:
    """Builds the call of one stage. Method `_NAME` adds the steps of stage NAME."""

    def __init__(self, plan: StagePlan, stage: str, arguments: dict[str, Value], empty: Empty) -> None:
        self._plan, self._stage, self._by_name, self._empty = plan, stage, dict(arguments), empty
        self._steps: list[Step] = []
        self._space: set[str] = set()

    def call(self) -> StageCall:
        getattr(self, f"_{self._stage}")()
        prepared = {"keys"} & set(self._by_name)
        return StageCall(self._stage, self._by_name, self._steps, self._space, prepared)

    def _launch(self, kernel: str, blocks: int) -> None:
        if blocks > MOST_BLOCKS:
            raise ValueError(f"stage {self._stage}: needs {blocks} blocks; allowed: {MOST_BLOCKS}; split the batch")
        if blocks:
            self._steps.append(KernelLaunch(symbol_of(self._plan, self._stage, kernel), blocks, THREADS, 0))

    def _number(self, name: str) -> int:
        value = self._by_name[name]
        assert isinstance(value, int), f"{name} must be a number, not {type(value).__name__}"
        return value

    def _tensor(self, name: str) -> Tensor:
        value = self._by_name[name]
        assert isinstance(value, Tensor), f"{name} must be a tensor, not {type(value).__name__}"
        return value

    def _size(self, name: str) -> int:
        value = self._by_name[name]
        return value.numel() if isinstance(value, Tensor) else 0

    def _make(self, name: str, size: int, dtype: torch.dtype, *, by_torch: bool = False) -> Tensor:
        """Makes work space that kernels write, or torch."""
        space = self._empty((size,), dtype, self._tensor("features").device)
        self._by_name[name] = space
        if not by_torch:
            self._space.add(name)
        return space

    def _distribution(self) -> _Distribution:
        """How the ids of the batch are divided among warps and blocks.

        The numbers follow from bucketings and not from streams, because some streams belong to no bucketing and some
        have no place in the message: kernels find the streams through the bucketings.
        """
        bucketings, batch, count = self._number("num_bucketings"), self._number("batch"), self._number("num_values")
        bags = max(1, batch * max(bucketings, self._number("num_features")))
        if count > MOST_IDS or bags > MOST_IDS:
            raise ValueError(
                f"values, offsets: {count} ids, {bags} bags; a stage takes {MOST_IDS} at most; split the batch"
            )
        run = max(1, min(WARP, IDS_PER_WARP * bags // max(count, 1)))
        parts = max(1, min(MOST_PARTS, -(-count // (THREADS * WORDS_PER_THREAD))))
        self._by_name |= {"run": run, "parts": parts}
        return _Distribution(bucketings, -(-bucketings * -(-batch // run) // WARPS), bucketings * parts)

    def _streams(self) -> int:
        streams = self._size("streams") // len(STREAM_WORDS)
        if streams > MOST_STREAMS:
            raise ValueError(f"streams: there are {streams}; a batch has {MOST_STREAMS} at most")
        return streams

    def _count(self) -> None:
        work = self._distribution()
        batch, streams = self._number("batch"), self._streams()
        slots, pools = self._size("slots"), self._size("pools")
        keys = slots + pools
        if keys > MOST_IDS:
            raise ValueError(
                f"slots, pools: {slots} ids, {pools} bags; a stage takes {MOST_IDS} at most; split the batch"
            )
        mistake = self._tensor("mistake")
        self._steps.append(lambda: _run(mistake.zero_))
        self._launch("borders", max(1, -(-batch * self._number("num_features") // THREADS)))
        self._launch("pooled", work.blocks_of_runs)
        if self._by_name["weights"] is not None and self._number("divisor_width"):
            self._launch("divisors", -(-work.bucketings * -(-batch // WARP) // WARPS))
        self._launch("totals", work.blocks_of_parts)
        self._by_name |= {"num_keys": keys, "num_slots": slots}
        unsorted = self._make("keys", keys, torch.int64, by_torch=True)
        in_order = self._make("sorted_keys", keys, torch.int64, by_torch=True)
        order = self._make("order", keys, torch.int64, by_torch=True)
        heads = self._make("heads", keys, torch.int32)
        ranks = self._make("ranks", keys, torch.int32, by_torch=True)
        self._make("firsts", streams if keys else 0, torch.int32)
        if keys:
            self._steps.append(lambda: _run(unsorted.zero_))
        self._launch("keys", work.blocks_of_parts)
        if pools:
            self._launch("pools", work.blocks_of_runs)
        if keys:
            self._steps.append(lambda: _run(torch.sort, unsorted, stable=True, out=(in_order, order)))
            self._launch("heads", -(-keys // THREADS))
            self._steps.append(lambda: _run(torch.cumsum, heads, 0, dtype=torch.int32, out=ranks))
            self._launch("firsts", -(-keys // THREADS))
            self._launch("slots", -(-keys // THREADS))

    def _fill(self) -> None:
        work = self._distribution()
        batch, lengths = self._number("batch"), self._tensor("lengths")
        ends = self._make("ends", lengths.numel(), torch.int32, by_torch=True)
        if lengths.numel():
            rows = lengths.view(-1, batch)
            self._steps.append(lambda: _run(torch.cumsum, rows, 1, dtype=torch.int32, out=ends.view(-1, batch)))
            self._launch("lengths", work.blocks_of_parts)
            if self._size("pools"):
                self._launch("asked", work.blocks_of_parts)
            self._launch("pooled", work.blocks_of_runs)
        if self._size("slots"):
            self._launch("sequence", work.blocks_of_parts)

    def _regroup(self) -> None:
        segments = self._number("num_segments")
        words = self._size("values") * self._tensor("values").element_size() // 4
        parts = min(MOST_PARTS, max(1, words // (max(segments, 1) * THREADS * WORDS_PER_THREAD)))
        self._by_name["parts"] = parts
        self._launch("values", segments * parts)
        self._launch("borders", max(1, segments))

    def _gather(self) -> None:
        picks = self._number("num_picks")
        bytes_ = self._size("picked") * self._tensor("picked").element_size()
        parts = min(MOST_GATHERING, max(1, bytes_ // (max(picks, 1) * THREADS * BYTES_PER_THREAD)))
        self._by_name["parts"] = parts
        self._launch("rows", picks * parts)

    def _network_forward(self) -> None:
        self._launch("pool", self._number("num_pieces") * -(-self._number("batch") // SAMPLES))

    def _network_backward(self) -> None:
        self._launch("spread", self._number("num_pieces") * -(-self._number("batch") // SAMPLES))

    def _pack(self) -> None:
        self._launch("rows", -(-self._number("rows") * self._number("num_parts") // WARPS))

    def _unpack(self) -> None:
        self._launch("rows", -(-self._number("rows") * self._number("num_parts") // WARPS))


def _run(function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """Runs an operation of torch and drops its result."""
    function(*arguments, **named)
