"""Small collections in which many combinations of formats, poolings and widths occur, and every built-in rule."""

from __future__ import annotations

import embforge as ef
from embforge import optim

_TABLES = (
    ef.TableSpec("a", 40, 8),
    ef.TableSpec("b", 30, 5, "fp16"),
    ef.TableSpec("c", 30, 12, "bf16"),
    ef.TableSpec("d", 20, 16, "fp8_e4m3"),
)
_FEATURES = (
    ef.FeatureSpec("a_sum", "a", weighted=True),
    ef.FeatureSpec("a_max", "a", "max"),
    ef.FeatureSpec("b_mean", "b", "mean", weighted=True, padding_idx=3),
    ef.FeatureSpec("b_rows", "b", "none"),
    ef.FeatureSpec("c_sqrtn", "c", "sqrtn", weighted=True),
    ef.FeatureSpec("c_concat", "c", "concat", hotness=3, padding_idx=1),
    ef.FeatureSpec("d_sum", "d", padding_idx=-1),
    ef.FeatureSpec("d_mean", "d", "mean"),
)
MIX = ef.CollectionSpec(_TABLES, _FEATURES, name="mix")
"""The table formats and poolings of the first digests; results in fp32."""
HALF = ef.CollectionSpec(
    [
        ef.TableSpec("a", 25, 7, "bf16"),
        ef.TableSpec("b", 30, 4),
        ef.TableSpec("c", 9, 3, "fp8_e4m3"),
        ef.TableSpec("d", 50, 10, "fp16"),
    ],
    [
        ef.FeatureSpec("a_max", "a", "max", padding_idx=-1),
        ef.FeatureSpec("a_concat", "a", "concat", weighted=True, hotness=2),
        ef.FeatureSpec("b_mean", "b", "mean"),
        ef.FeatureSpec("b_sum", "b", weighted=True, padding_idx=0),
        ef.FeatureSpec("c_rows", "c", "none", weighted=True, padding_idx=2),
        ef.FeatureSpec("c_max", "c", "max", padding_idx=4),
        ef.FeatureSpec("d_sqrtn", "d", "sqrtn", padding_idx=1),
    ],
    output_dtype="fp16",
    name="half",
)
"""Other pairs of them, with absent ids; results in fp16, and ids of 32 bits."""
NARROW = ef.CollectionSpec(
    [ef.TableSpec("a", 20, 6), ef.TableSpec("b", 20, 9, "bf16"), ef.TableSpec("c", 20, 4, "fp8_e4m3")],
    [
        ef.FeatureSpec("a", "a", weighted=True),
        ef.FeatureSpec("b", "b", "mean"),
        ef.FeatureSpec("c", "c", "max"),
    ],
    output_dtype="bf16",
    name="narrow",
)
"""What every rule trains; results in bf16."""
WIDE = ef.CollectionSpec(
    [ef.TableSpec("one", 9, 1), ef.TableSpec("wide", 12, 1000), ef.TableSpec("odd", 15, 133, "fp16")],
    [
        ef.FeatureSpec("one", "one"),
        ef.FeatureSpec("wide", "wide", "mean", weighted=True),
        ef.FeatureSpec("odd", "odd", "max"),
    ],
    name="wide",
)
"""Rows of one number, and rows that take more than a warp or a tile of registers."""
LATER = ef.CollectionSpec(
    [ef.TableSpec("a", 40, 8, "fp8_e5m2"), ef.TableSpec("b", 30, 5)],
    [
        ef.FeatureSpec("a_min", "a", "min", padding_idx=3),
        ef.FeatureSpec("a_mean", "a", "mean", weighted=True),
        ef.FeatureSpec("a_rows", "a", "none"),
        ef.FeatureSpec("b_min", "b", "min", padding_idx=-1),
    ],
    name="later",
)
"""The format and the pooling that came after these."""
REMAPPED = ef.CollectionSpec(
    [
        ef.TableSpec("a", 12, 4, remap=40),
        ef.TableSpec("b", 20, 6),
        ef.TableSpec("c", 9, 3, "bf16", remap=5),
    ],
    [
        ef.FeatureSpec("a_sum", "a", weighted=True),
        ef.FeatureSpec("a_mean", "a", "mean", padding_idx=3),
        ef.FeatureSpec("a_rows", "a", "none"),
        ef.FeatureSpec("b_max", "b", "max", padding_idx=2),
        ef.FeatureSpec("c_concat", "c", "concat", hotness=3, padding_idx=-1),
    ],
    name="remapped",
)
"""Tables of more and of fewer ids than rows, and one whose ids are its rows."""
ONE = ef.CollectionSpec([ef.TableSpec("t", 40, 8, "bf16")], [ef.FeatureSpec("f", "t")], name="one")
"""The smallest spec, for cases that must be quick."""

SIGNUM = optim.custom(
    "signum",
    state={"m": "element"},
    rule="m = beta * m + (1 - beta) * g\nw -= lr * sign(m)",
    hyper={"beta": 0.9},
)
RULES: dict[str, optim.Optimizer] = {
    "sgd": optim.SGD(lr=0.1),
    "sgd l2 nearest": optim.SGD(lr=0.1, weight_decay=0.01, rounding="nearest"),
    "momentum": optim.Momentum(lr=0.05, weight_decay=0.01),
    "nesterov": optim.Nesterov(lr=0.05),
    "adagrad": optim.Adagrad(lr=0.1, lr_decay=0.01),
    "rowwise_adagrad": optim.RowwiseAdagrad(lr=0.1, initial_accumulator_value=0.1),
    "adam": optim.Adam(lr=0.02),
    "adam decoupled clipped": optim.Adam(lr=0.02, weight_decay=0.1, decoupled=True, max_row_norm=0.5),
    "rowwise_adam": optim.RowwiseAdam(lr=0.02),
    "rmsprop": optim.RMSProp(lr=0.02),
    "ftrl": optim.Ftrl(lr=0.1, l1=0.001, l2=0.001),
    "lamb": optim.LAMB(lr=0.02, weight_decay=0.01),
    "lars": optim.LARS(lr=2.0, weight_decay=0.01),
    "signum": SIGNUM(lr=0.01),
}
"""Every built-in rule, options that change its code, and a user's rule."""
