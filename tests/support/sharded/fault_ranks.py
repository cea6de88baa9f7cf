"""The ranks of `test_faults.py`. Each function runs on every rank of a group."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.sharded.mix import (
    LONG,
    PLAN,
    SHORT,
    SPEC,
    Batch,
    batch_of,
    full_rows,
    joined,
    made,
    outcome,
    step,
    unsharded,
)
from torch import Tensor
from torch.distributed.algorithms.join import Join

import embforge as ef
from embforge.codegen.planner.topology import Link, Topology
from embforge.sharded import PrefetchedBatches, RowWise, ShardPlan
from embforge.sharded.exchange.collectives import Ranks

Outcome = tuple[str, str]


def bad_ids(rank: int, size: int, backend: str, dtype: torch.dtype) -> dict[str, Any]:
    """For every feature: a batch with a bad id on the last rank; then a good batch."""
    module = made(backend=backend)
    before = full_rows(module)
    good = batch_of(rank, 3, dtype=dtype, least=1)
    found: dict[str, Any] = {"errors": {}, "expected": {}}
    for number, feature in enumerate(SPEC.features):
        rows = SPEC.table(feature.table).num_embeddings
        for bad in (-1, rows, 2**31 - 1 if dtype == torch.int32 else 2**40):
            batch = with_id(batch_of(size - 1, 3, dtype=dtype, least=1), number, bad)
            key = f"{feature.name} {bad}"
            found["expected"][key] = outcome(lambda batch=batch: unsharded().forward_dict(*batch))  # type: ignore[misc]
            given = batch if rank == size - 1 else good
            found["errors"][key] = outcome(lambda given=given: step(module, given))  # type: ignore[misc]
    found["counters"] = module.counters()
    found["same"] = all(torch.equal(before[name], rows) for name, rows in full_rows(module).items())
    found["afterwards"] = backend != "reference" or afterwards(module, rank, size)  # nothing to compile there
    return found


def with_id(batch: Batch, feature: int, bad: int) -> Batch:
    """The batch with `bad` as the last id of a feature."""
    values, offsets, weights = batch
    size = (offsets.numel() - 1) // len(SPEC.features)
    values = values.clone()
    values[int(offsets[(feature + 1) * size]) - 1] = bad
    return values, offsets, weights


def afterwards(module: Any, rank: int, size: int) -> bool:
    """Whether a training step still gives what the unsharded collection gives."""
    batches = [batch_of(70 + r, 3) for r in range(size)]
    step(module, batches[rank])
    whole = unsharded()
    step(whole, joined(batches))
    return same_rows(module, whole)


def same_rows(module: Any, whole: Any) -> bool:
    rows = full_rows(module)
    for name in rows:
        torch.testing.assert_close(rows[name], whole.weight(name), rtol=1e-5, atol=1e-5)
    return True


def bad_arguments(rank: int, size: int) -> dict[str, Any]:
    """By the kind of mistake: the error if only one rank makes it."""
    module = made()
    values, offsets, weights = batch_of(rank, 3, least=1)
    cases: dict[str, tuple[Any, ...]] = {
        "floats": (values.float(), offsets, weights),
        "no tensor": ([1, 2], offsets, weights),
        "shape": (values[:, None], offsets, weights),
        "offsets": (values, offsets[:-1], weights),
        "weights": (values, offsets, weights[1:]),
        "falling": (values, offsets.flip(0), weights),
        "end": (values, offsets + 1, weights),
        "long concat": with_long_concat(values, weights),
    }
    found: dict[str, Any] = {}
    for number, (name, given) in enumerate(cases.items()):
        at_fault = number % size == rank
        mine = given if at_fault else (values, offsets, weights)
        found[name] = (number % size, outcome(lambda mine=mine: step(module, mine)))  # type: ignore[misc]
    found["counters"] = module.counters()
    found["afterwards"] = afterwards(module, rank, size)
    return found


def no_kernel(rank: int, size: int, empty: str) -> dict[str, Any]:
    """Rank 1 cannot build the kernels for training, and later it can."""
    spec = ef.CollectionSpec((ef.TableSpec("t", 9, 4),), (ef.FeatureSpec("f", "t"),))
    module = made(spec, ShardPlan.row_wise(spec), backend="cpu", optimizer=ef.optim.SGD(lr=0.1))
    batch = batch_of(rank, 3, spec, least=1)[:2]
    with torch.no_grad():
        module(*batch)
    module.reset_counters()
    before = full_rows(module)
    if rank == 1:
        os.environ |= {"EMBFORGE_JIT": "0", "EMBFORGE_CACHE_DIR": empty}
    found: dict[str, Any] = {"error": outcome(lambda: module(*batch).sum().backward()), "counters": module.counters()}
    if rank == 1:
        del os.environ["EMBFORGE_JIT"], os.environ["EMBFORGE_CACHE_DIR"]
    found["same"] = torch.equal(full_rows(module)["t"], before["t"])
    found["afterwards"] = outcome(lambda: module(*batch).sum().backward())
    return found


def groups(rank: int, size: int) -> dict[str, Any]:
    """Makes and closes modules repeatedly while ranks are in unequal numbers of groups."""
    found: dict[str, Any] = {}
    batch = batch_of(rank, 3, least=1)
    dist.new_group([0], use_local_synchronization=True)  # rank 0 alone
    for _ in range(3):
        module = made(timeout=LONG)
        step(module, batch)
        module.close()
    part = dist.new_group([0, 1])
    if rank < 2:
        found["unequal"] = outcome(lambda: made(process_group=part, timeout=LONG))
    dist.new_group([1], use_local_synchronization=True)  # now ranks 0 and 1 are in equally many groups
    if rank < 2:
        for _ in range(2):
            module = made(process_group=part, timeout=LONG)
            step(module, batch)
            module.close()
        found["equal"] = True
    return found


def other_backend(rank: int, size: int) -> dict[str, Any]:
    """A group with another backend than the default group's, and one whose backend cannot serve the device."""
    module = made(process_group=dist.new_group(backend="cpu:gloo"), timeout=LONG)
    step(module, batch_of(rank, 3))
    found = {
        "own": dist.get_backend_config(module._ids.group),
        "device": outcome(lambda: made(process_group=dist.new_group(backend="cuda:gloo"), timeout=LONG)),
    }
    dist.barrier()  # a fast rank must not end while another one still connects
    return found


