"""A helper process, for work that may crash, hang or be paused. It never outlives the process that started it.

The two processes communicate over a socket pair. The helper leads a process group of its own, so that Ctrl-C in a
terminal does not reach it, and so that it can be paused or killed together with the compilers that it runs. Its stdout
and stderr go to a file, of which errors show the end.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from socket import socketpair
from typing import Any

from embforge.codegen.errors import EmbforgeError

LAST_LINES = 6
"""The most characters of a dead helper's output that errors show."""
LAST_BYTES = 4096
END_SECONDS = 5.0
"""Seconds to wait for a helper to end after its connection broke."""
PR_SET_PDEATHSIG = 1

ENTER = "from embforge.tuner.judge.process import enter; enter({module!r}, {handle})"


class HelperDiedError(EmbforgeError, RuntimeError):
    """A helper process has ended. `how` is its signal or exit code; the message has the last lines of its output."""

    def __init__(self, how: str, last_lines: str) -> None:
        super().__init__(f"{how}; it wrote:\n{last_lines}" if last_lines else how)
        self.how = how


class Helper:
    """A process that runs `serve(connection)` of a module, and dies with the process that starts it."""

    def __init__(self, module: str, *, environment: Mapping[str, str] | None = None) -> None:
        ours, theirs = socketpair()
        self._written = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `kill`
        command = ENTER.format(module=module, handle=theirs.fileno())
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=self._written,
                stderr=self._written,
                pass_fds=[theirs.fileno()],
                env=os.environ | dict(environment or {}),
                process_group=0,
            )
        self.connection = Connection(ours.detach())
        self._death: HelperDiedError | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Any) -> None:
        """Sends the helper a message; `HelperDiedError` if the helper has ended."""
        self._raise_if_dead()
        try:
            self.connection.send(message)
        except OSError:
            raise self._gone() from None

    def receive(self, timeout: float | None = None) -> Any:
        """The helper's next message; `TimeoutError` if none comes in time, `HelperDiedError` if the helper ended."""
        self._raise_if_dead()
        try:
            if self.connection.poll(timeout):
                return self.connection.recv()
        except (EOFError, OSError):  # the helper may die in the middle of a message
            raise self._gone() from None
        raise TimeoutError(f"no message within {timeout:g} s")

    def pause(self) -> None:
        """Pauses the helper and all its processes until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets the helper continue."""
        self._signal(signal.SIGCONT)

    def interrupt(self) -> None:
        """Kills the helper and all its processes. For threads other than the one that exchanges messages with it."""
        self._signal(signal.SIGKILL)

    def kill(self) -> None:
        """Ends the helper and all its processes immediately. May be called again."""
        if self._death is None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._bury()

    def _gone(self) -> HelperDiedError:
        """The error that says how the helper died, after its connection broke."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.kill()
        assert self._death is not None
        return self._death

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise self._death

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # no process of the group is left
            os.killpg(self._process.pid, number)

    def _bury(self) -> None:
        status = self._process.returncode
        how = f"exit code {status}" if status >= 0 else signal.Signals(-status).name
        self._death = HelperDiedError(how, _tail(self._written.fileno()))
        self._written.close()
        self.connection.close()


def enter(module: str, handle: int) -> None:
    """Runs in the helper: calls the module's `serve` until it returns."""
    connection = Connection(handle)
    _die_with_parent(handle)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a candidate's crash is expected, so its core dump is of no use
    importlib.import_module(module).serve(connection)


def _die_with_parent(handle: int) -> None:
    """Kills this process group when the other end is closed, even while the main thread is in a kernel that hangs.

    A group that is paused at that moment cannot run this, so on Linux the parent's death is signalled by SIGCONT, which
    wakes this process only. The same signal helps if another process still has a copy of the parent's end.
    """
    parent, watched = os.getppid(), os.dup(handle)  # not closed before the process ends, even if `handle` is

    def kill_group() -> None:
        os.killpg(0, signal.SIGKILL)

    def woken(*_: object) -> None:
        if os.getppid() != parent:  # otherwise it is a pause that ends
            kill_group()

    def watch() -> None:
        hung_up = select.poll()
        hung_up.register(watched, 0)  # reports hang-ups only
        hung_up.poll()
        kill_group()

    if sys.platform == "linux":
        signal.signal(signal.SIGCONT, woken)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    threading.Thread(target=watch, daemon=True).start()


def _tail(file: int) -> str:
    size = os.fstat(file).st_size
    text = os.pread(file, LAST_BYTES, max(0, size - LAST_BYTES)).decode(errors="replace")
    return "\n".join(text.splitlines()[-LAST_LINES:])
