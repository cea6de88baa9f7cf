"""The kernels of the stages between ranks: their arguments, and the plan that determines their source.

One library holds all stages. It is made for number formats, not for a spec: a stage moves rows that follow each other
in memory, and moves each once, so widths and counts do not have to be constants. They are numbers in arrays that every
rank computes in the same way (`codegen/sharding`). All arrays of numbers are int64 unless an argument says otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from embforge.codegen.argument import BAGS, POOL, SIZES, Argument, Kernel, Record, records, space
from embforge.codegen.dtypes import ID_DTYPES, OUTPUT_DTYPES, WIRE
from embforge.codegen.errors import PlanError
from embforge.codegen.poolings import COMBINERS, DIVIDE, SELECTING, Combiner, selections_of
from embforge.codegen.target import BACKENDS, target_named

STAGES_SCHEMA = 3
"""This is raised whenever the meaning of a stage changes."""

FEATURE_WORDS = ("rows", "padding", "base", "divides", "divisor_column", "hotness", "weighted", "absent")
"""What `features` holds for each feature. `rows`: ids are less than this (-1: not checked). `padding`: an id that
pooled bags leave out, or -1. `base` is added to every id. `divides`: the Divisor of its pooling, or 0. `hotness`: most
ids of a concat bag, 0: any number. `weighted`: whether weights count in the divisor. `absent`: an id that is not a row
and not a mistake; or 0, which is a row."""

BUCKETING_WORDS = ("feature", "shards", "block", "first", "sequence", "layer", "checks")
"""What `bucketings` holds for each bucketing, which distributes the ids of a feature to shards.
`block`: rows per block; 0: the shard is the row modulo the number of shards. `first`: where the
streams of its shards begin in `shard_streams`. `sequence`: 1 if rows are sent one by one. `layer`:
its number among the bucketings of its feature, which is its row of `slots`. `checks`: 1 for the
bucketing that looks for mistakes and computes divisors. A bucketing with one shard sends all ids,
also padding and (as -1) ids that are not rows, so that positions in a bag do not change."""

STREAM_WORDS = ("header_at", "length_row", "weighted", "asked_at")
"""What `streams` holds for each stream. `header_at`: where its number of ids goes in `header`. `length_row`: its row of
`lengths` and `pools` (-1: rows are sent one by one). `weighted`: whether weights are sent with its ids. `asked_at`:
where the number of pools that it asks for goes in `header` (-1: they are not counted).

The pool of an empty bag is not asked for. Bags of one id ask
once for all bags with that id, unless ids have weights."""

PLACE_WORDS = ("ids_at", "lengths_at", "weights_at", "base", "asked_at")
"""What `places` holds for each stream: where its ids, lengths and weights begin in `words` (of 4 bytes). `base`: the
number of a sequence's first slot. `asked_at`: where the samples go whose pools are asked for; -1: none are asked for,
and all pools come back."""

MISTAKE_WORDS = ("kind", "feature", "sample", "position", "value")
"""What `mistake` holds: the first mistake. `kind`: its number among MISTAKES, counted from 1; 0: there is none."""

HEADER_WORDS = ("mistake", *MISTAKE_WORDS[1:], "batch", "flags", "call")
"""What a rank sends to every other rank before anything else. The counts of the streams between the two follow, then
the numbers of pools that are asked for.

