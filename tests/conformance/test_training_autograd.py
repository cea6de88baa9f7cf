"""Rows updated by autograd's backward pass: when, from which gradients, and how near to torch's own optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance.backends import device_of, every_backend
from conformance.training import (
    SPEC,
    WITH_ROWS,
    differing,
    draw,
    nothing_changes,
    snapshot,
    steps,
    trained,
    trained_backend,
    verdict,
)
from support.selections import SELECTIONS
from torch import Tensor, nn

from embforge import optim
from embforge.codegen.layout import layout_of
from embforge.codegen.poolings import POOLINGS
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.inputs import Batch
from embforge.launch.gradients import Gradients
from embforge.launch.reference.backward import reduce, weight_gradient
from embforge.launch.reference.forward import lookup
from embforge.launch.reference.forward_train import lookup_train
from embforge.verify.cases import Case, draw_batch

F64 = torch.float64


@every_backend
def test_the_backward_pass_updates(backend: Any) -> None:
    module = trained(backend)
    values, offsets, weights = draw(backend)
    before = snapshot(module)
    with nothing_changes(module):
        result = module(values, offsets, weights)
    assert result.requires_grad
    (result * 3).sum().backward()
    assert steps(module) == 1 and verdict(module) == 0.0
    changed = set((module.weight("a") != before["tables.a.weight"]).any(1).nonzero().flatten().tolist())
    of_sum, of_max = set(values[: offsets[6]].tolist()), set(values[offsets[12] :].tolist())
    assert of_sum <= changed <= of_sum | of_max  # max may choose none of a row's numbers
    assert 0 < len(of_sum | of_max) < 60


@trained_backend
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_recorded(backend: Any, mode: Any) -> None:
    module = trained(backend)
    wanted = module(*draw(backend))
    with mode(), nothing_changes(module):
        result = module(*draw(backend))
    assert not result.requires_grad and torch.equal(result, wanted)


def test_eval_does_not_freeze() -> None:
    """As in torch: `eval()` is for layers that behave differently in training; `no_grad` and `freeze` stop updates."""
    module = trained().eval()
    module(*draw()).sum().backward()
    assert steps(module) == 1


def _dense_gradients(
    spec: CollectionSpec, tables: list[Tensor], batch: Any, loss: Callable[..., Tensor]
) -> list[Tensor]:
    """The gradients of autograd for the lookup in fp64: those of tables, then those of weights."""
    leaves = [table.detach().to(F64).requires_grad_() for table in tables]
    weights = batch[2].detach().to(F64).requires_grad_()
    found = loss(*lookup(spec, batch[0], batch[1], weights, leaves, bounds_check="error", accumulate_dtype=F64))
    gradients = torch.autograd.grad(found, [*leaves, weights], allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, [*leaves, weights], strict=True)]


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "both": lambda pooled, rows: (pooled * torch.arange(34).to(pooled)).sum() + (rows * rows).sum(),
    "pooled alone": lambda pooled, rows: (pooled * pooled).sum(),
    "rows alone": lambda pooled, rows: (rows * torch.arange(rows.numel()).to(rows)).sum(),
    "expanded": lambda pooled, rows: pooled.sum() + rows.sum(),
    "not contiguous": lambda pooled, rows: (
        (pooled.T @ torch.ones(6, 2).to(pooled)).pow(2).sum() + rows.flip(0)[::2].sum()
    ),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_through_forward_dict_are_right(kind: str) -> None:
    module = trained(spec=WITH_ROWS, optimizer=optim.SGD(lr=0.5, rounding="nearest"))
    before = [module.weight(table.name).clone() for table in WITH_ROWS.tables]
    values, offsets, weights = draw(spec=WITH_ROWS)
    weights.requires_grad_()
    found = module.forward_dict(values, offsets, weights)
    pooled = torch.cat([found[name] for name in "xyz"], dim=1)
    LOSSES[kind](pooled, found["s"].reshape(-1)).backward()
    *tables, of_weights = _dense_gradients(WITH_ROWS, before, (values, offsets, weights), LOSSES[kind])
    torch.testing.assert_close(weights.grad, of_weights.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(module.weight("a"), (before[0] - 0.5 * tables[0]).float(), rtol=1e-5, atol=1e-5)
    wanted = (before[1] - 0.5 * tables[1]).to(torch.bfloat16)
    torch.testing.assert_close(module.weight("b"), wanted, rtol=2**-7, atol=1e-5)


@trained_backend
def test_autocast_changes_no_update(backend: Any) -> None:
    """The output has the spec's dtype; gradients of a narrower model are converted to it."""
    module, twin = trained(backend), trained(backend)
    device = device_of(backend)
    model = nn.Linear(34, 3).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        result = module(*draw(backend))
        result.retain_grad()
        found = model(result)
    assert result.dtype == torch.float32 and found.dtype == torch.bfloat16
    found.float().pow(2).sum().backward()
    twin(*draw(backend)).backward(result.grad)
    assert differing(snapshot(module), snapshot(twin)) == [] and steps(module) == 1


