"""The collectives of sharded modules: one path for NCCL and gloo, between which torch chooses by the tensors' device.

Everything is sent as bytes or words, which gloo supports too, in one call of `all_to_all_single` for all tables. On
gloo, this is also by far the fastest collective. Only large gradients are sent point to point (`exchange_blocks`). This
is the only file that works around what gloo lacks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from embforge.codegen.errors import RankError
from embforge.group_ending import end_at_exit, end_with
from embforge.sharded.exchange.buffers import Buffers
from embforge.sharded.exchange.waiting import wait
from embforge.torch_internals import number_of_groups, timeout_of

Collective = Callable[..., "dist.Work | None"]
"""A collective of torch.distributed: it takes tensors, and `group=`."""


class Ranks:
    """The ranks that share a module, in the order of their group. Makes new groups of these ranks for the module.

    `process_group` is a ProcessGroup, a DeviceMesh (of two dimensions: nodes, and the ranks of a node), or None for all
    ranks. Without torch.distributed, this process is the only rank.
    """

    def __init__(self, process_group: object, node_size: int | None, timeout: timedelta | None) -> None:
        group, mesh_node_size = _group_of(process_group)
        self.alone = group is None and not dist.is_initialized()
        if process_group is not None and not dist.is_initialized():
            raise RuntimeError("process_group: torch.distributed is not initialised; call init_process_group first")
        self.global_ranks = [0] if self.alone else dist.get_process_group_ranks(group or dist.group.WORLD)
        self.size = len(self.global_ranks)
        self.rank = 0 if self.alone else self.global_ranks.index(dist.get_rank())
        self.explicit_node_size = node_size or mesh_node_size
        """The number of ranks per node if the caller or the mesh says it."""
        self.node_size = self.explicit_node_size or _node_size_of_environment(self.global_ranks)
        self.timeout = timeout or (None if self.alone else timeout_of(group or dist.group.WORLD))
        self.parent_group = group
        """The caller's group; None for all ranks."""

    @property
    def are_all(self) -> bool:
        """Whether these are all ranks of the program."""
        return self.alone or self.size == dist.get_world_size()

    @cached_property
    def on_this_machine(self) -> int:
        """How many ranks of the program share this machine, as torchrun says; otherwise all of them."""
        local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
        return int(local_world_size) if local_world_size.isdigit() else self.size

    def check_device(self, device: torch.device) -> None:
        """Raises ValueError if the group has no collectives for tensors on this device."""
        if self.alone or device.type == "meta":
            return
        backends = dist.get_backend_config(self.parent_group)
        if device.type not in [part.split(":")[0] for part in backends.split(",")]:
            raise ValueError(
                f"process_group: its backends ({backends}) have no collectives for device {device.type!r}; use a "
                "group made by dist.new_group(backend='gloo') for the CPU or 'nccl' for GPUs"
            )

    def new_group(self) -> dist.ProcessGroup | None:
        """Makes a group of these ranks that no other code uses. All of the ranks must call."""
        if self.alone:
            return None
        try:
            self._check_names()
            group = dist.new_group(
                self.global_ranks,
                timeout=self.timeout,
                backend=None if self.parent_group is None else dist.get_backend_config(self.parent_group),
                use_local_synchronization=not self.are_all,
            )
            return group if self.are_all else end_at_exit(group)
        except RankError:
            raise
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} of {self.size}: making a process group failed: another rank died, or did not make "
                "the same module within the timeout; look for the first failure in the output of the other ranks. "
                f"torch says: {error}"
            ) from error

    def _check_names(self) -> None:
        """Raises RankError if the ranks are in different numbers of groups. torch names a group of some of the ranks by
        this number, so the ranks would wait for each other under different names."""
        if self.are_all:
            return
        numbers = [0] * self.size
        dist.all_gather_object(numbers, number_of_groups(), group=self.parent_group)
        other = next((rank for rank, number in enumerate(numbers) if number != numbers[0]), None)
        if other is not None:
            raise RankError(
                f"process_group: its rank 0 is in {numbers[0]} process groups, its rank {other} in {numbers[other]}; "
                "torch can make a group of some of the ranks only if all of these are in the same number of groups; "
                "make other groups after the module, or on all of its ranks"
            )


def _group_of(process_group: object) -> tuple[dist.ProcessGroup | None, int | None]:
    """The group, and the number of its ranks per node if a mesh says it."""
    if process_group is None or isinstance(process_group, dist.ProcessGroup):
        return process_group, None
    if not (hasattr(process_group, "get_group") and hasattr(process_group, "mesh")):
        raise TypeError(
            f"process_group: got {type(process_group).__name__}; allowed: a ProcessGroup, a DeviceMesh, or None"
        )
    mesh = process_group.mesh
    if mesh.dim() == 1:
        return process_group.get_group(), None
    if mesh.dim() == 2:
        ranks = sorted(mesh.flatten().tolist())
        if ranks != mesh.flatten().tolist():
            raise ValueError(
                f"process_group: the ranks of the mesh, {mesh.flatten().tolist()}, are not in ascending order; pass a "
                f"mesh of {ranks}"
            )
        if len(ranks) == dist.get_world_size():
            return dist.group.WORLD, mesh.shape[1]
        return end_at_exit(dist.new_group(ranks, use_local_synchronization=True)), mesh.shape[1]
    raise ValueError(f"process_group: a mesh of {mesh.dim()} dimensions; allowed: 1, or 2 (nodes, ranks per node)")


