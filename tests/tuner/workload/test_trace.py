"""Trace files, and workloads that are made from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.trace.file_format import RecordedCall, Trace, read_trace, trace_of, write_trace
from embforge.tuner.bench.forward import MIN_BATCHES, enough_batches
from embforge.tuner.workload.trace import Recorded, RecordedLengths, expected_distinct, fitted_exponent
from embforge.tuner.workload.workload import Batch, Uniform, Workload, WorkloadError, Zipf, make_batch, parse, traffic

ROWS = (10, 1000, 1000)
SPEC = CollectionSpec(
    (TableSpec("small", 10, 4), TableSpec("large", 1000, 8)),
    (
        FeatureSpec("a", "small"),
        FeatureSpec("b", "large", weighted=True),
        FeatureSpec("c", "large", pooling="concat", hotness=3),
    ),
)


def drawn(size: int, seed: int, weighted: bool = True) -> RecordedCall:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, 3 * size)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = np.concatenate(
        [rng.integers(0, rows, lengths[i * size : (i + 1) * size].sum()) for i, rows in enumerate(ROWS)]
    )
    return RecordedCall(size, values, offsets, rng.random(values.size, np.float32) if weighted else None)


def made(*batches: RecordedCall) -> Trace:
    return trace_of([f.name for f in SPEC.features], ROWS, "shape", batches or [drawn(4, 0), drawn(7, 1), drawn(1, 2)])


def same(one: Trace, other: Trace) -> bool:
    header = (one.features, one.rows, one.shape) == (other.features, other.rows, other.shape)
    return header and one.digest == other.digest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_trace(tmp_path / "t.npz", made())
    return tmp_path / "t.npz"


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4), seed=st.integers(0, 99), weighted=st.booleans())
def test_a_trace_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int, weighted: bool
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.npz"
    trace = made(*(drawn(size, seed + index, weighted) for index, size in enumerate(sizes)))
    write_trace(path, trace)
    assert same(read_trace(path), trace)
    assert list(path.parent.iterdir()) == [path]


def test_ids_past_32_bits_come_back(tmp_path: Path) -> None:
    trace = trace_of(["a"], [2**40], "", [RecordedCall(1, np.array([2**39]), np.array([0, 1]), None)])
    write_trace(tmp_path / "t.npz", trace)
    assert read_trace(tmp_path / "t.npz").values.tolist() == [2**39]


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_file_is_refused_by_name_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.npz"
    trace = made()
    write_trace(path, trace)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        assert same(read_trace(path), trace)
    except WorkloadError as error:
        assert str(path) in str(error)
        assert "embforge record" in str(error)


HEADER = {"schema": 1, "features": ["a"], "rows": [10], "shape": ""}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"header": None}, "no header"),
        ({"header": {**HEADER, "schema": 2}}, "schema 2; this embforge reads 1"),
        ({"header": {**HEADER, "rows": ["many"]}}, "lacks features, rows or shape"),
        ({"header": []}, "schema None"),
        ({"lengths": [2, 1]}, "2 bags do not fit 1 features"),
        ({"lengths": [-1]}, "bags hold -1 ids"),
        ({"lengths": [3]}, "bags hold 3 ids"),
        ({"values": [1, 10]}, "ids 1 to 10 of feature 'a' in 10 rows"),
        ({"values": [-1, 1]}, "ids -1 to 1"),
        ({"values": [0.5, 1.0]}, "values is float64"),
        ({"sizes": []}, "sizes is float64"),
        ({"sizes": np.zeros(0, np.int64)}, "0 bags|1 bags do not fit"),
        ({"weights": [1.0, 2.0]}, "2 float64 weights for 2 ids"),
        ({"weights": np.ones(3, np.float32)}, "3 float32 weights for 2 ids"),
        ({"values": np.array([object(), None])}, "cannot be read"),
    ],
)
def test_contents_of_a_trace_that_do_not_fit_are_named(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    parts: dict[str, Any] = {"header": HEADER, "sizes": [1], "lengths": [2], "values": [1, 2], "weights": []} | change
    parts["header"] = None if parts["header"] is None else json.dumps(parts["header"])
    arrays = {name: np.array(part) for name, part in parts.items() if part is not None}
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(WorkloadError, match=named):
        read_trace(tmp_path / "t.npz")


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "text.npz").write_text("zipf:1")
    (tmp_path / "empty.npz").touch()
    for name, named in (("array.npy", "it is a single array"), ("text.npz", "cannot be"), ("empty.npz", "cannot be")):
        with pytest.raises(WorkloadError, match=named):
            read_trace(tmp_path / name)
    with pytest.raises(WorkloadError, match=r"none\.npz: no such file"):
        make_batch(SPEC, parse(f"trace:{tmp_path}/none.npz"))
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("text", "workload"),
    [
        ("trace:t.npz", Workload(Recorded("t.npz"), batch=None)),
        ("trace:./a=b:c/t.npz , batch=7", Workload(Recorded("a=b:c/t.npz"), batch=7)),
        ("ids=trace:/x/t.npz", Workload(Recorded("/x/t.npz"), batch=None)),
        ("zipf:1,len=trace:a=b.npz", Workload(Zipf(1), RecordedLengths("a=b.npz"))),
    ],
)
def test_text_of_a_trace_workload_reads_back(text: str, workload: Workload) -> None:
    assert parse(text) == workload == parse(str(workload))


@pytest.mark.parametrize("text", ["trace:", "trace", "len=trace:", "trace:t.npz,len=fixed:3", "trace:t.npz,batch=x"])
def test_a_mistake_in_the_text_of_a_trace_workload_shows_the_form(text: str) -> None:
    with pytest.raises(WorkloadError, match="form: "):
        parse(text)


def test_only_a_trace_has_batch_sizes_of_its_own() -> None:
    with pytest.raises(WorkloadError, match="batch=N"):
        Workload(Uniform(), batch=None)


def bags_of(batch: Batch) -> list[tuple[list[list[int]], ...]]:
    """Every sample's bags."""
    bags = np.split(batch.values, batch.offsets[1:-1]) if batch.offsets.size > 1 else []
    listed = [bag.tolist() for bag in bags]
    return [tuple(listed[sample :: batch.size]) for sample in range(batch.size)]


