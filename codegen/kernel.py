"""The one description of kernels: their arguments, work space and results, and the mistakes that they report.

Prototypes, structs, enums of words, packers, launchers and manifests derive from it, for lookups, for the kernels of a
backward and for the stages between ranks. All arguments are `int64_t` scalars or pointers, which every launcher can
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
    """What every plan says about the library that it determines: a collection's `Plan` or a `StagePlan`."""

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
        """The plan as canonical JSON: equal plans have equal text."""

    @property
    def uri(self) -> str:
        """The plan's name, which is a C identifier."""

    @property
    def symbol(self) -> str:
        """The text with which the names of the library's kernels begin."""

    @property
    def nameless(self) -> Self:
        """The plan without names, on which no code depends. A kernel is found again by its URI."""

    @property
    def manifest_fields(self) -> Mapping[str, object]:
        """What a manifest says about the plan in addition to what all plans have: `collection` and `params`."""

    def on(self, target: str) -> Self:
        """The same plan for another target."""

    def called(self, symbol: str) -> Self:
        """The same plan for a binary that was generated under another symbol."""


class Outcome(IntEnum):
    """What a CPU kernel returns."""

    OK = 0
    BAD_OFFSETS = 1
    """Offsets are wrong, or a bag is too long for its slots. Nothing was written."""
    BAD_ID = 2
    """An id is not a row. A lookup took it as absent; a backward has written nothing."""
    NO_MEMORY = 3
    NOT_FINITE = 4
    """The loss is scaled, and a gradient is not finite. Nothing was written."""
    TOO_LARGE = 5
    """The batch is too large for one backward. Nothing was written."""


class StageOutcome(IntEnum):
    """What a stage returns on a CPU."""

    OK = 0
    NO_MEMORY = -1


MISTAKES = ("BAD_ID", "BAD_OFFSET", "LONG_CONCAT")
"""The mistakes that a cuda kernel can report, in the order of their records in `status`.

BAD_ID: the id `value` at `position` of its bag is not a row of the table. BAD_OFFSET: `value`, at `position` of
offsets, is outside of values or less than the offset before it. LONG_CONCAT: a bag has `value` ids, but only `position`
slots.
"""

STATUS_WORDS = ("claimed", "feature", "sample", "position", "value")
"""The words of one record of `status`, int64 each. `claimed` is 0 until a thread finds such a mistake, and the first
one that is found is kept."""

METADATA_WORDS = ("address", "rows")
"""What `metadata` holds for each table, in this order, as int64.

`rows` is the limit against which ids are checked; bounds_check="unchecked" stores -1 there, which as an unsigned number
lets every id pass.
"""

REMAP_WORDS = ("address", "ids", "rows")
"""What `metadata` holds for each table in the step that turns ids into rows: the address of the array with the row of
each id, the number of ids and the number of rows. All are 0 for a table whose ids are rows."""

UPDATE_METADATA_WORDS = (*METADATA_WORDS, "state", "trainable")
"""What `metadata` holds for each table in a backward. `state` is the address of the states (0: the table has none),
`trainable` is 0 for a table that is not trained and whose ids count as absent."""


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
    Argument("winners", "id_t*", "[batch, selected columns] position in values of the selected id, -1: empty bag",
             use="result"),
)  # fmt: skip
"""What a backward needs and only the forward knows."""
_LAUNCHED = (
    *SIZES,
    Argument("sequence_size", "int64_t", "elements of sequence", "blocks"),
    _STATUS,
    space("scratch", "float*", "partial sums of long bags, SCRATCH_WIDTH floats per unit"),
    space("queue", "int64_t*", "QUEUE_COUNTERS counters, then one LongBag per long bag"),
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
    Argument("skip_bad_ids", "int64_t", "1: ids that are not rows count as absent; 0: they are refused"),
    Argument("workspace", "char*", "memory to work in: as many bytes as the function ..._workspace returns", "threads",
             "space"),
    *POOL,
)  # fmt: skip

_SEQUENCE_SIZE = Argument("sequence_size", "int64_t", "elements of grad_sequence", "blocks")

