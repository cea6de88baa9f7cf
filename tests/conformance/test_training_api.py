"""How users train: accumulated gradients, scalers, schedulers, frozen tables."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.backends import device_of
from conformance.training import (
    ONE,
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
from torch import nn

from embforge import optim
from embforge.collection import EmbeddingCollection


def group(module: EmbeddingCollection) -> dict[str, Any]:
    assert module.optimizer is not None
    return module.optimizer.param_groups[0]


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
    """Bit by bit: a row's gradient is summed once, whenever it is used."""
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


# ---- Scalers and schedulers ------------------------------------------------------------------------------


@trained_backend
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_gradient_scaler_changes_no_bit(backend: Any, accumulate: bool) -> None:
    """Beside a dense optimizer; its first scale is a power of two, and one step of four has infinite gradients."""
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


def test_clipping_under_a_scaler() -> None:
    """`unscale_` as usual; norms are those of the loss that was not multiplied."""
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


def test_a_scaler_that_the_module_does_not_know() -> None:
    module = trained()
    scaler = torch.amp.GradScaler("cpu")
    assert module.optimizer is not None
    scaler.scale(module(*draw()).sum()).backward()
    with pytest.raises(RuntimeError, match=r"call module.use_grad_scaler\(scaler\) before the first forward"):
        scaler.step(module.optimizer)


def test_a_scaler_that_is_off() -> None:
    module, twin = trained(), trained()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    module.use_grad_scaler(scaler)
    assert module.optimizer is not None
    scaler.scale(module(*draw()).sum()).backward()
    scaler.step(module.optimizer)
    scaler.update()
    twin(*draw()).sum().backward()
    assert differing(snapshot(module), snapshot(twin)) == []


SCHEDULES: dict[str, Callable[[Any], torch.optim.lr_scheduler.LRScheduler]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=10),
}


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers(name: str, tensor: bool) -> None:
    """Rows are updated with what a scheduler makes of torch's own optimizer of that kind."""
    rate = torch.tensor(0.1, dtype=torch.float64) if tensor else 0.1
    module = trained(spec=ONE, optimizer=optim.Momentum(lr=rate))
    bag = nn.EmbeddingBag(9, 5, mode="sum", include_last_offset=True)
    with torch.no_grad():
        bag.weight.copy_(module.weight("t"))
    theirs = torch.optim.SGD(bag.parameters(), lr=0.1, momentum=0.9)
    assert module.optimizer is not None
    schedulers = [SCHEDULES[name](optimizer) for optimizer in (module.optimizer, theirs)]
    values, offsets, rates = torch.arange(9), torch.tensor([0, 4, 9]), set()
    for _ in range(3):
        theirs.zero_grad()
        for model, optimizer in ((module, module.optimizer), (bag, theirs)):
            model(values, offsets).pow(2).sum().backward()
            optimizer.step()
        assert float(group(module)["lr"]) == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-12)
        rates.add(float(group(module)["lr"]))
        torch.testing.assert_close(module.weight("t"), bag.weight.detach(), rtol=1e-5, atol=1e-6)
        for scheduler in schedulers:
            scheduler.step()
    assert len(rates) == 3


def test_numbers_are_written_through() -> None:
    module = trained()
    numbers = module._trainer.numbers
    assert numbers is not None and set(group(module)) == {"params", "lr", "beta1", "beta2", "eps"}
    group(module)["beta1"] = 0.5
    group(module).update(eps=1e-3)
    assert (numbers.get("beta1"), numbers.get("eps")) == (0.5, 1e-3)
    group(module)["lr"] = torch.tensor(0.75)  # from here on a tensor, which kernels read
    group(module)["lr"].mul_(2)
    assert numbers.get("lr") == 1.5
    group(module)["lr"] = 0.25
    assert numbers.get("lr") == 0.25 == float(group(module)["lr"])


@pytest.mark.parametrize("rate", [0.125, torch.tensor(0.125)], ids=["number", "tensor"])
def test_the_optimizers_own_state_dict(rate: Any) -> None:
    module, other = trained(), trained(optimizer=optim.Adam(lr=rate))
    assert module.optimizer is not None and other.optimizer is not None
    group(module)["beta1"], group(module)["initial_lr"] = 0.25, 3.0
    other.optimizer.load_state_dict(module.optimizer.state_dict())
    numbers = other._trainer.numbers
    assert numbers is not None and (numbers.get("lr"), numbers.get("beta1")) == (0.1, 0.25)
    assert group(other)["initial_lr"] == 3.0 and len(group(other)["params"]) == 1
    module.optimizer.load_state_dict(trained(optimizer=optim.Adam(lr=rate)).optimizer.state_dict())  # type: ignore[union-attr]
    assert float(group(module)["lr"]) == 0.125
    group(module)["lr"] = 0.5
    assert module._trainer.numbers is not None and module._trainer.numbers.get("lr") == 0.5
    with pytest.raises(ValueError, match="2 parameter groups; allowed: 1"):
        other.optimizer.load_state_dict({"state": {}, "param_groups": [{}, {}]})
    with pytest.raises(RuntimeError, match="trains the tables of its module only"):
        other.optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})


def test_the_manual_runs() -> None:
    """All its code in order, as one program; on the reference, which needs no compiler."""
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) >= 8
    code = "\n".join(blocks).replace("EmbeddingCollection(spec", 'EmbeddingCollection(spec, backend="reference"')
    exec(compile(code, "docs/training.md", "exec"), {})
