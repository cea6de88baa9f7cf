"""What torch does to a model around a module by walking its parameters, of which fused tables are none.

None of this tells the parts of the model, and all of it would pass fused tables by without a word. So a module looks
for itself: at what stands around its forward (DistributedDataParallel), its copy (AveragedModel), and whatever lists
the modules of the model (`requires_grad_`, `zero_grad`).
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
    "an EmbeddingCollection that trains its own rows is inside of {wrapper}, which knows nothing of them: every rank "
    "would update its rows from its own batches, and replicas would drift apart; use "
    "ef.sharded.ShardedEmbeddingCollection, whose tables are spread over the ranks or replicated and kept alike "
    "(ShardPlan.data_parallel), or freeze() the tables"
)
AVERAGED = (
    "AveragedModel averages parameters, and the tables of this EmbeddingCollection are none, because its optimizer "
    "updates them itself: the averaged copy would keep the rows of now for ever; average the other layers without the "
    "collection, or freeze() its tables first, or make it with optimizer=None, whose tables are parameters"
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
"""The code by which torch lists the parameters of a model."""
_FREEZES, _FORGETS = nn.Module.requires_grad_.__code__, nn.Module.zero_grad.__code__
_AVERAGES = AveragedModel.__init__.__code__


def refuse_replicas() -> None:
    """Raises in the forward of a DistributedDataParallel of several ranks. For lookups whose backward updates rows."""
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is not None and wrapper.process_group.size() > 1:
        raise RuntimeError(REPLICATED.format(wrapper="DistributedDataParallel"))


def refuse_average() -> None:
    """Raises if AveragedModel is what makes a copy. For modules whose rows will change."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _AVERAGES:
            raise RuntimeError(AVERAGED)
        frame = frame.f_back


class Surrounded(nn.Module, ABC):
    """A module that does what is asked of the model around it, though it has no parameters by which torch would ask."""

    _is_fsdp_managed_module = False
    """Set by torch if `fully_shard` or FullyShardedDataParallel take care of the module."""

    @property
    @abstractmethod
    def optimizer(self) -> Optimizer | None:
        """The optimizer that trains the module's own rows, if one does."""

    def refuse_fsdp(self) -> None:
        """Raises if FSDP looks after the module on several ranks. For modules that train rows of their own."""
        if self._is_fsdp_managed_module and distributed.get_world_size() > 1:
            raise RuntimeError(REPLICATED.format(wrapper="FSDP"))

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As of any module. `requires_grad_` and `zero_grad` of a model around this one come here, and are obeyed."""
        asked = _caller_of_listing()
        if asked is not None and asked.f_code is _FREEZES:
            self.requires_grad_(asked.f_locals["requires_grad"])
        elif asked is not None and asked.f_code is _FORGETS and self.optimizer is not None:
            self.optimizer.zero_grad()
        listed: Iterator[tuple[str, nn.Module]] = super().named_modules(memo, prefix, remove_duplicate)
        return listed


def _caller_of_listing() -> FrameType | None:
    """Who lists parameters now."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code in _LISTING:
        frame = frame.f_back
    return frame
