"""The one description of kernels: what each takes, works in, returns, and finds wrong.

Prototypes, structs, enums of words, packers, launchers and manifests derive from it: for lookups, for the kernels of a
backward and for the stages between ranks. Arguments are `int64_t` scalars and pointers only: what every launcher can
pass. `id_t` is the plan's id type, `out_t` the type of results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Protocol, Self

from embforge.codegen.argument import BAGS, POOL, SIZES, Argument, Kernel, Record, records, space
from embforge.codegen.rules.rule import COUNTERS, HYPER
from embforge.codegen.stages import STAGES, StagePlan


class KernelPlan(Protocol):
    """What every plan says of the library that it determines, be it of a lookup or of the stages between ranks."""

    @property
    def op(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def arch(self) -> str: ...
    @property
    def id_dtype(self) -> str: ...
    @property
    def text(self) -> str:
        """Canonical: equal plans have equal text."""

    @property
    def uri(self) -> str:
        """A C identifier."""

    @property
    def symbol(self) -> str:
        """What the names of the library's kernels begin with."""

    @property
    def nameless(self) -> Self:
        """The plan by whose URI a kernel is found again: without names, because no code depends on them."""

    @property
    def about(self) -> Mapping[str, object]:
        """What a manifest says of it beside: `collection` and `params`."""

    def on(self, target: str) -> Self:
        """The same for another target."""

    def called(self, symbol: str) -> Self:
        """The same where the binary was generated under another symbol."""


class Outcome(IntEnum):
    """What a CPU kernel returns."""

    OK = 0
    BAD_OFFSETS = 1
    """Or a bag too long for its slots. Nothing was written."""
    BAD_ID = 2
    """An id is no row. A lookup took it as absent; a backward has written nothing."""
    NO_MEMORY = 3
    NOT_FINITE = 4
    """A gradient, where the loss is scaled. Nothing was written."""
    TOO_LARGE = 5
    """The batch, for one backward. Nothing was written."""


class StageOutcome(IntEnum):
    """What a stage returns on a CPU."""

    OK = 0
    NO_MEMORY = -1


MISTAKES = ("BAD_ID", "BAD_OFFSET", "LONG_CONCAT")
"""What a cuda kernel can find wrong, in the order of its records in `status`.

BAD_ID: `value` at `position` of the bag is no row of the table. BAD_OFFSET: `value` at `position` of offsets lies
outside of values or before its predecessor. LONG_CONCAT: a bag of `value` ids where `position` slots are.
"""

STATUS_WORDS = ("claimed", "feature", "sample", "position", "value")
"""One record of `status`, int64 each. First come, first kept: `claimed` is 0 until a thread found such a mistake."""

METADATA_WORDS = ("address", "rows")
"""What `metadata` holds for each table, in this order, as int64.

`rows` is the limit ids are checked against; bounds_check="unchecked" stores -1 there, which as an
unsigned number lets every id pass.
"""

REMAP_WORDS = ("address", "ids", "rows")
"""What `metadata` of the step that turns ids into rows holds for each table: where the row of each id is written, how
many ids there are, and how many rows. Zeros where ids are rows."""

UPDATE_METADATA_WORDS = (*METADATA_WORDS, "state", "trainable")
"""What `metadata` holds for each table in a backward: the last two are the state's address (0: it has none) and
whether the table is trained (0: its ids count as absent)."""


def _metadata(words: tuple[str, ...]) -> Argument:
    return records("metadata", Record("TABLE", "table", words))


_STATUS = Argument(
    "status", "int64_t*", "per kind of mistake, the first that a thread found", "blocks", "changed",
    Record("STATUS", "kind of mistake", STATUS_WORDS),
)  # fmt: skip

# ---- lookups -------------------------------------------------------------------------------------------------------

_ROWS = (
    _metadata(METADATA_WORDS),
    *BAGS,
    Argument("pooled", "out_t*", "[batch, output_width] result of all features that are not 'none'", use="result"),
    Argument("sequence", "out_t*", "rows of the 'none' features, one feature after the other", use="result"),
)
_KEPT = (
    Argument("divisors", "float*", "[batch, dividing features] what mean and sqrtn divided by, 0: result is zeros",
             use="result"),
    Argument("winners", "id_t*", "[batch, selected columns] position in values of the id that won, -1: empty bag",
             use="result"),
)  # fmt: skip
"""What only the forward knows, and a backward needs."""
_LAUNCHED = (
    *SIZES,
    Argument("sequence_size", "int64_t", "elements that sequence has room for", "blocks"),
    _STATUS,
    space("scratch", "float*", "partial sums of long bags, SCRATCH_WIDTH floats per unit"),
    space("queue", "int64_t*", "QUEUE_COUNTERS counters, then a LongBag for each long bag"),
    *POOL,
)

# ---- backwards -----------------------------------------------------------------------------------------------------

