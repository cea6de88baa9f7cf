"""TorchRec's ShardedEmbeddingBagCollection as a contender, called in the fastest way that we know.

We use the sharder itself, without DistributedModelParallel around it (no difference was measured), FBGEMM's fused CPU
kernel with exact SGD, and no check of ids. Gradients are added over ranks and not divided by their number, as our
module does it. The result has TorchRec's own column order and is never regrouped. Inputs are made before the clock
starts, with both lengths and offsets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.sharded_cases import LEARNING_RATE, Case, Inputs

COLLECTIVES = ("asynchronous", "synchronous")
"""TorchRec's two ways to call collectives. For each case the faster one is timed."""


@dataclass(frozen=True, eq=False)
class TorchRec:
    """A sharded collection and how to call it."""

    case: Case
    module: Any
    collectives: str
    name: str = "torchrec"

    @property
    def note(self) -> str:
        return f"{self.collectives} collectives"

    def prepare(self, inputs: Inputs) -> tuple[Any, Tensor]:
        """The gradient, and a new KeyedJaggedTensor for each step, because it caches what it derives from its ids."""
        from torchrec import KeyedJaggedTensor

        names = [feature.name for feature in self.case.spec.features]
        features = KeyedJaggedTensor(names, inputs.values, lengths=inputs.lengths, offsets=inputs.offsets)
        return features, self._own_order(inputs)

    def step(self, prepared: tuple[Any, Tensor]) -> None:
        """Forward, backward and update."""
        features, gradient = prepared
        self._forward(features).values().backward(gradient)

    def checked_step(self, inputs: Inputs) -> Tensor:
        """A step that returns its result, with columns in the spec's order."""
        features, gradient = self.prepare(inputs)
        result = self._forward(features)
        values = result.values()
        values.backward(gradient)
        by_name = result.to_dict()
        return torch.cat([by_name[feature.name].detach() for feature in self.case.spec.features], dim=1)

    def shards(self, index: int) -> Iterator[tuple[int, Tensor]]:
        """The parts of a table that this rank has: the number of the first row, and the rows."""
        name = f"embedding_bags.{self.case.spec.tables[index].name}.weight"
        for shard in self.module.state_dict()[name].local_shards():
            yield shard.metadata.shard_offsets[0], shard.tensor

    @torch.no_grad()
    def load(self) -> None:
        """Fills all tables with the case's rows."""
        for index in range(len(self.case.spec.tables)):
            whole = self.case.full_table(index)
            for first, rows in self.shards(index):
                rows.copy_(whole[first : first + rows.shape[0]])

    def _forward(self, features: Any) -> Any:
        from torchrec.distributed.comm_ops import set_use_sync_collectives

        set_use_sync_collectives(self.collectives == "synchronous")
        return self.module(features)

    def _own_order(self, inputs: Inputs) -> Tensor:
        """The gradient with its columns in TorchRec's order."""
        columns = dict(zip((f.name for f in self.case.spec.features), self.case.columns(), strict=True))
        names = self.module._embedding_names  # noqa: SLF001 - no public attribute has the order
        return torch.cat([inputs.gradient[:, columns[name]] for name in names], dim=1)


def torchrec_contenders(case: Case, plan: str) -> list[TorchRec]:
    """One contender for each way of calling collectives; they share one module."""
    module = _sharded(case, plan, dist.get_world_size())
    return [TorchRec(case, module, collectives) for collectives in COLLECTIVES]


def _sharded(case: Case, plan: str, world_size: int) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
    from torchrec.distributed.comm_ops import set_gradient_division
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingEnv

    set_gradient_division(False)
    configs = [
        EmbeddingBagConfig(
            name=table.name,
            embedding_dim=table.embedding_dim,
            num_embeddings=table.num_embeddings,
            feature_names=[feature.name],
            pooling=PoolingType.SUM,
        )
        for table, feature in zip(case.spec.tables, case.spec.features, strict=True)
    ]
    whole = EmbeddingBagCollection(configs, device=torch.device("meta"))
    sharder = EmbeddingBagCollectionSharder(
        fused_params={
            "optimizer": EmbOptimType.EXACT_SGD,
            "learning_rate": LEARNING_RATE,
            "bounds_check_mode": BoundsCheckMode.NONE,
        }
    )
    kernel = EmbeddingComputeKernel.FUSED.value
    ranks = case.ranks_of_tables(world_size)
    parameters = {
        table.name: row_wise(compute_kernel=kernel)
        if plan == "row_wise"
        else table_wise(rank=rank, compute_kernel=kernel)
        for table, rank in zip(case.spec.tables, ranks, strict=True)
    }
    sharding_plan = construct_module_sharding_plan(
        whole, parameters, sharder=sharder, local_size=world_size, world_size=world_size, device_type="cpu"
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return sharder.shard(whole, sharding_plan, env, torch.device("cpu"))
