"""The one description of a kernel's arguments: prototypes, launchers, manifests and docs all read it.

`int64_t` scalars and pointers only: what every launcher can pass. `id_t` is the plan's id type,
`out_t` the collection's output type.
"""

from __future__ import annotations

from dataclasses import dataclass

Target = str
GPU_TARGETS: tuple[Target, ...] = ("cuda", "simt")
"""simt runs the text of cuda, so it takes what cuda takes."""
ALL_TARGETS: tuple[Target, ...] = ("cpu", *GPU_TARGETS)


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel, in C spelling."""

    name: str
    c_type: str
    doc: str
    targets: tuple[Target, ...] = ALL_TARGETS

    @property
    def is_pointer(self) -> bool:
        return self.c_type.endswith("*")


METADATA_WORDS = ("address", "rows")
"""What `metadata` holds for each table, in this order, as int64.

`rows` is the limit ids are checked against; bounds_check="unchecked" stores -1 there, which as an
unsigned number lets every id pass.
"""

MISTAKES = ("BAD_ID", "BAD_OFFSET", "LONG_CONCAT")
"""What a cuda kernel can find wrong, in the order of its records in `status`.

BAD_ID: `value` at `position` of the bag is no row of the table. BAD_OFFSET: `value` at `position` of offsets lies
outside of values or before its predecessor. LONG_CONCAT: a bag of `value` ids where `position` slots are.
"""

STATUS_WORDS = ("claimed", "feature", "sample", "position", "value")
"""One record of `status`, int64 each. First come, first kept: `claimed` is 0 until a thread found such a mistake."""

FORWARD: tuple[Argument, ...] = (
    Argument("metadata", "const int64_t*", "per table: " + ", ".join(METADATA_WORDS)),
    Argument("values", "const id_t*", "num_values ids of all bags"),
    Argument("offsets", "const id_t*", "features * batch + 1 bag borders in values, feature-major"),
    Argument("weights", "const float*", "num_values weights, or null: all ones"),
    Argument("pooled", "out_t*", "[batch, output_width] result of all features that are not 'none'"),
    Argument("sequence", "out_t*", "rows of the 'none' features, one feature after the other"),
    Argument("batch", "int64_t", "samples"),
    Argument("num_values", "int64_t", "ids in values"),
    Argument("sequence_size", "int64_t", "elements that sequence has room for", GPU_TARGETS),
    Argument("status", "int64_t*", "the first mistake of each kind, see STATUS_WORDS", GPU_TARGETS),
    Argument("scratch", "float*", "partial sums of long bags, see codegen/targets/cuda/launch.py", GPU_TARGETS),
    Argument("queue", "int64_t*", "counters and records of long bags, see codegen/targets/cuda/launch.py", GPU_TARGETS),
    Argument("parallel_for", "parallel_for_t", "torch's thread pool, or null: run serially", ("cpu",)),
    Argument("threads", "int64_t", "threads to split the work over", ("cpu",)),
)


FORWARD_TRAIN: tuple[Argument, ...] = (
    *FORWARD[:6],
    Argument("divisors", "float*", "[batch, dividing features] what mean and sqrtn divided by, 0: result is zeros"),
    Argument("winners", "id_t*", "[batch, columns of max features] position in values of the largest, -1: empty bag"),
    *FORWARD[6:],
)
"""A forward whose backward will come: it keeps what only it knows."""

UPDATE_METADATA_WORDS = ("address", "rows", "state", "trainable")
"""What `metadata` holds for each table in a backward: the last two are the state's address (0: it has none) and
whether the table is trained (0: its ids count as absent)."""

_GRADIENTS: tuple[Argument, ...] = (
    Argument("metadata", "const int64_t*", "per table: " + ", ".join(UPDATE_METADATA_WORDS)),
    Argument("values", "const id_t*", "num_values ids of all bags"),
    Argument("offsets", "const id_t*", "features * batch + 1 bag borders in values, feature-major"),
    Argument("weights", "const float*", "num_values weights, or null: all ones"),
    Argument("grad_pooled", "const out_t*", "[batch, output_width] gradient of the pooled result"),
    Argument("grad_sequence", "const out_t*", "gradient of the rows of the 'none' features"),
    Argument("divisors", "const float*", "as the forward stored them; null if no feature divides"),
    Argument("winners", "const id_t*", "as the forward stored them; null if no feature is a max"),
)
"""What every kernel of a backward reads."""

_SIZES: tuple[Argument, ...] = (
    Argument("batch", "int64_t", "samples"),
    Argument("num_values", "int64_t", "ids in values"),
)

_HOST: tuple[Argument, ...] = (
    Argument("parallel_for", "parallel_for_t", "torch's thread pool, or null: run serially", ("cpu",)),
    Argument("threads", "int64_t", "threads to split the work over", ("cpu",)),
)

_SEQUENCE_SIZE = Argument("sequence_size", "int64_t", "elements of grad_sequence", GPU_TARGETS)
_STATUS = Argument("status", "int64_t*", "the first mistake of each kind, see STATUS_WORDS", GPU_TARGETS)

_SORTED: tuple[Argument, ...] = (
    _SEQUENCE_SIZE,
    _STATUS,
    Argument("keys", "key_t*", "num_values rows, numbered over all tables", GPU_TARGETS),
    Argument("sorted_keys", "const key_t*", "those in order", GPU_TARGETS),
    Argument("order", "const int64_t*", "the position of each of them", GPU_TARGETS),
    Argument("bags", "int32_t*", "num_values bags, by position", GPU_TARGETS),
    Argument("heads", "int32_t*", "1 where a run begins among the sorted keys, else 0", GPU_TARGETS),
    Argument("runs", "const int32_t*", "those summed up: the run of a sorted key, counted from 1", GPU_TARGETS),
    Argument("sources", "int64_t*", "address of the gradient of each sorted key", GPU_TARGETS),
    Argument("factors", "float*", "its weight; null if no feature is weighted", GPU_TARGETS),
    Argument("chosen", "int64_t*", "address of its winners, 0: no max; null if no feature is a max", GPU_TARGETS),
    Argument("run_begin", "int32_t*", "num_values + 1 borders of runs", GPU_TARGETS),
    Argument("waiting", "int32_t*", "runs that are worked on last, see codegen/targets/cuda/backward.py", GPU_TARGETS),
    Argument("words", "int64_t*", "counters and borders, see templates/cuda/backward/occurrences.cu.j2", GPU_TARGETS),
    Argument("scaled", "float*", "gradients that were divided or converted; null if none is", GPU_TARGETS),
    Argument("partials", "float*", "partial sums of long runs, see templates/cuda/backward/items.cu.j2", GPU_TARGETS),
    Argument("level", "int64_t", "of the partial sums that a launch makes", GPU_TARGETS),
)
"""Work space of kernels whose keys torch sorts and whose heads torch sums up, between launches."""

BACKWARD: tuple[Argument, ...] = (
    *_GRADIENTS,
    Argument("hyper", "const double*", "the rule's numbers, see codegen/rules/rule.py"),
    Argument("counters", "int64_t*", "updates done, and the seed; the first grows by one"),
    *_SIZES,
    Argument("skip_bad_ids", "int64_t", "1: ids that are no row count as absent; 0: they are refused"),
    Argument("workspace", "char*", "room for the sort: as many bytes as the function {uri}_workspace says", ("cpu",)),
    *_HOST,
    Argument("verdict", "float*", "0, or infinity: a gradient is not finite, and nothing was updated", GPU_TARGETS),
    Argument("scalars", "float*", "1 / grad_scale, then the rule's numbers of this step", GPU_TARGETS),
    *_SORTED,
)
"""Reduces the gradient of every row that occurs and updates the row, in one call."""

REDUCE: tuple[Argument, ...] = (
    *_GRADIENTS,
    Argument("counts", "int64_t*", "rows of each table that occur"),
    Argument("rows", "int64_t*", "those rows, in order, one table after the other"),
    Argument("gradients", "float*", "their gradients, one table after the other"),
    *_SIZES,
    Argument("skip_bad_ids", "int64_t", "1: ids that are no row count as absent; 0: they are refused"),
    Argument("workspace", "char*", "room for the sort: as many bytes as the function {uri}_workspace says", ("cpu",)),
    *_HOST,
    *_SORTED,
)
"""Reduces the gradient of every row that occurs, and leaves the row alone."""

WEIGHT_GRADIENT: tuple[Argument, ...] = (
    *_GRADIENTS,
    Argument("weight_gradient", "float*", "num_values gradients of the weights; 0 for ids of unweighted features"),
    *_SIZES,
    *_HOST,
    _SEQUENCE_SIZE,
    _STATUS,
)

ARGUMENTS: dict[str, tuple[Argument, ...]] = {
    "forward": FORWARD,
    "forward_train": FORWARD_TRAIN,
    "backward": BACKWARD,
    "reduce": REDUCE,
    "weight_gradient": WEIGHT_GRADIENT,
}
"""By op. The keys are all ops there are."""


def arguments_of(target: Target, op: str = "forward") -> tuple[Argument, ...]:
    """The arguments of an op's kernels on one target, in call order."""
    return tuple(a for a in ARGUMENTS[op] if target in a.targets)


def prototype(target: Target, op: str = "forward", indent: str = "    ") -> str:
    """The C parameter list, one argument a line with its meaning."""
    return parameter_list(arguments_of(target, op), indent)


def parameter_list(arguments: tuple[Argument, ...], indent: str = "    ") -> str:
    """Arguments as C spells them, one a line with its meaning."""
    lines = []
    for position, argument in enumerate(arguments):
        restrict = " __restrict__" if argument.is_pointer else ""
        comma = "," if position + 1 < len(arguments) else ""
        lines.append(f"{indent}{argument.c_type}{restrict} {argument.name}{comma}  // {argument.doc}")
    return "\n".join(lines)
