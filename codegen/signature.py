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
    Argument("scratch", "float*", "partial sums of long bags, see codegen/targets/cuda_launch.py", GPU_TARGETS),
    Argument("queue", "int64_t*", "counters and records of long bags, see codegen/targets/cuda_launch.py", GPU_TARGETS),
    Argument("parallel_for", "parallel_for_t", "torch's thread pool, or null: run serially", ("cpu",)),
    Argument("threads", "int64_t", "threads to split the work over", ("cpu",)),
)


def arguments_of(target: Target) -> tuple[Argument, ...]:
    """The forward kernel's arguments on one target, in call order."""
    return tuple(a for a in FORWARD if target in a.targets)


def prototype(target: Target, indent: str = "    ") -> str:
    """The C parameter list, one argument a line with its meaning."""
    arguments = arguments_of(target)
    lines = []
    for position, argument in enumerate(arguments):
        restrict = " __restrict__" if argument.is_pointer else ""
        comma = "," if position + 1 < len(arguments) else ""
        lines.append(f"{indent}{argument.c_type}{restrict} {argument.name}{comma}  // {argument.doc}")
    return "\n".join(lines)
