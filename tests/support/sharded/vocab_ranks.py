"""The checks of tests/runtime/sharded/test_vocab_parallel.py, which run on every rank of a real gloo group."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import embforge as ef
from embforge.functional import tensor_parallel as parts
from embforge.sharded.vocab_parallel import VocabParallelEmbedding

MOST_RANKS = 4
Check = Callable[[int, int], None]


def run(rank: int, folder: str) -> None:
    """Runs one of `MOST_RANKS` processes: all checks in groups of 1, 2, 3 and 4 ranks, one after the other."""
    torch.set_num_threads(1)
    for size in range(1, MOST_RANKS + 1):
        if rank >= size:
            continue
        store = dist.FileStore(str(Path(folder) / f"store{size}"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=600))
        for check in CHECKS:
            try:
                check(rank, size)
            except BaseException as error:
                error.add_note(f"in {check.__name__} on rank {rank} of {size}")
                raise
        dist.destroy_process_group()
        gc.collect()
        assert not parts._GROUPS, "groups of a destroyed world are kept"


def drawn(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def looked_up(ids: Tensor, full: Tensor) -> Tensor:
    absent = (ids < 0) | (ids >= len(full))
    return nn.functional.embedding(ids.masked_fill(absent, 0).long(), full).masked_fill(absent[..., None], 0)


def split(full: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
    return [part.contiguous() for part in full.split(sizes, dim)]


def by_ceil(total: int, ranks: int) -> list[int]:
    each = -(-total // ranks)
    return [min(each, max(0, total - each * rank)) for rank in range(ranks)]


@contextmanager
def counted(name: str) -> Iterator[Any]:
    with mock.patch.object(dist, name, wraps=getattr(dist, name)) as calls:
        yield calls


IDS = torch.tensor([[0, 3, -1, 6], [2, 9, 5, -7], [4, 1, 10, 2**40]])


def rows_of_any_number(rank: int, size: int) -> None:
    for sizes in (by_ceil(10, size), by_ceil(5, size), [*range(size - 1, -1, -1)], [1] * (size - 1) + [4]):
        full = drawn((sum(sizes), 8)).requires_grad_()
        own = split(full.detach(), sizes, 0)[rank].requires_grad_()
        wanted = looked_up(IDS, full) if len(full) else torch.zeros(3, 4, 8)
        found = ef.functional.embedding(IDS, own, size, None, 0, rank)
        assert torch.equal(found, wanted), (sizes, found, wanted)
        if len(full):
            upstream = drawn((3, 4, 8), 1)
            found *= 2
            with counted("all_reduce") as calls:
                found.backward(upstream / 2)
            assert not calls.called, "the backward communicates nothing"
            wanted.backward(upstream)
            assert full.grad is not None and own.grad is not None
            assert torch.equal(own.grad, split(full.grad, sizes, 0)[rank])


def columns_of_any_number(rank: int, size: int) -> None:
    for width, sizes in ((8, by_ceil(8, size)), (7, by_ceil(7, size)), (2, by_ceil(2, size))):
        full = drawn((7, width), dtype=torch.float64).requires_grad_()
        own = split(full.detach(), sizes, 1)[rank].requires_grad_()
        found, wanted = ef.functional.embedding(IDS, own, size, None, 1, rank), looked_up(IDS, full)
        assert torch.equal(found, wanted)
        upstream = drawn((3, 4, width), 1, torch.float64)
        found *= 2
        found.backward(upstream / 2)
        wanted.backward(upstream)
        assert full.grad is not None and own.grad is not None
        assert torch.equal(own.grad, split(full.grad, sizes, 1)[rank])


def narrow_numbers(rank: int, size: int) -> None:
    """Weights are strided, so that torch looks them up: kernels of each dtype are not tested here."""
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        full = (20 * drawn((7, 6))).to(dtype)
        for dim in (0, 1):
            sizes = by_ceil(full.shape[dim], size)
            part = split(full, sizes, dim)[rank]
            own = part.new_empty(part.shape[0], 2 * part.shape[1])[:, ::2].copy_(part)
            found = ef.functional.embedding(IDS.int(), own, size, None, dim, rank)
            assert found.dtype == dtype and torch.equal(found.float(), looked_up(IDS.int(), full.float()))


def scales(rank: int, size: int) -> None:
    for dtype, scale_dtype in ((torch.int8, torch.float16), (torch.float8_e4m3fn, torch.float32)):
        full, scale = (20 * drawn((7, 8))).to(dtype), drawn((7,), 2).to(scale_dtype)
        wanted = looked_up(IDS, full.to(scale_dtype) * scale[:, None])
        rows = by_ceil(7, size)
        parts_of_scale = scale.split(rows)
        own = split(full, rows, 0)[rank]
        found = ef.functional.embedding(IDS, own, size, None, 0, rank, parts_of_scale[rank])
        assert found.dtype == scale_dtype and torch.equal(found, wanted)
        if dtype == torch.int8:
            own = split(full, by_ceil(8, size), 1)[rank]
            assert torch.equal(ef.functional.embedding(IDS, own, size, None, 1, rank, scale), wanted)


def inputs_of_any_shape(rank: int, size: int) -> None:
    full = drawn((6, 8))
    for dim in (0, 1):
        own = split(full.double() if dim else full, by_ceil(full.shape[dim], size), dim)[rank]
        for ids in (torch.tensor(5), torch.empty(0, dtype=torch.int64), torch.empty(2, 0, dtype=torch.int32)):
            found = ef.functional.embedding(ids, own, size, None, dim, rank)
            assert found.shape == (*ids.shape, 8) and torch.equal(found, looked_up(ids, full).to(found.dtype))
    own = split(full, by_ceil(6, size), 0)[rank]  # `padding` says how many rows a short part lacks
    missing = -(-6 // size) - len(own)
    for padding in (missing, torch.zeros(missing, 8)):
        found = ef.functional.embedding(IDS, own, size, None, 0, rank, padding=padding)
        assert torch.equal(found, looked_up(IDS, full))


def sizes_of_parts_are_exchanged_once(rank: int, size: int) -> None:
    own, other = (split(drawn((6, 8), seed), by_ceil(6, size), 0)[rank] for seed in (0, 1))
    with counted("all_gather") as calls:
        for weight in (own, own, nn.Parameter(other), own):
            ef.functional.embedding(IDS, weight, size, None, 0, rank)
    assert calls.call_count == (2 if size > 1 else 0)


def lists_of_ranks(rank: int, size: int) -> None:
    full = drawn((6, 8))
    ranks = [0, size - 1]
    if size < 3 or rank not in ranks:
        return
    own = split(full, by_ceil(6, 2), 0)[ranks.index(rank)]
    with counted("new_group") as calls:
        for _ in range(3):
            found = ef.functional.embedding(IDS, own, 2, ranks, 0, ranks.index(rank))
            assert torch.equal(found, looked_up(IDS, full))
    assert calls.call_count == 1


def mistakes(rank: int, size: int) -> None:
    if size == 1:
        return
    own = split(drawn((6, 8)), by_ceil(6, size), 0)[rank]
    for message, arguments in (
        ("tp_rank=None", (size, None, 0, None)),
        (f"has {size} ranks, this one is {rank}; tp_size={size + 1}", (size + 1, None, 0, rank)),
        (f"this one is {rank}; tp_size={size}, tp_rank={(rank + 1) % size}", (size, None, 0, (rank + 1) % size)),
        ("tp_group=.* is not allowed", (size, list(range(size))[::-1], 0, rank)),
        ("tp_group='all' is not allowed", (size, "all", 0, rank)),
    ):
        with pytest.raises(ValueError, match=message):
            ef.functional.embedding(IDS, own, *arguments)
    with pytest.raises(ValueError, match=r"rank 1 of tp_group holds \[2, 9\].*rank 0 \[2, 8\]"):
        ef.functional.embedding(IDS, torch.zeros(2, 8 + rank), size, None, 0, rank)  # all ranks raise
    ef.functional.embedding(IDS, own, size, None, 0, rank)
    with pytest.raises(ValueError, match="said to be split along 0"):
        ef.functional.embedding(IDS, own, size, None, 1, rank)


# ---- the module -----------------------------------------------------------------------------------------------------


def pair(sharding_dim: int, size: int) -> tuple[VocabParallelEmbedding, nn.Embedding]:
    """A module, and a whole nn.Embedding made from the same seed."""
    dtype = torch.float64 if sharding_dim else torch.float32
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,)) if sharding_dim else None
    torch.manual_seed(7)
    one = nn.Embedding(11, 8, padding_idx=-9, dtype=dtype)
    after = torch.rand(1)
    torch.manual_seed(7)
    module = VocabParallelEmbedding(11, 8, -9, sharding_dim, mesh, dtype)
    assert torch.equal(torch.rand(1), after), "the generator's state differs from that after making nn.Embedding"
    return module, one


def starts_and_trains_as_one(rank: int, size: int) -> None:
    ids = torch.tensor([[0, 2, 10, 2], [5, 6, 2, 1]])
    for dim in (0, 1):
        module, one = pair(dim, size)
        assert torch.equal(module.full(), one.weight.detach())
        assert module.weight.shape[dim] == by_ceil((11, 8)[dim], size)[rank]
        for step in range(3):
            upstream = drawn((2, 4, 8), step, one.weight.dtype)
            results = [m(ids) for m in (module, one)]
            assert torch.equal(results[0], results[1])
            for weight, result in zip((module.weight, one.weight), results, strict=True):
                (gradient,) = torch.autograd.grad((result.tanh() * upstream).sum(), weight)
                weight.data -= 0.5 * gradient  # torch.optim would import the compiler, on four ranks
        assert torch.equal(module.full(), one.weight.detach())
        assert module(torch.tensor([11, -1])).abs().sum() == 0


def state_goes_in_and_out(rank: int, size: int) -> None:
    for dim in (0, 1):
        module, one = pair(dim, size)
        state = copy.deepcopy(module.state_dict())
        assert list(state) == ["weight"] and state["weight"].shape == module.weight.shape
        twin = copy.deepcopy(module)
        module.load_full(torch.arange(88.0).view(11, 8))
        assert torch.equal(module.full(), torch.arange(88.0).view(11, 8).to(module.weight.dtype))
        assert torch.equal(twin.full(), one.weight.detach())
        module.load_state_dict(state)
        assert torch.equal(module.full(), one.weight.detach())
        with pytest.raises(ValueError, match=r"weight: shape \(11, 7\)"):
            module.load_full(torch.zeros(11, 7))


def prompts(rank: int, size: int) -> None:
    ids, tasks = torch.tensor([[0, 11, 12], [14, 13, 10]]), torch.tensor([[1], [0]])
    for dim in (0, 1):
        module, one = pair(dim, size)
        table = drawn((6, 8), 5, one.weight.dtype).requires_grad_()  # two tasks of three prompts
        found = module(ids, table, tasks, torch.tensor([3]))
        zero = torch.zeros(8)
        wanted = torch.stack([one.weight[0], table[3], table[4], zero.to(table.dtype), table[2], one.weight[10]])
        assert torch.equal(found.view(6, 8), wanted)
        found.sum().backward()
        assert table.grad is not None and table.grad[:, 0].tolist() == [0, 0, 1, 1, 1, 0]
        assert torch.equal(module(ids, table)[0, 1], table[0]), "without tasks the table is one task's"
        assert torch.equal(module(ids.int(), table, torch.tensor(-1), 3)[0, 1:].abs().sum(), zero[0].to(table.dtype))
        for message, arguments in (
            (r"prompt_table: shape \(6, 7\)", (table[:, 1:],)),
            ("without task_vocab_size", (table, tasks)),
            (r"tasks: shape \(2,\)", (table, tasks[:, 0], 3)),
            ("prompt_table; it is None", (None, tasks, 3)),
        ):
            with pytest.raises(ValueError, match=message):
                module(ids, *arguments)


CHECKS: tuple[Check, ...] = (
    rows_of_any_number,
    columns_of_any_number,
    narrow_numbers,
    scales,
    inputs_of_any_shape,
    sizes_of_parts_are_exchanged_once,
    lists_of_ranks,
    mistakes,
    starts_and_trains_as_one,
    state_goes_in_and_out,
    prompts,
)
