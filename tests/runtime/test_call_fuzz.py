"""Random calls, compared with what they must equal: functions with torch's, batches in any form with flat ones, and
sharded training with unsharded, under any default dtype and default device of torch.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.sharded.cases import HOTNESS, KINDS, RULES, VARIANTS, Training, feature_of, tables_of
from support.sharded.equal import check
from torch import Tensor

import embforge as ef
from embforge.codegen.poolings import POOLINGS
from embforge.codegen.spec import CollectionSpec
from embforge.inputs import normalise

MINUTES = float(os.environ.get("EMBFORGE_FUZZ_MINUTES", "10")) / 3
"""Seconds for which `make soak` runs each of the three tests."""
ROWS, DIM = 7, 8
"""Dims of weights: few, because each is a compilation."""
FEATURES = ("a", "b", "c")
SPEC = CollectionSpec(
    [ef.TableSpec("t", 50, 4)], [ef.FeatureSpec(name, "t", weighted=True, padding_idx=-1) for name in FEATURES]
)
DEFAULTS = st.tuples(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.sampled_from(["cpu", "cpu", "meta"])
)


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    """Another default dtype and default device within the block."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(usual)


def quick(examples: int, *, anew: bool) -> settings:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=examples, derandomize=not anew, deadline=None, suppress_health_check=checks)


def until_the_time_is_up(property_of: Callable[[settings], None]) -> None:
    end = time.monotonic() + MINUTES * 60
    while time.monotonic() < end:
        property_of(quick(100, anew=True))


# ---- Functions compared with torch's -----------------------------------------------------------------------


