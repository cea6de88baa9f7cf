"""Uneven numbers of steps, through torch's Join: a rank that has no more batches goes on with empty ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook


class EmptyCalls(Joinable):
    """`with Join([module]): ...` lets ranks call the module unequally often.

    A call with gradients on is one with a backward: evaluate under `torch.no_grad()`. With DistributedDataParallel
    wrap the
    dense layers alone and name the module first: `Join([module, dense])`; a module inside of it would be waited for
    by both.
    """

    _in_join = False
    _joined = False

    def __init__(self) -> None:
        super().__init__()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank does that has no more batches while others have."""
        if self._accumulate:  # type: ignore[attr-defined]
            raise ValueError(
                "Join with accumulate=True: a rank without batches cannot know when the others call step(); use "
                "accumulate=False, or give it empty batches (B = 0)"
            )
        return _EmptyCall(self)

    @property
    def join_device(self) -> torch.device:
        device: torch.device = self._device  # type: ignore[attr-defined]
        return device

    @property
    def join_process_group(self) -> Any:
        """The given one, not the module's own: Join wants the same of all that it is given."""
        return self._ranks.given or dist.group.WORLD  # type: ignore[attr-defined]

    def notify_join(self) -> None:
        """Every call of a rank that still has batches tells the others."""
        if not self._joined and self._join_config.enable:
            Join.notify_join_context(self)


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
            with torch.set_grad_enabled(done.wants("trains")):
                results = module._lookup(done)
            if done.wants("trains"):
                sum(result.sum() for result in results).backward()
        finally:
            module._joined = False
