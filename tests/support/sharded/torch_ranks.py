"""The ranks of `test_torch.py`. Each function runs on every rank of a group."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.sharded.mix import PLAN, SPEC, Batch, batch_of, full_rows, joined, made, outcome, rows_of, step, unsharded
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import embforge as ef
from embforge.sharded import ColumnWise, Hierarchical, RowWise, ShardPlan

POOLED = ef.CollectionSpec(SPEC.tables, tuple(f for f in SPEC.features if f.pooling != "none"))
WIDTH = 32
DENSE = 3
"""Dense numbers of a sample, in addition to its bags."""


class Model(nn.Module):
    """A small recommender: dense layers below and above, tables between them."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.below = nn.Linear(DENSE, 4)
        self.tables = tables
        self.above = nn.Sequential(nn.Linear(4 + WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense: Tensor, *batch: Tensor) -> Tensor:
        found: Tensor = self.above(torch.cat([self.below(dense), self.tables(*batch)], dim=1))
        return found


def samples_of(seed: int, size: int) -> tuple[Tensor, Tensor, Batch]:
    """Draws dense numbers, targets and bags."""
    generator = torch.Generator().manual_seed(seed)
    dense, targets = torch.randn(size, DENSE, generator=generator), torch.rand(size, 1, generator=generator)
    return dense, targets, batch_of(seed, size, POOLED)


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor, Batch]], parameters: Any = None) -> list[float]:
    """Makes steps of plain SGD and returns the losses."""
    optimizer = torch.optim.SGD(model.parameters() if parameters is None else parameters, lr=0.05)
    losses = []
    for dense, targets, batch in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(dense, *batch), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


STEPS, SIZE = 4, 3


def batches_by_rank(size: int) -> list[list[tuple[Tensor, Tensor, Batch]]]:
    """The batches of each rank."""
    return [[samples_of(100 * rank + n, SIZE) for n in range(STEPS)] for rank in range(size)]


def alone(size: int) -> Model:
    """The same model, trained by one process on the batches of all ranks put together."""
    model = Model(unsharded(POOLED))
    whole = []
    for of_step in zip(*batches_by_rank(size), strict=True):
        dense, targets, batches = zip(*of_step, strict=True)
        whole.append((torch.cat(dense), torch.cat(targets), joined(batches, POOLED)))
    train(model, whole)
    return model


def assert_alike(model: Any, expected: Model) -> None:
    for name, rows in full_rows(model.tables).items():
        torch.testing.assert_close(rows, expected.tables.weight(name), rtol=1e-5, atol=1e-6)  # type: ignore[operator]
    for layer in ("below", "above"):
        for mine, theirs in zip(getattr(model, layer).parameters(), getattr(expected, layer).parameters(), strict=True):
            mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def no_tables_inside(model: nn.Module, tables: nn.Module) -> bool:
    """Whether torch finds no parameter or buffer of the tables that it could broadcast, average or split."""
    nothing = not [*tables.parameters(), *tables.buffers(), *tables.children()]
    return nothing and all("tables" not in name for name, _ in [*model.named_parameters(), *model.named_buffers()])


def inside_ddp(rank: int, size: int) -> tuple[bool, bool]:
    """Shards of ranks differ, also in shape (9 rows on 2 ranks); DDP's broadcast at the start must leave them alone."""
    tables = made(POOLED, average_gradients=True)
    model = Model(tables)
    if rank:
        for parameter in model.parameters():  # DDP must make these equal on all ranks
            nn.init.zeros_(parameter)
    ddp = DistributedDataParallel(model)
    untouched = all(torch.equal(rows, rows_of(POOLED)[name]) for name, rows in full_rows(tables).items())
    train(ddp, batches_by_rank(size)[rank])
    assert_alike(model, alone(size))
    copies: list[Any] = [None] * size
    dist.all_gather_object(copies, tables.weight("copied").clone())
    assert all(torch.equal(copies[0], other) for other in copies)
    return untouched, no_tables_inside(model, tables)


def unsharded_inside(rank: int, size: int) -> dict[str, Any]:
    """The errors of an unsharded collection that trains its rows inside of wrappers, and the uses that are allowed."""
    from torch.distributed.fsdp import fully_shard

    dense, _, batch = samples_of(rank, SIZE)
    options: dict[str, Any] = {"optimizer": ef.optim.SGD(lr=0.1), "backend": "reference"}
    found = {}
    for name, more in {"eager": {}, "accumulate": {"accumulate": True}, "compiled": {}}.items():
        model = Model(ef.EmbeddingCollection(POOLED, **options | more))
        if name == "compiled":
            model.compile(backend="aot_eager")
        ddp = DistributedDataParallel(model)
        found[name] = outcome(lambda ddp=ddp: ddp(dense, *batch))
        with torch.no_grad():
            ddp(dense, *batch)
        model.tables.freeze()  # type: ignore[operator]
        ddp(dense, *batch).sum().backward()
    alone = [dist.new_group([other]) for other in range(size)][rank]
    model = Model(ef.EmbeddingCollection(POOLED, **options))
    DistributedDataParallel(model, process_group=alone)(dense, *batch).sum().backward()
    model = Model(ef.EmbeddingCollection(POOLED, **options))
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    found["fsdp"] = outcome(lambda: model(dense, *batch))
    return found