def test_batches_are_those_recorded_and_go_around(path: Path) -> None:
    workload, seen = parse(f"trace:{path}"), [drawn(4, 0), drawn(7, 1), drawn(1, 2)]
    for seed in range(5):
        batch, expected = make_batch(SPEC, workload, seed, "int32"), seen[seed % 3]
        assert batch.size == expected.size
        assert batch.values.dtype == batch.offsets.dtype == np.int32
        assert batch.values.tolist() == expected.values.tolist()
        assert batch.offsets.tolist() == expected.offsets.tolist()
        assert batch.weights is not None
        assert expected.weights is not None
        assert batch.weights.tolist() == expected.weights.tolist()


@pytest.mark.parametrize("size", [1, 5, 12, 30])
def test_other_batch_sizes_keep_samples_and_their_order(path: Path, size: int) -> None:
    recorded = [bag for seed in range(3) for bag in bags_of(make_batch(SPEC, parse(f"trace:{path}"), seed))]
    batches = [make_batch(SPEC, parse(f"trace:{path},batch={size}"), seed) for seed in range(4)]
    assert {batch.size for batch in batches} == {size}
    got = [bag for batch in batches for bag in bags_of(batch)]
    assert got == [recorded[index % 12] for index in range(4 * size)]


def test_a_trace_gives_an_empty_batch_on_request(path: Path) -> None:
    batch = make_batch(SPEC, parse(f"trace:{path},batch=0"))
    assert (batch.size, batch.values.size, batch.offsets.tolist()) == (0, 0, [0])