_SORTED = (
    _SEQUENCE_SIZE,
    _STATUS,
    space("keys", "key_t*", "[num_values] the row at each position, numbered over all tables"),
    space("sorted_keys", "const key_t*", "the keys in ascending order"),
    space("order", "const int64_t*", "the position of each sorted key"),
    space("bags", "int32_t*", "[num_values] the bag of each position"),
    space("heads", "int32_t*", "1 where a run begins among the sorted keys, otherwise 0"),
    space("runs", "const int32_t*", "prefix sums of heads: the run of each sorted key, counted from 1"),
    space("sources", "int64_t*", "address of the gradient of each sorted key"),
    space("factors", "float*", "weight of the id of each sorted key; null if no feature is weighted"),
    space("chosen", "int64_t*", "address of the winners of each sorted key, 0: its feature does not select; null if "
          "none does"),
    space("run_begin", "int32_t*", "[num_values + 1] borders of runs"),
    space("waiting", "int32_t*", "runs of more than WAITS occurrences, which are worked on last"),
    space("words", "int64_t*", "counters and borders, at STEP, WAITING and BORDERS"),
    space("scaled", "float*", "gradients that were divided or converted; null if there are none"),
    space("partials", "float*", "partial sums of long runs, PARTIAL_WIDTH floats each, level by level"),
    Argument("level", "int64_t", "level of the partial sums that a launch makes", "blocks"),
)  # fmt: skip
"""Work space of kernels between whose launches torch sorts the keys and sums up the heads."""

_OPS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("forward", (*_ROWS, *_LAUNCHED)),
        Kernel("forward_train", (*_ROWS, *_KEPT, *_LAUNCHED)),
        # Reduces the gradient of every row that occurs and updates the row, in one call.
        Kernel("backward", (
            *_GRADIENTS,
            Argument("hyper", "const double*", "learning rate, loss scale (0: not scaled), then the rule's own numbers",
                     record=Record("HYPER", "call, before the rule's own", HYPER)),
            Argument("counters", "int64_t*", "updates so far, which a call counts up, and the seed", use="changed",
                     record=Record("COUNTER", "call", COUNTERS)),
            *_SORTING,
            Argument("verdict", "float*", "0, or infinity: a gradient is not finite, and nothing was updated", "blocks",
                     "changed"),
            space("scalars", "float*", "1 / grad_scale, then the rule's numbers of this step"),
            *_SORTED,
        )),
        # Reduces the gradient of every row that occurs, and does not change the row.
        Kernel("reduce", (
            *_GRADIENTS,
            Argument("counts", "int64_t*", "how many rows of each table occur", use="changed"),
            Argument("rows", "int64_t*", "rows that occur, in ascending order, one table after the other",
                     use="result"),
            Argument("gradients", "float*", "gradients of these rows, one table after the other", use="result"),
            *_SORTING,
            *_SORTED,
        )),
        Kernel("weight_gradient", (
            *_GRADIENTS,
            Argument("weight_gradient", "float*", "[num_values] gradients of the weights; 0 for ids of unweighted "
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
            Argument("rows", "id_t*", "[num_values] row of each id, -1: none; what is written for ids that their "
                     "table does not know is in codegen/remap.py", use="result"),
            *SIZES,
            *POOL,
        )),
    )
}  # fmt: skip
"""The kernels of lookups, of backwards, and of what comes before both, by op."""

OPS = tuple(_OPS)
"""The ops that a `Plan` can have."""
KERNELS: dict[str, Kernel] = {**_OPS, **STAGES}
"""Every kernel by its name, an op's or a stage's."""


def kernels_of(op: str) -> tuple[Kernel, ...]:
    """The kernels of an op's library: the op's own, or all stages."""
    return tuple(STAGES.values()) if op == StagePlan.op else (KERNELS[op],)


def arguments_of(target: str, kernel: str = "forward") -> tuple[Argument, ...]:
    """The arguments of an op's or a stage's kernels on one target, in call order."""
    return KERNELS[kernel].on(target)


def records_of(arguments: Iterable[Argument]) -> tuple[Record, ...]:
    """The records of the arguments, each of them once, for the enums of generated code."""
    return tuple(dict.fromkeys(a.record for a in arguments if a.record is not None))
