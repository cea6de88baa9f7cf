"""Timers of calls: the monotonic clock for CPUs, events for CUDA devices; with warm caches or with cold ones.

Warm: calls follow each other, on batches that rotate. Cold: caches are emptied before every call, and only the call
is timed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from embforge.codegen.errors import ToolchainError
from embforge.codegen.targets.cuda.packages import cuda_module
from embforge.codegen.tuned.hardware import parse_bytes

SAMPLE_SECONDS = 1e-3
"""A warm sample lasts at least this long: shorter ones measure mostly the noise of clock and interpreter."""
WARM_UP_CALLS = 5
"""How many calls a timer makes to decide how often to repeat: two to warm up, and the fastest of the others counts."""
COLD_REPEATS = 5
"""The most calls of a cold sample: emptying the caches takes longer than most calls."""
USUAL_CACHE_BYTES = 32 << 20
"""The assumed size of all caches if the machine does not report it."""
TIMES_TO_EMPTY = 2
"""A buffer of this many times the caches' size leaves nothing else in them."""

Run = Callable[[Any], Any]


class Timer(Protocol):
    """Times calls of a function with prepared arguments, taken in turn."""

    def sample(self, run: Run, prepared: Sequence[Any], repeats: int) -> float:
        """Seconds per call, the mean of `repeats` calls."""

    def repeats_for(self, run: Run, prepared: Sequence[Any]) -> int:
        """How many calls a sample of this function needs. Warms the function up."""

    def clocks(self) -> dict[str, int | None]:
        """Clock rates at this moment, in MHz by name; None if they are not known."""


@dataclass(frozen=True)
class CpuTimer:
    """Measures wall time. With `empty_caches` it is cold. `synchronize` waits for a device if calls do not."""

    empty_caches: Callable[[], None] | None = None
    clock: Callable[[], float] = time.perf_counter
    synchronize: Callable[[], None] | None = None

    @classmethod
    def cold(cls) -> CpuTimer:
        """Empties this machine's caches before each call, on all threads that calls may use."""
        return cls(empty_caches=_streamed("cpu", TIMES_TO_EMPTY * cpu_cache_bytes()))

    def sample(self, run: Run, prepared: Sequence[Any], repeats: int) -> float:
        turns = _turns(prepared, repeats)
        if self.empty_caches is None:
            return self._timed(run, turns) / repeats
        total = 0.0
        for turn in turns:
            self.empty_caches()
            total += self._timed(run, [turn])
        return total / repeats

    def repeats_for(self, run: Run, prepared: Sequence[Any]) -> int:
        most = None if self.empty_caches is None else COLD_REPEATS
        return _repeats(self, run, prepared, most)

    def clocks(self) -> dict[str, int | None]:
        return {"cpu": _cpu_mhz()}

    def _timed(self, run: Run, turns: Sequence[Any]) -> float:
        if self.synchronize is not None:
            self.synchronize()
        start = self.clock()
        for turn in turns:
            run(turn)
        if self.synchronize is not None:
            self.synchronize()
        return self.clock() - start


@dataclass(frozen=True)
class CudaTimer:
    """Measures the time between two events on the stream. With `empty_caches` it is cold."""

    event: Callable[[], Any]
    """Makes a new event with timing, such as `torch.cuda.Event(enable_timing=True)`."""
    synchronize: Callable[[], None]
    empty_caches: Callable[[], None] | None
    read_clocks: Callable[[], dict[str, int | None]]

    @classmethod
    def of(cls, device: Any, *, cold: bool) -> CudaTimer:
        """The timer of a CUDA device. If it is cold, a buffer of twice its L2 is written before each call."""
        import torch

        device = torch.device(device)
        l2_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)
        return cls(
            event=lambda: torch.cuda.Event(enable_timing=True),
            synchronize=lambda: torch.cuda.synchronize(device),
            empty_caches=_streamed(device, TIMES_TO_EMPTY * l2_bytes) if cold else None,
            read_clocks=lambda: gpu_clocks(device.index or 0),
        )

    def sample(self, run: Run, prepared: Sequence[Any], repeats: int) -> float:
        turns = _turns(prepared, repeats)
        groups = [turns] if self.empty_caches is None else [[turn] for turn in turns]
        pairs = [(self.event(), self.event()) for _ in groups]
        self.synchronize()  # what was asked for before is no part of it
        for (begin, end), group in zip(pairs, groups, strict=True):
            if self.empty_caches is not None:
                self.empty_caches()
            begin.record()
            for turn in group:
                run(turn)
            end.record()
        self.synchronize()
        return sum(float(begin.elapsed_time(end)) for begin, end in pairs) * 1e-3 / repeats

    def repeats_for(self, run: Run, prepared: Sequence[Any]) -> int:
        return _repeats(self, run, prepared, None if self.empty_caches is None else COLD_REPEATS)

    def clocks(self) -> dict[str, int | None]:
        return self.read_clocks()


def cpu_cache_bytes() -> int:
    """The size of all second and third level caches of the machine together, each counted once."""
    sizes: dict[tuple[str, str], int] = {}
    for cache in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        level, shared, size = (_text(cache / name) for name in ("level", "shared_cpu_list", "size"))
        if level in ("2", "3") and shared and size:
            sizes[level, shared] = parse_bytes(size)
    return sum(sizes.values()) or USUAL_CACHE_BYTES


def gpu_clocks(index: int) -> dict[str, int | None]:
    """Clock rates of the multiprocessors and of the memory, from NVML through cuda.core; None without NVML."""
    names = ("sm", "memory")
    try:
        core = cuda_module("cuda.core")
    except ToolchainError:  # cuda.core is not on every system
        return dict.fromkeys(names)
    try:
        device = core.Device(index).to_system_device()
        return {name: int(device.get_clock(name).get_current_mhz()) for name in names}
    except Exception:  # NVML has a class for each of its refusals, and so has the search for its library
        return dict.fromkeys(names)


def _repeats(timer: Timer, run: Run, prepared: Sequence[Any], most: int | None) -> int:
    """How often a call must be repeated, so that a sample is long enough."""
    turns = _turns(prepared, WARM_UP_CALLS)
    for turn in turns[:2]:  # the first call compiles, faults pages in, starts threads
        run(turn)
    single = min(timer.sample(run, [turn], 1) for turn in turns[2:])
    needed = max(1, math.ceil(SAMPLE_SECONDS / max(single, 1e-9)))
    return needed if most is None else min(needed, most)


def _turns(prepared: Sequence[Any], count: int) -> list[Any]:
    return [prepared[turn % len(prepared)] for turn in range(count)]


def _streamed(device: Any, size: int) -> Callable[[], None]:
    """Rewrites a buffer of `size` bytes on a device, by all of torch's threads: private caches are emptied too."""
    import torch

    buffer = torch.zeros(size // 8, dtype=torch.int64, device=device)

    def stream() -> None:
        buffer.add_(1)

    return stream


def _cpu_mhz() -> int | None:
    """The mean clock rate of the cores, as Linux reports it."""
    lines = _text(Path("/proc/cpuinfo")).splitlines()
    rates = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    return round(sum(rates) / len(rates)) if rates else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