The first five words are the first mistake (0: none). `flags`:
the sum of FLAGS. `call`: how many calls the rank has made."""
MISTAKES = ("BAD_ID", "BAD_OFFSET", "LONG_CONCAT", "REFUSED")
"""The kinds of mistakes, counted from 1. REFUSED: the arguments were refused before any kernel ran."""
FLAGS = {"trains": 1, "weight_gradient": 2, "joined": 4, "no_gradients": 8}

SEGMENT_WORDS = ("ids_from", "count", "values_to", "lengths_from", "samples", "offsets_to", "weights_from")
"""What `segments` holds for each pair of a feature of the rank's own collection and
a source rank: where its ids, lengths (-1: a sequence, whose ids are dealt evenly to
the samples) and weights (-1: none) are in the received words, and where they go."""

PIECE_WORDS = ("column", "width", "action", "divisor_column", "first", "sources", "winner_column")
"""What `pieces` holds for each run of columns of the pooled result. `action`: one of ACTIONS. `first`, `sources`: the
first of its partial pools in the array `sources`, and their number."""
ACTIONS = {"divide": DIVIDE, **{combiner.name: combiner.action for combiner in COMBINERS}}
"""What is done with partial pools: they are combined, or added and divided."""
SOURCE_WORDS = ("block_at", "row_width", "column", "length_row", "own", "asked")
"""What `sources` holds for each partial pool. `block_at`: where its block begins (in numbers). `row_width`: how wide
the rows of the block are. `column`: its first column in the block. `length_row`: its row of `lengths` and `pools`.
`own`: whether the block is in `own_partials`, because what a rank has for itself is not copied to what came from other
ranks. `asked`: whether the rows of the block are pools that were asked for, numbered as in `pools`; otherwise the block
has one row per sample."""

PICK_WORDS = ("row", "byte", "bytes", "asked_from", "count", "to")
"""What `picks` holds for each pair of a pooled feature and a source rank that asked for pools. `row`: the row of the
source's first sample. `byte`, `bytes`: where the feature's bytes begin in a row, and how many they are. `asked_from`,
`count`: where `words` has the samples that were asked for, and how many. `to`: where their bytes go in `picked`. All
positions and sizes in bytes are even."""

PART_WORDS = ("column", "width", "byte")
"""What `parts` holds for each run of columns that share a scale: its first column and its width in a row of numbers,
and where it begins in a row of packed bytes."""
PACKED = tuple(dtype for dtype in WIRE.values() if dtype.is_packed)
"""The formats with one byte per number and one scale per run of columns."""
PACKINGS = {dtype.wire: number for number, dtype in enumerate(PACKED)}

BOUNDS = ("error", "zero", "unchecked")
"""The values of a module's `bounds_check`, in the order of the numbers that stages take for them."""

_GEOMETRY = (
    records("features", Record("FEATURE", "feature", FEATURE_WORDS)),
    records("bucketings", Record("BUCKETING", "bucketing", BUCKETING_WORDS)),
    Argument("shard_streams", "const int64_t*", "the stream of each shard of each bucketing"),
    records("streams", Record("STREAM", "stream", STREAM_WORDS)),
)
_COUNTS = (
    Argument("num_features", "int64_t", "features"),
    Argument("num_bucketings", "int64_t", "bucketings"),
    *SIZES,
    Argument("bounds", "int64_t", "Bounds: ids that are not rows are a mistake, absent, or not looked for"),
    Argument("merge", "int64_t", "1: an id that a stream of a sequence already has is not sent again"),
)
_NETWORK = (
    records("pieces", Record("PIECE", "piece", PIECE_WORDS)),
    records("sources", Record("SOURCE", "partial pool", SOURCE_WORDS)),
    Argument("lengths", "const int32_t*", "[pooled streams, batch] how many ids of every bag each shard has"),
    Argument("divisors", "const float*", "[batch, divisor_width] what mean and sqrtn divide by"),
)
_WIDTHS = (
    Argument("num_pieces", "int64_t", "pieces"),
    Argument("batch", "int64_t", "samples"),
    Argument("output_width", "int64_t", "columns of the result"),
    Argument("divisor_width", "int64_t", "columns of divisors"),
    Argument("winner_width", "int64_t", "columns of winners"),
    *POOL,
)
_PARTS = records("parts", Record("PART", "part", PART_WORDS))
_PACKING = (
    Argument("num_parts", "int64_t", "parts"),
    Argument("rows", "int64_t", "rows"),
    Argument("width", "int64_t", "numbers per row"),
    Argument("row_bytes", "int64_t", "packed bytes per row"),
    Argument("packing", "int64_t", "Packing: what a byte is"),
    *POOL,
)
_RECEIVED = Argument("words", "const int32_t*", "the received words")
_SHARING = space("parts", "int64_t", "blocks that share a bucketing, segment or pick")
_RUN = space("run", "int64_t", "samples that a warp takes")

