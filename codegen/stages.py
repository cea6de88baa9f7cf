"""The kernels of the stages between ranks: what they take, and the plan that determines their source.

One library holds all stages. It is made for number formats, not for a spec: what a stage moves lies in memory one row
after the other and is moved once, so widths and counts may be numbers in `metadata` arrays, which `codegen/sharding`
knows and every rank derives alike. All arrays of numbers here are int64 unless an argument says otherwise.
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
"""Raised whenever a stage's meaning changes."""

FEATURE_WORDS = ("rows", "padding", "base", "divides", "divisor_column", "hotness", "weighted", "absent")
"""What `features` holds for each feature. `rows`: ids are smaller (-1: not checked). `padding`: an id that pooled bags
leave out, or -1. `base` is added to every id. `divides`: the Divisor of its pooling, or 0. `hotness`: most ids of a
concat bag, 0: any number. `weighted`: whether weights count in the divisor. `absent`: an id that is no row, and no
mistake; or 0, which is a row."""

BUCKETING_WORDS = ("feature", "shards", "block", "first", "sequence", "layer", "checks")
"""What `bucketings` holds for each bucketing. `block`: rows of a block, 0: modulo. `first`: where the streams of its
shards begin in `shard_streams`. `sequence`: 1 if rows travel one by one. `layer`: its number among the bucketings of
its feature, and so its row of `slots`. `checks`: 1 for the one that looks for mistakes and computes divisors. A
bucketing of one shard sends all ids, padding too (and ids that are no rows, as -1), so that positions in a bag stay
what they were."""

STREAM_WORDS = ("header_at", "length_row", "weighted", "asked_at")
"""What `streams` holds for each stream: where `header` wants its count; its row of `lengths` and `pools` (-1: rows
travel one by one); whether weights travel with its ids; where `header` wants the number of pools that are asked for
(-1: nobody counts them).

An empty bag's pool is not asked for, and bags of one id each ask once for all that have that id, unless ids have
weights."""

PLACE_WORDS = ("ids_at", "lengths_at", "weights_at", "base", "asked_at")
"""What `places` holds for each stream: positions in `words` (of 4 bytes); `base`: what a sequence's slot is counted
from; `asked_at`: where the samples go whose pools are asked for, -1: all pools come back, none is asked for."""

MISTAKE_WORDS = ("kind", "feature", "sample", "position", "value")
"""What `mistake` holds of the first mistake. `kind`: 0: none, else counted from 1 among MISTAKES."""

HEADER_WORDS = ("mistake", *MISTAKE_WORDS[1:], "batch", "flags", "call")
"""What a rank tells every other before anything else; the counts of the streams between them follow,
then the numbers of pools that are asked for.

The first five are of the first mistake (0: none). `flags`: FLAGS. `call`: how many calls the rank has made."""
MISTAKES = ("BAD_ID", "BAD_OFFSET", "LONG_CONCAT", "REFUSED")
"""Counted from 1. REFUSED: arguments that no kernel has seen."""
FLAGS = {"trains": 1, "weight_gradient": 2, "joined": 4, "no_gradients": 8}

SEGMENT_WORDS = ("ids_from", "count", "values_to", "lengths_from", "samples", "offsets_to", "weights_from")
"""What `segments` holds for each (feature of a rank's own collection, source): positions in the received words of ids,
lengths (-1: a sequence, whose ids are dealt evenly to the samples) and weights (-1: none), and where they go."""

PIECE_WORDS = ("column", "width", "action", "divisor_column", "first", "sources", "winner_column")
"""What `pieces` holds for each run of columns of the pooled result. `action`: ACTIONS. `first`, `sources`: which
entries of `sources` hold its partial pools."""
ACTIONS = {"divide": DIVIDE, **{combiner.name: combiner.action for combiner in COMBINERS}}
"""What is done to partial pools: they are combined, or added and divided."""
SOURCE_WORDS = ("block_at", "row_width", "column", "length_row", "own", "asked")
"""What `sources` holds for each partial pool: where its block begins (in numbers), how wide the rows of the block are,
its column there, its row of `lengths` and `pools`, whether the block lies in `own_partials` (what a rank has for itself
is not copied to lie beside what came from others), and whether rows of the block are pools that were asked for, at the
places that `pools` says; else there is one a sample."""

