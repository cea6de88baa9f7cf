"""State dicts, copies, pickles and moves of a trained module keep rows, states and counters."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.backends import device_of
from conformance.training import ONE, SPEC, differing, draw, snapshot, steps, trained, trained_backend
from torch import distributed, nn

from embforge import optim
from embforge.codegen.errors import SpecError
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.collection import EmbeddingCollection

TAIL = {"optimizer": optim.RowwiseAdagrad(lr=0.1, initial_accumulator_value=0.5)}
"""The state is in the padding of table `a`, whose rows of 15 numbers take 16, and outside of the rows of table `b`."""


def test_keys_and_shapes() -> None:
    state = trained().state_dict()
    tables = [
        f"tables.{table}.{part}" for table in "ab" for part in ("weight", "optim.m", "optim.v", "optim.rule.name")
    ]
    assert list(state) == ["optim.step", "optim.seed", *tables]
    assert all(tensor.is_contiguous() for tensor in state.values())
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert shapes["tables.a.optim.m"] == shapes["tables.a.weight"] == (60, 15)
    assert state["optim.step"].dtype == torch.int64 and shapes["optim.step"] == ()
    assert state["tables.b.weight"].dtype == torch.bfloat16 and state["tables.b.optim.m"].dtype == torch.float32
    assert tuple(trained(**TAIL).state_dict()["tables.a.optim.s"].shape) == (60,)
    assert list(trained(optimizer=None).state_dict()) == ["tables.a.weight", "tables.b.weight"]


def test_fused_tables_are_neither_parameters_nor_buffers() -> None:
    """Wrappers and other optimizers must not broadcast, average or train them a second time."""
    module = trained()
    assert [*module.parameters(), *module.buffers()] == []
    assert not module.weight("a").requires_grad and not isinstance(module.weight("a"), nn.Parameter)
    assert [name for name, _ in trained(optimizer=None).named_parameters()] == ["tables.a.weight", "tables.b.weight"]


def _loaded(module: EmbeddingCollection, other: EmbeddingCollection, **more: Any) -> EmbeddingCollection:
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    other.load_state_dict(state, **more)
    return other


def _saved(module: EmbeddingCollection) -> EmbeddingCollection:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: EmbeddingCollection = torch.load(file, weights_only=False)
    return loaded


def _other(module: EmbeddingCollection, **more: Any) -> EmbeddingCollection:
    """Another module of the same kind, with different rows."""
    torch.manual_seed(99)
    options = {"backend": module.backend, "device": module.device, "optimizer": module.trainer.groups} | more
    return EmbeddingCollection(module.spec, **options)


WAYS: dict[str, Callable[[EmbeddingCollection], EmbeddingCollection]] = {
    "load_state_dict": lambda module: _loaded(module, _other(module)),
    "assign": lambda module: _loaded(module, _other(module), assign=True),
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": _saved,
    "meta, to_empty": lambda module: _loaded(module, _other(module, device="meta").to_empty(device=module.device)),
    "meta, assign": lambda module: _loaded(module, _other(module, device="meta"), assign=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("more", [{}, TAIL], ids=["adam", "rowwise adagrad"])
def test_loaded_modules_train_to_the_same_bits(more: dict[str, Any], way: str) -> None:
    """They round stochastically, which depends on seed and step."""
    module = trained(**more)
    for seed in range(2):
        module(*draw(seed=seed)).sum().backward()
    twin = WAYS[way](module)
    assert twin.weight("a").data_ptr() != module.weight("a").data_ptr()
    for seed in range(2, 4):
        for each in (module, twin):
            each(*draw(seed=seed)).sum().backward()
    assert steps(twin) == 4 and differing(snapshot(module), snapshot(twin)) == []


@trained_backend
def test_a_state_dict_is_read_by_the_kernels(backend: Any) -> None:
    module = trained(backend, **TAIL)
    module(*draw(backend)).sum().backward()
    twin = _loaded(module, _other(module))
    for each in (module, twin):
        each(*draw(backend, 1)).sum().backward()
    assert differing(snapshot(module), snapshot(twin)) == []


def test_states_in_padding_are_states() -> None:
    module = trained(**TAIL)
    placements = [table.states[0].placement for table in module.layout.tables]
    assert placements == ["tail", "section"]
    assert module.optimizer_state("a")["s"].unique().tolist() == [0.5]
    module(*draw()).sum().backward()
    state = module.optimizer_state("a")["s"]
    assert (state > 0.5).any() and torch.equal(state, module.state_dict()["tables.a.optim.s"])
    with torch.no_grad():
        module.weight("a").zero_()
    assert (module.optimizer_state("a")["s"] > 0.5).any()  # rows and states do not share bytes
    module.optimizer_state("a")["s"].fill_(2.0)
    assert module.state_dict()["tables.a.optim.s"].unique().tolist() == [2.0]


@pytest.mark.parametrize("more", [{}, TAIL], ids=["adam", "rowwise adagrad"])
def test_reset_parameters_starts_training_again(more: dict[str, Any]) -> None:
    module, twin = trained(**more), trained(**more)
    module(*draw()).sum().backward()
    for each in (module, twin):
        torch.manual_seed(5)
        each.reset_parameters()
    assert steps(module) == 0 and differing(snapshot(module), snapshot(twin)) == []


def test_a_state_dict_that_does_not_fit_is_refused() -> None:
    module = trained()
    state = snapshot(module)
    for missing in ("optim.step", "tables.a.optim.m", "tables.b.weight"):
        part = {name: tensor for name, tensor in state.items() if name != missing}
        with pytest.raises(RuntimeError, match=f'Missing key.*"{missing}"'):
            module.load_state_dict(part)
        assert module.load_state_dict(part, strict=False).missing_keys == [missing]
    for extra in ("optim.steps", "tables.a.optim.s", "tables.c.weight", "other", "other.weight"):
        with pytest.raises(RuntimeError, match=f'Unexpected key.*"{extra}"'):
            module.load_state_dict({**state, extra: torch.zeros(1)})
        module.load_state_dict({**state, extra: torch.zeros(1)}, strict=False)
    for wrong in ("optim.step", "tables.a.optim.m", "tables.b.weight"):
        with pytest.raises(RuntimeError, match=f"{wrong}: shape"):
            module.load_state_dict({**state, wrong: torch.zeros(3, 3)})
    for counter in ("optim.step", "optim.seed"):
        for bad, message in ((torch.tensor(1.5), "torch.float32"), (torch.tensor(-5), "-5"), (5, "5")):
            with pytest.raises(
                RuntimeError, match=f"{counter}: {message} is not allowed; allowed: a tensor of one whole"
            ):
                module.load_state_dict({**state, counter: bad})
    assert differing(state, snapshot(module)) == []
    trained(optimizer=None).load_state_dict(state)  # a module that serves skips the optimizer's entries


def test_a_part_of_a_model_is_loaded_as_a_part() -> None:
    """All keys start with the module's name, also those of counters."""
    model, other = nn.ModuleDict({"e": trained()}), nn.ModuleDict({"e": _other(trained())})
    model["e"](*draw()).sum().backward()
    assert {"e.optim.step", "e.tables.a.optim.v"} <= model.state_dict().keys()
    other.load_state_dict(model.state_dict())
    assert differing(model.state_dict(), other.state_dict()) == []


