"""`module.optimizer` as a torch optimizer: its numbers, schedulers and state dict."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from conformance.training import ONE, trained
from torch import nn

from embforge import optim
from embforge.collection import EmbeddingCollection


def group(module: EmbeddingCollection) -> dict[str, Any]:
    assert module.optimizer is not None
    return module.optimizer.param_groups[0]


SCHEDULES: dict[str, Callable[[Any], torch.optim.lr_scheduler.LRScheduler]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=10),
}


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_change_the_rate_of_updates(name: str, tensor: bool) -> None:
    """Rows are updated as by torch's optimizer of the same kind under the same scheduler."""
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


@pytest.mark.parametrize("optimizer", [optim.Adam(lr=0.1), optim.Momentum(lr=0.1)], ids=["Adam", "Momentum"])
@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_schedulers_change_momentum_too(optimizer: Any, name: str) -> None:
    """By default these schedulers also cycle the momentum, as they do for torch's optimizer."""
    module, bag = trained(spec=ONE, optimizer=optimizer), nn.Parameter(torch.zeros(1))
    adam = isinstance(optimizer, optim.Adam)
    theirs = torch.optim.Adam([bag], lr=0.1) if adam else torch.optim.SGD([bag], lr=0.1, momentum=0.9)
    numbers, kind = module.trainer.numbers, getattr(torch.optim.lr_scheduler, name)
    more = {"max_lr": 0.2, "total_steps": 10} if name == "OneCycleLR" else {"base_lr": 0.1, "max_lr": 0.2}
    schedulers = [kind(each, **more) for each in (module.optimizer, theirs)]
    assert numbers is not None and module.optimizer is not None
    for _ in range(4):
        mine, other = group(module), theirs.param_groups[0]
        key = "betas" if adam else "momentum"
        assert (mine["lr"], mine[key]) == (other["lr"], other[key])
        found = (numbers.get("beta1"), numbers.get("beta2")) if adam else numbers.get("momentum")
        assert (numbers.get("lr"), found) == (other["lr"], other[key])
        for each, scheduler in zip((module.optimizer, theirs), schedulers, strict=True):
            each.step()
            scheduler.step()
    assert {key for key in mine if key not in other} == ({"beta1", "beta2"} if adam else set())


def test_entries_that_no_kernel_reads_are_refused() -> None:
    module = trained()
    numbers, before = module.trainer.numbers, dict(group(module))
    assert numbers is not None and module.optimizer is not None
    for key, value, message in (
        ("weight_decay", 0.5, "'weight_decay' is not part of this optimizer.* given when it is made"),
        ("learning_rate", 0.5, "'learning_rate' is not part"),
        ("lr", -1.0, r"lr=-1.0 is not allowed; 0 <= lr"),
        ("lr", float("nan"), "lr=nan is not allowed"),
        ("lr", True, "lr=True is not allowed"),
        ("lr", torch.zeros(2), "a floating point tensor of one element"),
        ("beta2", 1.0, "beta2=1.0 is not allowed; 0 <= beta2 < 1"),
        ("beta1", torch.tensor(2.0), "beta1=2.0 is not allowed"),
        ("betas", (0.5, 1.5), "beta2=1.5 is not allowed"),
        ("betas", 0.5, "betas=0.5 is not allowed; 2 numbers: beta1, beta2"),
    ):
        ways: list[Callable[[], Any]] = [
            lambda key=key, value=value: group(module).__setitem__(key, value),
            lambda key=key, value=value: group(module).update({key: value}),
            lambda key=key, value=value: group(module).__ior__({key: value}),
        ]
        for way in ways:
            with pytest.raises(ValueError, match=message):
                way()
    with pytest.raises(ValueError, match="'weight_decay' is not part"):
        group(module).setdefault("weight_decay", 0.5)
    with pytest.raises(RuntimeError, match="cannot be replaced"):
        module.optimizer.param_groups[0] = {"lr": 0.5, "params": []}
    assert dict(group(module)) == before and numbers.get("lr") == 0.1
    group(module).setdefault("initial_lr", 0.5)
    group(module).setdefault("lr", 0.5)
    assert (group(module)["initial_lr"], group(module)["lr"]) == (0.5, 0.1)
    entries = group(module)
    entries |= {"lr": 0.25, "betas": (0.5, 0.75)}
    assert [numbers.get(name) for name in ("lr", "beta1", "beta2")] == [0.25, 0.5, 0.75]
    theirs = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=0.5)
    for foreign in (theirs.state_dict(), trained(optimizer=optim.SGD(lr=0.5)).optimizer.state_dict()):  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=r"that of another optimizer: .* has lr, beta1, beta2, eps"):
            module.optimizer.load_state_dict(foreign)
    assert numbers.get("lr") == 0.25