PICK_WORDS = ("row", "byte", "bytes", "asked_from", "count", "to")
"""What `picks` holds for each (pooled feature, source) whose pools were asked for: the row of the source's first
sample, where the feature's bytes begin in a row and how many they are, where `words` has the `count` samples asked for,
and where in `picked` their bytes go. All positions and sizes of bytes are even."""

PART_WORDS = ("column", "width", "byte")
"""What `parts` holds for each run of columns that shares a scale: where it lies in a row of numbers and of packed
bytes."""
PACKED = tuple(dtype for dtype in WIRE.values() if dtype.is_packed)
"""Formats of a byte a number, of which each run of columns has a scale."""
PACKINGS = {dtype.wire: number for number, dtype in enumerate(PACKED)}

BOUNDS = ("error", "zero", "unchecked")
"""What a module's `bounds_check` can be, in the order of the numbers that stages get for it."""

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
    Argument("bounds", "int64_t", "Bounds: ids that are no rows are a mistake, absent, or not looked for"),
    Argument("merge", "int64_t", "1: an id that a stream of a sequence has already is not sent again"),
)
_NETWORK = (
    records("pieces", Record("PIECE", "piece", PIECE_WORDS)),
    records("sources", Record("SOURCE", "partial pool", SOURCE_WORDS)),
    Argument("lengths", "const int32_t*", "[pooled streams, batch] ids of every bag that each shard has"),
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
    Argument("width", "int64_t", "numbers of a row"),
    Argument("row_bytes", "int64_t", "packed bytes of a row"),
    Argument("packing", "int64_t", "Packing: what a byte is"),
    *POOL,
)
_RECEIVED = Argument("words", "const int32_t*", "what was received")
_SHARING = space("parts", "int64_t", "blocks that share a bucketing, segment or pick")
_RUN = space("run", "int64_t", "samples that a warp takes")

