"""One call of a stage's CUDA kernels, whoever launches them: work space, arguments, and the steps in stream order.

A step is a launch, or an operation of torch on tensors of the call. Nothing waits for the device: grids and work space
follow from the sizes of tensors and from the numbers that the caller gave. What only the device knows (shards of a
bucketing, ids of a feature, words of a run) is shared out there, over a number of blocks that suits the average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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
IDS_A_WARP = 128
"""That a warp which deals out ids has at least, on average."""
WORDS_A_THREAD = 8
BYTES_A_THREAD = 64
"""That a thread gathers: as many vectors as it has on their way at once."""
MOST_PARTS = 64
"""Blocks that share a bucketing or segment, at most."""
MOST_GATHERING = 1024
"""Blocks that share a pick, at most: a pick may be all there is, so that they should fill a GPU."""
MOST_IDS = 2**31 - 64
"""Positions are counted in 31 bits, and a warp looks one window past the last."""
MOST_BLOCKS = 2**31 - 1

Empty = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]

Step = KernelLaunch | Callable[[], None]


@dataclass
class StageCall:
    """What a call launches, and on what."""

    stage: str
    given: dict[str, Value]
    """Every argument by name."""
    steps: list[Step]
    space: set[str] = field(default_factory=set)
    """Work space that holds nothing before a kernel writes it. What torch writes is none of it."""
    prepared: set[str] = field(default_factory=set)
    """Work space that torch fills and kernels write to."""

    def arguments(self) -> list[Value]:
        """The kernels' arguments, in their order."""
        return [self.given[name] for name in STAGES[self.stage].in_blocks]


def stage_call(plan: StagePlan, stage: str, given: dict[str, Value], empty: Empty) -> StageCall:
    """The call of a stage. `empty` makes a tensor of that shape, dtype and device for work space.

    AssertionError for arguments that are not the stage's; ValueError for more ids than kernels can count.
    """
    expected = set(STAGES[stage].used("read", "result", "changed"))
    if set(given) != expected:
        raise AssertionError(f"stage {stage} takes {sorted(expected)}, got {sorted(given)}")
    return _Maker(plan, stage, given, empty).call()