def nodes(rank: int, size: int) -> dict[str, Any]:
    """The ranks per node, which torchrun passes in the environment; nodes of unequal size count as one node."""
    found = {}
    for name, local in {"equal": 2, "unequal": 1 if rank < 1 else 3}.items():
        os.environ["LOCAL_WORLD_SIZE"] = str(local)
        module = made(timeout=LONG)
        step(module, batch_of(rank, 3))
        found[name] = module._ranks.node_size
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    found["every other"] = Ranks(dist.new_group([0, 2]), None, LONG).node_size if rank in (0, 2) else None
    return found


def unmade(rank: int, size: int) -> dict[str, Outcome]:
    """Errors of modules that one rank alone cannot make, and of arguments that a rank refuses without asking others."""
    link = Link(bandwidth=1e9, latency=1e-6)
    small = Topology("small", 1, 2, 1.0, 1e9, 1e9, link, link) if rank == 1 else None
    found = {"memory": outcome(lambda: made(topology=small, timeout=LONG))}
    found["formats"] = outcome(lambda: made(formats="bf16" if rank == 1 else None, timeout=LONG))
    return found


def with_long_concat(values: Tensor, weights: Tensor) -> Batch:
    lengths = torch.zeros(len(SPEC.features), dtype=torch.int64)
    lengths[3] = 4
    return torch.zeros(4, dtype=torch.int64), torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), torch.ones(4)


def zero_bounds(rank: int, size: int) -> tuple[bool, bool]:
    """Whether ids outside of their tables count as absent, as in an unsharded collection."""
    module, whole = made(bounds_check="zero"), unsharded(bounds_check="zero")
    batches = [with_id(with_id(batch_of(r, 3, least=1), 0, -5), 6, 10**9 + r) for r in range(size)]
    for number in range(len(SPEC.features)):
        batches[0] = with_id(batches[0], number, 99)
    results, expected = step(module, batches[rank]), step(whole, joined(batches))
    samples = slice(3 * rank, 3 * rank + 3)
    for name in ("sum", "mean", "concat", "max", "copied"):
        torch.testing.assert_close(results[name], expected[name][samples], rtol=1e-5, atol=1e-5)
    return same_rows(module, whole), all(result.isfinite().all() for result in results.values())


