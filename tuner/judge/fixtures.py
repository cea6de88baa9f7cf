"""Tables of a spec with their optimizer states and numbers, and the arguments of calls of kernels of any op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from embforge import optim
from embforge.codegen.layout import CollectionLayout, layout_of
from embforge.codegen.params import ReferenceParams
from embforge.codegen.plan import Plan
from embforge.codegen.plans import name_of
from embforge.codegen.rules.rule import COUNTERS, HYPER, Update
from embforge.codegen.spec import CollectionSpec
from embforge.inputs import Batch
from embforge.launch.gradients import Gradients
from embforge.launch.kernels import Program, load_kernel
from embforge.launch.metadata import metadata_of
from embforge.number_formats import torch_dtype
from embforge.storage.table import Table, new_table
from embforge.training.calls import TableMemory
from embforge.training.numbers import Numbers
from embforge.tuner.bench.peers import fill_table
from embforge.verify.cases import draw_tables
from embforge.verify.training import ANY_NUMBER, optimizer_named

LR = 0.05
GRADIENT_SEED = 7


@dataclass(frozen=True, eq=False)
class TableFixture:
    """Tables, the states of an update if there is one, and its numbers, on one device."""

    spec: CollectionSpec
    update: Update | None
    holders: tuple[Table, ...]
    """One entry per table of the spec; its `weight` and `states()` are live."""
    hyper: Tensor
    counters: Tensor

    @property
    def device(self) -> torch.device:
        return self.tables[0].device

    @cached_property
    def layout(self) -> CollectionLayout:
        return layout_of(self.spec, self.update)

    @cached_property
    def tables(self) -> list[Tensor]:
        return [holder.weight for holder in self.holders]

    def arguments(self, op: str, batch: Batch, gradients: Gradients | None, bounds_check: str = "error") -> Any:
        """The arguments of a call of that op's kernels."""
        tables = self.tables
        if op.startswith("forward"):
            return metadata_of(tables, bounds_check), tables, batch, sequence_size(self.layout, batch), bounds_check
        sections = [holder.section for holder in self.holders]
        metadata = TableMemory(tables, sections, [True] * len(tables), bounds_check).update_metadata()
        if op == "backward":
            return metadata, tables, sections, batch, gradients, self.hyper, self.counters, bounds_check
        return metadata, tables, batch, gradients, bounds_check

    def reference(self, op: str, id_dtype: str) -> Any:
        """The reference's kernel of an op on these tables."""
        update = self.update if op == "backward" else None
        plan = Plan(op, "reference", "reference", id_dtype, self.spec, ReferenceParams(), update)
        return load_kernel(Program(plan).text)


def filled_fixture(spec: CollectionSpec, update: Update | None, device: torch.device) -> TableFixture:
    """Tables of full size, with the same rows as in benchmarks."""
    return _fixture(spec, update, device, lambda table, index: fill_table(table.weight, index))


def drawn_fixture(
    spec: CollectionSpec, update: Update | None, device: torch.device, seed: int, special: bool
) -> TableFixture:
    """Tables with random rows, `special` among them if requested; padding has numbers that no kernel may read."""
    rows = draw_tables(spec, seed, special, device)

    def fill(table: Table, index: int) -> None:
        table.block.view(torch.uint8).fill_(0xFF)
        table.weight.copy_(rows[index])

    return _fixture(spec, update, device, fill)


def gradients_for(fixture: TableFixture, batch: Batch, train: Any) -> Gradients:
    """Gradients for a backward of the batch, which depend on its shape alone.

    `train` is a kernel of the forward that runs before a backward and keeps what that needs; None if it keeps nothing.
    """
    layout = fixture.layout
    noise = partial(_noise, torch_dtype(fixture.spec.output_dtype), fixture.device)
    kept = (None, None) if train is None else train(*fixture.arguments("forward_train", batch, None, "zero"))[2:]
    sequence = noise(sequence_size(layout, batch)) if layout.sequence_features else None
    return Gradients(noise(batch.batch, layout.output_width), sequence, *kept)


@lru_cache(maxsize=4)
def _noise(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    """Gradients of equal shape share their numbers, because those of all batches would take much memory."""
    generator = torch.Generator().manual_seed(GRADIENT_SEED)
    return torch.randn(shape, generator=generator).to(device, dtype)


def sequence_size(layout: CollectionLayout, batch: Batch) -> int:
    """How many numbers the flat sequence output of a batch has."""
    if not batch.batch or not layout.sequence_features:
        return 0
    borders = batch.offsets[:: batch.batch].tolist()
    return sum((borders[f.index + 1] - borders[f.index]) * f.dim for f in layout.sequence_features)


def optimizer_of(update: Update) -> optim.Optimizer:
    """An optimizer with this update: with the usual numbers of a built-in rule, otherwise with arbitrary ones."""
    name = name_of(update)
    if name is not None and (named := optimizer_named(name)) is not None:
        return named
    numbers = tuple((name, ANY_NUMBER) for name in update.rule.hyper)
    definition = optim.CustomRule(update.rule, numbers, ())
    return optim.Custom(lr=LR, rounding=update.rounding, definition=definition, numbers=numbers)


def _fixture(
    spec: CollectionSpec, update: Update | None, device: torch.device, fill: Callable[[Table, int], None]
) -> TableFixture:
    optimizer = None if update is None else optimizer_of(update)
    initial = {} if optimizer is None else optimizer.initial_states
    holders = []
    for index, table_layout in enumerate(layout_of(spec, update).tables):
        table = new_table(table_layout.table, table_layout, device, initial=initial)
        fill(table, index)
        for name, state in table.states().items():
            state.fill_(table.initial.get(name, 0.0))
        holders.append(table)
    if optimizer is None or update is None:
        hyper = torch.zeros(len(HYPER), dtype=torch.float64, device=device)
        return TableFixture(
            spec, None, tuple(holders), hyper, torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)
        )
    numbers = Numbers([optimizer], device)
    return TableFixture(spec, update, tuple(holders), numbers.hyper, numbers.counters)
