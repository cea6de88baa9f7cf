"""An update whose tables are trained by several rules: one kernel per rule, called as if they were one kernel.

Every kernel is made for the whole collection, and its metadata say which tables it trains; the others are frozen for
it. So the kernel of a rule is the same as in a collection that has this rule only, tables keep their numbers (which
stochastic rounding uses as a key), and every kernel finds all mistakes of a batch before it writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from embforge.inputs import Batch
from embforge.launch.gradients import Gradients
from embforge.launch.metadata import Metadata, metadata_to_train
from embforge.launch.update_kernel import UpdateKernel


@dataclass(frozen=True)
class RulePart:
    """One rule's part of an update."""

    program: str
    """The text of the program of the rule's kernel."""
    tables: tuple[int, ...]
    """The indices in the spec of the tables that the rule trains."""
    first_number: int
    """Where the rule's hyperparameters begin among those of all rules."""
    numbers: int
    """How many hyperparameters the rule has."""

    def hyper(self, numbers: Tensor) -> Tensor:
        """The rule's hyperparameters, taken from those of all rules."""
        return numbers[self.first_number : self.first_number + self.numbers]


def grouped_text(parts: Sequence[RulePart]) -> str:
    """The text of a program with several kernels: like the text of a program, with a list in place of the plan."""
    return "\n" + json.dumps([asdict(part) for part in parts], separators=(",", ":"))


def rule_parts(text: str) -> tuple[RulePart, ...]:
    """The parts of a program, from its text; empty if the program has a single kernel."""
    data = text.split("\n", 1)[1]
    if not data.startswith("["):
        return ()
    return tuple(RulePart(**{**part, "tables": tuple(part["tables"])}) for part in json.loads(data))


class GroupedUpdate(UpdateKernel):
    """The kernels of several rules as one kernel. `hyper` holds the hyperparameters of all rules, one rule after the
    other."""

    def __init__(self, parts: Sequence[RulePart], kernels: Sequence[UpdateKernel]) -> None:
        self._parts, self._kernels = tuple(parts), tuple(kernels)
        self.plan = kernels[0].plan  # the plans of the others differ in the rule, and possibly in plan fields

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
        """Updates by all rules or by none: the first kernel finds every mistake that the others would find."""
        self.reserve(batch)
        # One update is one step: all kernels but the last advance a copy of the counters.
        counting = [*(counters.clone() for _ in self._parts[1:]), counters]
        verdicts = []
        for number, (part, kernel) in enumerate(zip(self._parts, self._kernels, strict=True)):
            run = kernel.follow if number else kernel.__call__
            own = metadata_to_train(metadata, part.tables)
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