def test_a_trace_without_samples_gives_only_its_own_empty_batches(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.npz", made(drawn(0, 0)))
    assert make_batch(SPEC, parse(f"trace:{tmp_path}/t.npz")).size == 0
    for text in (f"trace:{tmp_path}/t.npz,batch=2", f"len=trace:{tmp_path}/t.npz"):
        with pytest.raises(WorkloadError, match="no samples"):
            make_batch(SPEC, parse(text))


def test_features_of_a_trace_are_matched_by_name(path: Path) -> None:
    turned = CollectionSpec(SPEC.tables, SPEC.features[::-1])
    batch, expected = make_batch(turned, parse(f"trace:{path}"), 1), make_batch(SPEC, parse(f"trace:{path}"), 1)
    for index in range(3):
        assert batch.values[batch.feature(index)].tolist() == expected.values[expected.feature(2 - index)].tolist()
    renamed = CollectionSpec(SPEC.tables, [FeatureSpec(f"new_{f.name}", f.table) for f in SPEC.features])
    plain = make_batch(renamed, parse(f"trace:{path}"), 1)
    assert plain.values.tolist() == expected.values.tolist()
    assert plain.weights is None  # no feature of this spec is weighted


def test_a_spec_that_does_not_fit_the_trace_is_refused(path: Path) -> None:
    cases = {
        "has 3 features.*the spec has 2": CollectionSpec(SPEC.tables, SPEC.features[:2]),
        "of feature 'b' is not a row of table 'large'; allowed: 0 to 99": CollectionSpec(
            (SPEC.tables[0], TableSpec("large", 100, 8)), SPEC.features
        ),
        "'c' has 3 ids, hotness=2": CollectionSpec(
            SPEC.tables, (*SPEC.features[:2], FeatureSpec("c", "large", pooling="concat", hotness=2))
        ),
    }
    for named, spec in cases.items():
        with pytest.raises(WorkloadError, match=named) as caught:
            make_batch(spec, parse(f"trace:{path}"))
        assert str(path) in str(caught.value)
        assert "record" in str(caught.value)


def test_recorded_lengths_are_drawn_by_feature(tmp_path: Path) -> None:
    values = np.zeros(12, np.int64)
    offsets = np.concatenate([[0], np.cumsum([5, 5, 0, 0, 1, 1])])
    write_trace(tmp_path / "t.npz", made(RecordedCall(2, values, offsets, None)))
    batch = make_batch(SPEC, parse(f"uniform,len=trace:{tmp_path}/t.npz,batch=50"))
    assert (np.diff(batch.offsets).reshape(3, 50) == [[5], [0], [1]]).all()
    assert np.unique(batch.values).size > 5
    assert traffic(SPEC, parse(f"len=trace:{tmp_path}/t.npz")).bag_length == 2.0


def test_identity_is_by_content(path: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved.npz"
    write_trace(moved, made())
    ids, lengths = parse(f"trace:{path},batch=4"), parse(f"len=trace:{path}")
    for one, other in ((ids, parse(f"trace:{moved},batch=4")), (lengths, parse(f"len=trace:{moved}"))):
        assert one != other
        assert one.identity() == other.identity() != str(one)
    assert ids.identity() != parse(f"trace:{path}").identity()
    before = ids.identity()
    write_trace(path, made(drawn(3, 5)))
    assert ids.identity() != before
    assert make_batch(SPEC, parse(f"trace:{path}")).size == 3
    assert parse("zipf:1").identity() == "zipf:1,batch=2048"


def test_enough_batches_and_smaller_ones(path: Path) -> None:
    workload = parse(f"trace:{path}")
    sizes = [batch.size for batch in enough_batches(SPEC, workload, 1)]
    assert len(sizes) >= MIN_BATCHES
    assert sizes[:4] == [7, 1, 4, 7]
    assert workload.at_most(2).batch == 2
    assert parse("batch=9").at_most(64) == parse("batch=9")


def test_traffic_of_a_trace_and_of_laws(path: Path) -> None:
    found = traffic(SPEC, parse(f"trace:{path}"))
    assert found.batch == 4
    assert found.bag_length == pytest.approx(made().lengths.mean())
    assert traffic(SPEC, parse(f"trace:{path},batch=9")).batch == 9
    by_law = traffic(SPEC, parse("zipf:1.05,len=geo:20,batch=64"))
    assert (by_law.batch, by_law.skew) == (64, 1.05)
    assert by_law.bag_length == pytest.approx((20 + 20 + 3) / 3, rel=0.05)  # concat holds 3 at most
    assert traffic(SPEC, parse("uniform")).skew == 0


@pytest.mark.parametrize("rows", [100, 20_000, 10_000_000])
@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.05, 1.5])
def test_the_skew_of_a_trace_is_that_of_its_law(rows: int, exponent: float) -> None:
    ids = Zipf(exponent).draw(np.random.default_rng(3), 100_000, rows)
    assert fitted_exponent(ids, rows) == pytest.approx(exponent, abs=0.2 if exponent == 0 else 0.05)


def test_expected_distinct_is_exact_for_equal_rows() -> None:
    for rows, draws in ((10, 7), (5000, 3000), (10**6, 1000)):
        assert expected_distinct(0.0, draws, rows) == pytest.approx(rows * (1 - (1 - 1 / rows) ** draws), rel=1e-9)
    assert expected_distinct(0.0, 5, 1) == 1.0
