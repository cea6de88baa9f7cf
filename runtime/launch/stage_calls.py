"""How stages are called, whatever runs them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

Value = Tensor | int | None
"""An argument of a stage: a tensor stands for its address, None for a null pointer."""


class Stages(Protocol):
    """A loaded library of stages."""

    def run(self, stage: str, **arguments: Value) -> None:
        """Runs one stage. A batch's mistakes are no exceptions here: `count` writes them down."""
