"""The hierarchical exchange of vectors, in two steps.

An owner sends partial pools to that rank of its own node which has the same position in the node as the rank of the
sample. This rank adds up what the ranks of its node send, and sends the sum along its rail (the ranks with the same
position in all nodes) to the rank of the sample. Gradients go the same way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from embforge.codegen.stages import PIECE_WORDS, SOURCE_WORDS, StagePlan
from embforge.launch.stages import stages_of
from embforge.sharded.exchange.collectives import Exchange
from embforge.sharded.exchange.formats import row_bytes
from embforge.sharded.exchange.wire import Wire
from embforge.sharded.stages.stage_metadata import StageArrays


@dataclass(frozen=True)
class HierarchicalVectors:
    """The exchange of the hierarchical columns of a module. `samples` are the numbers of samples of all ranks."""

    arrays: StageArrays
    exchange: Exchange
    forward_wire: Wire
    backward_wire: Wire
    plan: StagePlan
    kernels: str | None = None

    @property
    def rank(self) -> int:
        return self.arrays.rank

    def load(self) -> None:
        """Builds and loads the stage that adds up partial pools. Raises what `stages_of` raises."""
        stages_of(self._adding_plan, self.kernels)

    @cached_property
    def width(self) -> int:
        """How many columns of this rank's results are exchanged hierarchically."""
        local = self.arrays.geometry.locals[self.rank]
        return local.hierarchical_width if local is not None else 0

    @cached_property
    def _widths(self) -> list[int]:
        local = self.arrays.geometry.locals[self.rank]
        assert local is not None
        return [f.width for f in local.layout.features if f.column is not None and f.column >= local.direct_width]

    def to_samples(self, samples: Sequence[int], partials: Tensor) -> Tensor:
        """Exchanges partial pools `[samples of all ranks, width]` of this rank's shards. Returns the sums of each node
        for this rank's samples, `[nodes, own samples, width]`."""
        placement = self.arrays.geometry.placement
        size, nodes, width = placement.node_size, placement.nodes, self.width
        node, position = divmod(self.rank, size)
        blocks = partials.float().split(list(samples))
        order = [blocks[b * size + k] for k in range(size) for b in range(nodes)]
        rows = [sum(samples[b * size + k] for b in range(nodes)) for k in range(size)]
        send_sizes = self._of_node(node, [row * width for row in rows])
        receive_sizes = self._of_node(node, [rows[position] * width] * size)
        received = self.exchange.all_to_all("node_vectors", torch.cat(order).view(-1), send_sizes, receive_sizes)
        added = received.new_empty((rows[position], width))
        self._add(received, size, added)
        wire = self.forward_wire
        row = row_bytes(wire.format, self._widths)
        encoded = wire.encode(added, self._widths)
        send_sizes = self._of_rail(position, [samples[b * size + position] * row for b in range(nodes)])
        receive_sizes = self._of_rail(position, [samples[self.rank] * row] * nodes)
        on_rails = self.exchange.all_to_all("rail_vectors", encoded, send_sizes, receive_sizes)
        return wire.decode(on_rails, nodes * samples[self.rank], self._widths)

    def to_owners(self, samples: Sequence[int], gradients: Tensor) -> Tensor:
        """Exchanges the gradients `[nodes, own samples, width]` of what `to_samples` returns. Returns those of this
        rank's shards, `[samples of all ranks, width]`."""
        placement, wire = self.arrays.geometry.placement, self.backward_wire
        size, nodes, width = placement.node_size, placement.nodes, self.width
        node, position = divmod(self.rank, size)
        row = row_bytes(wire.format, self._widths)
        encoded = wire.encode(gradients.view(-1, width), self._widths)
        send_sizes = self._of_rail(position, [samples[self.rank] * row] * nodes)
        receive_sizes = self._of_rail(position, [samples[b * size + position] * row for b in range(nodes)])
        on_rails = self.exchange.all_to_all("rail_gradients", encoded, send_sizes, receive_sizes)
        rows = [sum(samples[b * size + k] for b in range(nodes)) for k in range(size)]
        for_node = wire.decode(on_rails, rows[position], self._widths).float().reshape(-1)
        send_sizes = self._of_node(node, [rows[position] * width] * size)
        receive_sizes = self._of_node(node, [count * width for count in rows])
        received = self.exchange.all_to_all("node_gradients", for_node.repeat(size), send_sizes, receive_sizes)
        order = [(b, k) for k in range(size) for b in range(nodes)]
        blocks = dict(
            zip(order, received.view(-1, width).split([samples[b * size + k] for b, k in order]), strict=True)
        )
        return torch.cat([blocks[b, k] for b in range(nodes) for k in range(size)])

    def _of_node(self, node: int, sizes: Sequence[int]) -> list[int]:
        """A size for each rank: those of a node, 0 for others."""
        size = self.arrays.geometry.placement.node_size
        of_ranks = [0] * self.arrays.geometry.world_size
        of_ranks[node * size : (node + 1) * size] = sizes
        return of_ranks

    def _of_rail(self, position: int, sizes: Sequence[int]) -> list[int]:
        """A size for each rank: those of a rail, 0 for others."""
        of_ranks = [0] * self.arrays.geometry.world_size
        of_ranks[position :: self.arrays.geometry.placement.node_size] = sizes
        return of_ranks

    @cached_property
    def _adding_plan(self) -> StagePlan:
        return replace(self.plan, wire_dtype="fp32", gradient_dtype="fp32", output_dtype="fp32")

    def _add(self, blocks: Tensor, count: int, to: Tensor) -> None:
        """Writes the sum of `count` blocks of rows, added in order, to `to`."""
        rows, width = to.shape
        assert PIECE_WORDS[:2] == ("column", "width") and PIECE_WORDS[5] == "sources"
        pieces = torch.tensor([0, width, 0, 0, 0, count, 0], dtype=torch.int64, device="cpu").to(to.device)
        assert SOURCE_WORDS == ("block_at", "row_width", "column", "length_row", "own", "asked")
        words = [[number * rows * width, width, 0, -1, 0, 0] for number in range(count)]
        sources = torch.tensor(words, dtype=torch.int64, device="cpu").to(to.device)
        stages_of(self._adding_plan, self.kernels).run(
            "network_forward",
            pieces=pieces,
            sources=sources,
            lengths=None,
            divisors=None,
            pools=None,
            partials=blocks,
            own_partials=None,
            pooled=to,
            winners=None,
            num_pieces=1,
            batch=rows,
            output_width=width,
            divisor_width=0,
            winner_width=0,
        )
