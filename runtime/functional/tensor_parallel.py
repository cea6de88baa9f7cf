"""A weight of which every rank of a group holds a part: who holds what, and the collectives that join results.

One code for NCCL and gloo: the tensors' device decides.
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


class Parts(NamedTuple):
    """Who holds how much of a weight."""

    group: dist.ProcessGroup | None
    rank: int
    dim: int
    sizes: tuple[int, ...]
    """Rows (dim 0) or columns (dim 1) of every rank."""

    @property
    def first(self) -> int:
        """The number of this rank's first row or column."""
        return sum(self.sizes[: self.rank])


def summed(partial: Tensor, parts: Parts) -> Tensor:
    """The sum of every rank's `partial`, in its memory."""
    return applied(_Sum, partial, parts)


def side_by_side(own: Tensor, parts: Parts) -> Tensor:
    """`[n, D]` from every rank's columns `[n, d]`."""
    return applied(_Columns, own, parts)


class _Sum(torch.autograd.Function):
    """The sum over ranks, in place. Its gradient is handed on: every rank has the whole of it."""

    @staticmethod
    def forward(ctx: Context, partial: Tensor, parts: Parts) -> Tensor:
        ctx.mark_dirty(partial)
        if partial.numel():
            dist.all_reduce(as_indexable(partial), group=parts.group)
        return partial

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _ColumnsContext(Context, Protocol):
    """Where a rank's columns begin in the whole, and how many they are."""

    first: int
    width: int


