"""What a judge and its worker tell each other. Imports no torch, which only the worker needs."""

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
    """What candidates are measured on. All else is in the anchor's plan: op, target, spec, dtype of ids, update."""

    anchor: str
    """The canonical text of the plan that every candidate is compared with."""
    workloads: tuple[str, ...]
    seed: int = 0
    cache: Cache = "warm"
    """Of screenings; rounds say it themselves."""
    threads: int | None = None
    """torch's; None: as many as it takes by itself."""


@dataclass(frozen=True)
class Prepare:
    """The first request: make tables, batches and right answers. No answer."""

    setup: Setup
    board: str
    """The file of the `Board`."""


@dataclass(frozen=True)
class TakeAnchor:
    """The second: all kernels are built that the worker needs, so it can begin. Answered by `Ready` or a failure."""

    train: str | None
    """The plan of the forward before the op, if that must keep something for it."""


@dataclass(frozen=True)
class Ready:
    seconds: float
    """Of the anchor's slowest call."""


@dataclass(frozen=True)
class Verify:
    """Answered by `Verified` or a failure."""

    plan: str


@dataclass(frozen=True)
class Verified:
    pass


@dataclass(frozen=True)
class Screen:
    """Answered by an outcome."""

    plan: str


@dataclass(frozen=True)
class TakeRounds:
    """Answered by `Rounds` or a failure."""

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
    """What other processes took of the CPUs meanwhile; None: the system does not tell, or a GPU was timed."""


@dataclass(frozen=True)
class MayITime:
    """The worker is about to time something, and waits for `GoOn`."""


@dataclass(frozen=True)
class GoOn:
    """It is quiet now."""


@dataclass(frozen=True)
class Broken:
    """The worker's last message: it made a mistake that is no candidate's."""

    traceback: str


Request = Prepare | TakeAnchor | Verify | Screen | TakeRounds | GoOn


class Notice(NamedTuple):
    """What stands on a board."""

    changes: int
    """How often it was written to."""
    plan: int
    """The place among the plans of a request."""
    patience: bool
    """Whether this is work of the worker's own, which takes as long as it takes, or a candidate's."""
    doing: str


class Board:
    """What the worker is doing, in memory that both sides see, so that it outlives a crash and disturbs no timing."""

    BYTES = 1024
    _HEAD = struct.Struct("qqq")

    def __init__(self, path: Path) -> None:
        """Opens the board; makes the file if there is none."""
        self.path = path
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(handle, self.BYTES)
            self._memory = mmap.mmap(handle, self.BYTES)
        finally:
            os.close(handle)

    def write(self, doing: str, plan: int = 0, *, patience: bool = False) -> None:
        """Puts a new notice up."""
        room = self.BYTES - self._HEAD.size
        self._memory[self._HEAD.size :] = doing.encode()[:room].ljust(room, b"\0")
        self._HEAD.pack_into(self._memory, 0, self.read().changes + 1, plan, patience)

    def go_on(self, plan: int) -> None:
        """The same notice for that plan: all that may happen while something is timed."""
        changes, _, patience = self._HEAD.unpack_from(self._memory, 0)
        self._HEAD.pack_into(self._memory, 0, changes + 1, plan, patience)

    def read(self) -> Notice:
        changes, plan, patience = self._HEAD.unpack_from(self._memory, 0)
        text = self._memory[self._HEAD.size :].rstrip(b"\0").decode(errors="replace")
        return Notice(changes, plan, bool(patience), text)
