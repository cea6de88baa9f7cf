"""Weights that are split over the ranks of a process group: which rank holds what, and the collectives that join
results.

The same code serves NCCL and gloo: torch chooses by the tensors' device.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from embforge.autograd_calls import Context, applied
from embforge.group_ending import end_at_exit
from embforge.number_formats import as_indexable


class WeightParts(NamedTuple):
    """How much of a weight each rank of a group holds."""

    group: dist.ProcessGroup | None
    rank: int
    """The number of this rank in the group."""
    dim: int
    """The dimension that is split: 0 for rows, 1 for columns."""
    sizes: tuple[int, ...]
    """The number of rows or columns of each rank."""

    @property
    def first(self) -> int:
        """The number of this rank's first row or column."""
        return sum(self.sizes[: self.rank])


def summed(partial: Tensor, parts: WeightParts) -> Tensor:
    """The sum of the `partial` of all ranks. It overwrites `partial`."""
    return applied(_Sum, partial, parts)


def side_by_side(own: Tensor, parts: WeightParts) -> Tensor:
    """`[n, D]`, the columns `[n, d]` of all ranks in their order."""
    return applied(_Columns, own, parts)


class _Sum(torch.autograd.Function):
    """The sum over ranks, in place. Its backward passes the gradient on, because every rank has the whole gradient."""

    @staticmethod
    def forward(ctx: Context, partial: Tensor, parts: WeightParts) -> Tensor:
        ctx.mark_dirty(partial)
        if partial.numel():
            dist.all_reduce(as_indexable(partial), group=parts.group)
        return partial

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _ColumnsContext(Context, Protocol):
    """The position and the number of this rank's columns in the result."""

    first: int
    width: int


