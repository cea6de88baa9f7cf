"""Who works on a trial: a process, for a while. Whatever ends a process, kill -9 included, ends its claims."""

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
"""After it, without a word from its owner, a claim has ended also for those who cannot see the owner's process."""
RENEW_SECONDS = 300.0
"""A claim that is older is written anew by its owner."""


@dataclass(frozen=True)
class Claim:
    """One process's hold of one trial."""

    id: str
    """Of this hold: whoever finds another one on the trial has lost it."""
    host: str
    """The machine's name, its boot and its space of process ids: within it `pid` means something."""
    pid: int
    started: str | None
    """When the process began, in the system's ticks: a pid alone is used again. None where nobody can tell."""
    until: float
    """Seconds since the epoch."""

    @classmethod
    def mine(cls) -> Claim:
        """A new one of this process."""
        pid = os.getpid()
        return cls(uuid.uuid4().hex, _host(), pid, _start_of(pid), time.time() + LEASE_SECONDS)

    @classmethod
    def from_data(cls, data: Any) -> Claim | None:
        """What `to_data` wrote; None for anything else."""
        try:
            return cls(**data)
        except TypeError:
            return None

    def to_data(self) -> Mapping[str, Any]:
        return asdict(self)

    def renewed(self) -> Claim:
        """The same hold, for as long as a new one."""
        return replace(self, until=time.time() + LEASE_SECONDS)

    @property
    def is_old(self) -> bool:
        """Whether its owner should renew it."""
        return time.time() > self.until - LEASE_SECONDS + RENEW_SECONDS

    @property
    def has_ended(self) -> bool:
        """Whether its process is gone, as far as can be seen from here, or has not renewed it in time."""
        if time.time() > self.until:
            return True
        return self.host == _host() and not _lives(self.pid, self.started)


@cache
def _host() -> str:
    parts = [platform.node()]
    with suppress(OSError):  # not Linux: the name must do
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))  # containers may share all else
    return " ".join(parts)


def _lives(pid: int, started: str | None) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is somebody else's
        pass
    seen = _start_of(pid)
    return seen is None or seen == started


def _start_of(pid: int) -> str | None:
    """When the process began; empty for a zombie, None where the system does not tell: others' may be hidden."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]  # field 22 of proc(5), counted behind the name
