"""The ranks of tests/runtime/sharded/test_corners.py: each function returns what its test makes assertions about."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from weakref import ref

import torch
from support.sharded.ranks import GROUP_TIMEOUT
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import embforge as ef
from embforge.sharded import (
    ColumnWise,
    DataParallel,
    DistributedSparseEmbedding,
    Formats,
    Hierarchical,
    PrefetchedBatches,
    RowWise,
    ShardedEmbeddingCollection,
    ShardPlan,
    TableWise,
)

OPTIONS: dict[str, Any] = {"backend": "reference", "timeout": GROUP_TIMEOUT}
ROWS, DIM = 4, 4


def spec_of(pooling: Any = "sum", weighted: bool = False) -> ef.CollectionSpec:
    table = ef.TableSpec("a", ROWS, DIM)
    return ef.CollectionSpec((table,), (ef.FeatureSpec("f", "a", pooling, weighted),))


def two_tables() -> ef.CollectionSpec:
    tables = (ef.TableSpec("a", ROWS, DIM), ef.TableSpec("b", ROWS, DIM))
    return ef.CollectionSpec(tables, (ef.FeatureSpec("fa", "a"), ef.FeatureSpec("fb", "b")))


def made(spec: ef.CollectionSpec, kinds: dict[str, Any], optimizer: Any = None, **options: Any) -> Any:
    """A sharded collection whose rows are all ones."""
    optimizer = optimizer or ef.optim.SGD(lr=1.0)
    module = ShardedEmbeddingCollection(spec, ShardPlan(kinds), optimizer=optimizer, **(OPTIONS | options))
    module.load_full({table.name: torch.ones(table.num_embeddings, table.embedding_dim) for table in spec.tables})
    return module


def offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def row_rules_on_pieces_of_one_rank(rank: int, size: int) -> dict[str, float]:
    """Largest difference from the unsharded collection, by optimizer and plan."""
    found = {}
    for optimizer in (ef.optim.RowwiseAdagrad(lr=0.1), ef.optim.LAMB(lr=0.1), ef.optim.SGD(lr=0.1, max_row_norm=0.1)):
        for kind in (ColumnWise(2), ColumnWise(2, (size - 1,)), ColumnWise(4)):
            spec = spec_of()
            module = made(spec, {"a": kind}, optimizer)
            alone = ef.EmbeddingCollection(spec, optimizer=optimizer, backend="reference")
            alone.weight("a").fill_(1.0)
            factors = torch.arange(1.0, 1 + DIM)
            for _ in range(3):
                (module(torch.tensor([0, 1]), offsets(1, 1)) * factors).pow(2).sum().backward()
                ids = torch.tensor([0, 1] * size)
                (alone(ids, offsets(*[1] * 2 * size)) * factors).pow(2).sum().backward()
            apart = (module.full("a") - alone.weight("a")).abs().max()
            found[f"{type(optimizer).__name__} {kind}"] = float(apart)
    return found


def hierarchical_gradients_in_two_bytes(rank: int, size: int, backend: str) -> list[Any]:
    found = []
    for format_ in (None, "bf16", "fp16"):
        formats = Formats(backward=format_)  # type: ignore[arg-type]
        module = made(spec_of(), {"a": Hierarchical()}, node_size=1, formats=formats, backend=backend)
        module(torch.tensor([0, 1]), offsets(1, 1)).sum().backward()
        found.append(module.full("a").tolist())
    return found


def rows_after_an_odd_number_of_columns(rank: int, size: int, backend: str) -> tuple[bool, float]:
    tables = (ef.TableSpec("a", 4, 5), ef.TableSpec("b", 6, 4))
    spec = ef.CollectionSpec(tables, (ef.FeatureSpec("fa", "a"), ef.FeatureSpec("fb", "b", "none")))
    module = made(spec, {"a": TableWise(1), "b": TableWise(1)}, backend=backend)
    rows = torch.arange(24.0).view(6, 4)
    module.load_full({"b": rows})
    found = module.forward_dict(torch.tensor([0, 1, 2, 3, 5]), offsets(1, 1, 1, 1, 1, 0))
    (found["fa"].sum() + found["fb"].sum()).backward()
    return torch.equal(found["fb"], rows[[3, 5]]), float(module.full("b")[3, 0])


def padding_of_a_fused_table(rank: int, size: int) -> list[float]:
    tables = (ef.TableSpec("a", ROWS, DIM), ef.TableSpec("b", ROWS, DIM))
    features = (ef.FeatureSpec("fa", "a"), ef.FeatureSpec("fb", "b", padding_idx=1))
    module = DistributedSparseEmbedding(ef.CollectionSpec(tables, features), optimizer=ef.optim.SGD(lr=1.0), **OPTIONS)
    numbered = torch.arange(1.0, 5.0)[:, None].expand(ROWS, DIM).contiguous()
    module.load_full({"a": torch.zeros(ROWS, DIM), "b": numbered})
    found: list[float] = module(torch.tensor([0, 1, 2]), offsets(1, 2))[0, DIM:].tolist()
    return found


def gradients_that_overflow_on_the_wire(rank: int, size: int) -> tuple[bool, float]:
    module = made(two_tables(), {"a": TableWise(0), "b": TableWise(1)}, formats=Formats(backward="fp16"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    module.use_grad_scaler(scaler)
    out = module(torch.tensor([0, 1]), offsets(1, 1))
    scaler.scale(out[:, :DIM].sum() + 0.01 * out[:, DIM:].sum()).backward()
    scaler.step(module.optimizer)
    scaler.update()
    untouched = all(bool((module.full(table) == 1).all()) for table in ("a", "b"))
    return untouched, scaler.get_scale()


def a_spoilt_pass_among_accumulated_ones(rank: int, size: int) -> list[tuple[float, float]]:
    found = []
    for kind in (RowWise(), DataParallel()):
        module = made(spec_of(), {"a": kind}, accumulate=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        module.use_grad_scaler(scaler)
        batch = torch.tensor([0]), offsets(1)
        scaler.scale(module(*batch).sum()).backward()
        scaler.scale((module(*batch) * float("inf")).sum()).backward()
        scaler.step(module.optimizer)
        scaler.update()
        found.append((float(module.full("a")[0, 0]), scaler.get_scale()))
    return found


def gradients_of_weights_are_not_averaged(rank: int, size: int) -> list[list[float]]:
    found = []
    for kind in (RowWise(), TableWise(0), DataParallel()):
        for pooling in ("sum", "none"):
            module = made(spec_of(pooling, weighted=True), {"a": kind}, average_gradients=True)
            weights = torch.ones(2, requires_grad=True)
            module.forward_dict(torch.tensor([0, 1]), offsets(2), weights)["f"].sum().backward()
            assert weights.grad is not None
            found.append(weights.grad.tolist())
    return found


def weights_after_rows_have_changed(rank: int, size: int) -> str:
    module = made(spec_of(weighted=True), {"a": RowWise()})
    batch = torch.tensor([0, 1]), offsets(2)
    first, second = (module(*batch, torch.ones(2, requires_grad=True)) for _ in range(2))
    first.sum().backward()
    try:
        second.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def queries_for_gradients_of_weights(rank: int, size: int) -> list[bool]:
    """Whether passes that ask only for gradients of weights leave rows as they were, and whether other passes change
    them."""
    found = []
    for accumulate in (False, True):
        module = made(spec_of(weighted=True), {"a": RowWise()}, accumulate=accumulate)
        batch, before = (torch.tensor([0, 1]), offsets(2)), module.full("a")
        weights = torch.ones(2, requires_grad=True)
        torch.autograd.grad(module(*batch, weights).sum(), [weights])
        module(*batch, weights).sum().backward(inputs=[weights])
        module.step()
        found.append(torch.equal(module.full("a"), before))
        module(*batch, weights).sum().backward()
        module.step()
        found.append(not torch.equal(module.full("a"), before))
    return found


def losses_scaled_by_an_unknown_scaler(rank: int, size: int) -> str:
    """The error on each rank; on rank 0 the loss is zero, so that it sees the error only through the others."""
    module = made(spec_of(), {"a": RowWise()})
    loss = module(torch.tensor([0, 1]), offsets(2)).sum() * float(rank)
    try:
        torch.amp.GradScaler("cpu").scale(loss).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def a_batch_that_changes_before_the_backward(rank: int, size: int) -> list[str]:
    """The errors for changed ids and for changed offsets."""
    found = []
    for changed in (0, 1):
        module = made(spec_of("none"), {"a": RowWise()})
        batch = torch.tensor([0, 1]), offsets(1, 1)
        rows = module.forward_dict(*batch)["f"]
        batch[changed][1] = 0
        try:
            rows.sum().backward()
        except RuntimeError as error:  # on every rank, so that none waits
            found.append(str(error))
    return found


def padding_that_is_no_row(rank: int, size: int) -> list[str]:
    """Plans whose results or rows differ from the unsharded collection's if padding is -1 or past the table's end."""
    features = [
        ef.FeatureSpec(pooling, "a", pooling, pooling == "mean", 3, padding)  # type: ignore[arg-type]
        for pooling, padding in (("sum", -1), ("mean", ROWS), ("max", -1), ("none", -1), ("concat", ROWS + 5))
    ]
    spec = ef.CollectionSpec((ef.TableSpec("a", ROWS, DIM),), features)
    ids = [i for f in features for i in (1, f.padding_idx, 3, f.padding_idx, 2)]
    batch = torch.tensor(ids), offsets(*([2, 1, 2] * len(features))), torch.linspace(1, 2, len(ids))
    wrong = []
    for name, kind in (
        ("rows", RowWise()), ("columns", ColumnWise(2)), ("table", TableWise(size - 1)), ("replicas", DataParallel()),
    ):  # fmt: skip
        alone = ef.EmbeddingCollection(spec, backend="reference", optimizer=ef.optim.SGD(lr=1.0))
        with torch.no_grad():
            alone.weight("a").fill_(1)
        modules = made(spec, {"a": kind}), alone
        results = [module.forward_dict(*batch) for module in modules]
        if any(not torch.equal(results[0][f.name], results[1][f.name]) for f in features):
            wrong.append(f"{name}: results")
        for module, result in zip(modules, results, strict=True):
            for _ in range(1 if module is modules[0] else size):  # every rank has the same samples
                sum(r.sum() for r in result.values()).backward(retain_graph=True)  # type: ignore[union-attr]
        if not torch.allclose(modules[0].full("a"), alone.weight("a")):
            wrong.append(f"{name}: rows")
    return wrong


def recomputed_forwards(rank: int, size: int) -> str:
    module = made(spec_of(), {"a": RowWise()})
    batch = torch.tensor([0]), offsets(1)
    parts = [checkpoint(lambda: module(*batch).pow(2), use_reentrant=False) for _ in range(2)]
    try:
        (parts[0].sum() + parts[1].sum()).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def calls_between_prefetched_batches(rank: int, size: int) -> int:
    module = made(spec_of(), {"a": RowWise()})
    right = 0

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(40):
            yield torch.tensor([number % ROWS] * (number % 3 + 1)), offsets(number % 3 + 1)

    with torch.no_grad():
        for (ids, _), done in PrefetchedBatches(module, batches()):
            between = module(torch.tensor([1]), offsets(1))
            right += bool((module(done) == len(ids)).all()) and bool((between == 1).all())
    return right


def a_batch_of_another_module(rank: int, size: int) -> str:
    one, twin = (made(spec_of(), {"a": RowWise()}) for _ in range(2))
    with torch.no_grad():
        done = one.distribute(torch.tensor([0]), offsets(1))
        try:
            twin(done)
        except ValueError as error:
            return f"{error}; {float(one(done).sum())}"
    return ""


def other_default_dtypes(rank: int, size: int) -> list[str]:
    """Names of the plans whose training under another default dtype gives other bits than under float32."""
    plans = {"replicas": DataParallel(), "rows": RowWise(), "columns": ColumnWise(2)}
    usual = {name: _trained_under(torch.float32, kind) for name, kind in plans.items()}
    return [
        f"{name} under {dtype}"
        for dtype in (torch.bfloat16, torch.float64)
        for name, kind in plans.items()
        if not all(map(torch.equal, usual[name], _trained_under(dtype, kind)))
    ]


def _trained_under(dtype: torch.dtype, kind: Any) -> list[Tensor]:
    """Rows, and the gradient of per-sample weights, after two steps of a rule that reduces rows."""
    factors = torch.arange(1, 1 + DIM, dtype=torch.float32)
    weights = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float32, requires_grad=True)
    torch.set_default_dtype(dtype)
    try:
        module = made(spec_of("mean", weighted=True), {"a": kind}, ef.optim.RowwiseAdagrad(lr=0.1))
        for _ in range(2):
            (module(torch.tensor([0, 1, 0]), offsets(2, 1), weights) * factors).pow(2).sum().backward()
        assert weights.grad is not None
        return [module.full("a"), weights.grad]
    finally:
        torch.set_default_dtype(torch.float32)


def steps_without_gradients(rank: int, size: int) -> list[tuple[float, int]]:
    found = []
    for kind in (DataParallel(), RowWise()):
        module = made(spec_of(), {"a": kind}, ef.optim.Adam(lr=0.1), accumulate=True)
        module.step()
        module.step()
        module(torch.tensor([0]), offsets(1)).pow(2).sum().backward()
        module.step()
        steps = [int(number) for key, number in module.state_dict().items() if key.endswith("optim.step")]
        found.append((float(module.full("a")[0, 0]), steps[0]))
    return found


def all_tables_frozen(rank: int, size: int) -> tuple[list[int], bool]:
    module = made(spec_of(weighted=True), {"a": TableWise(0)}, ef.optim.Adam(lr=0.1))
    module.freeze()
    weights = torch.ones(1, requires_grad=True)
    module(torch.tensor([0]), offsets(1), weights).sum().backward()
    steps = [int(number) for key, number in module.state_dict().items() if key.endswith("optim.step")]
    return steps, bool(module(torch.tensor([0]), offsets(1)).requires_grad)


def no_memory_on_one_rank(rank: int, size: int) -> str:
    module = made(spec_of(), {"a": RowWise()})
    if rank == 0:

        def fail(*_: Any) -> None:
            raise MemoryError("no memory")

        object.__setattr__(module.distributor, "_count", fail)
    try:
        with torch.no_grad():
            module(torch.tensor([0]), offsets(1))
    except Exception as error:
        return type(error).__name__
    return ""


def timeouts(rank: int, size: int) -> bool:
    """Whether a module's groups have the timeout of the group that it was passed."""
    module = ShardedEmbeddingCollection(
        spec_of(), ShardPlan({"a": RowWise()}), optimizer=ef.optim.SGD(lr=1.0), backend="reference"
    )
    module.close()
    return bool(module._ranks.timeout == GROUP_TIMEOUT)


