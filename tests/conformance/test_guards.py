"""Checks before a kernel runs, because kernels trust the layout of tables, which users can replace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.backends import BACKENDS, collection
from torch import Tensor

from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.collection import EmbeddingCollection

SPEC = CollectionSpec(
    [TableSpec("t", 100, 33)], [FeatureSpec("f", "t"), FeatureSpec("g", "t", weighted=True)], name="guards"
)
VALUES = torch.tensor([3, 99, 7, 7])
OFFSETS = torch.tensor([0, 1, 2, 3, 4])


@pytest.fixture(params=BACKENDS)
def module(request: pytest.FixtureRequest) -> EmbeddingCollection:
    return collection(SPEC, request.param)


def call(module: EmbeddingCollection) -> Tensor:
    return module(VALUES.to(module.device), OFFSETS.to(module.device))


@pytest.mark.parametrize("other", [torch.zeros(100, 33), torch.zeros(100, 33, dtype=torch.float16), torch.zeros(3)])
def test_a_table_of_another_layout_is_refused(other: Tensor) -> None:
    module = EmbeddingCollection(SPEC)
    module(VALUES, OFFSETS)
    with pytest.raises(ValueError, match=r"table 't'.*copy into module\.weight"):
        torch.func.functional_call(module, {"tables.t.weight": other}, (VALUES, OFFSETS))


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "simt"])
def test_fewer_rows_at_the_same_address_are_noticed(backend: Any, trains: bool) -> None:
    """What an earlier call cached does not hide the mistake. Lookups and training calls cache different values."""
    module = collection(SPEC, backend)
    with torch.set_grad_enabled(trains):
        call(module)
    few = {"tables.t.weight": module.weight("t").detach()[:10].requires_grad_(trains)}
    with pytest.raises(ValueError, match=r"table 't': .* its kernel needs"):
        torch.func.functional_call(module, few, (VALUES, OFFSETS))


def test_replaced_data_is_noticed(module: EmbeddingCollection) -> None:
    before = call(module)
    twin = collection(SPEC, module.backend)
    module.weight("t").data = twin.weight("t").data
    after = call(module)
    assert not torch.equal(before, after)
    assert torch.equal(after, call(twin))


def test_bounds_check_is_chosen_once(module: EmbeddingCollection) -> None:
    with pytest.raises(AttributeError):
        module.bounds_check = "zero"  # type: ignore[misc]


def test_spec_must_be_a_spec() -> None:
    with pytest.raises(TypeError, match="spec: got str"):
        EmbeddingCollection("dlrm")  # type: ignore[arg-type]


def operator_arguments(**changed: Any) -> list[Any]:
    module = EmbeddingCollection(SPEC)
    module(VALUES, OFFSETS)
    given = {
        "values": VALUES,
        "offsets": OFFSETS,
        "weights": None,
        "tables": [module.weight("t")],
        "rows": [],
        "program": module.programs[torch.int64].forward,
        "bounds_check": "error",
    }
    return list((given | changed).values())


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"values": VALUES.int()}, TypeError),
        ({"offsets": OFFSETS.int()}, TypeError),
        ({"weights": torch.ones(4, dtype=torch.float64)}, TypeError),
        ({"weights": torch.ones(3)}, ValueError),
        ({"values": torch.arange(8)[::2]}, ValueError),
        ({"offsets": OFFSETS[:4]}, ValueError),
        ({"tables": [torch.zeros(100, 33)]}, ValueError),
        ({"bounds_check": "bogus"}, ValueError),
    ],
)
def test_the_operator_checks_its_arguments(changed: dict[str, Any], error: type[Exception]) -> None:
    torch.ops.embforge.lookup(*operator_arguments())
    with pytest.raises(error):
        torch.ops.embforge.lookup(*operator_arguments(**changed))


def test_another_default_device_changes_nothing() -> None:
    module = EmbeddingCollection(SPEC)
    with torch.device("meta"):
        assert module(VALUES, OFFSETS).device.type == "cpu"


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_big_fp8_tables_do_not_start_as_zeros(dtype: Any) -> None:
    module = EmbeddingCollection(CollectionSpec([TableSpec("t", 1 << 21, 2, dtype)], [FeatureSpec("f", "t")]))
    assert module.weight("t").float().count_nonzero() > 1 << 21


@pytest.mark.parametrize("extra", [0, 3000])
@pytest.mark.parametrize("threads", [1, 2, 3, 7, 40])
def test_cut_bags_give_the_same_bits(threads: int, extra: int) -> None:
    """More threads than there are cores still split the work: two bags, of which an equal split cuts one or both."""
    spec = CollectionSpec([TableSpec("t", 50, 3)], [FeatureSpec("f", "t"), FeatureSpec("g", "t", "mean")], name="cuts")
    module, truth = EmbeddingCollection(spec), EmbeddingCollection(spec, backend="reference")
    truth.load_state_dict(module.state_dict())
    lengths = torch.tensor([20_000, 5, 50_000 + extra, 0])
    values = torch.randint(0, 50, (int(lengths.sum()),))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = module(values, lengths=lengths)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got, truth(values, lengths=lengths))
