"""`ef.functional` gives what torch.nn.functional gives, zeros for ids that are no row, and the gradients of both."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import embforge as ef
from embforge import functional
from embforge.functional.external_weights import programs_for

embedding, embedding_bag = ef.functional.embedding, ef.functional.embedding_bag
DIM = 8
"""All tests of kernels have the same dim, because every dim is a compilation."""


def table(rows: int, dtype: torch.dtype = torch.float32, dim: int = DIM, seed: int = 0) -> Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected(ids: Tensor, weight: Tensor) -> Tensor:
    """The right result, row by row."""
    rows = [weight[i] if 0 <= i < len(weight) else torch.zeros_like(weight[0]) for i in ids.reshape(-1).tolist()]
    return torch.stack(rows).view(*ids.shape, -1) if rows else weight.new_empty(*ids.shape, weight.shape[1])


ids_of_any_shape = st.lists(st.integers(0, 3), max_size=3).flatmap(
    lambda shape: st.lists(
        st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 9),
        min_size=torch.Size(shape).numel(),
        max_size=torch.Size(shape).numel(),
    ).map(lambda ids: torch.tensor(ids, dtype=torch.int64).view(shape))
)


@settings(max_examples=60, deadline=None)
@given(ids_of_any_shape, st.integers(1, 8), st.sampled_from(["float32", "float64"]), st.booleans())
def test_ids_of_any_shape_and_dtype_are_looked_up(ids: Tensor, rows: int, dtype: str, narrow: bool) -> None:
    weight = table(rows, getattr(torch, dtype)).requires_grad_()
    found = embedding(ids.int() if narrow else ids, weight)
    assert found.shape == (*ids.shape, DIM) and found.dtype == weight.dtype
    assert torch.equal(found, expected(ids, weight.detach()))
    found.sum().backward()
    counts = torch.tensor([(ids == row).sum() for row in range(rows)], dtype=weight.dtype)
    assert weight.grad is not None and torch.equal(weight.grad, counts[:, None].expand(rows, DIM))


def test_the_kernel_is_used_if_rows_have_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, ids = table(9), torch.tensor([0, 8, 9, -1])
    wanted = expected(ids, weight)

    def refuse(*given: object) -> Tensor:
        raise AssertionError("by torch")

    monkeypatch.setattr(functional, "_gather_by_torch", refuse)
    assert torch.equal(embedding(ids, weight), wanted)
    assert torch.equal(embedding(ids, torch.nn.Parameter(weight)), wanted)
    for strided in (table(9, dim=2 * DIM)[:, ::2], table(9, dim=DIM + 1)[:, 1:]):
        with pytest.raises(AssertionError, match="by torch"):
            embedding(ids, strided)
    monkeypatch.undo()
    for strided in (table(9, dim=2 * DIM)[:, ::2], table(9, dim=DIM + 1)[:, 1:], table(72).view(-1)[1:65].view(8, 8)):
        assert torch.equal(embedding(ids, strided), expected(ids, strided))


def test_another_vocabulary_needs_no_other_kernel() -> None:
    found = {programs_for(torch.empty(rows, DIM), torch.float32, "none", False) for rows in (1, 7, 1000)}
    assert len(found) == 1 and None not in found


def test_a_machine_without_a_compiler_is_served_by_torch(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBFORGE_JIT", "0")
    weight, ids = table(5, dim=12), torch.tensor([4, 5])
    with pytest.warns(UserWarning, match="torch does this lookup"):
        assert torch.equal(embedding(ids, weight), expected(ids, weight))
    with pytest.warns(UserWarning, match="torch does this lookup"):
        assert torch.equal(embedding_bag(ids[None, :1], weight), weight[4:5])


def test_rows_and_elements_past_32_bits_are_read(tmp_path: Path) -> None:
    rows = 2**28 + 5  # of 8 numbers: more than 2^31 of them, in a file with a hole
    weight = torch.from_file(str(tmp_path / "rows"), shared=True, size=rows * DIM).view(rows, DIM)
    weight[-1] = torch.arange(DIM)
    ids = torch.tensor([rows - 1, rows, 2**40, -(2**40), 0, 2**63 - 1, -(2**63)])
    assert torch.equal(embedding(ids, weight), expected(ids, weight))
    many = torch.arange(3.0).expand(2**33, 3)
    assert embedding(torch.tensor([2**32 + 7, 2**33, -1]), many).tolist() == [[0, 1, 2], [0, 0, 0], [0, 0, 0]]
    on_meta = torch.empty(2**33, 4096, device="meta", dtype=torch.bfloat16)
    assert embedding(torch.empty(2**21, 3, dtype=torch.int64, device="meta"), on_meta).shape == (2**21, 3, 4096)


def test_gradients_are_right_to_the_second_order() -> None:
    weight = table(6, torch.float64, 3).requires_grad_()
    ids = torch.tensor([[0, 5, 5], [7, -2, 1]])
    assert torch.autograd.gradcheck(lambda w: embedding(ids, w), (weight,))
    assert torch.autograd.gradgradcheck(lambda w: embedding(ids, w) ** 2, (weight,))
    scale = torch.rand(6, dtype=torch.float64, requires_grad=True)
    eights = torch.randint(-128, 128, (6, 3), dtype=torch.int8)
    assert torch.autograd.gradcheck(lambda s: embedding(ids, eights, per_token_scale=s), (scale,))


@pytest.mark.soak
def test_a_lookup_compiles_into_one_graph() -> None:
    weight, ids = table(9).requires_grad_(), torch.tensor([[3, 9], [-1, 0]])
    compiled = torch.compile(lambda i, w: embedding(i, w).sin(), fullgraph=True, backend="aot_eager")
    found = compiled(ids, weight)
    assert torch.equal(found, expected(ids, weight.detach()).sin())
    found.sum().backward()
    gradient, weight.grad = weight.grad, None
    embedding(ids, weight).sin().sum().backward()
    assert gradient is not None and weight.grad is not None and torch.equal(gradient, weight.grad)


@pytest.mark.parametrize(
    "dtype, scale_dtype",
    [("int8", "float32"), ("int8", "bfloat16"), ("float8_e5m2", "float16"), ("float8_e4m3fn", "float32")],
)
def test_every_row_may_have_a_scale(dtype: str, scale_dtype: str) -> None:
    weight = (20 * table(9)).to(getattr(torch, dtype))
    scale = torch.rand(9).to(getattr(torch, scale_dtype))
    scale[0] = float("inf")  # no id is 0, and absent ids must not use its scale
    ids = torch.tensor([[3, 9], [-1, 8]])
    found = embedding(ids, weight, per_token_scale=scale)
    assert found.dtype == scale.dtype
    product = weight[1:].to(scale.dtype) * scale[1:, None]
    assert torch.equal(found, expected(ids, torch.cat([product[:1] * 0, product])))
    assert torch.equal(embedding(ids, weight, per_token_scale=scale[:, None]), found)
    bare = embedding(ids, weight)
    assert bare.dtype == weight.dtype and torch.equal(bare.float(), expected(ids, weight.float()))


def test_results_may_be_written_to() -> None:
    """Many models run `x *= dim ** 0.5`."""
    for weight in (table(9).requires_grad_(), table(9, torch.float64).requires_grad_()):
        found = embedding(torch.tensor([[3, 9], [-1, 3]]), weight)
        found *= 2
        found.sum().backward()
        assert weight.grad is not None and weight.grad[:, 0].tolist() == [0, 0, 0, 4, 0, 0, 0, 0, 0]


def test_padding_changes_nothing() -> None:
    weight, ids = table(5), torch.tensor([4, 5, 7, 8])
    for padding in (None, 0, 3, torch.zeros(3, DIM)):
        assert torch.equal(embedding(ids, weight, padding=padding), expected(ids, weight))


def test_wrong_arguments_of_embedding_are_refused() -> None:
    weight, ids = table(5), torch.tensor([1])
    for error, message, arguments in (
        (TypeError, "input: dtype torch.float32", {"input": torch.ones(1)}),
        (ValueError, r"weight: shape \(5,\)", {"weight": weight[:, 0]}),
        (ValueError, "weight is on meta", {"weight": weight.to("meta")}),
        (ValueError, "tp_size=0", {"tp_size": 0}),
        (ValueError, "sharding_dim=2", {"sharding_dim": 2}),
        (TypeError, "int8 or fp8 weight", {"per_token_scale": torch.ones(5)}),
        (ValueError, "each of the 5 rows", {"weight": weight.to(torch.int8), "per_token_scale": torch.ones(4)}),
        (ValueError, "padding: -1", {"padding": -1}),
        (ValueError, r"padding: a tensor \(2, 7\)", {"padding": torch.zeros(2, 7)}),
        (ValueError, "tp_rank=None with tp_size=2", {"tp_size": 2}),
        (RuntimeError, "torch.distributed is not initialised", {"tp_size": 2, "tp_rank": 0}),
    ):
        with pytest.raises(error, match=message):
            embedding(**({"input": ids, "weight": weight} | arguments))


# ---- embedding_bag --------------------------------------------------------------------------------------------------


def test_the_signature_is_torchs() -> None:
    mine, theirs = (inspect.signature(f).parameters for f in (embedding_bag, F.embedding_bag))
    assert [(p.name, p.default, p.kind) for p in mine.values()] == [
        (p.name, p.default, p.kind) for p in theirs.values()
    ]


bags = st.lists(st.lists(st.integers(0, 6), max_size=5), max_size=4)


@pytest.mark.parametrize(
    "mode", ["mean", "weighted", *(pytest.param(mode, marks=pytest.mark.soak) for mode in ("sum", "max"))]
)
@settings(max_examples=25, deadline=None)
@given(
    bags,
    st.sampled_from([None, 0, -1, 4]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_bags_are_torchs(
    mode: str, ids: list[list[int]], padding_idx: int | None, last: bool, narrow: bool, sparse: bool
) -> None:
    dtype = torch.int32 if narrow else torch.int64
    values = torch.tensor([i for bag in ids for i in bag], dtype=dtype)
    borders = torch.tensor([0, *torch.tensor([len(bag) for bag in ids]).cumsum(0).tolist()], dtype=dtype)
    weights, factors = [table(7).requires_grad_() for _ in range(2)], [torch.rand(len(values)) for _ in range(2)]
    factors[1] = factors[0].clone()
    results = []
    for function, weight, factor in zip((embedding_bag, F.embedding_bag), weights, factors, strict=True):
        weighted = factor.requires_grad_() if mode == "weighted" else None
        spread = sparse and function is embedding_bag
        results.append(
            function(
                values,
                weight,
                borders if last else borders[:-1],
                mode="sum" if weighted is not None else mode,
                sparse=spread,
                per_sample_weights=weighted,
                include_last_offset=last,
                padding_idx=padding_idx,
            )
        )
    torch.testing.assert_close(results[0], results[1])
    upstream = torch.randn(results[0].shape, generator=torch.Generator().manual_seed(1))
    for result in results:
        result.backward(upstream)
    gradient = weights[0].grad
    assert gradient is not None and gradient.is_sparse == sparse
    torch.testing.assert_close(gradient.to_dense(), weights[1].grad)
    if mode == "weighted":
        torch.testing.assert_close(factors[0].grad, factors[1].grad)


def test_bags_with_options_are_torchs() -> None:
    ids = torch.tensor([[0, 3], [6, 6], [1, 2]])
    for ids_2d in (ids, ids[:0]):
        torch.testing.assert_close(
            embedding_bag(ids_2d, table(7), mode="sum"), F.embedding_bag(ids_2d, table(7), mode="sum")
        )
    assert torch.equal(embedding_bag(ids[:, :0], table(7), mode="sum"), torch.zeros(3, DIM))  # torch refuses it
    odd = table(7, torch.float64, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda w: embedding_bag(ids, w), (odd,))
    ours, theirs = table(7), table(7)
    found = embedding_bag(ids, ours, max_norm=1.0, mode="sum")
    torch.testing.assert_close(found, F.embedding_bag(ids, theirs, max_norm=1.0, mode="sum"))
    torch.testing.assert_close(ours, theirs)


def test_a_weight_may_change_between_forward_and_backward() -> None:
    weight = table(7).requires_grad_()
    found = embedding_bag(torch.tensor([[1, 2]]), weight, mode="mean")
    with torch.no_grad():
        weight.mul_(2)
    found.sum().backward()
    factors = torch.ones(1, 2, requires_grad=True)
    found = embedding_bag(torch.tensor([[1, 2]]), weight, mode="sum", per_sample_weights=factors)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


@pytest.mark.parametrize("changed", ["ids", "offsets"])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_a_batch_that_changes_before_the_backward_is_refused(changed: str, padding_idx: int | None) -> None:
    batch = {"ids": torch.tensor([1, 2, 3]), "offsets": torch.tensor([0, 2, 3])}
    weight = table(7).requires_grad_()
    found = embedding_bag(
        batch["ids"], weight, batch["offsets"], mode="sum", include_last_offset=True, padding_idx=padding_idx
    )
    batch[changed][1] = 1
    if changed == "ids" and padding_idx is not None:  # those are a copy
        found.sum().backward()
        assert weight.grad is not None and weight.grad[:, 0].tolist() == [0, 1, 1, 0, 0, 0, 0]
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ids_after_the_last_bag_are_in_none(mode: str, dtype: torch.dtype) -> None:
    """As torch documents it. Its own kernels do so for some dtypes only, so torch gets no such ids here."""
    ids, offsets = torch.tensor([1, 2, 3, 4, -5, 99]), torch.tensor([0, 2, 4])
    results, gradients = [], []
    for function, end in ((embedding_bag, 6), (F.embedding_bag, 4)):
        weight, factors = table(7, dtype).requires_grad_(), torch.full((6,), 2.0, dtype=dtype, requires_grad=True)
        weights = factors[:end] if mode == "weighted" else None
        kind = "sum" if mode == "weighted" else mode
        found = function(ids[:end], weight, offsets, mode=kind, per_sample_weights=weights, include_last_offset=True)
        found.sum().backward()
        results.append(found)
        gradients.append((weight.grad, factors.grad))
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*gradients)


def test_wrong_arguments_of_bags_are_refused() -> None:
    weight, ids, offsets = table(7), torch.tensor([1, 2]), torch.tensor([0])
    for error, message, arguments in (
        (IndexError, "id 7 at position 1 is not a row of weight; allowed: 0 to 6", {"input": torch.tensor([1, 7])}),
        (IndexError, "id -1 at position 0", {"input": torch.tensor([-1, 7])}),
        (ValueError, "offsets", {"offsets": torch.tensor([1])}),
        (ValueError, "offsets", {"offsets": torch.tensor([0, 3])}),
        (ValueError, "offsets: None", {"offsets": None}),
        (ValueError, "2-D input", {"input": ids[None]}),
        (ValueError, "input: shape", {"input": ids[None, None]}),
        (ValueError, "mode='min'", {"mode": "min"}),
        (ValueError, "cannot go with mode='mean'", {"mode": "mean", "per_sample_weights": torch.ones(2)}),
        (ValueError, "per_sample_weights: torch.float32", {"mode": "sum", "per_sample_weights": torch.ones(3)}),
        (ValueError, "scale_grad_by_freq=True is not supported", {"scale_grad_by_freq": True}),
        (ValueError, "padding_idx=7", {"padding_idx": 7}),
    ):
        with pytest.raises(error, match=message):
            embedding_bag(**({"input": ids, "weight": weight, "offsets": offsets, "mode": "sum"} | arguments))
    again = weight.requires_grad_()
    found = embedding_bag(ids, again, offsets)
    with pytest.raises(RuntimeError, match="cannot itself be differentiated"):
        torch.autograd.grad(found.sum(), again, create_graph=True)
