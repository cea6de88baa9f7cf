"""Uneven numbers of steps, through torch's Join: a rank that has no more batches goes on with empty ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from embforge.codegen.stages import FLAGS


class EmptyCalls(Joinable):
    """`with Join([module]): ...` lets ranks call the module unequally often."""

    _in_join = False
    _joined = False

    def __init__(self) -> None:
        super().__init__()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank does that has no more batches while others have."""
        return _EmptyCall(self)

    @property
    def join_device(self) -> torch.device:
        device: torch.device = self._device  # type: ignore[attr-defined]
        return device

    @property
    def join_process_group(self) -> Any:
        return self._ids.group  # type: ignore[attr-defined]

    def notify_join(self) -> None:
        """Every call of a rank that still has batches tells the others."""
        if not self._joined and self._join_config.enable:
            Join.notify_join_context(self)

    def join_flag(self) -> int:
        return FLAGS["joined"] if self._joined else 0


class _EmptyCall(JoinHook):
    def __init__(self, module: Any) -> None:
        self.module = module

    def main_hook(self) -> None:
        """One call with no samples; its backward too, if the others will have one."""
        module = self.module
        module._joined = True
        try:
            device = module.join_device
            empty = torch.zeros(0, dtype=torch.int64, device=device)
            done = module.distribute(empty, torch.zeros(1, dtype=torch.int64, device=device))
            results = module._lookup(done)
            if done.wants("trains"):
                sum(result.sum() for result in results).backward()
        finally:
            module._joined = False