def a_dropped_module(rank: int, size: int) -> list[bool]:
    """Whether modules and their rows are freed at once, by plan."""
    found = []
    for kind in (RowWise(), DataParallel(), ColumnWise(2)):
        module = made(spec_of(), {"a": kind}, ef.optim.RowwiseAdagrad(lr=0.1))
        module(torch.tensor([0, 1]), offsets(1, 1)).sum().backward()
        module.optimizer.step()
        seen, rows = ref(module), [ref(shard) for part in module._own_collections() for shard in part._blocks()]
        gc.disable()
        try:
            del module
            found.append(seen() is None and bool(rows) and not any(row() is not None for row in rows))
        finally:
            gc.enable()
    return found


def optimizers_by_table(rank: int, size: int) -> dict[str, Any]:
    """Optimizers by table, for tables on one rank, on all ranks and replicated, and one that is never trained."""
    names = ("here", "there", "rows", "copies", "fixed")
    tables = [ef.TableSpec(name, ROWS, DIM) for name in names]
    spec = ef.CollectionSpec(tables, [ef.FeatureSpec(f"of_{name}", name) for name in names])
    kinds = dict(zip(names, (TableWise(0), TableWise(1), RowWise(), DataParallel(), TableWise(1)), strict=True))
    sgd, adagrad = ef.optim.SGD(lr=1.0), ef.optim.RowwiseAdagrad(lr=1.0)
    rules = {("here", "copies"): sgd, "there": adagrad, "fixed": None, "*": ef.optim.SGD(lr=0.25)}
    module = made(spec, kinds, rules)
    groups = module.optimizer.param_groups
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        module.optimizer, [lambda step, f=f: f**step for f in (0.5, 1.0, 2.0)]
    )
    batch = torch.zeros(len(names), dtype=torch.int64), offsets(*[1] * len(names))
    module(*batch).sum().backward()
    module.optimizer.step()
    scheduler.step()
    saved = {key: value.clone() for key, value in module.state_dict().items()}
    module.freeze("rows")
    module(*batch).sum().backward()
    after = [float(module.full(name)[0, 0]) for name in names]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    module.use_grad_scaler(scaler)
    (module(*batch).sum() * float("inf")).backward()
    unchanged = after == [float(module.full(name)[0, 0]) for name in names]
    twin = made(spec, kinds, rules)
    twin.load_state_dict(saved)
    refused = []
    for attempt in (lambda: module.unfreeze("fixed"), lambda: twin.optimizer.load_state_dict({"param_groups": [{}]})):
        try:
            attempt()
        except (TypeError, ValueError) as error:
            refused.append(str(error))
    module.unfreeze()
    return {
        "rows": after,
        "groups": [(group["name"], group["tables"], group["lr"]) for group in groups],
        "states": {name: sorted(module.full_optimizer_state(name)) for name in names},
        "keys": sorted(key for key in saved if ".optim." in key and key.startswith("tables")),
        "loaded": [float(twin.full(name)[0, 0]) for name in names],
        "unchanged": unchanged,
        "refused": refused,
    }