@pytest.mark.parametrize("cast", ["half", "double", "bfloat16", "float"])
def test_casts_leave_tables_and_states_alone(cast: str) -> None:
    module = trained(**TAIL)
    module(*draw()).sum().backward()
    before = snapshot(module)
    assert getattr(module, cast)() is module
    assert differing(before, snapshot(module)) == []
    module(*draw()).sum().backward()
    assert steps(module) == 2


def test_the_optimizer_follows_the_module() -> None:
    """Schedulers hold `module.optimizer`: after a move, kernels must still read the numbers of that object."""
    module = _other(trained(), device="meta", optimizer=optim.Adam(lr=torch.tensor(0.25)))
    optimizer = module.optimizer
    assert optimizer is not None
    module.to_empty(device="cpu")
    module.reset_parameters()
    assert module.optimizer is optimizer and float(optimizer.param_groups[0]["lr"]) == 0.25
    optimizer.param_groups[0]["lr"].fill_(0.0)
    before = snapshot(module)
    module(*draw()).sum().backward()
    assert torch.equal(module.weight("a"), before["tables.a.weight"])
    assert optimizer.param_groups[0]["params"][0].grad is not None


def test_modules_on_meta_train_after_a_move() -> None:
    """The device may also be torch's default. A seed is drawn when the module gets memory."""
    with torch.device("meta"):
        module = EmbeddingCollection(SPEC, optimizer=optim.Adam(lr=0.25), backend="reference")
        here = EmbeddingCollection(SPEC, "cpu", optimizer=optim.Adam(lr=0.25), backend="reference")
    assert module.device.type == "meta" and here.device.type == "cpu" and not here.weight("a").is_meta
    seeds = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        each = copy.deepcopy(module).to_empty(device="cpu")
        each.reset_parameters()
        seeds.add(int(each.state_dict()["optim.seed"]))
        each(*draw()).sum().backward()
        assert steps(each) == 1
    assert len(seeds) == 2 and 0 not in seeds
    module.seed(5)
    assert int(module.to_empty(device="cpu").state_dict()["optim.seed"]) == 5


