"""Keys of tuned results from a spec and its traffic: equal meaning gives an equal digest, whatever the names."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict
from typing import Any

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.plans import SPARSE, name_of
from embforge.codegen.rules.rule import Update
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.tuned.record import Key, Shape, Traffic

DIGEST_DIGITS = 16
SKEW_STEP = 0.25
USUAL_BATCH = 2048
"""The batch size that is assumed if the user does not set one; also the default of the tuner's workloads."""


def shape_of(spec: CollectionSpec) -> Shape:
    """The properties of a spec that decide which parameters are fast.

    The digest leaves names out, and the usual bag length of a feature that does not concatenate: no kernel depends on
    it, and what bags hold is for the traffic to say. So do remaps, because lookups begin after them.
    """
    spec = spec.by_rows()
    index = {table.name: i for i, table in enumerate(spec.tables)}
    tables = [[t.num_embeddings, t.embedding_dim, t.dtype, t.storage] for t in spec.tables]
    features = [[index[f.table], f.pooling, f.weighted, f.slots or None, f.padding_idx] for f in spec.features]
    logs = [math.log(spec.tables[index[f.table]].embedding_dim) for f in spec.features]
    poolings = {f.kind.undivided.name + ("+weighted" if f.weighted else "") for f in spec.features}
    return Shape(
        digest=_digest([tables, features, spec.output_dtype]),
        dtypes=(*sorted({t.dtype for t in spec.tables}), spec.output_dtype),
        poolings=tuple(sorted(poolings)),
        features=len(spec.features),
        dim=math.exp(sum(logs) / len(logs)),
        table_bytes=sum(t.num_embeddings * t.embedding_dim * DTYPES[t.dtype].bytes for t in spec.tables),
    )


def usual_traffic(spec: CollectionSpec, batch: float | None = None) -> Traffic:
    """The traffic known in advance: the batch if the user sets it, bag lengths if every feature has a hotness."""
    lengths = [f.hotness for f in spec.features if f.hotness is not None]
    known = len(lengths) == len(spec.features)
    return Traffic(batch, sum(lengths) / len(lengths) if known else None)


def rule_named(update: Update | None) -> str:
    """The name of an update in `Key.rule`: its rule with modifiers; a user's own rule has a digest of its text, too."""
    if update is None:
        return SPARSE
    return name_of(update) or f"{update.rule.name}:{_digest(update.to_dict())[:8]}"


def bucket_of(traffic: Traffic) -> Traffic:
    """Traffic rounded to steps within which results count as the same: powers of two, quarters of Zipf's exponent."""
    skew = None if traffic.skew is None else round(traffic.skew / SKEW_STEP) * SKEW_STEP
    return Traffic(_power_of_two(traffic.batch), _power_of_two(traffic.bag_length), skew)


def digest_of(key: Key) -> str:
    """A hexadecimal hash, equal for keys of equal meaning: names in the spec and the hardware's name do not count."""
    hardware = [key.hardware.kind, key.hardware.identity, key.hardware.sizes]
    kernel = [key.op, key.target, key.rule, key.shape.digest, key.id_dtype]
    return _digest([*kernel, hardware, asdict(bucket_of(key.traffic)), key.cache])


def file_name(key: Key) -> str:
    """The name of a result's file in a store."""
    return f"{key.op}-{key.target}-{digest_of(key)}.json"


def _power_of_two(value: float | None) -> float | None:
    return value if not value else float(2.0 ** round(math.log2(value)))


def _digest(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_DIGITS]