def inside_fsdp(rank: int, size: int, whole: bool) -> tuple[bool, int]:
    """Trains with FSDP2 on the dense layers alone, or on the whole model."""
    from torch.distributed.fsdp import fully_shard

    tables = made(POOLED, average_gradients=True)
    model = Model(tables)
    mesh = init_device_mesh("cpu", (size,))
    for layer in (model.below, model.above):
        fully_shard(layer, mesh=mesh)
    if whole:
        fully_shard(model, mesh=mesh)
    before = all(torch.equal(rows, rows_of(POOLED)[name]) for name, rows in full_rows(tables).items())
    train(model, batches_by_rank(size)[rank])
    assert_alike(model, alone(size))
    return before and no_tables_inside(model, tables), len(list(model.parameters()))


def beside_ddp_in_join(rank: int, size: int) -> bool:
    """Dense layers are in DDP, tables are not, and numbers of steps are uneven: rank r has r + 1 batches."""

    class Above(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.layers = nn.Linear(WIDTH, 1)

        def forward(self, pooled: Tensor) -> Tensor:
            found: Tensor = self.layers(pooled)
            return found

    tables, dense = made(POOLED), DistributedDataParallel(Above())
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.05)
    batches = [[batch_of(10 * r + n, 2, POOLED) for n in range(r + 1)] for r in range(size)]
    with Join([tables, dense]):
        for batch in batches[rank]:
            optimizer.zero_grad()
            dense(tables(*batch)).sum().backward()
            optimizer.step()
    whole, above = unsharded(POOLED), Above()
    optimizer = torch.optim.SGD(above.parameters(), lr=0.05)
    for n in range(size):
        optimizer.zero_grad()
        there = joined([batches[r][n] for r in range(size) if n <= r], POOLED)
        above(whole(*there)).sum().backward()
        for parameter in above.parameters():
            assert parameter.grad is not None
            parameter.grad /= size
        optimizer.step()
    if rank == size - 1:  # a rank that has joined gets the others' parameters at the end
        for mine, theirs in zip(dense.module.parameters(), above.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    for name, rows in full_rows(tables).items():
        torch.testing.assert_close(rows, whole.weight(name), rtol=1e-5, atol=1e-6)
    return True


def on_meshes(rank: int, size: int) -> dict[str, Any]:
    """Meshes as process groups: one dimension is all ranks, two are nodes and the ranks of a node, and each row of a
    mesh is a group of its own."""
    found: dict[str, Any] = {}
    plan = ShardPlan({**dict(PLAN.kinds), "rows": Hierarchical()})
    flat, square = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (2, size // 2))
    for name, mesh in (("flat", flat), ("square", square)):
        module, whole = made(SPEC, plan, process_group=mesh), unsharded()
        batches = [batch_of(20 + r, 2) for r in range(size)]
        step(module, batches[rank])
        step(whole, joined(batches))
        found[name] = module._ranks.node_size, sorted(module.counters())
        for table, rows in full_rows(module).items():
            torch.testing.assert_close(rows, whole.weight(table), rtol=1e-5, atol=1e-5)
    row = square[("mesh_dim_1",)] if square.mesh_dim_names else None
    found["deep"] = outcome(lambda: made(process_group=init_device_mesh("cpu", (1, 2, size // 2))))
    found["nonsense"] = outcome(lambda: made(process_group="all"))
    assert row is None
    return found


def in_two_groups(rank: int, size: int) -> bool:
    """Two groups of ranks, each with its own modules, made in different orders, and a module of all ranks."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    number, place = rank % 2, rank // 2
    plans = [ShardPlan({**dict(PLAN.kinds), "rows": RowWise("block")}), PLAN]
    order = plans if number == 0 else plans[::-1]
    everyone = made()
    modules = [made(SPEC, plan, process_group=groups[number]) for plan in order]
    for module in modules if number else reversed(modules):
        whole = unsharded()
        batches = [batch_of(50 + 10 * number + r, 2) for r in range(2)]
        step(module, batches[place])
        step(whole, joined(batches))
        for table, rows in full_rows(module).items():
            torch.testing.assert_close(rows, whole.weight(table), rtol=1e-5, atol=1e-5)
    batches, whole = [batch_of(90 + r, 2) for r in range(size)], unsharded()
    step(everyone, batches[rank])
    step(whole, joined(batches))
    for table, rows in full_rows(everyone).items():
        torch.testing.assert_close(rows, whole.weight(table), rtol=1e-5, atol=1e-5)
    return True


def saved_and_loaded(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Trains, saves and continues to train. A new module that loads trains to the same bits."""
    plan = ShardPlan({**dict(PLAN.kinds), "columns": ColumnWise(4)})
    optimizer = ef.optim.Adam(lr=0.05)

    def model() -> nn.Module:
        return nn.ModuleDict({"tables": made(SPEC, plan, optimizer=optimizer), "dense": nn.Linear(2, 2)})

    first, path = model(), Path(folder) / f"{rank}.pt"
    for n in range(3):
        step(first["tables"], batch_of(7 * n + rank, 3))
    torch.save(first.state_dict(), path)
    loaded = torch.load(path)
    second = model()
    second.load_state_dict(loaded)
    for n in range(3, 6):
        step(first["tables"], batch_of(7 * n + rank, 3))
        step(second["tables"], batch_of(7 * n + rank, 3))
    mine, theirs = first.state_dict(), second.state_dict()
    found: dict[str, Any] = {"shapes": {key: tuple(value.shape) for key, value in mine.items()}}
    found["contiguous"] = all(value.is_contiguous() for value in mine.values())
    found["same"] = all(torch.equal(mine[key], theirs[key]) for key in mine) and list(mine) == list(theirs)
    key = f"tables.tables.rows[{rank}::{size}].weight"
    found["moved"] = not torch.equal(mine[key], loaded[key])
    found["steps"] = int(theirs["tables.optim.step"]), int(theirs["tables.replicated.optim.step"])
    other = torch.load(Path(folder) / f"{rank}.pt")
    dist.barrier()
    rows = second["tables"].full("rows")

    def load(**changed: Any) -> None:
        second.load_state_dict({key: value for key, value in (other | changed).items() if value is not None})

    found["missing"] = outcome(lambda: load(**{key: None}))
    found["unexpected"] = outcome(lambda: load(**{"tables.tables.lines.weight": torch.zeros(1)}))
    found["shape"] = outcome(lambda: load(**{key: torch.zeros(2, 4)}))
    found["counter"] = outcome(lambda: load(**{"tables.optim.step": torch.tensor(-1)}))
    found["swapped"] = outcome(lambda: second.load_state_dict(torch.load(Path(folder) / f"{(rank + 1) % size}.pt")))
    by_rows = made(SPEC, plan, optimizer=ef.optim.RowwiseAdagrad(lr=0.1)).state_dict()
    found["row states"] = {key.rpartition(".")[2] for key in by_rows if "columns" in key}
    found["not strict"] = second.load_state_dict({}, strict=False).missing_keys
    found["kept"] = torch.equal(rows, second["tables"].full("rows"))
    return found


def moved_and_copied(rank: int, size: int) -> dict[str, Any]:
    module = made()
    before = full_rows(module)
    module.half().cpu().eval().train().to(torch.float64)
    found: dict[str, Any] = {"casts": all(torch.equal(before[name], rows) for name, rows in full_rows(module).items())}
    found["move"] = outcome(lambda: module.to("meta"))
    found["inside"] = outcome(lambda: nn.Sequential(module, nn.Linear(1, 1)).to_empty(device="meta"))
    found["deepcopy"] = outcome(lambda: copy.deepcopy(nn.Sequential(module)))
    found["copy"] = outcome(lambda: copy.copy(module))
    found["pickle"] = outcome(lambda: pickle.dumps(module))
    found["save"] = outcome(lambda: torch.save(module, io.BytesIO()))
    module.requires_grad_(False)
    step_nothing = module.forward_dict(*batch_of(rank, 2))
    found["frozen"] = not any(result.requires_grad for result in step_nothing.values())
    found["works"] = all(torch.equal(before[name], rows) for name, rows in full_rows(module).items())
    return found


def wrapped(rank: int, size: int) -> dict[str, Any]:
    """Runs all that loads torch's compiler, which takes seconds, in one group."""
    return {
        "ddp": inside_ddp(rank, size),
        "fsdp": inside_fsdp(rank, size, whole=False),
        "whole fsdp": inside_fsdp(rank, size, whole=True),
        "join": beside_ddp_in_join(rank, size),
        "compile": compiled(rank, size),
    }


def compiled(rank: int, size: int) -> tuple[bool, int]:
    """Whether a compiled model trains as the eager one does, and its number of graphs: the module's call is in none."""
    expected, model = Model(made(POOLED, average_gradients=True)), Model(made(POOLED, average_gradients=True))
    batches = batches_by_rank(size)[rank][:2]
    graphs: list[Any] = []

    def note(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    losses = train(torch.compile(model, backend=note), batches, model.parameters())
    torch.testing.assert_close(losses, train(expected, batches))
    mine, theirs = full_rows(model.tables), full_rows(expected.tables)  # type: ignore[arg-type]
    return all(torch.equal(mine[name], theirs[name]) for name in mine), len(graphs)
