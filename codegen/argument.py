"""The parts of a kernel's description: its arguments, what kernels do to their memory, and the words in arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from embforge.codegen.target import Split, target_named


@dataclass(frozen=True)
class Record:
    """The words (int64, or numbers) of one record in an array of records, in this order."""

    name: str
    """The prefix of its enum in generated code: `TABLE_ADDRESS, TABLE_ROWS, TABLE_WORDS`."""
    each: str
    words: tuple[str, ...]

    @property
    def doc(self) -> str:
        return f"per {self.each}: {', '.join(self.words)}"


Use = Literal["read", "result", "changed", "space"]
"""What kernels do to an argument's memory: only read it, write all of it, change it, or use it as work space. Work
space that is `const` for kernels is written by torch between launches."""


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel, in C spelling."""

    name: str
    c_type: str
    doc: str
    only: Split | None = None
    """Only targets that split work in this way have the argument; None: all targets."""
    use: Use = "read"
    record: Record | None = None
    """The record whose words it holds, if they have names."""

    @property
    def is_pointer(self) -> bool:
        return self.c_type.endswith("*")


@dataclass(frozen=True)
class Kernel:
    """An entry of a generated library. On a GPU it may be several kernels, which all take the same arguments."""

    name: str
    """An op or a stage."""
    arguments: tuple[Argument, ...]

    def by(self, split: Split | None) -> tuple[Argument, ...]:
        """Its arguments for targets that split work in this way, in call order."""
        return tuple(a for a in self.arguments if a.only in (None, split))

    def on(self, target: str) -> tuple[Argument, ...]:
        """Its arguments on one target, in call order."""
        return self.by(target_named(target).split)

    @cached_property
    def in_blocks(self) -> tuple[str, ...]:
        """The names of its arguments on a GPU, in call order."""
        return tuple(a.name for a in self.by("blocks"))

    def used(self, *uses: Use) -> tuple[str, ...]:
        """The names of its arguments on a GPU whose memory is used in this way."""
        return tuple(a.name for a in self.by("blocks") if a.use in uses)


def records(name: str, record: Record) -> Argument:
    """An argument that is an array of records, which the host writes."""
    return Argument(name, "const int64_t*", record.doc, record=record)


def space(name: str, c_type: str, doc: str) -> Argument:
    """An argument that only GPUs have: work space, or a number that says how work is split."""
    return Argument(name, c_type, doc, "blocks", "space")


BAGS = (
    Argument("values", "const id_t*", "num_values ids of all bags"),
    Argument("offsets", "const id_t*", "features * batch + 1 bag borders in values, feature-major"),
    Argument("weights", "const float*", "num_values weights, or null: all ones"),
)
SIZES = (
    Argument("batch", "int64_t", "samples"),
    Argument("num_values", "int64_t", "ids in values"),
)
POOL = (
    Argument("parallel_for", "parallel_for_t", "torch's thread pool, or null: run serially", "threads"),
    Argument("threads", "int64_t", "threads to split the work over", "threads"),
)