STAGES: dict[str, Kernel] = {
    stage.name: stage
    for stage in (
        Kernel("count", (
            *_GEOMETRY,
            *BAGS,
            Argument("lengths", "int32_t*", "[pooled streams, batch] how many ids of every bag each shard has",
                     use="result"),
            Argument("slots", "int32_t*", "[layers, num_values] slot: the number of an id's row among those of its "
                     "stream; -1 - slot if the row was sent before; ABSENT", use="result"),
            Argument("pools", "int32_t*", "[pooled streams, batch] slot of a bag's pool among those that its stream "
                     "asks for; -1 - slot if it was asked for before; ABSENT: empty. Null: no stream asks",
                     use="result"),
            Argument("divisors", "float*", "[batch, divisor_width] what mean and sqrtn divide by, 0: the result is "
                     "zeros", use="result"),
            Argument("header", "int64_t*", "counts, at the positions that `streams` has", use="result"),
            Argument("mistake", "int64_t*", "kind (0: none), feature, sample, position, value", use="changed",
                     record=Record("MISTAKE", "call", MISTAKE_WORDS)),
            *_COUNTS,
            Argument("divisor_width", "int64_t", "columns of divisors"),
            *POOL,
            space("keys", "int64_t*", "[layers, num_values] stream and row of a sequence's ids, then [pooled streams, "
                   "batch] those of pools that are asked for; zeros before the first launch"),
            space("sorted_keys", "const int64_t*", "the keys in ascending order"),
            space("order", "const int64_t*", "the position of each sorted key among the keys"),
            space("heads", "int32_t*", "1 for a sorted key with which a row to send or a pool to ask for begins, "
                   "otherwise 0"),
            space("ranks", "const int32_t*", "prefix sums of heads"),
            space("firsts", "int32_t*", "how many heads all streams before a stream have"),
            space("num_keys", "int64_t", "how many keys there are"),
            space("num_slots", "int64_t", "layers * num_values: where keys of pools begin"),
            _RUN,
            _SHARING,
        )),
        Kernel("fill", (
            *_GEOMETRY,
            *BAGS,
            Argument("lengths", "const int32_t*", "as count wrote them"),
            Argument("slots", "int32_t*", "as count wrote them; then numbers among all rows that the feature gets "
                     "back, -1: absent", use="changed"),
            Argument("pools", "int32_t*", "as count wrote them; then, for streams that ask, slots without the marks "
                     "of count, -1: empty. Null: no stream asks", use="changed"),
            records("places", Record("PLACE", "stream", PLACE_WORDS)),
            Argument("words", "int32_t*", "what is sent: ids, lengths, weights and samples that are asked for, of "
                     "every stream", use="result"),
            *_COUNTS,
            *POOL,
            space("ends", "const int32_t*", "prefix sums of lengths, along the samples"),
            _RUN,
            _SHARING,
        )),
        Kernel("regroup", (
            records("segments", Record("SEGMENT", "segment", SEGMENT_WORDS)),
            _RECEIVED,
            Argument("values", "wire_id_t*", "ids, by feature of this rank's own collection, then by source",
                     use="result"),
            Argument("offsets", "wire_id_t*", "bag borders of the ids; the first is 0", use="result"),
            Argument("weights", "float*", "weights of the ids, or null", use="result"),
            Argument("num_segments", "int64_t", "segments"),
            *POOL,
            _SHARING,
        )),
        Kernel("gather", (
            records("picks", Record("PICK", "pick", PICK_WORDS)),
            _RECEIVED,
            Argument("rows", "const uint8_t*", "pools of all samples, row_bytes each"),
            Argument("picked", "uint8_t*", "the pools that were asked for, pick by pick", use="result"),
            Argument("num_picks", "int64_t", "picks"),
            Argument("row_bytes", "int64_t", "bytes per row"),
            *POOL,
            _SHARING,
        )),
        Kernel("network_forward", (
            *_NETWORK,
            Argument("pools", "const int32_t*", "[pooled streams, batch] as fill wrote them; null: none were asked "
                     "for"),
            Argument("partials", "const wire_t*", "partial pools of all sources"),
            Argument("own_partials", "const wire_t*", "partial pools of this rank itself, or null"),
            Argument("pooled", "out_t*", "[batch, output_width] result", use="result"),
            Argument("winners", "int32_t*", "[batch, winner_width] which partial pool was selected, -1: none; or null",
                     use="result"),
            *_WIDTHS,
        )),
        Kernel("network_backward", (
            *_NETWORK,
            Argument("grad_pooled", "const out_t*", "[batch, output_width] gradient of the result"),
            Argument("winners", "const int32_t*", "as network_forward wrote them"),
            Argument("partials", "gradient_t*", "gradients of the partial pools, one block per rank", use="result"),
            Argument("own_partials", "gradient_t*", "gradients of this rank's own partial pools, or null",
                     use="result"),
            Argument("factor", "const float*", "a number by which every gradient is multiplied; null: 1"),
            *_WIDTHS,
        )),
        Kernel("pack", (
            _PARTS,
            Argument("numbers", "const float*", "[rows, width]"),
            Argument("bytes", "uint8_t*", "[rows, row_bytes] for every part an fp32 scale, then one byte per number",
                     use="result"),
            *_PACKING,
        )),
        Kernel("unpack", (
            _PARTS,
            Argument("bytes", "const uint8_t*", "as pack wrote them"),
            Argument("numbers", "float*", "[rows, width]", use="result"),
            *_PACKING,
        )),
    )
}  # fmt: skip
"""The stages, in the order in which a step calls them. On a GPU, a stage may be several kernels: see
`codegen/targets/cuda/stages.py`."""