def killed(rank: int, size: int, when: str) -> Outcome:
    """One rank is killed in the middle of a step: before it sends vectors, or before its backward."""
    module = made(timeout=LONG)
    step(module, batch_of(rank, 3))
    if rank == 1 and when == "vectors":
        done = module.distribute(*batch_of(rank, 3))
        assert done.total
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and when == "backward":
        module.forward_dict(*batch_of(rank, 3))
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome(lambda: step(module, batch_of(rank, 3)))


def stops_calling(rank: int, size: int) -> Outcome:
    """One rank keeps living but makes no more calls."""
    step(made(timeout=LONG), batch_of(rank, 3))  # does what is slow only the first time
    dist.barrier()
    module = made(timeout=SHORT)
    step(module, batch_of(rank, 3))
    return _without_rank_1(rank, lambda: step(module, batch_of(rank, 3)))


def never_made(rank: int, size: int) -> Outcome:
    """One rank does not make the module that the others make."""
    return _without_rank_1(rank, lambda: made(timeout=SHORT))


def _without_rank_1(rank: int, call: Callable[[], Any]) -> Outcome:
    """The outcome of a call of rank 0 while rank 1 lives and does nothing."""
    found = outcome(call) if rank == 0 else ("nothing", "")
    dist.barrier()
    return found


def no_samples(rank: int, size: int) -> bool:
    """Whether ranks without samples, one or all of them, take part in forward and backward."""
    module, whole = made(), unsharded()
    for sizes in ([0, *[2] * (size - 1)], [*[2] * (size - 1), 0], [0] * size):
        batches = [batch_of(9 + r, sizes[r]) for r in range(size)]
        step(module, batches[rank])
        if sum(sizes):
            step(whole, joined(batches))
    return same_rows(module, whole)


def out_of_step(rank: int, size: int) -> dict[str, Any]:
    """Errors if one rank has made one more call than the others, and if one has gradients off."""
    module = made()
    step(module, batch_of(rank, 2))
    if rank == 0:
        module._calls += 1  # as if it had called while the others did not
    found: dict[str, Any] = {"calls": outcome(lambda: step(module, batch_of(rank, 2)))}
    if rank != 0:
        module._calls += 1
    with torch.set_grad_enabled(rank != 1):
        found["gradients"] = outcome(lambda: module.forward_dict(*batch_of(rank, 2)))
    found["counters"] = module.counters()
    found["afterwards"] = outcome(lambda: step(module, batch_of(rank, 2)))
    return found


def mismatches(rank: int, size: int) -> dict[str, Outcome]:
    """Errors of modules that are made with a different argument on the last rank."""
    last = rank == size - 1
    grown = ef.CollectionSpec((ef.TableSpec("rows", 10 if last else 9, 4), *SPEC.tables[1:]), SPEC.features)
    renamed = ef.CollectionSpec((ef.TableSpec("lines" if last else "rows", 9, 4),), (
        ef.FeatureSpec("sum", "lines" if last else "rows"),))  # fmt: skip
    block = ShardPlan({**dict(PLAN.kinds), "rows": RowWise("block" if last else "modulo")})
    cases: dict[str, dict[str, Any]] = {
        "spec": {"spec": grown, "plan": PLAN},
        "table": {"spec": renamed, "plan": ShardPlan.row_wise(renamed)},
        "plan": {"plan": block},
        "plan of other tables": {"plan": ShardPlan.row_wise(renamed) if last else PLAN},
        "optimizer": {"optimizer": ef.optim.SGD(lr=0.1) if last else ef.optim.Adagrad(lr=0.1)},
        "lr": {"optimizer": ef.optim.SGD(lr=0.2 if last else 0.1)},
        "eps": {"optimizer": ef.optim.Adagrad(lr=0.1, eps=1e-3 if last else 1e-10)},
        "lr of a table": {"optimizer": {"rows": ef.optim.SGD(lr=0.2 if last else 0.1), "*": ef.optim.Adam()}},
        "order of entries": {
            "optimizer": {name: ef.optim.SGD() for name in (("*", "rows") if last else ("rows", "*"))}
        },
        "misspelt table": {"optimizer": {"row" if last else "rows": ef.optim.SGD(), "*": ef.optim.SGD()}},
        "accumulate": {"accumulate": last},
        "average_gradients": {"average_gradients": last},
        "duplicates": {"duplicates": "merge" if last else "keep"},
        "formats": {"formats": ef.sharded.Formats(forward="bf16" if last else "fp16")},
        "bounds_check": {"bounds_check": "zero" if last else "error"},
        "node_size": {"node_size": 1 if last else size},
        "no optimizer": {"optimizer": None if last else ef.optim.SGD(lr=0.1)},
        "torch's optimizer": {"optimizer": torch.optim.SGD if last else ef.optim.SGD(lr=0.1)},
        "no plan": {"plan": "row_wise" if last else PLAN},
        "unknown word": {"duplicates": "drop" if last else "keep"},
    }
    found = {name: outcome(lambda given=given: made(**given)) for name, given in cases.items()}  # type: ignore[misc]
    found["the same"] = outcome(lambda: step(made(), batch_of(rank, 2)))
    return found


