"""Workload strings and the batches made from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.tuner.workload.laws import spread
from embforge.tuner.workload.workload import (
    Fixed,
    Geometric,
    Skew,
    Uniform,
    Workload,
    WorkloadError,
    Zipf,
    make_batch,
    parse,
)

SPEC = CollectionSpec(
    (TableSpec("small", 10, 4), TableSpec("large", 1_000_003, 8)),
    (
        FeatureSpec("a", "small"),
        FeatureSpec("b", "large", hotness=5),
        FeatureSpec("c", "large", pooling="concat", hotness=3),
    ),
)

reals = st.floats(0, 10).map(lambda x: float(f"{x:g}"))
laws = st.one_of(
    st.none(),
    st.integers(0, 1000).map(Fixed),
    reals.map(Geometric),
    st.builds(Skew, st.integers(0, 9), st.integers(0, 9999), st.sampled_from([0.0, 0.01, 1.0])),
)


@given(st.builds(Workload, st.one_of(st.just(Uniform()), reals.map(Zipf)), laws, st.integers(0, 2**20)))
def test_text_roundtrip(workload: Workload) -> None:
    assert parse(str(workload)) == workload


def test_the_documented_workload_is_understood() -> None:
    assert parse("zipf:1.05,len=geo:20,batch=2048") == Workload(Zipf(1.05), Geometric(20), 2048)
    assert parse("ids=uniform") == parse("") == Workload()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("zip:1", "ids='zip:1'"),
        ("zipf", "ids='zipf'"),
        ("zipf:x", "zipf exponent='x'"),
        ("zipf:-1", "zipf exponent=-1"),
        ("zipf:nan", "zipf exponent=nan"),
        ("len=fixed:2.5", "len=fixed='2.5'"),
        ("len=geo", "len='geo'"),
        ("len=skew:1:2", "len='skew:1:2'"),
        ("len=skew:1:2:1.5", "len=skew share=1.5"),
        ("batch=-1", "batch=-1"),
        ("size=3", "unknown key 'size'"),
        ("uniform,zipf:1", "ids is given twice"),
    ],
)
def test_mistakes_are_named_with_the_form(text: str, named: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        parse(text)
    assert named in str(caught.value)
    assert repr(text) in str(caught.value)
    assert "zipf:1.05,len=geo:20,batch=2048" in str(caught.value)


def test_batch_is_feature_major_and_in_range() -> None:
    batch = make_batch(SPEC, parse("zipf:1.05,len=geo:4,batch=300"))
    assert batch.offsets.size == 3 * 300 + 1
    assert batch.offsets[0] == 0
    assert batch.offsets[-1] == batch.values.size
    assert (np.diff(batch.offsets) >= 0).all()
    for index, feature in enumerate(SPEC.features):
        ids = batch.values[batch.feature(index)]
        assert ids.size
        assert ids.min() >= 0
        assert ids.max() < SPEC.table(feature.table).num_embeddings
    assert batch.weights is None


def test_length_defaults_to_hotness_and_concat_is_never_exceeded() -> None:
    lengths = np.diff(make_batch(SPEC, Workload(batch=7)).offsets).reshape(3, 7)
    assert (lengths == [[1], [5], [3]]).all()
    longer = np.diff(make_batch(SPEC, parse("len=fixed:50,batch=7")).offsets).reshape(3, 7)
    assert (longer == [[50], [50], [3]]).all()


def test_weights_exist_if_any_feature_is_weighted() -> None:
    spec = CollectionSpec(SPEC.tables, (*SPEC.features, FeatureSpec("w", "small", weighted=True)))
    batch = make_batch(spec, Workload(batch=9))
    assert batch.weights is not None
    assert batch.weights.dtype == np.float32
    assert batch.weights.shape == batch.values.shape


@pytest.mark.parametrize("text", ["batch=0", "len=fixed:0,batch=5"])
def test_empty_batches_have_no_ids(text: str) -> None:
    batch = make_batch(SPEC, parse(text))
    assert batch.values.size == 0
    assert batch.offsets.size == 3 * batch.size + 1


def test_same_seed_same_bits_other_seed_other_ids() -> None:
    workload = parse("zipf:1.05,len=fixed:20,batch=100")
    first, again, other = (make_batch(SPEC, workload, seed) for seed in (3, 3, 4))
    assert (first.values == again.values).all()
    assert (first.values != other.values).any()
    # Pinned: batches must not change under a reader who compares runs of different versions.
    pinned = [
        7,
        3,
        3,
        4,
        930065,
        333334,
        252221,
        659567,
        728648,
        783952,
        998299,
        367765,
    ]
    assert make_batch(SPEC, parse("zipf:1,len=fixed:2,batch=2")).values.tolist() == pinned


def test_ids_are_int32_on_request() -> None:
    batch = make_batch(SPEC, Workload(batch=4), id_dtype="int32")
    assert batch.values.dtype == batch.offsets.dtype == np.int32


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.05, 2.0])
def test_zipf_frequencies_follow_the_law(exponent: float) -> None:
    rows, count = 1_000_003, 400_000
    ids = Zipf(exponent).draw(np.random.default_rng(1), count, rows)
    ranked = np.sort(np.unique(ids, return_counts=True)[1])[::-1]
    mass = (np.arange(1, rows + 1, dtype=np.float64) ** -exponent).cumsum()
    for top in (1, 10, 1000):
        expected = count * mass[top - 1] / mass[-1]
        if expected > 1000:  # below, the noise of the draw decides
            assert ranked[:top].sum() == pytest.approx(expected, rel=0.1)


def test_zipf_tail_reaches_past_the_exact_head() -> None:
    ids = Zipf(0.0).draw(np.random.default_rng(1), 400_000, 1_000_003)
    assert abs(ids.mean() / 1_000_003 - 0.5) < 0.01
    assert np.unique(ids).size > 300_000


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 1000, 65_537])
def test_spread_is_a_bijection(rows: int) -> None:
    assert np.unique(spread(np.arange(rows, dtype=np.int64), rows)).size == rows


def test_hot_rows_are_spread_over_the_table() -> None:
    hot = np.sort(spread(np.arange(1000, dtype=np.int64), 1_000_000))
    assert np.diff(hot).min() > 100
    huge = spread(np.arange(2**40 - 5, 2**40, dtype=np.int64), 2**40)
    assert huge.min() >= 0
    assert huge.max() < 2**40