def test_weights_that_a_model_computes_under_autocast() -> None:
    module, dense = trained(), nn.Linear(3, 1)
    values, offsets, _ = draw()
    inputs = torch.rand(values.numel(), 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = dense(inputs).squeeze(1)
        assert weights.dtype == torch.bfloat16
        module(values, offsets, weights).sum().backward()
    assert steps(module) == 1 and dense.weight.grad is not None and bool(dense.weight.grad.any())
    with pytest.raises(TypeError, match=r"weights: dtype torch.bfloat16 is not allowed"):
        module(values, offsets, weights)


def test_a_retained_graph_updates_again() -> None:
    module, twin = trained(), trained()
    loss = module(*draw())[:, :15].sum()  # a sum: its gradient does not depend on rows
    loss.backward(retain_graph=True)
    loss.backward()
    for _ in range(2):
        twin(*draw())[:, :15].sum().backward()
    assert steps(module) == 2 and differing(snapshot(module), snapshot(twin)) == []


@pytest.mark.parametrize("more", [{}, {"accumulate": True}, {"optimizer": None}], ids=str)
def test_double_backward_is_refused(more: dict[str, Any]) -> None:
    module = trained(**more)
    loss = module(*draw()).pow(2).sum()
    with nothing_changes(module), pytest.raises(RuntimeError, match="call backward without create_graph=True"):
        loss.backward(create_graph=True)
    if more.get("optimizer", True) is None:
        assert module.weight("a").grad is None
    module.step()
    assert not more.get("accumulate") or steps(module) == 0


def test_only_the_wanted_gradients_are_computed() -> None:
    """A backward for other leaves does not reach the tables; one for the grad anchor updates them."""
    module, scale = trained(), torch.ones(1, requires_grad=True)
    loss = (module(*draw()) * scale).sum()
    with nothing_changes(module):
        loss.backward(inputs=[scale], retain_graph=True)
    assert scale.grad is not None and module.optimizer is not None
    (given,) = torch.autograd.grad(loss, module.optimizer.param_groups[0]["params"])
    assert steps(module) == 1 and given.tolist() == [0.0]


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_query_for_gradients_of_weights_updates_nothing(accumulate: bool, compiler: str | None) -> None:
    """The query runs the lookup's node of the graph, but does not ask for gradients of rows."""
    module = trained(accumulate=accumulate)
    values, offsets, weights = draw()
    weights.requires_grad_()
    called: Any = torch.compile(module, backend=compiler) if compiler else module
    with nothing_changes(module):
        torch.autograd.grad(called(values, offsets, weights).sum(), [weights])
        called(values, offsets, weights).sum().backward(inputs=[weights])
        module.step()
    assert weights.grad is not None
    called(values, offsets, weights).sum().backward()
    module.step()
    assert steps(module) == 1


@trained_backend
@pytest.mark.parametrize("fused", [True, False])
def test_frozen_tables_still_give_gradients_of_weights(backend: Any, fused: bool) -> None:
    module = trained(backend, optimizer=optim.Adam() if fused else None)
    module.freeze()
    values, offsets, weights = draw(backend)
    assert not module(values, offsets, weights).requires_grad
    weights.requires_grad_()
    tables = [module.weight(name).detach().cpu() for name in "ab"]
    with nothing_changes(module):
        module(values, offsets, weights).pow(2).sum().backward()
    batch = (values.cpu(), offsets.cpu(), weights.cpu())
    wanted = _dense_gradients(SPEC, tables, batch, lambda pooled, rows: pooled.pow(2).sum())[-1]
    torch.testing.assert_close(weights.grad.cpu(), wanted.float(), rtol=1e-4, atol=1e-5)
    assert int((weights.grad != 0).sum()) == int(offsets[6]) > 0


@trained_backend
def test_gradients_of_weights_are_refused_once_rows_have_changed(backend: Any) -> None:
    """Two towers: the first backward updates the rows that the second would need."""
    module, twin = trained(backend), trained(backend)
    values, offsets, weights = draw(backend)
    weights.requires_grad_()
    loss = module(values, offsets, weights).sum() + module(values, offsets, weights).sum()
    with pytest.raises(RuntimeError, match="gradient of per-sample weights needs the rows that the forward read"):
        loss.backward()
    twin(values, offsets, weights).sum().backward()
    assert steps(module) == 1 and differing(snapshot(module), snapshot(twin)) == []


def test_gradients_of_weights_in_two_towers_that_accumulate() -> None:
    module = trained(accumulate=True)
    values, offsets, weights = draw()
    weights.requires_grad_()
    tables = [module.weight(name).clone() for name in "ab"]
    (module(values, offsets, weights).pow(2) + module(values, offsets, weights).pow(2)).sum().backward()
    wanted = _dense_gradients(SPEC, tables, (values, offsets, weights), lambda pooled, _: 2 * pooled.pow(2).sum())[-1]
    torch.testing.assert_close(weights.grad, wanted.float(), rtol=1e-4, atol=1e-5)


# ---- The formulas in fp64 against autograd ---------------------------------------------------------------


KINDS = [(name, w) for name, pooling in POOLINGS.items() for w in (False, True) if pooling.weightable or not w]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("pooling", "weighted"), KINDS)
def test_formulas_are_those_of_autograd(pooling: str, weighted: bool, padded: bool) -> None:
    """Every pooling together with a sum over the same table, so that gradients of a row come from two features."""
    more: dict[str, Any] = {"hotness": 9} if pooling == "concat" else {}
    padding = 3 if padded else None
    first = FeatureSpec("f", "t", pooling, weighted=weighted, padding_idx=padding, **more)  # type: ignore[arg-type]
    spec = CollectionSpec([TableSpec("t", 9, 5)], [first, FeatureSpec("g", "t", weighted=True)])
    values, offsets, weights = draw_batch(spec, Case(7), 1)
    assert weights is not None
    weights = weights.double().abs() + 0.5  # no bag whose weights nearly cancel
    table = torch.randn(9, 5, dtype=F64, generator=torch.Generator().manual_seed(2))
    pooled, sequence, divisors, winners = lookup_train(
        spec, values, offsets, weights, [table], bounds_check="error", accumulate_dtype=F64
    )
    of_pooled = torch.linspace(-1, 1, pooled.numel(), dtype=F64).view_as(pooled)
    of_rows = None if sequence is None else torch.linspace(-2, 2, sequence.numel(), dtype=F64)

    def loss(pooled: Tensor, rows: Tensor) -> Tensor:
        return (pooled * of_pooled).sum() + (0.0 if of_rows is None else (rows * of_rows).sum())

    of_table, of_weights = _dense_gradients(spec, [table], (values, offsets, weights), loss)
    batch, gradients = Batch(values, offsets, weights, 7, None), Gradients(of_pooled, of_rows, divisors, winners)
    layout = layout_of(spec)
    ((rows, found),) = reduce(spec, layout, [table], [True], batch, gradients, "error", F64)
    if padded and pooling in ("none", "concat"):  # the row is read, but padding has no gradient
        of_table = of_table - _of_padding(values, offsets, weights if weighted else None, of_pooled, of_rows, pooling)
    torch.testing.assert_close(torch.zeros_like(table).index_copy_(0, rows, found), of_table, rtol=1e-12, atol=1e-12)
    found = weight_gradient(spec, layout, [table], batch, gradients, "error", F64)
    torch.testing.assert_close(found, of_weights, rtol=1e-12, atol=1e-12)