STAGES: dict[str, Kernel] = {
    stage.name: stage
    for stage in (
        Kernel("count", (
            *_GEOMETRY,
            *BAGS,
            Argument("lengths", "int32_t*", "[pooled streams, batch] ids of every bag that each shard has",
                     use="result"),
            Argument("slots", "int32_t*", "[layers, num_values] where an id's row stands among those of its stream; "
                     "-1 - that for one that was sent before; ABSENT", use="result"),
            Argument("pools", "int32_t*", "[pooled streams, batch] where a bag's pool stands among those that its "
                     "stream asks for; -1 - that for one that was asked for before; ABSENT: empty. Null: no stream "
                     "asks", use="result"),
            Argument("divisors", "float*", "[batch, divisor_width] what mean and sqrtn divide by, 0: the result is "
                     "zeros", use="result"),
            Argument("header", "int64_t*", "counts go where streams say, the first mistake to `mistake`",
                     use="result"),
            Argument("mistake", "int64_t*", "kind (0: none), feature, sample, position, value", use="changed",
                     record=Record("MISTAKE", "call", MISTAKE_WORDS)),
            *_COUNTS,
            Argument("divisor_width", "int64_t", "columns of divisors"),
            *POOL,
            space("keys", "int64_t*", "[layers, num_values] stream and row of a sequence's ids, then of pools that "
                   "are asked for [pooled streams, batch]; zeros before"),
            space("sorted_keys", "const int64_t*", "those in order"),
            space("order", "const int64_t*", "where each of them stood"),
            space("heads", "int32_t*", "1 where a row begins that is sent, or a pool that is asked for, by sorted "
                   "key"),
            space("ranks", "const int32_t*", "those summed up"),
            space("firsts", "int32_t*", "heads of all streams before a stream"),
            space("num_keys", "int64_t", "keys"),
            space("num_slots", "int64_t", "layers * num_values: where keys of pools begin"),
            _RUN,
            _SHARING,
        )),
        Kernel("fill", (
            *_GEOMETRY,
            *BAGS,
            Argument("lengths", "const int32_t*", "as count left them"),
            Argument("slots", "int32_t*", "as count left them; then rows among all that the feature gets, -1: absent",
                     use="changed"),
            Argument("pools", "int32_t*", "as count left them; then of streams that ask the places alone, -1: empty. "
                     "Null: no stream asks", use="changed"),
            records("places", Record("PLACE", "stream", PLACE_WORDS)),
            Argument("words", "int32_t*", "what is sent: ids, lengths, weights and samples asked for, of every stream",
                     use="result"),
            *_COUNTS,
            *POOL,
            space("ends", "const int32_t*", "lengths, summed up along the samples"),
            _RUN,
            _SHARING,
        )),
        Kernel("regroup", (
            records("segments", Record("SEGMENT", "segment", SEGMENT_WORDS)),
            _RECEIVED,
            Argument("values", "wire_id_t*", "ids, by feature of this rank's own collection, then by source",
                     use="result"),
            Argument("offsets", "wire_id_t*", "their bag borders; the first is 0", use="result"),
            Argument("weights", "float*", "weights of the ids, or null", use="result"),
            Argument("num_segments", "int64_t", "segments"),
            *POOL,
            _SHARING,
        )),
        Kernel("gather", (
            records("picks", Record("PICK", "pick", PICK_WORDS)),
            _RECEIVED,
            Argument("rows", "const uint8_t*", "pools of all samples, row_bytes each"),
            Argument("picked", "uint8_t*", "those that were asked for, pick by pick", use="result"),
            Argument("num_picks", "int64_t", "picks"),
            Argument("row_bytes", "int64_t", "bytes of a row"),
            *POOL,
            _SHARING,
        )),
        Kernel("network_forward", (
            *_NETWORK,
            Argument("pools", "const int32_t*", "[pooled streams, batch] as fill left them; null: none were asked "
                     "for"),
            Argument("partials", "const wire_t*", "partial pools of all sources"),
            Argument("own_partials", "const wire_t*", "those of this rank itself, or null"),
            Argument("pooled", "out_t*", "[batch, output_width] result", use="result"),
            Argument("winners", "int32_t*", "[batch, winner_width] which partial pool was selected, -1: none; or null",
                     use="result"),
            *_WIDTHS,
        )),
        Kernel("network_backward", (
            *_NETWORK,
            Argument("grad_pooled", "const out_t*", "[batch, output_width] gradient of the result"),
            Argument("winners", "const int32_t*", "as network_forward left them"),
            Argument("partials", "gradient_t*", "gradients of the partial pools, a block a rank", use="result"),
            Argument("own_partials", "gradient_t*", "those of this rank's own, or null", use="result"),
            Argument("factor", "const float*", "one number that every gradient is multiplied by, or null: 1"),
            *_WIDTHS,
        )),
        Kernel("pack", (
            _PARTS,
            Argument("numbers", "const float*", "[rows, width]"),
            Argument("bytes", "uint8_t*", "[rows, row_bytes]: of every part an fp32 scale, then a byte a number",
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
"""The entries of the library, in the order in which a step calls them. On a GPU a stage may be several kernels: see
`codegen/targets/cuda/stages.py`."""

ABSENT = -(2**31)
"""A slot of an id that has no row."""


@dataclass(frozen=True)
class StagePlan:
    """The library of all stages for some number formats and ways to select."""

    target: str
    arch: str
    id_dtype: str
    """Of ids as they are given."""
    wire_id_dtype: str
    """Of rows as they travel."""
    wire_dtype: str
    """Of partial pools as they travel."""
    gradient_dtype: str
    """Of their gradients."""
    output_dtype: str
    selecting: tuple[str, ...] = tuple(combiner.name for combiner in selections_of(()))
    """Names of the combiners by which the library selects one of several partial pools: `selections_of` a spec. A spec
    that selects nothing takes the library of the first of them."""

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
        """What entries of the library begin with: its URI, or that of the plan whose text an emulating target runs."""
        return self.on(target_named(self.target).text_of).uri

    @property
    def selections(self) -> tuple[Combiner, ...]:
        """The combiners that `selecting` names."""
        return tuple(combiner for combiner in SELECTING.values() if combiner.name in self.selecting)

    @property
    def nameless(self) -> StagePlan:
        """The plan itself: there are no names in it."""
        return self

    @property
    def about(self) -> Mapping[str, object]:
        """A library of stages belongs to no collection and has nothing to tune."""
        return {"collection": None, "params": {}}

    def on(self, target: str) -> StagePlan:
        """The same for another target."""
        return replace(self, target=target)

    def called(self, symbol: str) -> StagePlan:
        """The plan itself, whose binary has no other symbol."""
        if symbol != self.symbol:
            raise PlanError(f"{self.uri}: its binary has the symbol {symbol!r}; only {self.symbol!r} fits")
        return self
