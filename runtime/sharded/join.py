"""Uneven numbers of steps, through torch's Join: a rank that has no more batches goes on with empty ones."""

from __future__ import annotations

from abc import abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from embforge.sharded.stages.data_distributor import Distributed
from embforge.sharded.training import ShardedTraining


class EmptyCalls(Joinable, ShardedTraining):
    """`with Join([module]): ...` lets ranks call the module unequally often.

    A call with gradients on is one with a backward: evaluate under `torch.no_grad()`. With DistributedDataParallel wrap
    the dense layers alone and name the module first: `Join([module, dense])`. Inside of DDP it cannot join: Join would
    wait for DDP's turn before the module has its own.
    """

    _joined = False
    """Whether a call runs that this rank has no batch for."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank does that has no more batches while others have."""
        if self.trainer.accumulate:
            raise ValueError(
                "Join with accumulate=True: a rank without batches cannot know when the others call step(); use "
                "accumulate=False, or give it empty batches (B = 0)"
            )
        return _EmptyCall(self)

    @property
    def join_device(self) -> torch.device:
        return self._device

    @property
    def join_process_group(self) -> Any:
        """The given one, not the module's own: Join wants the same of all that it is given."""
        return self._ranks.given or dist.group.WORLD

    @property
    def joins(self) -> bool:
        """Whether the module is called inside of Join."""
        enabled: bool = self._join_config.enable
        return enabled

    @abstractmethod
    def distribute(self, values: Tensor, offsets: Tensor) -> Distributed:
        """The first half of a call."""

    @abstractmethod
    def lookup(self, done: Distributed) -> tuple[Tensor, ...]:
        """The second half."""

    def notify_join(self) -> None:
        """Every call of a rank that still has batches tells the others."""
        if not self._joined and self.joins:
            Join.notify_join_context(self)

    def empty_call(self) -> Tensor | None:
        """A call with no samples. Returns a loss whose backward must run, if the other ranks will have one."""
        self._joined = True
        try:
            empty = torch.zeros(0, dtype=torch.int64, device=self._device)
            done = self.distribute(empty, torch.zeros(1, dtype=torch.int64, device=self._device))
        finally:
            self._joined = False
        with torch.set_grad_enabled(done.wants("trains")):
            results = self.lookup(done)
            return torch.stack([result.sum() for result in results]).sum() if done.wants("trains") else None


class _EmptyCall(JoinHook):
    """Backward passes run in a thread: Join gives its hooks one turn each, and DistributedDataParallel's hook waits in
    its own for collectives of the others' backward, which may come before or behind those of the tables."""

    def __init__(self, module: EmptyCalls) -> None:
        self._module = module
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="embforge-join")
        self._backward: Future[None] | None = None

    def main_hook(self) -> None:
        """One call with no samples; its backward too, if the others will have one."""
        self._finish()
        loss = self._module.empty_call()
        if loss is not None:
            self._backward = self._pool.submit(loss.backward)

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks are done."""
        self._finish()
        self._pool.shutdown()

    def _finish(self) -> None:
        if self._backward is not None:
            self._backward.result()
            self._backward = None
