"""How users train: accumulated gradients, scalers, frozen tables."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.backends import device_of
from conformance.training import (
    ONE,
    WITH_ROWS,
    differing,
    draw,
    nothing_changes,
    sgd,
    snapshot,
    steps,
    trained,
    trained_backend,
    verdict,
)
from torch import Tensor, nn

from embforge import optim
from embforge.explanation import explain


@trained_backend
def test_freezing_a_fused_table(backend: Any) -> None:
    module = trained(backend)
    start = snapshot(module)
    module.freeze("a")
    module(*draw(backend)).sum().backward()
    changed = differing(start, snapshot(module))
    assert steps(module) == 1 and "tables.b.weight" in changed
    assert not any(name.startswith("tables.a") for name in changed)
    module.freeze()
    assert not module(*draw(backend)).requires_grad
    module.unfreeze("a")
    before = snapshot(module)
    module(*draw(backend)).sum().backward()
    changed = differing(before, snapshot(module))
    assert "tables.a.weight" in changed and not any(name.startswith("tables.b") for name in changed)
    assert module.requires_grad_(False) is module and not module(*draw(backend)).requires_grad
    assert module.requires_grad_(True)(*draw(backend)).requires_grad


def test_a_table_is_frozen_as_torch_does_it() -> None:
    module = trained()
    module.tables.get_submodule("a").requires_grad_(False)
    before = snapshot(module)
    module(*draw()).sum().backward()
    assert not any(name.startswith("tables.a") for name in differing(before, snapshot(module)))
    module.tables.requires_grad_(False)
    assert not module(*draw()).requires_grad
    module.tables.requires_grad_()
    assert module.named_tables()["a"].trainable and module.named_tables()["b"].trainable


@pytest.mark.parametrize("accumulate", [False, True])
def test_what_is_frozen_before_the_backward_is_not_trained(accumulate: bool) -> None:
    module = trained(accumulate=accumulate)
    losses = [module(*draw()).sum() for _ in range(2)]
    module.freeze()
    with nothing_changes(module):
        losses[0].backward()
        module.step()
    module.unfreeze("b")
    before = snapshot(module)
    losses[1].backward()
    module.step()
    changed = differing(before, snapshot(module))
    assert "tables.b.weight" in changed and not any(name.startswith("tables.a") for name in changed)


# ---- Gradients that wait ---------------------------------------------------------------------------------


@trained_backend
def test_accumulated_gradients_are_those_of_one_batch(backend: Any) -> None:
    module, once = trained(backend, accumulate=True, **sgd()), trained(backend, **sgd())
    batches = [draw(backend, seed) for seed in range(3)]
    with nothing_changes(module):
        for batch in batches:
            module(*batch).sum().backward()
    assert module.optimizer is not None
    module.optimizer.step()
    parts: list[list[Any]] = [[], [], []]
    for feature in range(3):  # samples of all batches side by side
        for values, offsets, weights in batches:
            begin, end = offsets[feature * 6], offsets[feature * 6 + 6]
            parts[0].append(values[begin:end])
            parts[1].append(offsets[feature * 6 : feature * 6 + 7].diff())
            parts[2].append(weights[begin:end])
    values, lengths, weights = map(torch.cat, parts)
    once(values, lengths=lengths, weights=weights).sum().backward()
    assert steps(module) == steps(once) == 1
    torch.testing.assert_close(module.weight("a"), once.weight("a"), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(module.weight("b"), once.weight("b"), rtol=2**-7, atol=1e-6)


def test_one_pass_and_a_step_is_an_update() -> None:
    """The bits are equal: a row's gradient is summed once, in a backward or in a step."""
    module, twin = trained(accumulate=True), trained()
    for seed in range(3):
        for each in (module, twin):
            each(*draw(seed=seed)).sum().backward()
        module.step()
    assert steps(module) == 3 and differing(snapshot(module), snapshot(twin)) == []


def test_a_step_uses_gradients_once() -> None:
    module = trained(accumulate=True)
    module(*draw()).sum().backward()
    module.step()
    with nothing_changes(module):
        module.step()
        trained().step()