def _of_padding(
    values: Tensor, offsets: Tensor, weights: Tensor | None, of_pooled: Tensor, of_rows: Tensor | None, pooling: str
) -> Tensor:
    """The gradients that autograd gives to row 3 through the first feature, one per id."""
    result = torch.zeros(9, 5, dtype=F64)
    for sample in range(7):
        for slot, position in enumerate(range(int(offsets[sample]), int(offsets[sample + 1]))):
            if values[position] == 3:
                source = of_rows if pooling == "none" else of_pooled[sample]
                assert source is not None
                place = position if pooling == "none" else slot
                item = source[place * 5 : place * 5 + 5]
                result[3] += item if weights is None else item * weights[position]
    return result


@trained_backend
@pytest.mark.parametrize("pooling", SELECTIONS)
def test_selections_are_those_of_torch(backend: Any, pooling: Any) -> None:
    """Results, and rows after a step, equal those of torch.segment_reduce, for rows without equal numbers."""
    feature = FeatureSpec("f", "t", pooling, padding_idx=2)
    module = trained(backend, CollectionSpec([TableSpec("t", 30, 7)], [feature]), optimizer=optim.SGD(lr=0.5))
    before = module.weight("t").cpu().double().requires_grad_()
    lengths = torch.tensor([3, 1, 0, 70, 9])
    ids = torch.cat([torch.randperm(30, generator=torch.Generator().manual_seed(n))[:length] for n, length in
                     enumerate([3, 1, 0, 30, 30, 10, 9])])  # fmt: skip
    kept = [bag[bag != 2].unique() for bag in ids.split(lengths.tolist())]
    sizes = torch.tensor([bag.numel() for bag in kept])
    want = torch.segment_reduce(before[torch.cat(kept)], pooling, lengths=sizes, axis=0, initial=None)
    want = torch.where(sizes[:, None] > 0, want, 0.0)
    factors = torch.linspace(-1, 1, want.numel(), dtype=F64).view_as(want)
    (of_rows,) = torch.autograd.grad((want * factors).sum(), before)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    have = module(*(tensor.to(module.weight("t").device) for tensor in (ids, offsets)))
    (have * factors.to(have)).sum().backward()
    assert torch.equal(have.detach().cpu().double(), want.detach())
    torch.testing.assert_close(module.weight("t").cpu().double(), before.detach() - 0.5 * of_rows, rtol=1e-6, atol=1e-6)


