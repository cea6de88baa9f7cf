"""The script that torchrun starts on every rank: trains a small collection by nodes and by rows, and compares with one
process.

Prints `ok RANK WORLD_SIZE NODE_SIZE` and the address of its host."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist

import embforge as ef
from embforge.sharded import ShardedEmbeddingCollection, ShardPlan

SPEC = ef.CollectionSpec(
    (ef.TableSpec("users", 13, 4), ef.TableSpec("items", 6, 8)),
    (ef.FeatureSpec("user", "users", "mean"), ef.FeatureSpec("item", "items"), ef.FeatureSpec("seen", "items")),
)
STEPS, SAMPLES = 3, 2


def batch_of(seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch with two ids per bag from a seed; the first samples do not depend on `size`."""
    generator = torch.Generator().manual_seed(seed)
    tables = [SPEC.table(feature.table).num_embeddings for feature in SPEC.features]
    values = [torch.randint(rows, (size, 2), generator=generator) for rows in tables]
    return torch.stack(values), torch.arange(0, 2 * 3 * size + 1, 2)


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = {t.name: torch.randn(t.num_embeddings, t.embedding_dim) for t in SPEC.tables}
    dist.broadcast_object_list(held := [rows])
    rows = held[0]
    node_size = 0
    for plan in (ShardPlan.hierarchical(SPEC), ShardPlan.row_wise(SPEC)):
        optimizer = ef.optim.Adagrad(lr=0.1)
        module = ShardedEmbeddingCollection(SPEC, plan, optimizer=optimizer, backend="reference")
        whole = ef.EmbeddingCollection(SPEC, optimizer=optimizer, backend="reference")
        module.load_full(rows)
        for name, given in rows.items():
            whole.weight(name).copy_(given)
        for step in range(STEPS):
            values, _ = batch_of(step, SAMPLES * size)
            mine = values[:, SAMPLES * rank : SAMPLES * (rank + 1)].reshape(-1)
            result = module(mine, torch.arange(0, 2 * 3 * SAMPLES + 1, 2))
            expected = whole(values.reshape(-1), torch.arange(0, 2 * 3 * SAMPLES * size + 1, 2))
            torch.testing.assert_close(result, expected[SAMPLES * rank : SAMPLES * (rank + 1)], rtol=1e-5, atol=1e-6)
            (result * result).sum().backward()
            (expected * expected).sum().backward()
        for name in rows:
            torch.testing.assert_close(module.full(name), whole.weight(name), rtol=1e-5, atol=1e-6)
        node_size = module.geometry.placement.node_size
        rails = "rail_vectors" in module.counters()
        assert rails == (plan == ShardPlan.hierarchical(SPEC)), module.counters()
    dist.barrier()
    os.write(1, f"ok {rank} {size} {node_size} {address()}\n".encode())  # at once: ranks share the pipe
    dist.destroy_process_group()


def address() -> str:
    """The address of this host in its connection to the master's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return str(probe.getsockname()[0])


if __name__ == "__main__":
    main()