def test_numbers_of_numpy_are_numbers() -> None:
    module = trained(optimizer=optim.Adam(lr=np.float32(0.5), betas=(np.float64(0.5), 0.75)))  # type: ignore[arg-type]
    group(module)["lr"] = np.float32(0.25)
    assert module.trainer.numbers is not None and module.trainer.numbers.get("lr") == 0.25
    with pytest.raises(ValueError, match="lr=True is not allowed"):
        optim.SGD(lr=True)


def test_numbers_are_written_through() -> None:
    module = trained()
    numbers = module.trainer.numbers
    assert numbers is not None and set(group(module)) == {"params", "lr", "beta1", "beta2", "betas", "eps"}
    group(module)["beta1"] = 0.5
    group(module).update(eps=1e-3)
    assert (numbers.get("beta1"), numbers.get("eps")) == (0.5, 1e-3) and group(module)["betas"] == (0.5, 0.999)
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
    numbers = other.trainer.numbers
    assert numbers is not None and (numbers.get("lr"), numbers.get("beta1")) == (0.1, 0.25)
    assert group(other)["initial_lr"] == 3.0 and len(group(other)["params"]) == 1
    module.optimizer.load_state_dict(trained(optimizer=optim.Adam(lr=rate)).optimizer.state_dict())  # type: ignore[union-attr]
    assert float(group(module)["lr"]) == 0.125
    group(module)["lr"] = 0.5
    assert module.trainer.numbers is not None and module.trainer.numbers.get("lr") == 0.5
    with pytest.raises(ValueError, match="2 parameter groups; allowed: 1"):
        other.optimizer.load_state_dict({"state": {}, "param_groups": [{}, {}]})
    with pytest.raises(RuntimeError, match="trains the tables of its module only"):
        other.optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})


def test_a_parameter_group_can_be_pickled() -> None:
    """It is pickled as a plain dict, with the grad anchor that it holds."""
    optimizer = trained().optimizer
    assert optimizer is not None
    assert pickle.loads(pickle.dumps(optimizer.param_groups[0]))["lr"] == 0.1


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_module_is_freed_when_it_is_dropped(accumulate: bool) -> None:
    """It is freed at once and not by the garbage collector: tables may take most of a machine's memory."""
    module = trained(spec=ONE, accumulate=accumulate)
    optimizer = module.optimizer
    assert optimizer is not None
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    module(torch.arange(9), torch.tensor([0, 4, 9])).sum().backward()
    optimizer.step()
    scheduler.step()
    module.state_dict()
    seen, rows = ref(module), ref(module.weight("t"))
    gc.disable()
    try:
        del module
        assert seen() is None and rows() is None
    finally:
        gc.enable()
    for call in (optimizer.step, optimizer.zero_grad, lambda: copy.deepcopy(optimizer)):
        with pytest.raises(RuntimeError, match="its module is gone"):
            call()


def test_a_copy_of_an_optimizer_holds_its_module() -> None:
    module = trained(spec=ONE)
    twin = copy.deepcopy(module.optimizer)
    assert twin is not None and twin is not module.optimizer
    gc.collect()
    twin.step()
    assert pickle.loads(pickle.dumps(twin)).param_groups[0]["lr"] == 0.1
