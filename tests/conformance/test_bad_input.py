"""Bad input on every backend raises the error that the semantics name, and later calls give right results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.backends import available, collection, every_backend, refusal

from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.collection import EmbeddingCollection

SPEC = CollectionSpec(
    [TableSpec("small", 10, 4), TableSpec("large", 1000, 16, "fp16")],
    [
        FeatureSpec("pooled", "small"),
        FeatureSpec("best", "large", "max"),
        FeatureSpec("concat", "large", "concat", hotness=2),
        FeatureSpec("rows", "small", "none"),
    ],
)
VALUES = [1, 2, 3, 400, 500, 600, 700, 8, 9]
OFFSETS = [0, 1, 3, 3, 5, 5, 7, 8, 9]


def call(module: EmbeddingCollection, values: Any = VALUES, offsets: Any = OFFSETS, **more: Any) -> dict[str, Any]:
    to = dict(dtype=more.pop("dtype", torch.int64), device=module.device)
    return module.forward_dict(torch.tensor(values, **to), torch.tensor(offsets, **to), **more)


@pytest.fixture(scope="module")
def modules() -> dict[tuple[str, str], EmbeddingCollection]:
    return {(name, mode): collection(SPEC, name, bounds_check=mode) for name in available() for mode in MODES}


MODES = ("error", "zero")
Modules = dict[tuple[str, str], EmbeddingCollection]

BAD_OFFSETS = [
    ([1, 1, 3, 3, 5, 5, 7, 8, 9], r"offsets\[0\] is 1"),
    ([0, 3, 1, 3, 5, 5, 7, 8, 9], r"offsets\[1\] is 3 and offsets\[2\] is 1"),
    ([0, 1, 3, 3, 5, 5, 7, 12, 9], r"offsets\[7\] is 12 and offsets\[8\] is 9"),
    ([0, 1, 3, 3, 5, 5, 7, -8, 9], r"offsets\[6\] is 7 and offsets\[7\] is -8"),
    ([0, 2**31 - 1, 0, 3, 5, 5, 7, 8, 9], r"offsets\[1\] is 2147483647 and offsets\[2\] is 0"),
    ([0, 1, 3, 3, 5, 5, 7, 8, 10], r"values has 9 ids, offsets end at 10"),
    ([0, 1, 3, 3, 5, 5, 7, 8, 8], r"values has 9 ids, offsets end at 8"),
    ([0, 1, 3, 3, 4, 4, 7, 8, 9], r"feature 'concat': the bag of sample 1 has 3 ids.*hotness=2"),
    ([0, 1, 3, 3, 5, 5, 7, 8], r"offsets: length 8 does not fit 4 features"),
]

BAD_IDS = [
    (0, 10, r"feature 'pooled': id 10 of sample 0, position 0.*table 'small'.*10 (rows|ids)"),
    (2, -1, r"feature 'pooled': id -1 of sample 1, position 1"),
    (4, 1000, r"feature 'best': id 1000 of sample 1, position 1.*table 'large'.*1000 (rows|ids)"),
    (6, -(2**31), r"feature 'concat': id -2147483648 of sample 1, position 1"),
    (7, 2**31 - 1, r"feature 'rows': id 2147483647 of sample 0, position 0"),
]


@every_backend
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("offsets", "message"), BAD_OFFSETS)
def test_bad_offsets_are_named(
    modules: Modules, backend: str, mode: str, dtype: torch.dtype, offsets: list[int], message: str
) -> None:
    module = modules[backend, mode]
    before = call(module, dtype=dtype)
    with refusal(module, ValueError, message):
        call(module, offsets=offsets, dtype=dtype)
    after = call(module, dtype=dtype)
    assert all(torch.equal(before[name], after[name]) for name in before)


@every_backend
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("place", "bad", "message"), BAD_IDS)
def test_bad_ids_are_named(
    modules: Modules, backend: str, dtype: torch.dtype, place: int, bad: int, message: str
) -> None:
    module = modules[backend, "error"]
    before = call(module, dtype=dtype)
    values = [*VALUES[:place], bad, *VALUES[place + 1 :]]
    with refusal(module, IndexError, message):
        call(module, values, dtype=dtype)
    after = call(module, dtype=dtype)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert len(call(modules[backend, "zero"], values, dtype=dtype)) == 4


@every_backend
@pytest.mark.parametrize("bad", [2**62, -(2**63), 2**32 + 1, -(2**32)])
def test_ids_past_32_bits_are_no_rows(modules: Modules, backend: str, bad: int) -> None:
    """2^32 + 1 must not be taken for 1."""
    with refusal(modules[backend, "error"], IndexError, f"id {bad} of sample 0"):
        call(modules[backend, "error"], [bad, *VALUES[1:]])
    result = call(modules[backend, "zero"], [bad, *VALUES[1:]])
    assert not result["pooled"][0].any()


@every_backend
def test_an_absent_id_of_every_pooling_is_zero(modules: Modules, backend: str) -> None:
    result = call(modules[backend, "zero"], [-1] * 9)
    assert all(not tensor.any() and not tensor.isnan().any() for tensor in result.values())


@every_backend
def test_a_bad_id_deep_in_a_long_bag_is_named(modules: Modules, backend: str) -> None:
    """Some thread finds it, and the error names it exactly."""
    values = [3] * 200_000 + [1, 400, 500, 600, 700, 8, 9]
    values[123_456] = 10
    offsets = [0, 200_000, 200_001, 200_001, 200_003, 200_003, 200_005, 200_006, 200_007]
    with refusal(modules[backend, "error"], IndexError, "feature 'pooled': id 10 of sample 0, position 123456"):
        call(modules[backend, "error"], values, offsets)


@every_backend
def test_lengths_that_do_not_add_up_are_refused(modules: Modules, backend: str) -> None:
    module = modules[backend, "error"]
    values = torch.tensor(VALUES, device=module.device)
    with refusal(module, ValueError, "values has 9 ids, offsets end at 8"):
        module.forward_dict(values, lengths=torch.ones_like(values[:8]))
    with refusal(module, ValueError, "offsets must (never|start).* fall"):
        module.forward_dict(values, lengths=torch.tensor([1, -2, 2, 2, 2, 2, 1, 1], device=module.device))


@every_backend
def test_wrong_dtypes_devices_and_sizes_are_refused(modules: Modules, backend: str) -> None:
    module = modules[backend, "error"]
    values, offsets = (torch.tensor(numbers, device=module.device) for numbers in (VALUES, OFFSETS))
    with pytest.raises(TypeError, match=r"values: dtype torch\.float32"):
        module.forward_dict(values.float(), offsets)
    with pytest.raises(TypeError, match=r"offsets: dtype torch\.float64"):
        module.forward_dict(values, offsets.double())
    with pytest.raises(TypeError, match=r"weights: dtype torch\.float64"):
        module.forward_dict(values, offsets, torch.ones_like(values, dtype=torch.float64))
    with pytest.raises(ValueError, match="weights: 8 numbers for 9 ids"):
        module.forward_dict(values, offsets, torch.ones_like(values[:8], dtype=torch.float32))
    with pytest.raises(ValueError, match=f"values: is on meta, the tables are on {module.device.type}"):
        module.forward_dict(values.to("meta"), offsets)


@every_backend
def test_a_module_call_refuses_sequence_features(modules: Modules, backend: str) -> None:
    with pytest.raises(ValueError, match=r"'rows'.*forward_dict"):
        modules[backend, "error"](torch.tensor(VALUES), torch.tensor(OFFSETS))


@pytest.mark.parametrize(
    "argument", [{"backend": "tpu"}, {"bounds_check": "maybe"}, {"device": "meta", "backend": "x"}]
)
def test_unknown_backends_and_bounds_checks_are_refused(argument: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"(backend|bounds_check)='(tpu|maybe|x)' is not known; allowed: "):
        EmbeddingCollection(SPEC, **argument)