ABSENT = -(2**31)
"""The slot of an id that has no row."""


@dataclass(frozen=True)
class StagePlan:
    """The library of all stages for some number formats and ways to select."""

    target: str
    arch: str
    id_dtype: str
    """The format of a caller's ids."""
    wire_id_dtype: str
    """The format in which row numbers are sent."""
    wire_dtype: str
    """The format in which partial pools are sent."""
    gradient_dtype: str
    """The format in which gradients of partial pools are sent."""
    output_dtype: str
    selecting: tuple[str, ...] = tuple(combiner.name for combiner in selections_of(()))
    """The names of the combiners that select one of several partial pools: the `selections_of` a spec. A spec that
    selects nothing takes the library with the first of them."""

    op = "stages"

    def __post_init__(self) -> None:
        numbers, ids = OUTPUT_DTYPES, ID_DTYPES
        allowed = {
            "target": tuple(BACKENDS), "id_dtype": ids, "wire_id_dtype": ids,
            "wire_dtype": numbers, "gradient_dtype": numbers, "output_dtype": numbers,
        }  # fmt: skip
        for field, values in allowed.items():
            value = getattr(self, field)
            if value not in values:
                raise PlanError(f"stage plan field {field}={value!r} is not known; allowed: {', '.join(values)}")
        known = [combiner.name for combiner in SELECTING.values()]
        if not self.selecting or list(self.selecting) != [name for name in known if name in self.selecting]:
            raise PlanError(
                f"stage plan field selecting={self.selecting!r} is not known; allowed: "
                f"at least one of {', '.join(known)}, each once, in this order"
            )

    @cached_property
    def text(self) -> str:
        """Canonical JSON: equal plans have equal text."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps({"schema": STAGES_SCHEMA, **fields}, sort_keys=True, separators=(",", ":"))

    @cached_property
    def uri(self) -> str:
        """A C identifier: `stages_cpu_avx2_int64_int32_fp32_fp32_fp32_1f0c2a9b`."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:10]
        formats = (self.id_dtype, self.wire_id_dtype, self.wire_dtype, self.gradient_dtype, self.output_dtype)
        return "_".join(("stages", self.target, self.arch, *formats, digest))

    @property
    def symbol(self) -> str:
        """The text with which names of its kernels begin: its URI,
        or for an emulating target that of the plan it emulates."""
        return self.on(target_named(self.target).text_of).uri

    @property
    def selections(self) -> tuple[Combiner, ...]:
        """The combiners that `selecting` names."""
        return tuple(combiner for combiner in SELECTING.values() if combiner.name in self.selecting)

    @property
    def nameless(self) -> StagePlan:
        """The plan itself, because there are no names in it."""
        return self

    @property
    def manifest_fields(self) -> Mapping[str, object]:
        """A library of stages belongs to no collection and has nothing to tune."""
        return {"collection": None, "params": {}}

    def on(self, target: str) -> StagePlan:
        """The same plan for another target."""
        return replace(self, target=target)

    def called(self, symbol: str) -> StagePlan:
        """The plan itself: its binary cannot have another symbol. `PlanError` if `symbol` is another one."""
        if symbol != self.symbol:
            raise PlanError(f"{self.uri}: its binary has the symbol {symbol!r}; only {self.symbol!r} fits")
        return self