@pytest.mark.parametrize("more", [{}, {"accumulate": True}, {"optimizer": None}], ids=str)
def test_modules_made_in_inference_mode_train(more: dict[str, Any]) -> None:
    with torch.inference_mode():
        module = trained(**more)
        twins = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))][: 1 if module.optimizer is None else 2]
        module(*draw())
    for each in (module, *twins):
        with torch.no_grad():
            each(*draw())
        each(*draw()).sum().backward()
        each.step()
    if more.get("optimizer", True) is not None:
        assert steps(module) == 1 and all(differing(snapshot(module), snapshot(twin)) == [] for twin in twins)
    else:
        assert module.weight("a").grad is not None


@pytest.mark.parametrize("way", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
@pytest.mark.parametrize("reverse", [False, True])
def test_copies_of_the_optimizer_are_of_the_modules_copy(way: Callable[[Any], Any], reverse: bool) -> None:
    module = trained()
    assert module.optimizer is not None
    scheduler = torch.optim.lr_scheduler.OneCycleLR(module.optimizer, max_lr=0.2, total_steps=10)
    pair = way((scheduler, module) if reverse else (module, scheduler))
    twin, other = pair[::-1] if reverse else pair
    assert other.optimizer is twin.optimizer and twin.optimizer is not module.optimizer
    for each, schedule in ((module, scheduler), (twin, other)):
        each(*draw()).sum().backward()
        each.optimizer.step()
        schedule.step()
    assert twin.optimizer.param_groups[0]["lr"] == module.optimizer.param_groups[0]["lr"]
    assert steps(twin) == 1 and differing(snapshot(module), snapshot(twin)) == []
    alone = way(module.optimizer)
    alone.param_groups[0]["lr"] = 0.0
    assert module.optimizer.param_groups[0]["lr"] != 0.0


def test_a_copy_has_numbers_of_its_own() -> None:
    module = trained()
    twin = copy.deepcopy(module)
    assert module.optimizer is not None and twin.optimizer is not None
    module.optimizer.param_groups[0]["lr"] = 0.0
    before = snapshot(module)
    for each in (module, twin):
        each(*draw()).sum().backward()
    assert torch.equal(module.weight("a"), before["tables.a.weight"])
    assert not torch.equal(twin.weight("a"), before["tables.a.weight"])


def test_frozen_tables_stay_frozen_in_copies() -> None:
    for more in ({}, {"optimizer": None}):
        module = trained(**more)
        module.freeze("a")
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            before = snapshot(twin)
            twin(*draw()).sum().backward()
            assert torch.equal(twin.weight("a"), before["tables.a.weight"])
            assert twin.weight("a").grad is None


@trained_backend
def test_distributed_data_parallel_leaves_tables_alone(backend: Any, tmp_path: Path) -> None:
    """It broadcasts parameters and buffers when it starts, and averages gradients, but only those of the dense part."""
    if not distributed.is_available():
        raise AssertionError("torch without distributed is not what the package is tested with")
    device = device_of(backend)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        module, twin = trained(backend), trained(backend)
        dense = nn.Linear(34, 1, device=device)
        model = nn.parallel.DistributedDataParallel(nn.ModuleDict({"e": module, "d": dense}))
        assert [name for name, _ in model.named_parameters()] == ["module.d.weight", "module.d.bias"]
        dense(module(*draw(backend))).sum().backward()
        dense(twin(*draw(backend))).sum().backward()
        assert steps(module) == 1 and differing(snapshot(module), snapshot(twin)) == []
    finally:
        distributed.destroy_process_group()


def test_batches_of_these_tests_have_ids_of_both_tables() -> None:
    """Otherwise tests could pass because nothing was looked up."""
    _, offsets, _ = draw()
    assert all(int(offsets[6 * i + 6] - offsets[6 * i]) > 2 for i in range(len(SPEC.features)))


@pytest.mark.parametrize("how", ["eager", "accumulate", "compiled"])
@pytest.mark.parametrize("assign", [False, True])
def test_rows_that_are_loaded_between_forward_and_backward_are_updated(assign: bool, how: str) -> None:
    """The update changes the rows that the module has now, whether they were copied or assigned, not those it had."""
    module, twin = (trained(spec=ONE, accumulate=how == "accumulate", optimizer=optim.SGD(lr=0.5)) for _ in range(2))
    called: Any = torch.compile(module, backend="aot_eager", fullgraph=True) if how == "compiled" else module
    ids = torch.arange(9), torch.tensor([0, 4, 9])
    loss = called(*ids).sum()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state["tables.t.weight"] += 1
    module.load_state_dict(state, assign=assign)
    loss.backward()
    module.step()
    twin(*ids).sum().backward()
    twin.step()
    torch.testing.assert_close(module.weight("t"), twin.weight("t") + 1)


@pytest.mark.parametrize("how", ["eager", "accumulate", "compiled"])
def test_a_module_that_moves_between_forward_and_backward(how: str) -> None:
    module = trained(spec=ONE, accumulate=how == "accumulate")
    called: Any = torch.compile(module, backend="aot_eager", fullgraph=True) if how == "compiled" else module
    loss = called(torch.arange(9), torch.tensor([0, 4, 9])).sum()
    module.to("meta")
    with pytest.raises(RuntimeError, match="has moved to another device since this forward"):
        loss.backward()


def test_copies_divide_by_no_scale() -> None:
    """Copies do not have the scaler of the module that they were copied from."""
    module = trained(spec=ONE, optimizer=optim.SGD(lr=0.5))
    module.use_grad_scaler(torch.amp.GradScaler("cpu", init_scale=64.0))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        before = twin.weight("t").clone()
        twin(torch.arange(9), torch.tensor([0, 4, 9])).sum().backward()
        torch.testing.assert_close(twin.weight("t"), before - 0.5)


@pytest.mark.parametrize("kept", ["dict", "file"])
def test_states_of_another_optimizer_are_refused(kept: str, tmp_path: Path) -> None:
    """Adam's and LAMB's have the same names and shapes."""
    module, other = trained(), trained(optimizer=optim.LAMB(lr=0.1))
    module(*draw()).sum().backward()
    state: dict[str, Any] = module.state_dict()
    if kept == "file":
        torch.save(dict(state), tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt")
    before = {name: other.optimizer_state("a")[name].clone() for name in "mv"}
    with pytest.raises(RuntimeError, match=r"tables\.a\.optim\.rule\.name: these are states of the optimizer 'adam/1'"):
        other.load_state_dict(state)
    assert all(torch.equal(before[name], other.optimizer_state("a")[name]) for name in "mv")
    other.load_state_dict({name: tensor for name, tensor in state.items() if ".optim." not in name}, strict=False)
    for wrong in (torch.zeros(3), "adam", torch.zeros(64, dtype=torch.uint8)):
        with pytest.raises(RuntimeError, match=r"tables\.b\.optim\.rule\.name"):
            trained().load_state_dict(state | {"tables.b.optim.rule.name": wrong})


def test_state_dicts_that_do_not_name_their_optimizer_still_load() -> None:
    module, twin = trained(), trained()
    module(*draw()).sum().backward()
    twin.load_state_dict({name: tensor for name, tensor in module.state_dict().items() if "rule" not in name})
    assert differing(snapshot(module), snapshot(twin)) == []
    trained(optimizer=None).load_state_dict(module.state_dict())  # one that serves skips it, with the states


def test_tables_whose_keys_would_collide_are_refused() -> None:
    tables = [TableSpec("a", 4, 2), TableSpec("a.optim", 5, 2), TableSpec("a.optim.rule", 6, 2)]
    spec = CollectionSpec(tables, [FeatureSpec(f"f{place}", table.name) for place, table in enumerate(tables)])
    batch = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2, 3])
    module, twin = trained(spec=spec), trained(spec=spec)
    module(*batch).sum().backward()
    twin.load_state_dict(module.state_dict())
    assert len(module.state_dict()) == 2 + 4 * len(tables) and differing(snapshot(module), snapshot(twin)) == []
    named = optim.custom("named", {"weight": "element"}, "weight += g * g\nw -= lr * weight")
    with pytest.raises(SpecError, match=r"two tensors would be called 'tables\.a\.optim\.weight' in state dicts"):
        trained(spec=spec, optimizer=named(lr=0.1))
