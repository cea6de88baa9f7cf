"""The hierarchical way of vectors: two exchanges more.

To the node's rank that has the local rank of the sample's, which adds partial pools up, and from there on the rail of
that local rank to the sample's node. Gradients go the same way back.
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
from embforge.sharded.stages.stage_metadata import Wiring


@dataclass(frozen=True)
class ByNodes:
    """The exchange of hierarchical columns of one module. `samples`: of every rank."""

    wiring: Wiring
    exchange: Exchange
    forward_wire: Wire
    backward_wire: Wire
    plan: StagePlan
    kernels: str | None = None

    @property
    def rank(self) -> int:
        return self.wiring.rank

    def load(self) -> None:
        """Builds and loads the stage that adds partial pools up. Raises what `stages_of` raises."""
        stages_of(self._adding_plan, self.kernels)

    @cached_property
    def width(self) -> int:
        """Columns of this rank's results that go this way."""
        local = self.wiring.geometry.locals[self.rank]
        return local.hierarchical_width if local is not None else 0

    @cached_property
    def _widths(self) -> list[int]:
        local = self.wiring.geometry.locals[self.rank]
        assert local is not None
        return [f.width for f in local.layout.features if f.column is not None and f.column >= local.direct_width]

    def to_samples(self, samples: Sequence[int], partials: Tensor) -> Tensor:
        """`[samples of all ranks, width]` of this rank's shard to `[nodes, own samples, width]`, sums over each
        node."""
        placement = self.wiring.geometry.placement
        size, nodes, width = placement.node_size, placement.nodes, self.width
        node, place = divmod(self.rank, size)
        blocks = partials.float().split(list(samples))
        order = [blocks[b * size + k] for k in range(size) for b in range(nodes)]
        rows = [sum(samples[b * size + k] for b in range(nodes)) for k in range(size)]
        sizes = self._of_node(node, [row * width for row in rows])
        mine = self._of_node(node, [rows[place] * width] * size)
        received = self.exchange.all_to_all("node_vectors", torch.cat(order).view(-1), sizes, mine)
        added = received.new_empty((rows[place], width))
        self._add(received, size, added)
        wire = self.forward_wire
        row = row_bytes(wire.format, self._widths)
        encoded = wire.encode(added, self._widths)
        sent = self._of_rail(place, [samples[b * size + place] * row for b in range(nodes)])
        came = self._of_rail(place, [samples[self.rank] * row] * nodes)
        on_rails = self.exchange.all_to_all("rail_vectors", encoded, sent, came)
        return wire.decode(on_rails, nodes * samples[self.rank], self._widths)

    def to_owners(self, samples: Sequence[int], gradients: Tensor) -> Tensor:
        """`[nodes, own samples, width]` to `[samples of all ranks, width]` for this rank's shard."""
        placement, wire = self.wiring.geometry.placement, self.backward_wire
        size, nodes, width = placement.node_size, placement.nodes, self.width
        node, place = divmod(self.rank, size)
        row = row_bytes(wire.format, self._widths)
        encoded = wire.encode(gradients.view(-1, width), self._widths)
        sent = self._of_rail(place, [samples[self.rank] * row] * nodes)
        came = self._of_rail(place, [samples[b * size + place] * row for b in range(nodes)])
        on_rails = self.exchange.all_to_all("rail_gradients", encoded, sent, came)
        rows = [sum(samples[b * size + k] for b in range(nodes)) for k in range(size)]
        for_node = wire.decode(on_rails, rows[place], self._widths).float().reshape(-1)
        sizes = self._of_node(node, [rows[place] * width] * size)
        mine = self._of_node(node, [count * width for count in rows])
        received = self.exchange.all_to_all("node_gradients", for_node.repeat(size), sizes, mine)
        order = [(b, k) for k in range(size) for b in range(nodes)]
        blocks = dict(
            zip(order, received.view(-1, width).split([samples[b * size + k] for b, k in order]), strict=True)
        )
        return torch.cat([blocks[b, k] for b in range(nodes) for k in range(size)])

    def _of_node(self, node: int, sizes: Sequence[int]) -> list[int]:
        size = self.wiring.geometry.placement.node_size
        found = [0] * self.wiring.geometry.world_size
        found[node * size : (node + 1) * size] = sizes
        return found

    def _of_rail(self, place: int, sizes: Sequence[int]) -> list[int]:
        found = [0] * self.wiring.geometry.world_size
        found[place :: self.wiring.geometry.placement.node_size] = sizes
        return found

    @cached_property
    def _adding_plan(self) -> StagePlan:
        return replace(self.plan, wire_dtype="fp32", gradient_dtype="fp32", output_dtype="fp32")

    def _add(self, blocks: Tensor, count: int, to: Tensor) -> None:
        """The sum of `count` blocks of rows, in order."""
        rows, width = to.shape
        assert PIECE_WORDS[:2] == ("column", "width") and PIECE_WORDS[5] == "sources"
        pieces = torch.tensor([0, width, 0, 0, 0, count, 0], dtype=torch.int64, device="cpu").to(to.device)
        assert SOURCE_WORDS == ("block_at", "row_width", "column", "length_row", "own", "asked")
        placed = [[number * rows * width, width, 0, -1, 0, 0] for number in range(count)]
        sources = torch.tensor(placed, dtype=torch.int64, device="cpu").to(to.device)
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
