"""`VocabParallelEmbedding`: an embedding for transformer models whose weight is split over ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embforge.chosen_device import chosen_device
from embforge.functional import parallel_embedding
from embforge.functional.external_weights import check_device, check_ids
from embforge.functional.tensor_parallel import WeightParts, gathered_columns, gathered_rows, process_group_of

DRAWN_ELEMENTS = 1 << 22
"""About how many numbers are drawn at once for the initial weight."""
BLOCK = 16
"""torch draws normal numbers on the CPU in blocks of this size: if a draw is split between blocks, its numbers stay the
same."""


class VocabParallelEmbedding(nn.Module):
    """An nn.Embedding that is split over the ranks of a group. All ranks pass the same ids and get the same result.

    `weight` is a parameter with this rank's part: ceil(V / ranks) consecutive rows (`sharding_dim=0`), or ceil(D /
    ranks) columns of all rows (1); the last ranks may hold fewer, or none. `process_group` is a ProcessGroup, a
    DeviceMesh of one dimension, or None for all ranks; if torch.distributed is not initialised, this process is the
    only rank. Ids that are not rows give zeros. `padding_idx` is that of nn.Embedding: the row starts as zeros and gets
    no gradient.

    If all ranks have the same seed, the initial rows are those of nn.Embedding on one rank (on a GPU: those of this
    module on one rank), for any number of ranks. Gradients are those of `ef.functional.embedding`; any torch optimizer
    can train the part. The state dict holds the part; to change the number of ranks, use `full()` and `load_full()`.
    Under DistributedDataParallel, use a group of ranks that hold the same part.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        sharding_dim: int = 0,
        process_group: object = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("num_embeddings", num_embeddings), ("embedding_dim", embedding_dim)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} is not allowed; allowed: a whole number from 1")
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"padding_idx={padding_idx} is not a row; allowed: {-num_embeddings} to {num_embeddings - 1}"
            )
        if sharding_dim not in (0, 1):
            raise ValueError(f"sharding_dim={sharding_dim!r} is not allowed; allowed: 0 (rows), 1 (columns)")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.sharding_dim = sharding_dim
        self.parts = _parts(process_group, sharding_dim, (num_embeddings, embedding_dim)[sharding_dim])
        shape = [num_embeddings, embedding_dim]
        shape[sharding_dim] = self.parts.sizes[self.parts.rank]
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=chosen_device(device)))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws all rows again from a standard normal distribution, and keeps those of this rank."""
        if self.weight.is_meta:
            return
        for first, last in _row_blocks(self.num_embeddings, self.embedding_dim):
            drawn = self.weight.new_empty(last - first, self.embedding_dim).normal_()
            if self.padding_idx is not None and first <= self.padding_idx < last:
                drawn[self.padding_idx - first] = 0
            self._keep(drawn, first)

    @torch.no_grad()
    def load_full(self, weight: Tensor) -> None:
        """Copies this rank's part of `weight`, `[num_embeddings, embedding_dim]` of any dtype and device."""
        if tuple(weight.shape) != (self.num_embeddings, self.embedding_dim):
            raise ValueError(
                f"weight: shape {tuple(weight.shape)}; allowed: {(self.num_embeddings, self.embedding_dim)}, the "
                "whole weight"
            )
        self._keep(weight, 0)

    @torch.no_grad()
    def full(self) -> Tensor:
        """The whole weight, on every rank. All ranks must call."""
        own = self.weight.detach()
        if len(self.parts.sizes) == 1:
            return own.clone()
        return gathered_rows(own, self.parts) if self.sharding_dim == 0 else gathered_columns(own, self.parts)

    def forward(
        self,
        input: Tensor,
        prompt_table: Tensor | None = None,
        tasks: Tensor | None = None,
        task_vocab_size: int | Tensor | None = None,
    ) -> Tensor:
        """Looks up ids: `input` is int32 or int64 of any shape, the result is `[*input.shape, embedding_dim]`.

        Ids from `num_embeddings` on are prompts. A prompt is row `(id - num_embeddings) + task * task_vocab_size` of
        `prompt_table`, `[tasks * task_vocab_size, embedding_dim]`, which is not split: every rank passes the whole
        table. A prompt outside of its task's vocabulary gives zeros. `tasks` has one task per id, or a shape that
        broadcasts to that of `input` and has the same number of dimensions, e.g. `[batch, 1]`; None means task 0.
        `task_vocab_size=None` means that the whole table belongs to one task.
        """
        check_ids("input", input)
        check_device(self.weight, input=input, prompt_table=prompt_table, tasks=tasks)
        parts = self.parts if len(self.parts.sizes) > 1 else None
        padding = -1 if self.padding_idx is None else self.padding_idx - (self.sharding_dim == 0) * self.parts.first
        result = parallel_embedding(input, self.weight, parts, padding_idx=padding)
        if prompt_table is None:
            if tasks is not None or task_vocab_size is not None:
                raise ValueError("tasks and task_vocab_size need a prompt_table; it is None")
            return result
        rows = self._prompt_rows(input, prompt_table, tasks, task_vocab_size)
        prompts = parallel_embedding(rows, prompt_table, None).to(result.dtype)
        return torch.where((input >= self.num_embeddings)[..., None], prompts, result)

    def _prompt_rows(
        self, input: Tensor, table: Tensor, tasks: Tensor | None, task_vocab_size: int | Tensor | None
    ) -> Tensor:
        """For each id, the row of its prompt in the prompt table; -1 if it has none."""
        if table.dim() != 2 or table.shape[1] != self.embedding_dim:
            raise ValueError(f"prompt_table: shape {tuple(table.shape)}; allowed: [rows, {self.embedding_dim}]")
        if task_vocab_size is None:
            if tasks is not None:
                raise ValueError("tasks: passed without task_vocab_size; pass the number of prompts per task, too")
            task_vocab_size = table.shape[0]
        prompt = input.to(torch.int64) - self.num_embeddings
        row = prompt
        if tasks is not None:
            if tasks.dim() not in (0, input.dim()):
                raise ValueError(
                    f"tasks: shape {tuple(tasks.shape)}; allowed: {tuple(input.shape)}, the shape of input, "
                    "with 1 in place of any size"
                )
            row = prompt + tasks.to(torch.int64) * task_vocab_size
        return row.masked_fill((prompt < 0) | (prompt >= task_vocab_size), -1)

    def _keep(self, rows: Tensor, first: int) -> None:
        """Copies this rank's part of `rows`, whose first row is row `first` of the whole weight."""
        begin, size = self.parts.first, self.parts.sizes[self.parts.rank]
        if self.sharding_dim == 1:
            self.weight[first : first + len(rows)].copy_(rows[:, begin : begin + size])
            return
        low, high = max(first, begin), min(first + len(rows), begin + size)
        if low < high:
            self.weight[low - begin : high - begin].copy_(rows[low - first : high - first])

    def extra_repr(self) -> str:
        ranks = len(self.parts.sizes)
        padded = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        split = f", rank {self.parts.rank} of {ranks}, sharding_dim={self.sharding_dim}" if ranks > 1 else ""
        return f"{self.num_embeddings}, {self.embedding_dim}{padded}{split}"

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabParallelEmbedding:
        """A copy with the same process group, because a process group cannot be copied."""
        module = self.__class__.__new__(self.__class__)
        memo[id(self)], memo[id(self.parts)] = module, self.parts
        module.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return module


def _parts(process_group: object, dim: int, size: int) -> WeightParts:
    """Parts of ceil(size / ranks) rows or columns, of which the last ones may be smaller or empty."""
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return WeightParts(None, 0, dim, (size,))
    group = process_group_of(process_group, "process_group")
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        raise ValueError("process_group: this process is not in it; make the module only on ranks of its group")
    each = -(-size // ranks)
    return WeightParts(group, rank, dim, tuple(min(each, max(0, size - each * r)) for r in range(ranks)))


def _row_blocks(rows: int, dim: int) -> Iterator[tuple[int, int]]:
    """The first and the last row of blocks that are drawn one after the other. On the CPU, this gives the same numbers
    as one draw of all rows."""
    step = max(1, DRAWN_ELEMENTS // (dim * BLOCK)) * BLOCK
    first = 0
    while first < rows:
        last = first + step
        last = last if (rows - last) * dim >= BLOCK else rows  # torch draws less than a block differently
        yield first, last
        first = last