class _Columns(torch.autograd.Function):
    """The columns of all ranks side by side. The gradient of a rank's columns is its slice."""

    @staticmethod
    def forward(ctx: _ColumnsContext, own: Tensor, parts: Parts) -> Tensor:
        ctx.first, ctx.width = parts.first, own.shape[1]
        return gathered_columns(own, parts)

    @staticmethod
    def backward(ctx: _ColumnsContext, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.narrow(1, ctx.first, ctx.width), None


def gathered_columns(own: Tensor, parts: Parts) -> Tensor:
    """`[n, D]` from every rank's `[n, own columns]`."""
    blocks = _gathered(F.pad(as_indexable(own), (0, max(parts.sizes) - own.shape[1])), parts)
    return _as_received(
        torch.cat([block[:, :size] for block, size in zip(blocks, parts.sizes, strict=True)], 1), own.dtype
    )


def gathered_rows(own: Tensor, parts: Parts) -> Tensor:
    """`[V, d]` from every rank's `[own rows, d]`."""
    blocks = _gathered(F.pad(as_indexable(own), (0, 0, 0, max(parts.sizes) - own.shape[0])), parts)
    return _as_received(torch.cat([block[:size] for block, size in zip(blocks, parts.sizes, strict=True)]), own.dtype)


def _gathered(block: Tensor, parts: Parts) -> Tensor:
    """`[ranks, *shape]` from equal blocks."""
    result = block.new_empty(len(parts.sizes), *block.shape)
    if block.numel():
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(result.view(-1, *block.shape[1:]), block.contiguous(), group=parts.group)
    return result


def _as_received(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


_Lists = dict[tuple[int, ...], "dist.ProcessGroup"]
_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, _Lists] = weakref.WeakKeyDictionary()
"""Groups made for lists of ranks, by the default group: they go when that is destroyed."""


def group_of(given: object, size: int, rank: int | None) -> dist.ProcessGroup:
    """The ProcessGroup that `tp_group` means; ValueError if `tp_size` and `tp_rank` are not this process's in it."""
    if not isinstance(rank, int):
        raise ValueError(f"tp_rank={rank!r} with tp_size={size}; give this rank's number in tp_group, from 0")
    group = process_group_of(given, "tp_group")
    found = dist.get_world_size(group), dist.get_rank(group)
    if found != (size, rank):
        where = "does not hold this process" if found[1] < 0 else f"has {found[0]} ranks, this one is {found[1]}"
        raise ValueError(f"tp_group {where}; tp_size={size}, tp_rank={rank} do not fit it")
    return group


def process_group_of(given: object, name: str) -> dist.ProcessGroup:
    """The ProcessGroup that an argument of that name means: itself, a 1-D DeviceMesh, a list of ranks, None: all."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(f"{name}: torch.distributed is not initialised; call init_process_group first, see torchrun")
    world = dist.group.WORLD
    assert world is not None  # as it is initialised
    if given is None:
        return world
    if isinstance(given, dist.ProcessGroup):
        return given
    if hasattr(given, "get_group") and getattr(given, "ndim", 0) == 1:
        own: dist.ProcessGroup = given.get_group()
        return own
    ranks = tuple(given) if isinstance(given, Sequence) else ()
    if not ranks or not all(isinstance(r, int) for r in ranks) or list(ranks) != sorted(set(ranks)):
        raise ValueError(
            f"{name}={given!r} is not allowed; allowed: a ProcessGroup, a 1-D DeviceMesh, a rising list of ranks, or "
            "None: all ranks"
        )
    if ranks == tuple(range(dist.get_world_size())):
        return world
    made = _GROUPS.setdefault(world, {})
    if ranks not in made:
        if dist.get_rank() not in ranks:
            raise ValueError(f"{name}={list(ranks)} does not hold this process, rank {dist.get_rank()}")
        group = dist.new_group(list(ranks), use_local_synchronization=True)  # others need not know
        made[ranks] = end_at_exit(group)
    return made[ranks]


@dataclass(frozen=True)
class _Told:
    """What ranks told each other about a weight."""

    group: weakref.ref[dist.ProcessGroup]
    shape: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]


_TOLD: Any = WeakIdKeyDictionary()
"""By weight. An entry goes with its weight, and counts for one group only."""


def parts_of(weight: Tensor, group: dist.ProcessGroup, dim: int) -> Parts:
    """The parts of the weight that ranks of the group hold. They tell each other in the first call with a weight."""
    if torch.compiler.is_compiling():  # a compiler leaves it to Python. No decorator: that would import the compiler
        found: Parts = torch.compiler.disable(_parts_of)(weight, group, dim)
        return found
    return _parts_of(weight, group, dim)


def _parts_of(weight: Tensor, group: dist.ProcessGroup, dim: int) -> Parts:
    told: _Told | None = _TOLD.get(weight)
    if told is None or told.group() is not group:
        told = _TOLD[weight] = _Told(weakref.ref(group), tuple(weight.shape), dim, _tell(weight, group, dim))
    if told.shape != tuple(weight.shape):
        raise ValueError(
            f"weight: shape {tuple(weight.shape)} was {told.shape} when ranks told each other their parts; "
            "make a new tensor on every rank instead of resizing one"
        )
    if dim != told.dim:
        raise ValueError(f"sharding_dim={dim} for a weight that was said to be split along {told.dim}")
    return Parts(group, dist.get_rank(group), dim, told.sizes)


def _tell(weight: Tensor, group: dist.ProcessGroup, dim: int) -> tuple[int, ...]:
    """Sizes along `dim` of every rank's part. ValueError on all ranks if their parts are not of one table."""
    facts = [*weight.shape, dim, zlib.crc32(str(weight.dtype).encode())]
    own = torch.tensor(facts, dtype=torch.int64, device=weight.device)
    words = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(words, own, group=group)
    told = [word.tolist() for word in words]
    first = told[0]
    for rank, other in enumerate(told):
        if other[2:] != first[2:] or other[1 - first[2]] != first[1 - first[2]]:
            raise ValueError(
                f"weight: rank {rank} of tp_group holds {other[:2]} with sharding_dim={other[2]}, rank 0 {first[:2]} "
                f"with sharding_dim={first[2]}, or they differ in dtype; all must hold parts of one table"
            )
    return tuple(word[dim] for word in told)
