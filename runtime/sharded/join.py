"""Uneven numbers of steps, by torch's Join: a rank that has no more batches makes empty calls."""

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
    """Makes a module joinable: `with Join([module]): ...` lets ranks call it different numbers of times.

    A call with gradients turned on must have a backward, so evaluate under `torch.no_grad()`. With
    DistributedDataParallel, wrap only the dense layers in it, and put the module first: `Join([module, dense])`. A
    module inside of DDP cannot join, because Join would wait for DDP before it lets the module run.
    """

    _joined = False
    """Whether the present call is an empty one, for which this rank has no batch."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook that makes empty calls on a rank without more batches, while other ranks have some."""
        if self.trainer.accumulate:
            raise ValueError(
                "Join with accumulate=True: a rank without batches cannot know when the others call step(); use "
                "accumulate=False, or call the module with empty batches (B = 0)"
            )
        return _EmptyCall(self)

    @property
    def join_device(self) -> torch.device:
        return self._device

    @property
    def join_process_group(self) -> Any:
        """The caller's group and not the module's own: Join needs the same group for everything that joins."""
        return self._ranks.parent_group or dist.group.WORLD

    @property
    def joins(self) -> bool:
        """Whether calls are made within Join."""
        enabled: bool = self._join_config.enable
        return enabled

    @abstractmethod
    def distribute(self, values: Tensor, offsets: Tensor) -> Distributed:
        """The first half of a call, which exchanges ids."""

    @abstractmethod
    def lookup(self, distributed: Distributed) -> tuple[Tensor, ...]:
        """The second half of a call, which returns results."""

    def notify_join(self) -> None:
        """Notifies the other ranks that this rank makes a call with a batch."""
        if not self._joined and self.joins:
            Join.notify_join_context(self)

    def empty_call(self) -> Tensor | None:
        """Makes a call without samples. Returns a loss whose backward must run if the other ranks run a backward,
        otherwise None."""
        self._joined = True
        try:
            empty = torch.zeros(0, dtype=torch.int64, device=self._device)
            distributed = self.distribute(empty, torch.zeros(1, dtype=torch.int64, device=self._device))
        finally:
            self._joined = False
        with torch.set_grad_enabled(distributed.wants("trains")):
            results = self.lookup(distributed)
            return torch.stack([result.sum() for result in results]).sum() if distributed.wants("trains") else None


class _EmptyCall(JoinHook):
    """Makes empty calls. Backward passes run in a thread: Join calls its hooks one after the other, and the hook of
    DistributedDataParallel waits for collectives of the other ranks' backward, which may run before or after the
    collectives of the tables."""

    def __init__(self, module: EmptyCalls) -> None:
        self._module = module
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="embforge-join")
        self._backward: Future[None] | None = None

    def main_hook(self) -> None:
        """Makes one empty call, and its backward if the other ranks run one."""
        self._finish()
        loss = self._module.empty_call()
        if loss is not None:
            self._backward = self._pool.submit(loss.backward)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Runs when no rank has more batches."""
        self._finish()
        self._pool.shutdown()

    def _finish(self) -> None:
        if self._backward is not None:
            self._backward.result()
            self._backward = None
