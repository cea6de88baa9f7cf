"""Recognises what torch does to the model that contains a module with fused tables.

torch freezes, clears, averages and replicates a model by walking its parameters. The tables of a fused optimizer are
not parameters, so torch would silently skip them, and it does not notify modules. So a module checks by itself what
called it: what wraps its forward (DistributedDataParallel), what copies it (AveragedModel), and which method of the
model lists its modules (`requires_grad_`, `zero_grad`).
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import FrameType

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from embforge.torch_internals import named_members

REPLICATED = (
    "an EmbeddingCollection that trains its own rows is inside {wrapper}, which does not know these rows: every rank "
    "would update its rows from its own batches, and replicas would drift apart; use "
    "ef.sharded.ShardedEmbeddingCollection, whose tables are spread over the ranks or replicated and kept equal "
    "(ShardPlan.data_parallel), or freeze() the tables"
)
AVERAGED = (
    "AveragedModel averages parameters, and the tables of this EmbeddingCollection are not parameters, because its "
    "optimizer updates them itself: the averaged copy would keep the present rows for ever; average the other layers "
    "without the collection, or freeze() its tables first, or make it with optimizer=None, whose tables are parameters"
)

_LISTING = {
    method.__code__
    for method in (
        nn.Module.parameters,
        nn.Module.named_parameters,
        named_members,
        nn.Module.named_modules,
    )
}
"""The code of torch's methods that list the parameters of a model."""
_REQUIRES_GRAD, _ZERO_GRAD = nn.Module.requires_grad_.__code__, nn.Module.zero_grad.__code__
_AVERAGES = AveragedModel.__init__.__code__


def refuse_replicas() -> None:
    """Raises RuntimeError in the forward of a DistributedDataParallel of several ranks.

    Every lookup whose backward updates rows calls it.
    """
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is not None and wrapper.process_group.size() > 1:
        raise RuntimeError(REPLICATED.format(wrapper="DistributedDataParallel"))


def refuse_average() -> None:
    """Raises RuntimeError if AveragedModel makes the copy that is being made. Modules whose rows may change call it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _AVERAGES:
            raise RuntimeError(AVERAGED)
        frame = frame.f_back


class EnclosedModule(nn.Module, ABC):
    """A module that follows `requires_grad_` and `zero_grad` of a model that contains it, although its tables are not
    parameters, which are all that torch changes."""

    _is_fsdp_managed_module = False
    """Set by torch if `fully_shard` or FullyShardedDataParallel manages the module."""

    @property
    @abstractmethod
    def optimizer(self) -> Optimizer | None:
        """The fused optimizer that trains the module's rows, or None."""

    def refuse_fsdp(self) -> None:
        """Raises RuntimeError if FSDP manages the module on several ranks. Modules that train their own rows call
        it."""
        if self._is_fsdp_managed_module and distributed.get_world_size() > 1:
            raise RuntimeError(REPLICATED.format(wrapper="FSDP"))

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Lists modules as torch does. If `requires_grad_` or `zero_grad` of a model that contains this module calls
        it, it does the same to this module's tables first."""
        caller = _caller_of_listing()
        if caller is not None and caller.f_code is _REQUIRES_GRAD:
            self.requires_grad_(caller.f_locals["requires_grad"])
        elif caller is not None and caller.f_code is _ZERO_GRAD and self.optimizer is not None:
            self.optimizer.zero_grad()
        listed: Iterator[tuple[str, nn.Module]] = super().named_modules(memo, prefix, remove_duplicate)
        return listed


def _caller_of_listing() -> FrameType | None:
    """The frame of the function that called torch to list parameters."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code in _LISTING:
        frame = frame.f_back
    return frame
