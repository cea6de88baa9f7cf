"""From a spec and its traffic to what tuned results are known by: equal meaning, equal digest, whatever the names."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict
from typing import Any

from embforge.codegen.buckets import POOLING_CLASS
from embforge.codegen.dtypes import DTYPES
from embforge.codegen.rules.rule import Update
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.plans import SPARSE, name_of
from embforge.codegen.tuned.record import Key, Shape, Traffic

DIGEST_DIGITS = 16
SKEW_STEP = 0.25
USUAL_BATCH = 2048
"""What a result is best made for where nobody says which batches come. The tuner's workloads have it by default."""


def shape_of(spec: CollectionSpec) -> Shape:
    """What of a spec decides which parameters are fast.

    The digest leaves names out, and the usual bag length of a feature that does not concatenate: no kernel depends on
    it, and what bags hold is for the traffic to say.
    """
    index = {table.name: i for i, table in enumerate(spec.tables)}
    tables = [[t.num_embeddings, t.embedding_dim, t.dtype, t.storage] for t in spec.tables]
    features = [
        [index[f.table], f.pooling, f.weighted, f.hotness if f.pooling == "concat" else None, f.padding_idx]
        for f in spec.features
    ]
    logs = [math.log(spec.tables[index[f.table]].embedding_dim) for f in spec.features]
    poolings = {POOLING_CLASS[f.pooling] + ("+weighted" if f.weighted else "") for f in spec.features}
    return Shape(
        digest=_digest([tables, features, spec.output_dtype]),
        dtypes=(*sorted({t.dtype for t in spec.tables}), spec.output_dtype),
        poolings=tuple(sorted(poolings)),
        features=len(spec.features),
        dim=math.exp(sum(logs) / len(logs)),
        table_bytes=sum(t.num_embeddings * t.embedding_dim * DTYPES[t.dtype].bytes for t in spec.tables),
    )


def usual_traffic(spec: CollectionSpec, batch: float | None = None) -> Traffic:
    """What is known of traffic before any: the batch if the user says, bag lengths if every feature has a hotness."""
    lengths = [f.hotness for f in spec.features if f.hotness is not None]
    known = len(lengths) == len(spec.features)
    return Traffic(batch, sum(lengths) / len(lengths) if known else None)


def rule_named(update: Update | None) -> str:
    """An update as `Key.rule` names it: its rule with modifiers; one of the user's own with a digest of its text."""
    if update is None:
        return SPARSE
    return name_of(update) or f"{update.rule.name}:{_digest(update.to_dict())[:8]}"


def bucket_of(traffic: Traffic) -> Traffic:
    """Traffic in steps within which nobody tunes twice: powers of two, and quarters of Zipf's exponent."""
    skew = None if traffic.skew is None else round(traffic.skew / SKEW_STEP) * SKEW_STEP
    return Traffic(_power_of_two(traffic.batch), _power_of_two(traffic.bag_length), skew)


def digest_of(key: Key) -> str:
    """Hexadecimal; equal for keys of one meaning: people's name of the hardware counts as little as those in a spec."""
    hardware = [key.hardware.kind, key.hardware.identity, key.hardware.sizes]
    kernel = [key.op, key.target, key.rule, key.shape.digest, key.id_dtype]
    return _digest([*kernel, hardware, asdict(bucket_of(key.traffic)), key.cache])


def file_name(key: Key) -> str:
    """What a result's file is called."""
    return f"{key.op}-{key.target}-{digest_of(key)}.json"


def _power_of_two(value: float | None) -> float | None:
    return value if not value else float(2.0 ** round(math.log2(value)))


def _digest(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_DIGITS]