def uneven(rank: int, size: int, trains: bool) -> tuple[bool, int]:
    """Uneven numbers of batches under Join: rank r has r + 1 batches."""
    module, whole = made(), unsharded()
    batches = [[batch_of(10 * r + n, 2) for n in range(r + 1)] for r in range(size)]
    results = []
    with Join([module]), torch.set_grad_enabled(trains):
        for batch in batches[rank]:
            results.append(step(module, batch) if trains else module.forward_dict(*batch))
    for n in range(size):
        of_step = [batches[r][n] for r in range(size) if n <= r]
        expected = step(whole, joined(of_step)) if trains else whole.forward_dict(*joined(of_step))
        if n <= rank:
            first = 2 * [r for r in range(size) if n <= r].index(rank)
            for name in ("sum", "mean", "concat", "max", "copied"):
                torch.testing.assert_close(
                    results[n][name].detach(), expected[name][first : first + 2].detach(), rtol=1e-5, atol=1e-5
                )
    return same_rows(module, whole), len(results)


def refused_in_join(rank: int, size: int) -> list[Outcome]:
    """What cannot work under Join is refused before any rank waits."""
    waits = made(accumulate=True)
    found = [outcome(lambda: Join([waits]))]
    module = made()
    with Join([module], enable=True):
        found.append(outcome(lambda: next(iter(PrefetchedBatches(module, [batch_of(rank, 2)])))))
    return found


def prefetched(rank: int, size: int) -> list[Any]:
    """The error of a bad batch among prefetched ones is raised when its turn comes."""
    module = made()
    batches = [batch_of(rank, 2, least=1), batch_of(rank + 9, 2, least=1), batch_of(rank + 20, 2, least=1)]
    if rank == 0:
        batches[1] = with_id(batches[1], 0, 99)
    seen: list[Any] = []

    def run() -> None:
        for _, done in PrefetchedBatches(module, batches):
            seen.append(sorted(module.forward_dict(done)))

    return [outcome(run), len(seen), afterwards(module, rank, size)]


def released(rank: int, size: int) -> tuple[list[Outcome], int, list[bool]]:
    """Whether failed calls keep anything alive: their errors, how many more tensors there are, and which batches are
    freed."""
    module = made()
    kept: list[Any] = []
    errors: list[Outcome] = []

    def fail() -> None:
        batch = with_id(batch_of(rank, 4, least=1), 0, 99) if rank == 0 else batch_of(rank, 4, least=1)
        kept.extend(weakref.ref(tensor) for tensor in batch)
        errors.append(outcome(lambda: step(module, batch)))

    fail()  # the first call makes what is made only once
    before = tensors()
    for _ in range(3):
        fail()
    return errors, tensors() - before, [reference() is None for reference in kept]


def tensors() -> int:
    gc.collect()
    return sum(isinstance(thing, Tensor) for thing in gc.get_objects())