class _Columns(torch.autograd.Function):
    """The columns of all ranks, concatenated. The gradient of this rank's columns is their slice of the whole
    gradient."""

    @staticmethod
    def forward(ctx: _ColumnsContext, own: Tensor, parts: WeightParts) -> Tensor:
        ctx.first, ctx.width = parts.first, own.shape[1]
        return gathered_columns(own, parts)

    @staticmethod
    def backward(ctx: _ColumnsContext, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.narrow(1, ctx.first, ctx.width), None


def gathered_columns(own: Tensor, parts: WeightParts) -> Tensor:
    """The columns of all ranks, `[n, D]`, of which this rank holds `[n, own columns]`."""
    blocks = _gathered(F.pad(as_indexable(own), (0, max(parts.sizes) - own.shape[1])), parts)
    return _as_received(
        torch.cat([block[:, :size] for block, size in zip(blocks, parts.sizes, strict=True)], 1), own.dtype
    )


def gathered_rows(own: Tensor, parts: WeightParts) -> Tensor:
    """The rows of all ranks, `[V, d]`, of which this rank holds `[own rows, d]`."""
    blocks = _gathered(F.pad(as_indexable(own), (0, 0, 0, max(parts.sizes) - own.shape[0])), parts)
    return _as_received(torch.cat([block[:size] for block, size in zip(blocks, parts.sizes, strict=True)]), own.dtype)


def _gathered(block: Tensor, parts: WeightParts) -> Tensor:
    """The blocks of all ranks, `[ranks, *shape]`. All blocks must have the same shape."""
    result = block.new_empty(len(parts.sizes), *block.shape)
    if block.numel():
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(result.view(-1, *block.shape[1:]), block.contiguous(), group=parts.group)
    return result


def _as_received(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


_Lists = dict[tuple[int, ...], "dist.ProcessGroup"]
_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, _Lists] = weakref.WeakKeyDictionary()
"""Groups that were made for lists of ranks, by default group. They are forgotten when the default group is
destroyed."""


def group_of(argument: object, size: int, rank: int | None) -> dist.ProcessGroup:
    """The ProcessGroup that the argument `tp_group` means. ValueError if `tp_size` is not its size, or `tp_rank` not
    the number of this process in it."""
    if not isinstance(rank, int):
        raise ValueError(f"tp_rank={rank!r} with tp_size={size}; pass the number of this rank in tp_group, from 0")
    group = process_group_of(argument, "tp_group")
    own_size, own_rank = dist.get_world_size(group), dist.get_rank(group)
    if (own_size, own_rank) != (size, rank):
        problem = "does not hold this process" if own_rank < 0 else f"has {own_size} ranks, this one is {own_rank}"
        raise ValueError(f"tp_group {problem}; tp_size={size}, tp_rank={rank} do not fit it")
    return group


def process_group_of(argument: object, name: str) -> dist.ProcessGroup:
    """The ProcessGroup that the argument `name` means: a ProcessGroup, a 1-D DeviceMesh, a list of ranks, or None,
    which means all ranks. ValueError for anything else."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(f"{name}: torch.distributed is not initialised; call init_process_group first, see torchrun")
    world = dist.group.WORLD
    assert world is not None  # because torch.distributed is initialised
    if argument is None:
        return world
    if isinstance(argument, dist.ProcessGroup):
        return argument
    if hasattr(argument, "get_group") and getattr(argument, "ndim", 0) == 1:
        of_mesh: dist.ProcessGroup = argument.get_group()
        return of_mesh
    ranks = tuple(argument) if isinstance(argument, Sequence) else ()
    if not ranks or not all(isinstance(r, int) for r in ranks) or list(ranks) != sorted(set(ranks)):
        raise ValueError(
            f"{name}={argument!r} is not allowed; allowed: a ProcessGroup, a 1-D DeviceMesh, a rising list of ranks, "
            "or None for all ranks"
        )
    if ranks == tuple(range(dist.get_world_size())):
        return world
    groups = _GROUPS.setdefault(world, {})
    if ranks not in groups:
        if dist.get_rank() not in ranks:
            raise ValueError(f"{name}={list(ranks)} does not hold this process, rank {dist.get_rank()}")
        group = dist.new_group(list(ranks), use_local_synchronization=True)  # other ranks do not take part
        groups[ranks] = end_at_exit(group)
    return groups[ranks]


@dataclass(frozen=True)
class _Exchanged:
    """What the ranks of a group have exchanged about a weight."""

    group: weakref.ref[dist.ProcessGroup]
    shape: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]


_EXCHANGED: Any = WeakIdKeyDictionary()
"""What ranks have exchanged, by weight. An entry is removed with its weight, and is valid for one group only."""


def parts_of(weight: Tensor, group: dist.ProcessGroup, dim: int) -> WeightParts:
    """How the ranks of the group share a weight. They exchange it in the first call with the weight."""
    if torch.compiler.is_compiling():  # not traced; torch.compiler.disable as a decorator would import the compiler
        parts: WeightParts = torch.compiler.disable(_parts_of)(weight, group, dim)
        return parts
    return _parts_of(weight, group, dim)


def _parts_of(weight: Tensor, group: dist.ProcessGroup, dim: int) -> WeightParts:
    known: _Exchanged | None = _EXCHANGED.get(weight)
    if known is None or known.group() is not group:
        sizes = _exchange_sizes(weight, group, dim)
        known = _EXCHANGED[weight] = _Exchanged(weakref.ref(group), tuple(weight.shape), dim, sizes)
    if known.shape != tuple(weight.shape):
        raise ValueError(
            f"weight: shape {tuple(weight.shape)} was {known.shape} when ranks exchanged the sizes of their parts; "
            "make a new tensor on every rank instead of resizing one"
        )
    if dim != known.dim:
        raise ValueError(
            f"sharding_dim={dim} for a weight that was said to be split along {known.dim} in an earlier call"
        )
    return WeightParts(group, dist.get_rank(group), dim, known.sizes)


def _exchange_sizes(weight: Tensor, group: dist.ProcessGroup, dim: int) -> tuple[int, ...]:
    """The size of each rank's part along `dim`. ValueError on all ranks if the parts do not belong to one weight."""
    facts = [*weight.shape, dim, zlib.crc32(str(weight.dtype).encode())]
    own = torch.tensor(facts, dtype=torch.int64, device=weight.device)
    received = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, own, group=group)
    by_rank = [each.tolist() for each in received]
    first = by_rank[0]
    for rank, other in enumerate(by_rank):
        if other[2:] != first[2:] or other[1 - first[2]] != first[1 - first[2]]:
            raise ValueError(
                f"weight: rank {rank} of tp_group holds {other[:2]} with sharding_dim={other[2]}, rank 0 {first[:2]} "
                f"with sharding_dim={first[2]}, or they differ in dtype; all must hold parts of one table"
            )
    return tuple(each[dim] for each in by_rank)
