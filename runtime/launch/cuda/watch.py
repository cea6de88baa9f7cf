"""How the host learns about mistakes that kernels find in their input, without waiting: kernels write words of device
memory, which are copied to the host after the kernels and read in a later call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from embforge.codegen.kernel import MISTAKES, STATUS_WORDS

_RECORDS = (len(MISTAKES), len(STATUS_WORDS))
_UNCLAIMED, _CLAIMED = range(2)
"""The halves of a watch's memory: one takes the records of calls that found no mistake and is never read, the other
the records of mistakes, which the host reads."""


def status_words(device: torch.device) -> Tensor:
    """New status words for one call."""
    return torch.zeros(_RECORDS[0] * _RECORDS[1], dtype=torch.int64, device=device)


class _Message:
    """A copy of words from the device to pinned host memory, which runs after the current stream's work."""

    def __init__(self, words: Tensor) -> None:
        self._host = torch.empty(words.shape, dtype=words.dtype, device="cpu", pin_memory=True)
        self._host.copy_(words, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def arrived(self) -> bool:
        """Whether the copy is complete. Does not wait."""
        return bool(self._event.query())

    def words(self) -> list[int]:
        """The copied words. Call it only after `arrived` was true."""
        return list(self._host.tolist())


@dataclass
class Watch:
    """The status words of the calls on one device with one mode of `bounds_check`, and a copy of them to the host.

    Threads share it. A thread holds the lock while it launches and sends, or receives and wipes: so no words are sent
    that are about to be wiped, and no kernel is launched whose words would be wiped before they are read.
    """

    memory: Tensor
    lock: Lock = field(default_factory=Lock)
    _message: _Message | None = None

    @classmethod
    def on(cls, device: torch.device) -> Watch:
        """Makes a watch whose words are zeros. Waits for the device, because calls on other streams must find the zeros
        too."""
        with torch.inference_mode(False):  # a tensor made in inference mode cannot be written outside of it
            memory = torch.zeros((2, *_RECORDS), dtype=torch.int64, device=device)
        torch.cuda.current_stream(device).synchronize()
        return cls(memory)

    @property
    def status(self) -> Tensor:
        """The words that the host reads."""
        return self.memory[_CLAIMED].view(-1)

    def collect(self, words: Tensor) -> None:
        """Copies the mistakes of a call that has its own status words to the words that the host reads, after the
        current stream's work.

        Calls on other streams may do so at the same time, so a call that found no mistake must not overwrite the
        mistake of another: its records go to the other half. The first word of a record, `claimed`, is 0 or 1 and
        selects the half.
        """
        records = words.view(1, *_RECORDS)
        self.memory.scatter_(0, records[:, :, :1].expand_as(records), records)

    def send(self) -> None:
        """Starts a copy to the host after the current stream's work. Does nothing if a copy has been started already:
        on a busy GPU a later copy would take its place again and again, and none would arrive."""
        if self._message is None:
            self._message = _Message(self.status)

    def received(self) -> list[int] | None:
        """The words of a copy that has arrived, otherwise None."""
        if self._message is None or not self._message.arrived():
            return None
        words, self._message = self._message.words(), None
        return words

    def wipe(self) -> None:
        """Sets the words to zeros for the next call. Waits for the device, which must be the current one, so that no
        kernel writes to the words now."""
        torch.cuda.synchronize(self.memory.device)
        self.status.zero_()
        torch.cuda.current_stream(self.memory.device).synchronize()
        self._message = None  # what was sent before is out of date
