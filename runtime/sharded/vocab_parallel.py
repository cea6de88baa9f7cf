"""`VocabParallelEmbedding`: an embedding for transformer models, of which every rank holds a part."""

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
"""About as many numbers are drawn at once at the start."""
BLOCK = 16
"""torch draws normal numbers on the CPU in blocks of so many: a draw cut between blocks is the same draw."""


class VocabParallelEmbedding(nn.Module):
    """nn.Embedding over the ranks of a group: same ids on every rank, same result on every rank.

    `weight` is this rank's part, a parameter: ceil(V / ranks) consecutive rows (`sharding_dim=0`), or as many columns
    of all rows (1); the last ranks hold fewer, or none. `process_group`: a ProcessGroup, a 1-D DeviceMesh or None: all
    ranks, and where torch.distributed is not initialised a rank alone. Ids that are no row give zeros. `padding_idx`:
    as nn.Embedding's, the row starts as zeros and gets no gradient.

    Ranks that call with the same seed start with the rows of nn.Embedding on one rank (on a GPU: of this module on one
    rank), whatever their number. Gradients are as `ef.functional.embedding` says; any optimizer of torch trains the
    part. A state dict holds the part; `full()` and `load_full()` are for other numbers of ranks. Under
    DistributedDataParallel, use a group that holds ranks with the same part.
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
        """Draws all rows anew, from a standard normal distribution, and keeps this rank's."""
        if self.weight.is_meta:
            return
        for first, last in _row_blocks(self.num_embeddings, self.embedding_dim):
            drawn = self.weight.new_empty(last - first, self.embedding_dim).normal_()
            if self.padding_idx is not None and first <= self.padding_idx < last:
                drawn[self.padding_idx - first] = 0
            self._keep(drawn, first)

    @torch.no_grad()
    def load_full(self, weight: Tensor) -> None:
        """This rank's part of `weight`, `[num_embeddings, embedding_dim]` of any dtype and device."""
        if tuple(weight.shape) != (self.num_embeddings, self.embedding_dim):
            raise ValueError(
                f"weight: shape {tuple(weight.shape)}; allowed: {(self.num_embeddings, self.embedding_dim)}, the whole"
            )
        self._keep(weight, 0)

    @torch.no_grad()
    def full(self) -> Tensor:
        """The whole weight, on every rank; all must call it."""
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
        """`[*input.shape, embedding_dim]`; `input` int32 or int64 of any shape.

        Ids from `num_embeddings` on are prompts: row `(id - num_embeddings) + task * task_vocab_size` of
        `prompt_table`, `[tasks * task_vocab_size, embedding_dim]`, which every rank has whole. A prompt past its task's
        vocabulary gives zeros. `tasks`: a task an id, or what broadcasts to it with as many dims (`[batch, 1]`); None:
        task 0. `task_vocab_size` None: the table is one task's.
        """
        check_ids("input", input)
        check_device(self.weight, input=input, prompt_table=prompt_table, tasks=tasks)
        parts = self.parts if len(self.parts.sizes) > 1 else None
        padding = -1 if self.padding_idx is None else self.padding_idx - (self.sharding_dim == 0) * self.parts.first
        found = parallel_embedding(input, self.weight, parts, padding_idx=padding)
        if prompt_table is None:
            if tasks is not None or task_vocab_size is not None:
                raise ValueError("tasks and task_vocab_size go with a prompt_table; it is None")
            return found
        rows = self._prompt_rows(input, prompt_table, tasks, task_vocab_size)
        prompts = parallel_embedding(rows, prompt_table, None).to(found.dtype)
        return torch.where((input >= self.num_embeddings)[..., None], prompts, found)

    def _prompt_rows(
        self, input: Tensor, table: Tensor, tasks: Tensor | None, task_vocab_size: int | Tensor | None
    ) -> Tensor:
        """Rows of the prompt table; -1 where there is none."""
        if table.dim() != 2 or table.shape[1] != self.embedding_dim:
            raise ValueError(f"prompt_table: shape {tuple(table.shape)}; allowed: [rows, {self.embedding_dim}]")
        if task_vocab_size is None:
            if tasks is not None:
                raise ValueError("tasks: given without task_vocab_size; give the prompts of a task")
            task_vocab_size = table.shape[0]
        prompt = input.to(torch.int64) - self.num_embeddings
        row = prompt
        if tasks is not None:
            if tasks.dim() not in (0, input.dim()):
                raise ValueError(
                    f"tasks: shape {tuple(tasks.shape)}; allowed: {tuple(input.shape)} as input, or 1 instead of a size"
                )
            row = prompt + tasks.to(torch.int64) * task_vocab_size
        return row.masked_fill((prompt < 0) | (prompt >= task_vocab_size), -1)

    def _keep(self, rows: Tensor, first: int) -> None:
        """Copies what is this rank's of rows `first` and up."""
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
        """A copy in the same group, which cannot be copied itself."""
        made = self.__class__.__new__(self.__class__)
        memo[id(self)], memo[id(self.parts)] = made, self.parts
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


def _parts(process_group: object, dim: int, size: int) -> WeightParts:
    """Equal parts of ceil(size / ranks), the last ones shorter or empty."""
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return WeightParts(None, 0, dim, (size,))
    group = process_group_of(process_group, "process_group")
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        raise ValueError("process_group does not hold this process; make the module only on ranks of its group")
    each = -(-size // ranks)
    return WeightParts(group, rank, dim, tuple(min(each, max(0, size - each * r)) for r in range(ranks)))


def _row_blocks(rows: int, dim: int) -> Iterator[tuple[int, int]]:
    """Borders of blocks that are drawn one by one, with the numbers of one draw of all rows (on the CPU)."""
    step = max(1, DRAWN_ELEMENTS // (dim * BLOCK)) * BLOCK
    first = 0
    while first < rows:
        last = first + step
        last = last if (rows - last) * dim >= BLOCK else rows  # a draw of less than a block is another kind of draw
        yield first, last
        first = last
