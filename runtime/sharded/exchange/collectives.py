"""The collectives of sharded modules: one path for NCCL and gloo, which torch chooses by the tensors' device.

What travels does so as bytes or words that gloo knows too, in one call of `all_to_all_single` for all tables,
which on gloo is also by far the fastest collective; large gradients go point to point (`to_places`). What gloo lacks is
made here and nowhere else.
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
"""One of torch.distributed: of tensors, on a group."""


class Ranks:
    """Who takes part: the ranks of a group, in its order, and a group of the module's own for each kind of traffic.

    `given`: a ProcessGroup, a DeviceMesh (two dimensions: nodes and the ranks of a node), or None: all ranks; without
    torch.distributed, this process alone.
    """

    def __init__(self, given: object, node_size: int | None, timeout: timedelta | None) -> None:
        group, mesh_node_size = _group_of(given)
        self.alone = group is None and not dist.is_initialized()
        if given is not None and not dist.is_initialized():
            raise RuntimeError("process_group: torch.distributed is not initialised; call init_process_group first")
        self.global_ranks = [0] if self.alone else dist.get_process_group_ranks(group or dist.group.WORLD)
        self.size = len(self.global_ranks)
        self.rank = 0 if self.alone else self.global_ranks.index(dist.get_rank())
        self.given_node_size = node_size or mesh_node_size
        self.node_size = self.given_node_size or _node_size_of_environment(self.global_ranks)
        self.timeout = timeout or (None if self.alone else timeout_of(group or dist.group.WORLD))
        self.given = group

    @property
    def are_all(self) -> bool:
        """Whether no rank of the program is left out."""
        return self.alone or self.size == dist.get_world_size()

    @cached_property
    def here(self) -> int:
        """Ranks of the program on this machine, as far as is known."""
        said = os.environ.get("LOCAL_WORLD_SIZE", "")
        return int(said) if said.isdigit() else self.size

    def check_device(self, device: torch.device) -> None:
        """Refuses a group that has no collectives for tensors of this device."""
        if self.alone or device.type == "meta":
            return
        backends = dist.get_backend_config(self.given)
        if device.type not in [part.split(":")[0] for part in backends.split(",")]:
            raise ValueError(
                f"process_group: its backends ({backends}) have no collectives for device {device.type!r}; give a "
                "group made by dist.new_group(backend='gloo') for the CPU or 'nccl' for GPUs"
            )

    def new_group(self) -> dist.ProcessGroup | None:
        """A group of these ranks that nobody else's collectives get into. All of them must call."""
        if self.alone:
            return None
        try:
            self._check_names()
            group = dist.new_group(
                self.global_ranks,
                timeout=self.timeout,
                backend=None if self.given is None else dist.get_backend_config(self.given),
                use_local_synchronization=not self.are_all,
            )
            return group if self.are_all else end_at_exit(group)
        except RankError:
            raise
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} of {self.size}: no process group: another rank died, or did not come to make the "
                "same module within the timeout; look for the first failure in the other ranks' output. torch says: "
                f"{error}"
            ) from error

    def _check_names(self) -> None:
        """torch names a group of a part of the ranks by how many groups each of them is in: if those numbers differ,
        they would wait for each other under different names."""
        if self.are_all:
            return
        numbers = [0] * self.size
        dist.all_gather_object(numbers, number_of_groups(), group=self.given)
        other = next((rank for rank, number in enumerate(numbers) if number != numbers[0]), None)
        if other is not None:
            raise RankError(
                f"process_group: its rank 0 is in {numbers[0]} process groups, its rank {other} in {numbers[other]}; "
                "torch can make a group of a part of all ranks only among ranks that are in equally many; make other "
                "groups after the module, or on all of its ranks"
            )


def _group_of(given: object) -> tuple[dist.ProcessGroup | None, int | None]:
    """The group, and how many of its ranks share a node if a mesh says so."""
    if given is None or isinstance(given, dist.ProcessGroup):
        return given, None
    if hasattr(given, "get_group") and hasattr(given, "mesh"):
        if given.mesh.dim() == 1:
            return given.get_group(), None
        if given.mesh.dim() == 2:
            ranks = sorted(given.mesh.flatten().tolist())
            if ranks != given.mesh.flatten().tolist():
                raise ValueError(f"process_group: a mesh of ranks {ranks} in another order; give it in ascending order")
            if len(ranks) == dist.get_world_size():
                return dist.group.WORLD, given.mesh.shape[1]
            return end_at_exit(dist.new_group(ranks, use_local_synchronization=True)), given.mesh.shape[1]
        raise ValueError(
            f"process_group: a mesh of {given.mesh.dim()} dimensions; allowed: 1, or 2 (nodes, ranks a node)"
        )
    raise TypeError(f"process_group: got {type(given).__name__}; allowed: a ProcessGroup, a DeviceMesh, or None")