# ---- torch.optim on nn.EmbeddingBag ----------------------------------------------------------------------

TORCH: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer], bool]] = {
    "sgd": (optim.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1), True),
    "sgd, decay": (optim.SGD(0.1, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), False),
    "momentum": (optim.Momentum(0.1), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), False),
    "nesterov": (optim.Nesterov(0.1), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), False),
    "adagrad": (optim.Adagrad(), lambda p: torch.optim.Adagrad(p), True),
    "adagrad, more": (
        optim.Adagrad(0.1, lr_decay=0.3, initial_accumulator_value=0.2),
        lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.3, initial_accumulator_value=0.2),
        True,
    ),
    "adam": (optim.Adam(), lambda p: torch.optim.Adam(p), False),
    "adam, l2": (optim.Adam(0.1, weight_decay=0.1), lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1), False),
    "adamw": (
        optim.Adam(0.1, weight_decay=0.1, decoupled=True),
        lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1),
        False,
    ),
    "sparse adam": (  # whose eps is not divided as the second moment is: small, so that it does not show
        optim.Adam(0.1, eps=1e-12),
        lambda p: torch.optim.SparseAdam(list(p), 0.1, eps=1e-12),
        True,
    ),
    "rmsprop": (optim.RMSProp(), lambda p: torch.optim.RMSprop(p), False),
}
"""Our optimizer, torch's, and whether torch's does not change rows that do not occur, as ours never does."""


RULES = [(rule, mode) for rule in TORCH for mode in ("sum", "mean", "max", "weighted")]
RULES.remove(("sparse adam", "max"))  # torch's max has no sparse gradients


@pytest.mark.parametrize(("rule", "mode"), RULES)
def test_rows_are_those_of_torch(rule: str, mode: str) -> None:
    ours, theirs, lazy = TORCH[rule]
    sparse = lazy and mode != "max"
    pooling, weighted = ("sum", True) if mode == "weighted" else (mode, False)
    feature = FeatureSpec("f", "t", pooling, weighted=weighted)  # type: ignore[arg-type]
    module = trained(spec=CollectionSpec([TableSpec("t", 8, 5)], [feature]), optimizer=ours)
    bag = nn.EmbeddingBag(8, 5, mode=pooling, sparse=sparse, include_last_offset=True)
    with torch.no_grad():
        bag.weight.copy_(module.weight("t"))
    other = theirs(bag.parameters())
    generator = torch.Generator().manual_seed(3)
    for step in range(3):
        drawn = torch.randint(8 - (2 if sparse and step else 0), (12,), generator=generator)
        values = drawn if sparse else torch.cat([drawn, torch.randperm(8, generator=generator)])
        offsets = torch.tensor([0, 3, 3, 8, values.numel()])
        factors = torch.randn(4, 5, generator=generator)
        weights = torch.rand(values.numel(), generator=generator) if weighted else None
        found = [None if weights is None else weights.clone().requires_grad_() for _ in range(2)]
        other.zero_grad()
        (module(values, offsets, found[0]) * factors).sum().backward()
        (bag(values, offsets, found[1]) * factors).sum().backward()
        other.step()
        torch.testing.assert_close(module.weight("t"), bag.weight.detach(), rtol=2e-5, atol=2e-6)
        if found[0] is not None and found[1] is not None:
            torch.testing.assert_close(found[0].grad, found[1].grad, rtol=1e-5, atol=1e-6)