def fused_tables_with_optimizers(rank: int, size: int) -> tuple[str, list[float]]:
    """The error for different optimizers of tables that are stacked, and rows trained by one optimizer."""
    tables = [ef.TableSpec("a", ROWS, DIM), ef.TableSpec("b", ROWS, DIM), ef.TableSpec("c", ROWS, 8)]
    spec = ef.CollectionSpec(tables, [ef.FeatureSpec(f"of_{table.name}", table.name) for table in tables])
    slow, fast = ef.optim.SGD(lr=0.5), ef.optim.SGD(lr=1.0)
    try:
        DistributedSparseEmbedding(spec, optimizer={"a": slow, "*": fast}, **OPTIONS)
        said = ""
    except ValueError as error:
        said = str(error)
    module = DistributedSparseEmbedding(spec, optimizer={("a", "b"): slow, "c": fast}, **OPTIONS)
    module.load_full({table.name: torch.zeros(ROWS, table.embedding_dim) for table in tables})
    module(torch.zeros(3, dtype=torch.int64), offsets(1, 1, 1)).sum().backward()
    return said, [float(module.full(table.name)[0, 0]) for table in tables]


def states_of_another_rule(rank: int, size: int) -> list[str]:
    """The errors if the states of a rule are loaded under another rule, for tables split by rows and by columns."""
    found = []
    for kind in (RowWise(), ColumnWise(2)):
        adam, lamb = (made(spec_of(), {"a": kind}, optimizer(lr=0.1)) for optimizer in (ef.optim.Adam, ef.optim.LAMB))
        lamb.load_state_dict(lamb.state_dict())
        state = adam.state_dict()
        adam.load_state_dict({key: tensor for key, tensor in state.items() if "rule" not in key})
        try:
            lamb.load_state_dict({**state})
        except RuntimeError as error:
            found.append(str(error))
    return found


def everything(rank: int, size: int) -> dict[str, Any]:
    """Runs all functions that need no compiler in one group."""
    return {work.__name__: work(rank, size) for work in WORKS}


WORKS = (
    row_rules_on_pieces_of_one_rank,
    padding_of_a_fused_table,
    gradients_that_overflow_on_the_wire,
    a_spoilt_pass_among_accumulated_ones,
    gradients_of_weights_are_not_averaged,
    weights_after_rows_have_changed,
    queries_for_gradients_of_weights,
    losses_scaled_by_an_unknown_scaler,
    a_batch_that_changes_before_the_backward,
    padding_that_is_no_row,
    recomputed_forwards,
    calls_between_prefetched_batches,
    a_batch_of_another_module,
    other_default_dtypes,
    steps_without_gradients,
    all_tables_frozen,
    optimizers_by_table,
    fused_tables_with_optimizers,
    no_memory_on_one_rank,
    timeouts,
    a_dropped_module,
    states_of_another_rule,
)
