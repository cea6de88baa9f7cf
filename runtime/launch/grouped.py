"""An update whose tables are trained by several rules: one kernel per rule, run as if they were one.

Every kernel is made for the whole collection and told which tables to train; the others are frozen for it. So a kernel
is the one of a collection with its rule alone, tables keep their numbers (by which stochastic rounding is keyed), and
every kernel sees all that may be wrong with a batch before it writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from embforge.inputs import Batch
from embforge.launch.gradients import Gradients
from embforge.launch.metadata import Metadata, frozen_beside
from embforge.launch.update_kernel import UpdateKernel


@dataclass(frozen=True)
class Part:
    """One rule's part of an update."""

    program: str
    """The text of its kernel's program."""
    tables: tuple[int, ...]
    """The tables that it trains, by their places in the spec."""
    first_number: int
    """Where its numbers begin among those of all rules."""
    numbers: int

    def hyper(self, numbers: Tensor) -> Tensor:
        """Its numbers among those of all rules."""
        return numbers[self.first_number : self.first_number + self.numbers]


def grouped_text(parts: Sequence[Part]) -> str:
    """The text of a program that is several: as a program's, with a list where that has a plan."""
    return "\n" + json.dumps([asdict(part) for part in parts], separators=(",", ":"))


def parts_of(text: str) -> tuple[Part, ...]:
    """The parts of a program's text; none if it is one kernel's."""
    data = text.split("\n", 1)[1]
    if not data.startswith("["):
        return ()
    return tuple(Part(**{**part, "tables": tuple(part["tables"])}) for part in json.loads(data))


class GroupedUpdate(UpdateKernel):
    """The kernels of several rules as one. `hyper` holds the numbers of all rules, part after part."""

    def __init__(self, parts: Sequence[Part], kernels: Sequence[UpdateKernel]) -> None:
        self._parts, self._kernels = tuple(parts), tuple(kernels)
        self.plan = kernels[0].plan  # the others' differ in the rule, and maybe in plan fields

    def __call__(
        self,
        metadata: Metadata,
        tables: Sequence[Tensor],
        states: Sequence[Tensor],
        batch: Batch,
        gradients: Gradients,
        hyper: Tensor,
        counters: Tensor,
        bounds_check: str,
    ) -> Tensor:
        """One update by all rules, or by none: the first kernel finds what the others would."""
        self.reserve(batch)
        # One update is one step: all but the last count in a copy.
        counting = [*(counters.clone() for _ in self._parts[1:]), counters]
        verdicts = []
        for number, (part, kernel) in enumerate(zip(self._parts, self._kernels, strict=True)):
            run = kernel.follow if number else kernel.__call__
            own = frozen_beside(metadata, part.tables)
            verdicts.append(
                run(own, tables, states, batch, gradients, part.hyper(hyper), counting[number], bounds_check)
            )
        return verdicts[0]

    def reserve(self, batch: Batch) -> None:
        for kernel in self._kernels:
            kernel.reserve(batch)

    def check(self) -> None:
        for kernel in self._kernels:
            kernel.check()
