"""The ranks of `test_ddp.py`. All cases run in one group, because processes take longer to start than to train."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from conformance.training import SPEC, draw
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import embforge as ef

STEPS = 3
CASES: list[tuple[Any, dict[str, Any]]] = [
    (True, {"gradient_as_bucket_view": True}),
    (False, {"gradient_as_bucket_view": True}),
    (False, {"static_graph": True}),
    (["b"], {"find_unused_parameters": True}),
]
"""Kinds of gradients, and options of DistributedDataParallel."""
UNPADDED = ef.CollectionSpec([ef.TableSpec("t", 10, 8)], [ef.FeatureSpec("f", "t", "mean")])


class Model(nn.Module):
    """Tables without a fused optimizer, and a layer above them."""

    def __init__(self, sparse: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tables = ef.EmbeddingCollection(SPEC, backend="reference", sparse=sparse)
        self.above = nn.Linear(34, 1)

    def forward(self, *batch: Tensor) -> Tensor:
        found: Tensor = self.above(self.tables(*batch))
        return found


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    found: Tensor = model(*draw(seed=10 * rank + step)).square().mean()
    return found


class Replica(NamedTuple):
    """The results of one case on one rank."""

    same: bool
    """Whether all gradients and parameters are those of one process that trains on the batches of all ranks."""
    sparse: list[bool]
    """Which tables have sparse gradients."""
    rows: list[list[float]]


def everything(rank: int, size: int) -> tuple[list[Replica], bool]:
    """The replicas of all cases, and whether FSDP2 finds the gradient of all batches."""
    return [replica(rank, size, *case) for case in CASES], sharded_by_torch(rank, size)


def optimizer_of(model: nn.Module, sparse: Any) -> torch.optim.Optimizer:
    """A torch optimizer that takes sparse or dense gradients, as the model has them."""
    if sparse is False:
        return torch.optim.Adam(model.parameters(), lr=0.05)
    return torch.optim.SGD(model.parameters(), lr=0.05)


def replica(rank: int, size: int, sparse: Any, options: dict[str, Any]) -> Replica:
    """Trains a model under DistributedDataParallel, and the same model without it on the batches of all ranks."""
    model, alone = Model(sparse), Model(sparse)
    wrapped = DistributedDataParallel(model, **options)
    same = True
    both = [(each, optimizer_of(each, sparse)) for each in (model, alone)]
    for step in range(STEPS):
        for each, _ in both:
            each.zero_grad(set_to_none=step % 2 == 0)
        loss_of(wrapped, rank, step).backward()
        for other in range(size):
            (loss_of(alone, other, step) / size).backward()
        for each, optimizer in both:
            if sparse is False:
                nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            optimizer.step()
        same = same and all(
            torch.equal(_dense(one.grad), _dense(other.grad)) and torch.equal(one, other)
            for one, other in zip(model.parameters(), alone.parameters(), strict=True)
        )
    kinds = [bool(p.grad is not None and p.grad.is_sparse) for p in model.tables.parameters()]
    return Replica(same, kinds, model.tables.weight("a").tolist())


def sharded_by_torch(rank: int, size: int) -> bool:
    """Whether FSDP2 over a table with dense gradients, whose rows have no gaps, gives the gradient of all batches."""
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        made.append(ef.EmbeddingCollection(UNPADDED, backend="reference", sparse=False))
    sharded, alone = fully_shard(made[0], mesh=init_device_mesh("cpu", (size,))), made[1]
    sharded(*draw(seed=rank, spec=UNPADDED)).square().sum().backward()
    for other in range(size):
        (alone(*draw(seed=other, spec=UNPADDED)).square().sum() / size).backward()
    (one,), (other,) = sharded.parameters(), alone.parameters()
    whole: Any = one.grad
    return torch.equal(whole.full_tensor(), other.grad)  # type: ignore[arg-type]


def _dense(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.to_dense()