def _node_size_of_environment(global_ranks: Sequence[int]) -> int:
    """The number of ranks per node that torchrun says, if the ranks fill nodes of that size; otherwise all ranks are
    taken as one node."""
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    size, count = int(local_world_size) if local_world_size.isdigit() else 0, len(global_ranks)
    nodes = [list(global_ranks[first : first + size]) for first in range(0, count, size)] if size else []
    whole = all(node[0] % size == 0 and node == list(range(node[0], node[0] + size)) for node in nodes)
    return size if nodes and whole else count


class Exchange:
    """The collectives of one group, and counters of the bytes that they sent to other ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.group = ranks.new_group()
        self._end = None if self.group is None or not ranks.are_all else end_with(self, self.group)
        self.counters: dict[str, int] = {}
        self.buffers = Buffers()

    def all_to_all(
        self,
        name: str,
        sent: Tensor,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
        into: Tensor | None = None,
    ) -> Tensor:
        """Sends a run of a contiguous 1-D tensor to each rank, in the order of ranks. Returns what the ranks sent, in
        the same order, in `into` if that is passed.

        Raises `RankError` if another rank died or did not call within the group's timeout.
        """
        own = self.ranks.rank
        self.count(name, (sum(send_sizes) - send_sizes[own]) * sent.element_size())
        if self.ranks.size == 1:
            return sent if into is None else into.copy_(sent)
        received = into
        if received is None:
            received = self.buffers.empty(name, (sum(receive_sizes),), sent.dtype, sent.device)
        self._run(
            name,
            dist.all_to_all_single,
            received.view(torch.uint8) if sent.element_size() == 2 else received,  # gloo has no bf16
            sent.view(torch.uint8) if sent.element_size() == 2 else sent,
            _bytes(receive_sizes) if sent.element_size() == 2 else list(receive_sizes),
            _bytes(send_sizes) if sent.element_size() == 2 else list(send_sizes),
        )
        return received

    def exchange_blocks(self, name: str, sent: Sequence[Tensor], into: Sequence[Tensor], large: bool) -> None:
        """Sends a block of contiguous bytes to every other rank, and writes the blocks of the other ranks to those of
        `into`. This rank's own block of `into` is not changed.

        The blocks may be anywhere in memory, but an all-to-all needs them next to each other on both ends. So with
        `large`, which must be the same on all ranks, blocks are sent point to point, except for GPUs over gloo, which
        lacks that. Otherwise they are copied for an all-to-all, for which ranks do not have to sleep (see `waiting`).
        """
        size, own = self.ranks.size, self.ranks.rank
        others = [rank for rank in range(size) if rank != own]
        if large and size > 2 and (sent[own].is_cpu or self._has_nccl):
            self.count(name, sum(sent[rank].numel() for rank in others))
            blocks = {self.ranks.global_ranks[rank]: (sent[rank], into[rank]) for rank in others}
            self.call(name, _send_and_receive, blocks)
            return
        send_sizes, receive_sizes = ([p.numel() * (r != own) for r, p in enumerate(ps)] for ps in (sent, into))
        targets = [into[rank] for rank in others]
        whole_target = adjacent(targets)
        flat = joined([sent[rank] for rank in others], sent[own].device)
        received = self.all_to_all(name, flat, send_sizes, receive_sizes, whole_target)
        if whole_target is None:
            for block, target in zip(received.split([target.numel() for target in targets]), targets, strict=True):
                target.copy_(block)

    @cached_property
    def _has_nccl(self) -> bool:
        return "nccl" in str(dist.get_backend_config(self.group))

    def all_reduce(self, name: str, tensor: Tensor) -> Tensor:
        """Adds a tensor up over ranks, in place."""
        self.count(name, tensor.nbytes)
        if self.ranks.size > 1:
            self._run(name, dist.all_reduce, tensor)
        return tensor

    def reduce_scatter(self, name: str, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        """Adds a tensor `[sum(rows), width]` up over ranks. Returns this rank's rows of the sum; `rows` has the number
        of rows of each rank.

        NCCL and gloo can only scatter parts of the same size, so smaller parts are padded to the largest.
        """
        width, most, own = tensor.shape[1], max(rows), rows[self.ranks.rank]
        self.count(name, (self.ranks.size - 1) * most * width * tensor.element_size())
        if self.ranks.size == 1:
            return tensor
        if min(rows) < most:
            padded = tensor.new_zeros((self.ranks.size, most, width))
            for part, block in zip(padded, tensor.split(list(rows)), strict=True):
                part[: block.shape[0]] = block
            tensor = padded.view(-1, width)
        scattered = tensor.new_empty((most, width))
        self._run(name, _named("reduce_scatter_single", "reduce_scatter_tensor"), scattered, tensor)
        return scattered[:own]

    def all_gather(self, name: str, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        """Returns the rows of all ranks, `[sum(rows), width]`, in the order of ranks. `rows` has the number of rows of
        each rank. Smaller parts are padded to the largest on their way."""
        width, most = tensor.shape[1], max(rows)
        self.count(name, (self.ranks.size - 1) * most * width * tensor.element_size())
        if self.ranks.size == 1:
            return tensor
        if tensor.shape[0] < most:
            tensor = torch.cat([tensor, tensor.new_zeros((most - tensor.shape[0], width))])
        gathered = tensor.new_empty((self.ranks.size * most, width))
        self._run(name, _named("all_gather_single", "all_gather_into_tensor"), gathered, tensor.contiguous())
        if min(rows) == most:
            return gathered
        return torch.cat([block[:count] for block, count in zip(gathered.split(most), rows, strict=True)])

    def broadcast(self, tensor: Tensor, rank: int) -> Tensor:
        """Copies the tensor of a rank to all ranks, in place. The bytes are not counted, because no step does this."""
        if self.ranks.size > 1:
            raw = tensor.view(torch.uint8) if tensor.element_size() < 4 else tensor
            self.call("rows", dist.broadcast, raw, self.ranks.global_ranks[rank])
        return tensor

    def close(self) -> None:
        """Destroys the group, which also happens when the exchange is freed or the program ends. A group of only some
        of the ranks is kept until the program ends: otherwise torch would give its name to the next group, which would
        then find old entries under that name in the store."""
        if self._end is not None:
            self._end()
        self.group = None

    def count(self, name: str, sent: int) -> None:
        """Adds to the counter of bytes with this name."""
        self.counters[name] = self.counters.get(name, 0) + sent

    def _run(self, name: str, collective: Collective, to: Tensor, *arguments: object) -> None:
        """Runs a collective of a step. For tensors on the CPU it waits as `waiting` says; GPUs need no waiting."""
        if to.is_cpu:
            self.call(name, self._awaited, collective, to, *arguments)
        else:
            self.call(name, collective, to, *arguments)

    def _awaited(self, collective: Collective, to: Tensor, *arguments: object, group: dist.ProcessGroup | None) -> None:
        work = collective(to, *arguments, group=group, async_op=True)
        if work is not None:
            num_bytes = max(tensor.nbytes for tensor in (to, *arguments) if isinstance(tensor, Tensor))
            wait(work, num_bytes, self.ranks.on_this_machine)

    def call(self, name: str, collective: Callable[..., object], *arguments: object) -> None:
        """Runs a collective on this group. If it fails, the error has the name of the exchange."""
        try:
            collective(*arguments, group=self.group)
        except torch.OutOfMemoryError:  # not caused by another rank
            raise
        except RuntimeError as error:
            raise RankError(
                f"rank {self.ranks.rank} of {self.ranks.size}: the exchange of {name!r} failed: another rank died, "
                "raised, or did not call within the group's timeout; look for the first failure in the output of the "
                f"other ranks. torch says: {error}"
            ) from error


def _send_and_receive(blocks: Mapping[int, tuple[Tensor, Tensor]], group: dist.ProcessGroup | None) -> None:
    """Exchanges blocks with other ranks: for each of their numbers in the program, the block to send and the one to
    receive into. Empty blocks are not sent."""
    received = [dist.P2POp(dist.irecv, into, rank, group) for rank, (_, into) in blocks.items() if into.numel()]
    sent = [dist.P2POp(dist.isend, block, rank, group) for rank, (block, _) in blocks.items() if block.numel()]
    if received or sent:
        for work in dist.batch_isend_irecv(received + sent):
            work.wait()


def adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """Flat tensors as one tensor, if each begins in memory where the one before ends; otherwise None."""
    parts = [part for part in parts if part.numel()]
    if not parts:
        return None
    first = parts[0]
    at = first.data_ptr()
    for part in parts:
        if part.data_ptr() != at or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        at += part.nbytes
    return first.as_strided((sum(part.numel() for part in parts),), (1,))


def joined(parts: Sequence[Tensor], device: torch.device, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Flat tensors as one tensor, without a copy if they are adjacent in memory already."""
    if not any(part.numel() for part in parts):
        return torch.empty(0, dtype=dtype, device=device)
    whole = adjacent(parts)
    return torch.cat(list(parts)) if whole is None else whole


def _named(name: str, older: str) -> Collective:
    """A collective by its name, or by the name that it had before torch 2.13."""
    collective: Collective = getattr(dist, name, None) or getattr(dist, older)
    return collective


def _bytes(sizes: Sequence[int]) -> list[int]:
    return [2 * size for size in sizes]