_GRADIENTS = (
    _metadata(UPDATE_METADATA_WORDS),
    *BAGS,
    Argument("grad_pooled", "const out_t*", "[batch, output_width] gradient of the pooled result"),
    Argument("grad_sequence", "const out_t*", "gradient of the rows of the 'none' features"),
    Argument("divisors", "const float*", "as the forward stored them; null if no feature divides"),
    Argument("winners", "const id_t*", "as the forward stored them; null if no feature selects"),
)
"""What every kernel of a backward reads."""

_SORTING = (
    *SIZES,
    Argument("skip_bad_ids", "int64_t", "1: ids that are no row count as absent; 0: they are refused"),
    Argument("workspace", "char*", "room for the sort: as many bytes as the function ..._workspace says", "threads",
             "space"),
    *POOL,
)  # fmt: skip

_SEQUENCE_SIZE = Argument("sequence_size", "int64_t", "elements of grad_sequence", "blocks")

_SORTED = (
    _SEQUENCE_SIZE,
    _STATUS,
    space("keys", "key_t*", "num_values rows, numbered over all tables"),
    space("sorted_keys", "const key_t*", "those in order"),
    space("order", "const int64_t*", "the position of each of them"),
    space("bags", "int32_t*", "num_values bags, by position"),
    space("heads", "int32_t*", "1 where a run begins among the sorted keys, else 0"),
    space("runs", "const int32_t*", "those summed up: the run of a sorted key, counted from 1"),
    space("sources", "int64_t*", "address of the gradient of each sorted key"),
    space("factors", "float*", "its weight; null if no feature is weighted"),
    space("chosen", "int64_t*", "address of its winners, 0: of no selection; null if no feature selects"),
    space("run_begin", "int32_t*", "num_values + 1 borders of runs"),
    space("waiting", "int32_t*", "runs of more than WAITS occurrences, which are worked on last"),
    space("words", "int64_t*", "counters and borders, at STEP, WAITING and BORDERS"),
    space("scaled", "float*", "gradients that were divided or converted; null if none is"),
    space("partials", "float*", "partial sums of long runs, PARTIAL_WIDTH floats each, level by level"),
    Argument("level", "int64_t", "of the partial sums that a launch makes", "blocks"),
)
"""Work space of kernels whose keys torch sorts and whose heads torch sums up, between launches."""

_OPS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("forward", (*_ROWS, *_LAUNCHED)),
        Kernel("forward_train", (*_ROWS, *_KEPT, *_LAUNCHED)),
        # Reduces the gradient of every row that occurs and updates the row, in one call.
        Kernel("backward", (
            *_GRADIENTS,
            Argument("hyper", "const double*", "the learning rate, the loss scale or 0, then the rule's own numbers",
                     record=Record("HYPER", "call, before the rule's own", HYPER)),
            Argument("counters", "int64_t*", "updates done, and the seed; the first grows by one", use="changed",
                     record=Record("COUNTER", "call", COUNTERS)),
            *_SORTING,
            Argument("verdict", "float*", "0, or infinity: a gradient is not finite, and nothing was updated", "blocks",
                     "changed"),
            space("scalars", "float*", "1 / grad_scale, then the rule's numbers of this step"),
            *_SORTED,
        )),
        # Reduces the gradient of every row that occurs, and leaves the row alone.
        Kernel("reduce", (
            *_GRADIENTS,
            Argument("counts", "int64_t*", "rows of each table that occur", use="changed"),
            Argument("rows", "int64_t*", "those rows, in order, one table after the other", use="result"),
            Argument("gradients", "float*", "their gradients, one table after the other", use="result"),
            *_SORTING,
            *_SORTED,
        )),
        Kernel("weight_gradient", (
            *_GRADIENTS,
            Argument("weight_gradient", "float*", "num_values gradients of the weights; 0 for ids of unweighted "
                     "features", use="result"),
            *SIZES,
            *POOL,
            _SEQUENCE_SIZE,
            _STATUS,
        )),
        # Turns the ids of a batch into rows, before its lookup.
        Kernel("resolve", (
            records("metadata", Record("REMAP", "table", REMAP_WORDS)),
            *BAGS[:2],
            Argument("rows", "id_t*", "num_values rows; -1: the id has none; see codegen/remap.py for ids that are no "
                     "ids of their table", use="result"),
            *SIZES,
            *POOL,
        )),
    )
}  # fmt: skip
"""The kernels of lookups, of backwards, and of what comes before both, by op."""

OPS = tuple(_OPS)
"""What a plan of a collection can be for."""
KERNELS: dict[str, Kernel] = {**_OPS, **STAGES}
"""Every kernel by its name, an op's or a stage's."""


def kernels_of(op: str) -> tuple[Kernel, ...]:
    """The entries of a library: an op's own, or all stages."""
    return tuple(STAGES.values()) if op == StagePlan.op else (KERNELS[op],)


def arguments_of(target: str, kernel: str = "forward") -> tuple[Argument, ...]:
    """The arguments of an op's or a stage's kernels on one target, in call order."""
    return KERNELS[kernel].on(target)


def records_of(arguments: Iterable[Argument]) -> tuple[Record, ...]:
    """The records that the arguments hold, none of them twice: for the enums of generated code."""
    return tuple(dict.fromkeys(a.record for a in arguments if a.record is not None))