def test_zero_grad_drops_what_waits() -> None:
    module = trained(accumulate=True)
    assert module.optimizer is not None
    with nothing_changes(module):
        for drop in (module.optimizer.zero_grad, module.drop_gradients):
            module(*draw()).sum().backward()
            drop()
            module.step()


@trained_backend
@pytest.mark.parametrize("limit", [0.01, 1e6])
def test_clipping_by_the_norm_of_all_gradients(backend: Any, limit: float) -> None:
    module, torchs = trained(backend, accumulate=True, **sgd()), trained(backend, optimizer=None)
    before = module.weight("a").clone()
    for each in (module, torchs):
        for seed in range(2):
            each(*draw(backend, seed)).sum().backward()
    for parameter in torchs.parameters():  # torch clips no sparse gradients of several passes
        assert parameter.grad is not None
        parameter.grad = parameter.grad.float().to_dense().to(parameter.dtype)
    wanted = nn.utils.clip_grad_norm_(torchs.parameters(), limit)
    torch.testing.assert_close(module.clip_grad_norm_(limit), wanted.float(), rtol=2e-3, atol=0.0)  # bf16 gradients
    module.step()
    gradient = torchs.weight("a").grad
    assert gradient is not None and steps(module) == 1
    torch.testing.assert_close(module.weight("a"), before - 0.5 * gradient, rtol=2e-3, atol=1e-5)
    assert float(module.clip_grad_norm_(1.0)) == 0.0  # nothing waits


def test_the_clipped_norm_is_the_limit() -> None:
    module = trained(accumulate=True, **sgd())
    module(*draw()).sum().backward()
    assert float(module.clip_grad_norm_(0.25)) > 1
    assert float(module.clip_grad_norm_(0.25)) == pytest.approx(0.25, rel=1e-5)


# ---- Scalers --------------------------------------------------------------------------------------------