@st.composite
def bag_calls(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of embedding_bag for us and for torch, without those for which torch does not do what it documents."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    id_dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    bags = draw(st.lists(st.lists(st.integers(0, ROWS - 1), max_size=70), max_size=5))
    flat, borders = [i for bag in bags for i in bag], [0]
    for bag in bags:
        borders.append(borders[-1] + len(bag))
    mode = draw(st.sampled_from(["sum", "mean", "max"]))
    call: dict[str, Any] = {"mode": mode, "sparse": mode != "max" and draw(st.booleans())}
    if draw(st.booleans()):
        width = draw(st.integers(1, 4))
        flat = (flat + [0] * width)[: max(len(flat) // width, 1) * width]
        call["input"] = torch.tensor(flat, dtype=id_dtype, device="cpu").view(-1, width)
    else:
        last = draw(st.booleans())
        call["input"] = torch.tensor(flat, dtype=id_dtype, device="cpu")
        call["offsets"] = torch.tensor(borders if last else borders[:-1], dtype=id_dtype, device="cpu")
        call["include_last_offset"] = last
    if mode == "sum" and draw(st.booleans()):
        weights = torch.linspace(-1, 2, call["input"].numel() or 1, dtype=dtype, device="cpu")
        call["per_sample_weights"] = weights[: call["input"].numel()].view(call["input"].shape)
    call["padding_idx"] = draw(st.none() | st.integers(-ROWS, ROWS - 1))
    call["max_norm"] = draw(st.none() | st.sampled_from([0.5, 2.0]))
    call["weight"] = torch.randn(ROWS, DIM, dtype=dtype, device="cpu", generator=torch.Generator("cpu").manual_seed(1))
    return call


def outcome(function: Any, call: dict[str, Any]) -> list[Tensor]:
    """The result, and the gradients of the weight and of per-sample weights."""
    weight = call["weight"].clone().requires_grad_()
    factors = call.get("per_sample_weights")
    more = {} if factors is None else {"per_sample_weights": factors.clone().requires_grad_()}
    found = function(**{**call, "weight": weight, **more})
    slope = torch.linspace(-1, 1, found.numel() or 1, dtype=found.dtype, device="cpu")[: found.numel()]
    (found * slope.view(found.shape)).sum().backward()
    assert weight.grad is not None
    gradients = [weight.grad.to_dense(), *(tensor.grad for tensor in more.values())]
    return [found.detach(), weight.detach(), *gradients]


def functions_are_torchs(how: settings) -> None:
    @how
    @given(bag_calls(), DEFAULTS)
    def bags(call: dict[str, Any], usual: tuple[torch.dtype, str]) -> None:
        wanted = outcome(F.embedding_bag, call)
        with defaults(*usual):
            found = outcome(ef.functional.embedding_bag, call)
        torch.testing.assert_close(found, wanted)

    @how
    @given(st.lists(st.integers(0, ROWS - 1), max_size=24), st.integers(1, 3), DEFAULTS)
    def rows(ids: list[int], width: int, usual: tuple[torch.dtype, str]) -> None:
        given_ids = torch.tensor(ids[: len(ids) // width * width], dtype=torch.int64, device="cpu").view(-1, width)
        call = {"input": given_ids, "weight": torch.eye(ROWS, DIM, dtype=torch.float32, device="cpu")}
        wanted = outcome(F.embedding, call)
        with defaults(*usual):
            found = outcome(ef.functional.embedding, call)
        assert all(map(torch.equal, found, wanted))

    bags()
    rows()


def test_random_calls_of_functions_equal_torchs() -> None:
    functions_are_torchs(quick(25, anew=False))


@pytest.mark.soak
def test_many_random_calls_of_functions_equal_torchs() -> None:
    until_the_time_is_up(functions_are_torchs)


# ---- Forms of one batch ------------------------------------------------------------------------------------

Bags = list[list[list[int]]]
"""Ids by feature, then by sample."""


def as_feature(draw: st.DrawFn, bags: list[list[int]], weights: list[list[float]]) -> tuple[Any, Any]:
    """One feature's ids in some form, and their weights if the form cannot hold weights."""
    ids = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64, device="cpu")
    factors = torch.tensor([w for bag in weights for w in bag], dtype=torch.float32, device="cpu")
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64, device="cpu")
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    most = max(map(len, bags), default=0)
    padded = torch.full((len(bags), most), -1, dtype=torch.int64, device="cpu")
    spread = torch.zeros(len(bags), most, dtype=torch.float32, device="cpu")
    for number, bag in enumerate(bags):
        padded[number, : len(bag)] = ids[offsets[number] : offsets[number + 1]]
        spread[number, : len(bag)] = factors[offsets[number] : offsets[number + 1]]
    return draw(
        st.sampled_from(
            [
                (bags, weights),
                ([torch.tensor(bag, dtype=torch.int64, device="cpu") for bag in bags], factors),
                ((ids, lengths), factors),
                ((ids.numpy(), lengths.numpy()), factors.numpy()),
                ((padded, lengths), spread),
                ({"values": ids, "offsets": offsets, "weights": factors}, None),
                ({"values": padded, "lengths": lengths, "weights": spread}, None),
                (ef.Jagged(ids, offsets, weights=factors), None),
                (ef.Jagged.from_padded(padded[:, None], lengths[None], spread[:, None]), None),
            ]
        )
    )


@st.composite
def forms(draw: st.DrawFn) -> tuple[Bags, list[list[list[float]]], dict[str, Any]]:
    """A batch, its weights, and the arguments of a call that means both."""
    samples = draw(st.integers(0, 4))
    bag = st.lists(st.integers(0, 49), max_size=3)
    bags: Bags = [draw(st.lists(bag, min_size=samples, max_size=samples)) for _ in FEATURES]
    weights = [[[i / 8 + f for i in own] for own in feature] for f, feature in enumerate(bags)]
    by_sample = [[feature[b] for feature in bags] for b in range(samples)]
    weights_by_sample = [[feature[b] for feature in weights] for b in range(samples)]
    jagged = ef.Jagged.from_lists(by_sample, weights_by_sample, num_features=len(FEATURES))
    kind = draw(st.sampled_from(["mapping", "jagged", "slices", "flat", "nested"]))
    if kind == "mapping":
        parts = [as_feature(draw, *pair) for pair in zip(bags, weights, strict=True)]
        given_ids = {name: part[0] for name, part in zip(FEATURES, parts, strict=True)}
        given_weights = {name: part[1] for name, part in zip(FEATURES, parts, strict=True) if part[1] is not None}
        return bags, weights, {"values": given_ids, "weights": given_weights or None}
    if kind == "slices" and samples:
        cut = draw(st.integers(0, samples))
        return bags, weights, {"values": ef.Jagged.concatenate([jagged[:cut], *jagged[cut:]])}
    assert jagged.lengths is not None
    flat = {"values": jagged.values, "weights": jagged.weights}
    if kind == "nested" and samples and jagged.values.numel():
        offsets = F.pad(jagged.lengths.reshape(-1).cumsum(0), (1, 0))
        return bags, weights, flat | {"values": torch.nested.nested_tensor_from_jagged(jagged.values, offsets)}
    if kind == "flat":
        return bags, weights, flat | {"lengths": draw(st.sampled_from([jagged.lengths, jagged.lengths.numpy()]))}
    return bags, weights, {"values": jagged}


def forms_mean_one_batch(how: settings) -> None:
    @how
    @given(forms(), DEFAULTS)
    def same(form: tuple[Bags, Any, dict[str, Any]], usual: tuple[torch.dtype, str]) -> None:
        bags, weights, call = form
        with defaults(*usual):
            batch = normalise(SPEC, torch.device("cpu"), **call)
        assert batch.values.tolist() == [i for feature in bags for bag in feature for i in bag]
        assert batch.offsets.diff().tolist() == [len(bag) for feature in bags for bag in feature]
        assert batch.batch == len(bags[0]) and batch.values.is_cpu and batch.offsets.is_cpu
        assert batch.weights is not None and batch.weights.dtype is torch.float32
        assert batch.weights.tolist() == [w for feature in weights for bag in feature for w in bag]

    same()


def test_random_forms_of_input_mean_the_same_batch() -> None:
    forms_mean_one_batch(quick(60, anew=False))


@pytest.mark.soak
def test_many_random_forms_of_input_mean_the_same_batch() -> None:
    until_the_time_is_up(forms_mean_one_batch)


# ---- Sharded training compared with unsharded --------------------------------------------------------------


def drawn_training(seed: int) -> Training:
    """Tables of any kinds, features of any poolings and paddings, any rule, any options that change no result."""
    rng = random.Random(seed)
    rule, tables = rng.choice([*RULES]), tables_of(rng.randint(1, 4))
    # Ftrl makes many numbers 0, and which of equal ones wins depends on shards: see docs/sharding.md.
    variants = [variant for variant in VARIANTS if rule != "ftrl" or not POOLINGS[variant[0]].selects]
    features = [
        feature_of(f"f{number}", table, rng.choice(variants), rng.choice([None, 0, 1, -1, HOTNESS * 99]))
        for number, table in enumerate([*tables, *rng.choices(tables, k=rng.randint(0, 3))])
    ]
    kinds = tuple((table.name, rng.choice([*KINDS])) for table in tables)
    options = {"pools": rng.choice([None, "all", "different"]), "bounds_check": rng.choice(["error", "zero"])}
    return Training(f"seed {seed}", CollectionSpec(tables, features), kinds, RULES[rule], rng.randint(1, 4), options)


@pytest.mark.soak
def test_two_ranks_train_as_one() -> None:
    end = time.monotonic() + MINUTES * 60
    seed = random.SystemRandom().randrange(10**9)
    while time.monotonic() < end:
        check([drawn_training(seed + number) for number in range(20)], 2)
        seed += 20