class _Maker:
    """Makes the call of one stage."""

    def __init__(self, plan: StagePlan, stage: str, given: dict[str, Value], empty: Empty) -> None:
        self._plan, self._stage, self._given, self._empty = plan, stage, dict(given), empty
        self._steps: list[Step] = []
        self._space: set[str] = set()

    def call(self) -> StageCall:
        getattr(self, f"_{self._stage}")()
        prepared = {"keys"} & set(self._given)
        return StageCall(self._stage, self._given, self._steps, self._space, prepared)

    def _launch(self, kernel: str, blocks: int) -> None:
        if blocks > MOST_BLOCKS:
            raise ValueError(f"stage {self._stage}: {blocks} blocks; a launch takes {MOST_BLOCKS}; split the batch")
        if blocks:
            self._steps.append(KernelLaunch(symbol_of(self._plan, self._stage, kernel), blocks, THREADS, 0))

    def _number(self, name: str) -> int:
        value = self._given[name]
        assert isinstance(value, int), f"{name} must be a number, not {type(value).__name__}"
        return value

    def _tensor(self, name: str) -> Tensor:
        value = self._given[name]
        assert isinstance(value, Tensor), f"{name} must be a tensor, not {type(value).__name__}"
        return value

    def _size(self, name: str) -> int:
        value = self._given[name]
        return value.numel() if isinstance(value, Tensor) else 0

    def _make(self, name: str, size: int, dtype: torch.dtype, *, by_torch: bool = False) -> Tensor:
        """Work space, written by kernels or by torch."""
        made = self._empty((size,), dtype, self._tensor("features").device)
        self._given[name] = made
        if not by_torch:
            self._space.add(name)
        return made

    def _deal(self) -> tuple[int, int, int]:
        """How ids are shared out: bucketings, warps that take runs of samples, blocks a bucketing.

        Not every stream is a bucketing's, nor has every stream a place: kernels come to streams by bucketings.
        """
        bucketings, batch, count = self._number("num_bucketings"), self._number("batch"), self._number("num_values")
        bags = max(1, batch * max(bucketings, self._number("num_features")))
        if count > MOST_IDS or bags > MOST_IDS:
            raise ValueError(
                f"values, offsets: {count} ids, {bags} bags; a stage takes {MOST_IDS} at most; split the batch"
            )
        run = max(1, min(WARP, IDS_A_WARP * bags // max(count, 1)))
        parts = max(1, min(MOST_PARTS, -(-count // (THREADS * WORDS_A_THREAD))))
        self._given |= {"run": run, "parts": parts}
        return bucketings, bucketings * -(-batch // run), parts

    def _streams(self) -> int:
        streams = self._size("streams") // len(STREAM_WORDS)
        if streams > MOST_STREAMS:
            raise ValueError(f"streams: {streams} of them; a batch has {MOST_STREAMS} at most")
        return streams

    def _count(self) -> None:
        bucketings, warps, parts = self._deal()
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
        self._launch("pooled", -(-warps // WARPS))
        if self._given["weights"] is not None and self._number("divisor_width"):
            self._launch("divisors", -(-bucketings * -(-batch // WARP) // WARPS))
        self._launch("totals", bucketings * parts)
        self._given |= {"num_keys": keys, "num_slots": slots}
        made = self._make("keys", keys, torch.int64, by_torch=True)
        in_order = self._make("sorted_keys", keys, torch.int64, by_torch=True)
        order = self._make("order", keys, torch.int64, by_torch=True)
        heads = self._make("heads", keys, torch.int32)
        ranks = self._make("ranks", keys, torch.int32, by_torch=True)
        self._make("firsts", streams if keys else 0, torch.int32)
        if keys:
            self._steps.append(lambda: _run(made.zero_))
        self._launch("keys", bucketings * parts)
        if pools:
            self._launch("pools", -(-warps // WARPS))
        if keys:
            self._steps.append(lambda: _run(torch.sort, made, stable=True, out=(in_order, order)))
            self._launch("heads", -(-keys // THREADS))
            self._steps.append(lambda: _run(torch.cumsum, heads, 0, dtype=torch.int32, out=ranks))
            self._launch("firsts", -(-keys // THREADS))
            self._launch("slots", -(-keys // THREADS))

    def _fill(self) -> None:
        bucketings, warps, parts = self._deal()
        batch, lengths = self._number("batch"), self._tensor("lengths")
        ends = self._make("ends", lengths.numel(), torch.int32, by_torch=True)
        if lengths.numel():
            rows = lengths.view(-1, batch)
            self._steps.append(lambda: _run(torch.cumsum, rows, 1, dtype=torch.int32, out=ends.view(-1, batch)))
            self._launch("lengths", bucketings * parts)
            if self._size("pools"):
                self._launch("asked", bucketings * parts)
            self._launch("pooled", -(-warps // WARPS))
        if self._size("slots"):
            self._launch("sequence", bucketings * parts)

    def _regroup(self) -> None:
        segments = self._number("num_segments")
        words = self._size("values") * self._tensor("values").element_size() // 4
        parts = min(MOST_PARTS, max(1, words // (max(segments, 1) * THREADS * WORDS_A_THREAD)))
        self._given["parts"] = parts
        self._launch("values", segments * parts)
        self._launch("borders", max(1, segments))

    def _gather(self) -> None:
        picks = self._number("num_picks")
        bytes_ = self._size("picked") * self._tensor("picked").element_size()
        parts = min(MOST_GATHERING, max(1, bytes_ // (max(picks, 1) * THREADS * BYTES_A_THREAD)))
        self._given["parts"] = parts
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
    """An operation of torch, whatever it returns."""
    function(*arguments, **named)