@trained_backend
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_gradient_scaler_changes_no_bit(backend: Any, accumulate: bool) -> None:
    """There is a dense optimizer too. The first scale is a power of two; one step of four has infinite gradients."""
    device = device_of(backend)
    module, twin = trained(backend, accumulate=accumulate), trained(backend, accumulate=accumulate)
    dense = nn.Linear(34, 1, device=device)
    other = torch.optim.SGD(dense.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    module.use_grad_scaler(scaler)
    for step in range(4):
        batch, bad = draw(backend, step), step == 1
        assert module.optimizer is not None and twin.optimizer is not None
        for optimizer in (module.optimizer, twin.optimizer, other):
            optimizer.zero_grad()
        before = snapshot(module)
        scaler.scale(dense(module(*batch)).sum() * (torch.inf if bad else 1.0)).backward()
        assert verdict(module) == (torch.inf if bad else 0.0)
        for optimizer in (module.optimizer, other):
            scaler.step(optimizer)
        scaler.update()
        if bad:
            assert differing(before, snapshot(module)) == []
        else:
            dense(twin(*batch)).sum().backward()
            twin.optimizer.step()
        assert scaler.get_scale() == (1024.0 if step < 1 else 512.0)
        assert differing(snapshot(module), snapshot(twin)) == []
    assert steps(module) == 3
    module.use_grad_scaler(None)
    for each in (module, twin):
        each(*draw(backend)).sum().backward()
        each.step()
    assert differing(snapshot(module), snapshot(twin)) == []


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_scaler_recovers_from_one_overflow(accumulate: bool) -> None:
    """In a loop without `zero_grad`, and with a module that is frozen for a while."""
    module = trained(accumulate=accumulate)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    module.use_grad_scaler(scaler)
    optimizer, scales = module.optimizer, []
    for step in range(5):
        assert optimizer is not None
        module.freeze() if step == 3 else module.unfreeze()
        loss = module(*draw()).sum() + torch.zeros(1, requires_grad=True)
        scaler.scale(loss * (torch.inf if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [1024.0] + [512.0] * 4 and steps(module) == 3


@pytest.mark.parametrize("accumulate", [False, True])
def test_every_incoming_gradient_counts(accumulate: bool) -> None:
    """Gradients of a frozen table's columns count too: the scaler sees what it would see of torch's modules."""
    module = trained(accumulate=accumulate)
    module.freeze("b")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    module.use_grad_scaler(scaler)
    optimizer, results = module.optimizer, [module(*draw()) for _ in range(2)]
    gradient = torch.ones_like(results[0])
    gradient[:, 15:19] = torch.inf  # feature `y` of table `b`
    assert optimizer is not None
    with nothing_changes(module):
        results[0].backward(gradient)
        assert verdict(module) == torch.inf
        if accumulate:  # what spoils one pass spoils their sum
            results[1].backward(torch.ones_like(gradient))
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0
    with nothing_changes(module):
        module.step()


@pytest.mark.parametrize("accumulate", [False, True])
def test_incoming_gradients_of_rows_one_by_one_count(accumulate: bool) -> None:
    """They also count for a frozen table, although they are not added there."""
    module = trained(spec=WITH_ROWS, accumulate=accumulate)
    module.freeze("a")
    module.use_grad_scaler(torch.amp.GradScaler("cpu", init_scale=2.0))
    results = module.forward_dict(*draw(spec=WITH_ROWS))
    with nothing_changes(module):
        (results["y"].sum() + results["s"].sum() * torch.inf).backward()
        assert verdict(module) == torch.inf
        module.step()


def test_clipping_forgets_no_pass_that_was_not_finite() -> None:
    """The pass is that of a frozen table, whose gradients are not among those that are clipped."""
    module = trained(accumulate=True, **sgd())
    module.freeze("b")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    module.use_grad_scaler(scaler)
    assert module.optimizer is not None
    result = module(*draw())
    gradient = torch.ones_like(result)
    gradient[:, 15:19] = torch.inf  # feature `y` of table `b`
    result.backward(gradient)
    with nothing_changes(module):
        assert 0 < float(module.clip_grad_norm_(0.25)) < torch.inf
        scaler.step(module.optimizer)


def test_clipping_under_a_scaler() -> None:
    """With `unscale_` as usual, norms are those of the unscaled loss."""
    module, twin = trained(accumulate=True, **sgd()), trained(accumulate=True, **sgd())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    module.use_grad_scaler(scaler)
    assert module.optimizer is not None
    scaler.scale(module(*draw()).sum()).backward()
    twin(*draw()).sum().backward()
    scaler.unscale_(module.optimizer)
    assert torch.equal(module.clip_grad_norm_(0.25), twin.clip_grad_norm_(0.25))
    scaler.step(module.optimizer)
    twin.step()
    assert steps(module) == 1
    torch.testing.assert_close(module.weight("a"), twin.weight("a"), rtol=1e-6, atol=1e-7)


def test_a_step_by_a_scaler_that_the_module_does_not_know() -> None:
    module = trained()
    scaler = torch.amp.GradScaler("cpu")
    assert module.optimizer is not None
    scaler.scale(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"call module.use_grad_scaler\(scaler\) before the first forward"):
        scaler.step(module.optimizer)


def test_a_scaler_that_is_off_changes_nothing() -> None:
    module, twin = trained(), trained()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    module.use_grad_scaler(scaler)
    assert module.optimizer is not None
    scaler.scale(module(*draw()).sum()).backward()
    scaler.step(module.optimizer)
    scaler.update()
    twin(*draw()).sum().backward()
    assert differing(snapshot(module), snapshot(twin)) == []


@pytest.mark.parametrize("accumulate", [False, True])
def test_explain_names_all_that_training_runs(accumulate: bool) -> None:
    module = trained("cpu", accumulate=accumulate)
    module.freeze("b")
    text, shown = explain(module), "optimizer=adam(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-08, rounding='stochastic')"
    assert shown in text and shown in repr(module) and "frozen: b" in text and "frozen: b" in repr(module)
    assert ("accumulate=True" in text) == accumulate
    plans = module.plans()
    assert {"forward", "train", "backward", "weight_gradient"} <= plans.keys()
    assert all(plan.uri in text for plan in plans.values()) and ("in step(): " in text) == accumulate
    assert "radix_bits = " in text and re.search(r"; other states of the optimizer: [\d.]+ k?B\n", text)
    assert "optimizer" not in explain(trained(optimizer=None)) + repr(trained(optimizer=None))
    assert module.optimizer is not None
    module.optimizer.param_groups[0]["lr"] = 0.5
    assert "lr=0.5" in repr(module)


def test_the_manual_runs() -> None:
    """All code of the page runs in order as one program, on the reference, which needs no compiler."""
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) >= 8
    code = "\n".join(blocks).replace("EmbeddingCollection(spec", 'EmbeddingCollection(spec, backend="reference"')
    exec(compile(code, "docs/training.md", "exec"), {})


@pytest.mark.parametrize("way", ["eager", "accumulate", "compiled", "profiled"])
def test_the_loss_scale_is_that_of_the_backward(way: str) -> None:
    """A batch may be looked up before `scaler.update()` of the previous batch, as in loops that prefetch."""
    options: Any = {"optimizer": optim.SGD(lr=0.5), "accumulate": way == "accumulate"}
    module, twin = trained(spec=ONE, **options), trained(spec=ONE, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    module.use_grad_scaler(scaler)
    called: Any = torch.compile(module, backend="aot_eager", fullgraph=True) if way == "compiled" else module
    ids = torch.arange(9), torch.tensor([0, 4, 9])
    assert module.optimizer is not None
    with torch.profiler.profile() if way == "profiled" else nullcontext():
        ahead = called(*ids).sum()
        for _ in range(3):
            loss, ahead = ahead, called(*ids).sum()
            scaler.scale(loss).backward()
            scaler.step(module.optimizer)
            scaler.update()
            twin(*ids).sum().backward()
            twin.step()
    assert scaler.get_scale() == 512.0
    torch.testing.assert_close(module.weight("t"), twin.weight("t"))


UNKNOWN = r"was scaled by a GradScaler that the module does not know.*call module.use_grad_scaler\(scaler\)"


SCALED: dict[str, Callable[[torch.amp.GradScaler, Tensor], Tensor]] = {
    "loss": lambda scaler, out: scaler.scale(out.sum()),
    "part of a loss": lambda scaler, out: scaler.scale(out.sum() / 4),
    "vector": lambda scaler, out: scaler.scale(out).sum(),
    "one of several": lambda scaler, out: scaler.scale([out.sum(), out.mean()])[1],
}
"""The tensors on which users call `backward()`."""


@pytest.mark.parametrize("way", ["eager", "accumulate", "compiled"])
@pytest.mark.parametrize("form", SCALED)
def test_a_scaler_that_the_module_does_not_know_is_refused(form: str, way: str) -> None:
    """Every backward pass is refused before a row changes."""
    module = trained(spec=ONE, accumulate=way == "accumulate")
    called: Any = torch.compile(module, backend="aot_eager", fullgraph=True) if way == "compiled" else module
    ids, scaler = (torch.arange(9), torch.tensor([0, 4, 9])), torch.amp.GradScaler("cpu")
    for _ in range(3):
        with nothing_changes(module), pytest.raises(RuntimeError, match=UNKNOWN):
            SCALED[form](scaler, called(*ids)).backward()
        called(*ids).sum().backward()
        module.step()
    module.use_grad_scaler(scaler)
    SCALED[form](scaler, called(*ids)).backward()
    other = torch.amp.GradScaler("cpu", init_scale=8.0)
    with pytest.raises(RuntimeError, match=UNKNOWN):
        SCALED[form](other, called(*ids)).backward()


def test_scalers_of_other_modules_do_not_matter() -> None:
    ids, scaler = (torch.arange(9), torch.tensor([0, 4, 9])), torch.amp.GradScaler("cpu")
    dense = nn.Linear(2, 1)
    apart = dense(torch.ones(1, 2)).sum()
    scaler.scale(apart).backward()  # it is alive, and has been used
    off = torch.amp.GradScaler("cpu", enabled=False)
    for make in (lambda loss: loss, lambda loss: loss * 0.5, lambda loss: loss * torch.tensor(3.0), off.scale):
        module = trained(spec=ONE)
        for _ in range(4):
            loss = module(*ids).sum()
            make(loss).backward()
        assert steps(module) == 4
    assert scaler.get_scale() == 65536.0
