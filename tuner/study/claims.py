"""Claims of processes on trials. A claim ends with its process, even by kill -9, or after a time without renewal."""

from __future__ import annotations

import os
import platform
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

LEASE_SECONDS = 900.0
"""A claim that was not renewed for this many seconds has ended, also if the owner's process cannot be seen."""
RENEW_SECONDS = 300.0
"""The owner renews a claim that is older than this."""


@dataclass(frozen=True)
class Claim:
    """The claim of one process on one trial."""

    id: str
    """Identifies this claim. A process that finds a different one on its trial has lost the trial."""
    host: str
    """The machine's name, its boot and its namespace of process ids, in which `pid` is valid."""
    pid: int
    started: str | None
    """When the process began, in the system's ticks, because pids are reused. None if it is not known."""
    until: float
    """When it was renewed last, in seconds since the epoch."""

    @classmethod
    def mine(cls) -> Claim:
        """A new claim of this process."""
        pid = os.getpid()
        return cls(uuid.uuid4().hex, _host(), pid, _start_of(pid), time.time() + LEASE_SECONDS)

    @classmethod
    def from_data(cls, data: Any) -> Claim | None:
        """The claim of which `to_data` returned the data; None for other data."""
        try:
            return cls(**data)
        except TypeError:
            return None

    def to_data(self) -> Mapping[str, Any]:
        return asdict(self)

    def renewed(self) -> Claim:
        """The same claim, renewed now."""
        return replace(self, until=time.time() + LEASE_SECONDS)

    @property
    def is_old(self) -> bool:
        """Whether its owner should renew it."""
        return time.time() > self.until - LEASE_SECONDS + RENEW_SECONDS

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended, as far as this process can see, or has not renewed it in time."""
        if time.time() > self.until:
            return True
        return self.host == _host() and not _lives(self.pid, self.started)


@cache
def _host() -> str:
    parts = [platform.node()]
    with suppress(OSError):  # not Linux: only the name is known
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))  # containers may share everything else
    return " ".join(parts)


def _lives(pid: int, started: str | None) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to a different user
        pass
    seen = _start_of(pid)
    return seen is None or seen == started


def _start_of(pid: int) -> str | None:
    """When the process began; empty for a zombie, None if the system does not show it, e.g. to other users."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]  # field 22 of proc(5), counted after the name
