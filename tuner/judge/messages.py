"""The messages between a judge and its worker. It does not import torch, which only the worker needs."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from embforge.tuner.judge.judge import Cache
from embforge.tuner.measure.quiet import Usage


@dataclass(frozen=True)
class Setup:
    """Workloads and settings of measurements. The anchor's plan has op, target, spec, dtype of ids and update."""

    anchor: str
    """The canonical text of the plan that every candidate is compared with."""
    workloads: tuple[str, ...]
    seed: int = 0
    cache: Cache = "warm"
    """The state of caches in screenings; requests for rounds have their own."""
    threads: int | None = None
    """The number of torch's threads; None: torch's default."""


@dataclass(frozen=True)
class Prepare:
    """The first request: make tables, batches and right answers. It has no reply."""

    setup: Setup
    board: str
    """The path of the `Board`."""


@dataclass(frozen=True)
class TakeAnchor:
    """The second request: the worker's kernels are built, so it can begin. The reply is `Ready` or a failure."""

    train: str | None
    """The plan of the forward that runs before a backward, if the backward needs something that it keeps."""


@dataclass(frozen=True)
class Ready:
    seconds: float
    """Seconds of the anchor's slowest call."""


@dataclass(frozen=True)
class Verify:
    """A request to verify plans. The reply is `Verified` or a failure."""

    plan: str


@dataclass(frozen=True)
class Verified:
    pass


@dataclass(frozen=True)
class Screen:
    """A request to screen a plan. The reply is an outcome."""

    plan: str


@dataclass(frozen=True)
class TakeRounds:
    """A request for rounds of several plans. The reply is `Rounds` or a failure."""

    plans: tuple[str, ...]
    workload: str
    count: int
    seed: int
    cache: Cache


@dataclass(frozen=True)
class Rounds:
    samples: list[tuple[float, ...]]
    clocks: dict[str, int | None]
    others: Usage | None
    """CPU time of other processes during the rounds; None if it is not known, or if a GPU was timed."""


@dataclass(frozen=True)
class MayITime:
    """The worker is about to time something, and waits for `GoOn`."""


@dataclass(frozen=True)
class GoOn:
    """The judge's reply to it: the machine is quiet now."""


@dataclass(frozen=True)
class Broken:
    """The worker's last message: something failed that is not a candidate's fault."""

    traceback: str


Request = Prepare | TakeAnchor | Verify | Screen | TakeRounds | GoOn


class Notice(NamedTuple):
    """The content of a board."""

    changes: int
    """How often the board was written."""
    plan: int
    """The index of the plan in the request."""
    patience: bool
    """Whether this is the worker's own work, which has a longer time limit, or a candidate's."""
    doing: str


class Board:
    """A note of what the worker is doing, in shared memory, so that it survives a crash and does not disturb timing."""

    BYTES = 1024
    _HEAD = struct.Struct("qqq")

    def __init__(self, path: Path) -> None:
        """Opens the board; creates the file if it does not exist."""
        self.path = path
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(handle, self.BYTES)
            self._memory = mmap.mmap(handle, self.BYTES)
        finally:
            os.close(handle)

    def write(self, doing: str, plan: int = 0, *, patience: bool = False) -> None:
        """Writes a new notice."""
        room = self.BYTES - self._HEAD.size
        self._memory[self._HEAD.size :] = doing.encode()[:room].ljust(room, b"\0")
        self._HEAD.pack_into(self._memory, 0, self.read().changes + 1, plan, patience)

    def go_on(self, plan: int) -> None:
        """Changes only the plan of the notice, which is fast enough while something is timed."""
        changes, _, patience = self._HEAD.unpack_from(self._memory, 0)
        self._HEAD.pack_into(self._memory, 0, changes + 1, plan, patience)

    def read(self) -> Notice:
        changes, plan, patience = self._HEAD.unpack_from(self._memory, 0)
        text = self._memory[self._HEAD.size :].rstrip(b"\0").decode(errors="replace")
        return Notice(changes, plan, bool(patience), text)