def _node_size_of_environment(global_ranks: Sequence[int]) -> int:
    """What torchrun says, where the ranks fill nodes of that size; else they are taken as one node."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    size, most = int(said) if said.isdigit() else 0, len(global_ranks)
    nodes = [list(global_ranks[first : first + size]) for first in range(0, most, size)] if size else []
    whole = all(node[0] % size == 0 and node == list(range(node[0], node[0] + size)) for node in nodes)
    return size if nodes and whole else most


class Exchange:
    """The collectives of one group, and how many bytes they sent to other ranks."""

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
        """Runs of a contiguous 1-D tensor to each rank, in the order of ranks; what the others sent, in that order.

        `into`: where to put it. `RankError` if another rank died, or did not come within the group's timeout.
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

    def to_places(self, name: str, sent: Sequence[Tensor], into: Sequence[Tensor], large: bool) -> None:
        """Contiguous bytes for every other rank, wherever they lie; what each of them sent, to where `into` says. What
        stands there for this rank itself is left alone.

        `large`, the same on all ranks: point to point (but for GPUs over gloo, which lacks it), because an all-to-all
        wants everything side by side on both ends. Else by an all-to-all, which ranks need not sleep for (`waiting`);
        that is worth a copy.
        """
        size, own = self.ranks.size, self.ranks.rank
        others = [rank for rank in range(size) if rank != own]
        if large and size > 2 and (sent[own].is_cpu or self._has_nccl):
            self.count(name, sum(sent[rank].numel() for rank in others))
            moved = {self.ranks.global_ranks[rank]: (sent[rank], into[rank]) for rank in others}
            self.call(name, _send_and_receive, moved)
            return
        send_sizes, receive_sizes = ([p.numel() * (r != own) for r, p in enumerate(ps)] for ps in (sent, into))
        places = [into[rank] for rank in others]
        place = side_by_side(places)
        flat = joined([sent[rank] for rank in others], sent[own].device)
        received = self.all_to_all(name, flat, send_sizes, receive_sizes, place)
        if place is None:
            for part, to in zip(received.split([part.numel() for part in places]), places, strict=True):
                to.copy_(part)

    @cached_property
    def _has_nccl(self) -> bool:
        return "nccl" in str(dist.get_backend_config(self.group))

    def all_reduce(self, name: str, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        self.count(name, tensor.nbytes)
        if self.ranks.size > 1:
            self._run(name, dist.all_reduce, tensor)
        return tensor

    def reduce_scatter(self, name: str, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        """`[sum(rows), width]`: the sum over ranks of the rows that are this rank's.

        Neither NCCL nor gloo scatters unequal parts; equal ones they do, unequal ones are padded to the largest.
        """
        width, most, mine = tensor.shape[1], max(rows), rows[self.ranks.rank]
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
        return scattered[:mine]

    def all_gather(self, name: str, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        """`[sum(rows), width]`: every rank's rows, in the order of ranks. Unequal ones travel padded to the largest."""
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
        """A rank's tensor, on all, in place. Not counted: no part of a step."""
        if self.ranks.size > 1:
            raw = tensor.view(torch.uint8) if tensor.element_size() < 4 else tensor
            self.call("rows", dist.broadcast, raw, self.ranks.global_ranks[rank])
        return tensor

    def close(self) -> None:
        """Gives the group back, as also happens when the exchange is freed or the program ends. A group of a part of
        the ranks stays with torch until the program ends, because torch would give its name, and with it what it left
        in the store, to the next group."""
        if self._end is not None:
            self._end()
        self.group = None

    def count(self, name: str, sent: int) -> None:
        """Adds to a counter."""
        self.counters[name] = self.counters.get(name, 0) + sent

    def _run(self, name: str, collective: Collective, to: Tensor, *arguments: object) -> None:
        """A collective of a step: CPU tensors are waited for as `waiting` says, GPUs go on by themselves."""
        if to.is_cpu:
            self.call(name, self._awaited, collective, to, *arguments)
        else:
            self.call(name, collective, to, *arguments)

    def _awaited(self, collective: Collective, to: Tensor, *arguments: object, group: dist.ProcessGroup | None) -> None:
        work = collective(to, *arguments, group=group, async_op=True)
        if work is not None:
            moved = max(tensor.nbytes for tensor in (to, *arguments) if isinstance(tensor, Tensor))
            wait(work, moved, self.ranks.here)

    def call(self, name: str, collective: Callable[..., object], *arguments: object) -> None:
        """A collective on this group, whose failure says what it was for."""
        try:
            collective(*arguments, group=self.group)
        except torch.OutOfMemoryError:  # nobody else's fault
            raise
        except RuntimeError as error:
            raise RankError(
                f"rank {self.ranks.rank} of {self.ranks.size}: the exchange of {name!r} failed: another rank died, "
                "raised, or did not come within the group's timeout; look for the first failure in the other ranks' "
                f"output. torch says: {error}"
            ) from error


def _send_and_receive(moved: Mapping[int, tuple[Tensor, Tensor]], group: dist.ProcessGroup | None) -> None:
    """To and from other ranks, by their numbers in the program; nothing travels where there is nothing."""
    received = [dist.P2POp(dist.irecv, into, rank, group) for rank, (_, into) in moved.items() if into.numel()]
    sent = [dist.P2POp(dist.isend, part, rank, group) for rank, (part, _) in moved.items() if part.numel()]
    if received or sent:
        for work in dist.batch_isend_irecv(received + sent):
            work.wait()


def side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """Flat tensors that lie one behind the other in one block of memory, as one; None: they do not."""
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
    """One flat tensor; no copy if the parts lie side by side already."""
    if not any(part.numel() for part in parts):
        return torch.empty(0, dtype=dtype, device=device)
    found = side_by_side(parts)
    return torch.cat(list(parts)) if found is None else found


def _named(name: str, older: str) -> Collective:
    """A collective by its name, or by the one it had before torch 2.13."""
    found: Collective = getattr(dist, name, None) or getattr(dist, older)
    return found


def _bytes(sizes: Sequence[int]) -> list[int]:
    return [2 * size for size in sizes]
