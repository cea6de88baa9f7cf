"""How the host learns what kernels found wrong with their input, without waiting: words of device memory, copied to the
host behind the kernels and looked at in a later call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from embforge.codegen.kernel import MISTAKES, STATUS_WORDS

_RECORDS = (len(MISTAKES), len(STATUS_WORDS))
_NOTHING, _TOLD = range(2)
"""The halves of a watch's memory: records of mistakes that nobody made, and those that the host looks at."""


def status_words(device: torch.device) -> Tensor:
    """Status words of a call of its own."""
    return torch.zeros(_RECORDS[0] * _RECORDS[1], dtype=torch.int64, device=device)


class _Message:
    """Words on their way from the device: a copy to pinned memory behind the current stream's work, and its event."""

    def __init__(self, words: Tensor) -> None:
        self._host = torch.empty(words.shape, dtype=words.dtype, device="cpu", pin_memory=True)
        self._host.copy_(words, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def arrived(self) -> bool:
        """Whether they are here, without waiting."""
        return bool(self._event.query())

    def words(self) -> list[int]:
        """The words, once arrived."""
        return list(self._host.tolist())


@dataclass
class Watch:
    """The status words of the calls on one device with one bounds mode, and a copy of them under way.

    Threads share it. Who holds the lock launches and sends, or receives and wipes: so no copy of words that are about
    to be wiped is sent, and no kernel is launched whose words would be wiped unread.
    """

    memory: Tensor
    lock: Lock = field(default_factory=Lock)
    _message: _Message | None = None

    @classmethod
    def on(cls, device: torch.device) -> Watch:
        """With clean words. Waits for them, because calls on other streams must find the zeros, too."""
        with torch.inference_mode(False):  # else nobody outside of it could write to them
            memory = torch.zeros((2, *_RECORDS), dtype=torch.int64, device=device)
        torch.cuda.current_stream(device).synchronize()
        return cls(memory)

    @property
    def status(self) -> Tensor:
        """What the host looks at."""
        return self.memory[_TOLD].view(-1)

    def collect(self, words: Tensor) -> None:
        """Takes over, behind the current stream's work, what a call found that has words of its own.

        Only writes: calls on other streams may do so at the same time, and one that found nothing must not wipe what
        another found. `claimed`, the first word of a record, is 0 or 1 and says into which half it goes.
        """
        records = words.view(1, *_RECORDS)
        self.memory.scatter_(0, records[:, :, :1].expand_as(records), records)

    def send(self) -> None:
        """Starts a copy behind the current stream's work, unless one is under way: else a busy GPU never tells."""
        if self._message is None:
            self._message = _Message(self.status)

    def received(self) -> list[int] | None:
        """The words of a copy, if one has arrived."""
        if self._message is None or not self._message.arrived():
            return None
        words, self._message = self._message.words(), None
        return words

    def wipe(self) -> None:
        """A clean slate for the next call. Waits for the device, the current one: no kernel may write to it now."""
        torch.cuda.synchronize(self.memory.device)
        self.status.zero_()
        torch.cuda.current_stream(self.memory.device).synchronize()
        self._message = None  # old news
