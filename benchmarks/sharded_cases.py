"""The cases of the sharded benchmark: their tables, the batches of every rank, and the right results of a step.

All of it follows from seeds alone, so that every rank can calculate what any other rank has.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.workloads import collection_of
from embforge.codegen.layout import layout_of
from embforge.codegen.spec import CollectionSpec
from embforge.tuner.bench.peers import fill_table
from embforge.tuner.workload.workload import make_batch, parse

CASES = Path(__file__).with_name("sharded_cases.toml")
LEARNING_RATE = 0.05
BATCHES = 4
"""Batches per rank, which are used in turn."""


@dataclass(frozen=True)
class Inputs:
    """One rank's batch, feature-major, with the gradient of its result."""

    size: int
    values: Tensor
    lengths: Tensor
    offsets: Tensor
    gradient: Tensor

    def feature(self, index: int) -> tuple[Tensor, Tensor]:
        """The ids and offsets of one feature; the offsets start at 0 and end with the number of ids."""
        offsets = self.offsets[index * self.size : (index + 1) * self.size + 1]
        return self.values[offsets[0] : offsets[-1]], offsets - offsets[0]


@dataclass(frozen=True)
class Case:
    """A collection and its workload. Feature i looks up table i."""

    name: str
    spec: CollectionSpec
    loads: tuple[str, ...]
    """The workload string of each feature."""
    batch: int
    """Samples per rank."""

    @property
    def table_bytes(self) -> int:
        return sum(table.num_embeddings * table.embedding_dim * 4 for table in self.spec.tables)

    def full_table(self, index: int) -> Tensor:
        """A whole table as it is before the first step."""
        table = self.spec.tables[index]
        rows = torch.empty(table.num_embeddings, table.embedding_dim)
        fill_table(rows, index)
        return rows

    def inputs(self, rank: int, turn: int) -> Inputs:
        """The batch that a rank uses in a turn."""
        seed = turn * 1009 + rank
        columns = zip(self.spec.tables, self.spec.features, self.loads, strict=True)
        batches = [
            make_batch(CollectionSpec((table,), (feature,)), parse(load), seed * 101 + index)
            for index, (table, feature, load) in enumerate(columns)
        ]
        lengths = torch.cat([torch.from_numpy(batch.offsets).diff() for batch in batches])
        generator = torch.Generator().manual_seed(seed)
        return Inputs(
            self.batch,
            torch.cat([torch.from_numpy(batch.values) for batch in batches]),
            lengths,
            functional.pad(lengths.cumsum(0), (1, 0)),
            torch.randn(self.batch, layout_of(self.spec).output_width, generator=generator),
        )

    def columns(self) -> Iterator[slice]:
        """The columns of each feature in a result that has the spec's order."""
        start = 0
        for table in self.spec.tables:
            yield slice(start, start + table.embedding_dim)
            start += table.embedding_dim

    def ranks_of_tables(self, world_size: int) -> list[int]:
        """The rank of each table in a table-wise shard plan with about equal work on all ranks.

        Tables are placed from the one with the most work to the one with the least, each on the rank that has the least
        work so far.
        """
        first = self.inputs(0, 0)
        work = [
            (first.feature(index)[0].numel() + self.batch) * table.embedding_dim
            for index, table in enumerate(self.spec.tables)
        ]
        loads, ranks = [0] * world_size, [0] * len(work)
        for index in sorted(range(len(work)), key=lambda i: -work[i]):
            ranks[index] = loads.index(min(loads))
            loads[ranks[index]] += work[index]
        return ranks

    def expected_outputs(self, inputs: Inputs) -> Tensor:
        """The right result of a lookup before the first step, by plain torch on whole tables."""
        return torch.cat(
            [
                functional.embedding_bag(*_torch_arguments(inputs.feature(index), self.full_table(index)), mode="sum")
                for index in range(len(self.spec.tables))
            ],
            dim=1,
        )

    def expected_rows(self, index: int, of_ranks: list[Inputs]) -> Tensor:
        """A table after one step of SGD with the gradients of all ranks added, in double precision."""
        rows = self.full_table(index)
        columns = list(self.columns())[index]
        features = [inputs.feature(index) for inputs in of_ranks]
        changed, positions = torch.cat([values for values, _ in features]).unique(return_inverse=True)
        sums = torch.zeros(len(changed), rows.shape[1], dtype=torch.float64)
        by_rank = zip(of_ranks, features, positions.split([len(values) for values, _ in features]), strict=True)
        for inputs, (_, offsets), of_rank in by_rank:
            bags = torch.arange(inputs.size).repeat_interleave(offsets.diff())
            sums.index_add_(0, of_rank, inputs.gradient[:, columns][bags].double())
        rows[changed] = (rows[changed].double() - LEARNING_RATE * sums).float()
        return rows


def read_cases(path: Path = CASES) -> list[Case]:
    """The cases of a file, in the order of the file."""
    return [_case(entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["case"]]


def _case(entry: dict[str, Any]) -> Case:
    spec, bags = collection_of(entry["name"], entry["tables"], entry["rows"], entry["dims"]), entry["bags"]
    loads = tuple(
        f"{entry['ids']},len={bags[index % len(bags)]},batch={entry['batch']}" for index in range(len(spec.tables))
    )
    return Case(entry["name"], spec, loads, entry["batch"])


def _torch_arguments(feature: tuple[Tensor, Tensor], rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of F.embedding_bag, which takes offsets without the last one."""
    values, offsets = feature
    return values, rows, offsets[:-1]
