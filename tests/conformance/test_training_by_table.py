"""Tables with optimizers of their own: `optimizer={"users": ..., "*": ...}`.

Two oracles: modules of one rule each whose other tables are frozen, for what an update is; and a module with one
optimizer for all tables, to which a mapping that says the same must be equal in everything.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from conformance.backends import every_backend, refusal
from conformance.training import (
    ONE,
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
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import embforge as ef
from embforge import lookups, optim
from embforge.codegen.spec import CollectionSpec
from embforge.collection import EmbeddingCollection
from embforge.launch.cpu import backward as cpu_backward
from embforge.launch.kernels import Program

ADAM, ROWWISE = optim.Adam(lr=0.1), optim.RowwiseAdagrad(lr=0.3, initial_accumulator_value=0.5)
MAPPINGS: dict[str, dict[str, Any]] = {
    "the rest in padding": {"b": ADAM, "*": ROWWISE},
    "the rest in a section": {"*": ROWWISE, "a": ADAM},
}
SAME: dict[Any, Any] = {"a": ADAM, "b": optim.Adam(lr=0.1)}
"""The optimizer that `trained()` has for all tables."""


def group_of(module: EmbeddingCollection, place: int) -> dict[str, Any]:
    assert module.optimizer is not None
    found: dict[str, Any] = module.optimizer.param_groups[place]
    return found


def of_table(module: EmbeddingCollection, table: str) -> dict[str, Tensor]:
    return {key: value for key, value in snapshot(module).items() if key.startswith((f"tables.{table}.", "optim."))}


def train(module: EmbeddingCollection, backend: Any = "reference", seeds: Any = range(3)) -> None:
    for seed in seeds:
        module(*draw(backend, seed)).pow(2).sum().backward()


# ---- What an update is --------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_every_table_is_trained_by_its_own_rule(backend: Any, mapping: str) -> None:
    given = MAPPINGS[mapping]
    module = trained(backend, optimizer=given)
    train(module, backend)
    assert steps(module) == 3
    for table, other in ("ab", "ba"):
        alone = trained(backend, optimizer=given.get(table, given.get("*")))
        alone.freeze(other)
        for seed in range(3):  # the gradient of a table depends on its own columns alone
            alone(*draw(backend, seed)).pow(2).sum().backward()
        assert differing(of_table(module, table), of_table(alone, table)) == []
        assert not torch.equal(module.weight(table), trained(backend).weight(table))


def test_separate_collections_have_the_same_rows() -> None:
    """They round to nearest: stochastic rounding depends on a table's number, which is 0 in a separate collection."""
    rules = {"a": optim.Adam(lr=0.1), "b": optim.RowwiseAdagrad(lr=0.3, rounding="nearest")}
    module = trained(optimizer=rules)
    alone = {}
    for name, rule in rules.items():
        spec = CollectionSpec((SPEC.table(name),), tuple(f for f in SPEC.features if f.table == name))
        alone[name] = trained(spec=spec, optimizer=rule)
        with torch.no_grad():
            alone[name].weight(name).copy_(module.weight(name))
    for seed in range(3):
        values, offsets, weights = draw(seed=seed)
        module(values, offsets, weights).pow(2).sum().backward()
        size = (offsets.numel() - 1) // len(SPEC.features)
        for name, each in alone.items():
            of = [i for i, feature in enumerate(SPEC.features) if feature.table == name]
            parts = [slice(int(offsets[i * size]), int(offsets[(i + 1) * size])) for i in of]
            lengths = offsets.diff().view(-1, size)[of].flatten()
            own = torch.cat([weights[part] for part in parts]) if name == "a" else None
            each(torch.cat([values[part] for part in parts]), None, own, lengths=lengths).pow(2).sum().backward()
    for name, each in alone.items():
        assert torch.equal(module.weight(name), each.weight(name))
        states, wanted = module.optimizer_state(name), each.optimizer_state(name)
        assert states.keys() == wanted.keys() and all(torch.equal(states[key], wanted[key]) for key in wanted)


@every_backend
def test_the_same_rule_for_every_table_is_one_for_all(backend: Any) -> None:
    module, twin = trained(backend, optimizer=SAME), trained(backend)
    for each in (module, twin):
        train(each, backend)
    assert differing(snapshot(module), snapshot(twin)) == []


def test_one_entry_for_several_tables_is_the_plain_module() -> None:
    modules = [trained("cpu", optimizer=given) for given in ({"*": ADAM}, {("a", "b"): ADAM}, ADAM)]
    programs = [module.programs[torch.int64] for module in modules]
    assert programs[0] == programs[1] == programs[2]
    assert programs[0].backward == Program(modules[0].plans()["backward"]).text
    assert [group_of(module, 0).get("name") for module in modules] == ["*", "a, b", None]


@trained_backend
def test_frozen_tables_are_not_trained(backend: Any) -> None:
    """One group is frozen, or one table of it. The step counts the updates of the module."""
    module, twin = trained(backend, optimizer=SAME), trained(backend)
    for frozen in (("a",), ("b",), ()):
        for each in (module, twin):
            each.unfreeze()
            if frozen:
                each.freeze(*frozen)
            train(each, backend, [0])
    assert steps(module) == 3 and differing(snapshot(module), snapshot(twin)) == []


@trained_backend
def test_a_table_without_optimizer_is_never_trained(backend: Any) -> None:
    module, twin = trained(backend, optimizer={"b": None, "*": ADAM}), trained(backend)
    twin.freeze("b")
    before = snapshot(module)["tables.b.weight"]
    for each in (module, twin):
        train(each, backend)
    found = snapshot(module)
    assert [key for key in found if "b.optim" in key] == [] and torch.equal(before, found["tables.b.weight"])
    assert differing(of_table(module, "a"), of_table(twin, "a")) == []
    assert "frozen: b" in repr(module)
    module.unfreeze()  # all that can be
    for unfreeze in (lambda: module.unfreeze("b"), lambda: module.tables._modules["b"].requires_grad_()):  # type: ignore[union-attr]
        with pytest.raises(TypeError, match="table 'b': its optimizer is None, so that it cannot be trained"):
            unfreeze()
    module.freeze("a")
    with pytest.raises(TypeError, match="table 'b': its optimizer is None"):
        module.unfreeze("a", "b")
    assert not module.tables.a.is_trained()  # what is refused changes nothing
    module.unfreeze("a")
    module.tables.requires_grad_(True)  # leaves it frozen
    assert not module.tables.b.is_trained()
    everywhere = trained(backend, optimizer={"b": ADAM, "*": ADAM})
    module.load_state_dict(everywhere.state_dict())  # strictly: states of a table that is not trained are not needed
    assert torch.equal(module.weight("b"), everywhere.weight("b"))


# ---- What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mapping", "error", "message"),
    [
        ({"a": ADAM}, ValueError, "optimizer: table 'b' is in no entry; name it"),
        ({"user": ADAM, "*": ADAM}, ValueError, "optimizer: 'user' is no table of this collection; tables: a, b"),
        ({"a": ADAM, ("a", "b"): ADAM}, ValueError, r"optimizer: table 'a' is named by the entries 'a' and \('a', 'b'"),
        ({"a": ADAM, "b": ADAM, "*": ADAM}, ValueError, "'[*]' stands for tables that no other entry names"),
        ({"a": None, "b": None}, ValueError, "optimizer: no entry has an optimizer, so nothing would be trained"),
        ({}, ValueError, "optimizer: table 'a' is in no entry"),
        ({(): ADAM, "*": ADAM}, ValueError, "an empty tuple names no table"),
        ({0: ADAM}, TypeError, "optimizer: 0 is no key; allowed: the name of a table, a tuple of names, or '[*]'"),
        ({"*": torch.optim.Adam}, TypeError, "optimizer: entry '[*]': got <class .*Adam'>; allowed: one of embforge"),
    ],
)
def test_mappings_that_are_refused(mapping: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        trained(optimizer=mapping)


def test_a_misspelt_table_is_guessed() -> None:
    spec = CollectionSpec([ef.TableSpec("users", 4, 4)], [ef.FeatureSpec("f", "users")])
    with pytest.raises(ValueError, match="'user' is no table of this collection; did you mean 'users'"):
        EmbeddingCollection(spec, optimizer={"user": ADAM})


@every_backend
@pytest.mark.parametrize("feature", range(3))
def test_a_bad_id_in_one_table_changes_nothing_in_any(backend: Any, feature: int) -> None:
    """On a GPU the error is known later. Even then no rule has used the batch, and the next call is right."""
    module = trained(backend, optimizer=MAPPINGS["the rest in padding"])
    train(module, backend, [0])
    values, offsets, weights = draw(backend)
    loss = module(values, offsets, weights).sum()
    with nothing_changes(module), refusal(module, IndexError, "feature"):
        values.data[int(offsets[6 * feature])] = 99  # what autograd cannot see
        loss.backward()
    train(module, backend, [1])
    assert steps(module) == 2


def test_a_lack_of_memory_changes_nothing_in_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the lack is found by the second kernel."""
    module = trained("cpu", optimizer=MAPPINGS["the rest in padding"])
    module(*draw("cpu")).sum()
    larger, block, given = draw("cpu", size=400), cpu_backward._allocated, []

    def scarce(size: int) -> Tensor:
        given.append(size)
        if len(given) > 1:
            raise MemoryError("no more")
        return block(size)

    loss = module(*larger).sum()
    monkeypatch.setattr(cpu_backward, "_allocated", scarce)
    with nothing_changes(module), pytest.raises(MemoryError, match="no more"):
        loss.backward()


# ---- Numbers ------------------------------------------------------------------------------------------


def test_a_group_per_entry_in_its_order() -> None:
    module = trained(optimizer=MAPPINGS["the rest in a section"])
    first, second = group_of(module, 0), group_of(module, 1)
    assert (first["name"], first["tables"], first["lr"]) == ("*", ("b",), 0.3)
    assert (second["name"], second["tables"], second["betas"]) == ("a", ("a",), (0.9, 0.999))
    assert "beta1" not in first
    with pytest.raises(ValueError, match="name='c' is not allowed: this group is that of 'a'"):
        second["name"] = "c"
    with pytest.raises(ValueError, match="'beta1' is not part of this optimizer"):
        first["beta1"] = 0.5


def test_rates_of_a_scheduler_are_those_of_groups() -> None:
    module, twin = trained(optimizer=SAME), trained(optimizer=SAME)
    rates = [lambda step: 0.5**step, lambda step: 1.0 / (1 + step)]
    assert module.optimizer is not None
    scheduler = torch.optim.lr_scheduler.LambdaLR(module.optimizer, rates)
    for step in range(3):
        train(module, seeds=[step])
        for place, rate in enumerate(rates):
            group_of(twin, place)["lr"] = 0.1 * rate(step)
        train(twin, seeds=[step])
        module.optimizer.step()
        scheduler.step()
    assert differing(snapshot(module), snapshot(twin)) == []
    assert not torch.equal(module.weight("b"), trained(optimizer=SAME).weight("b"))


CYCLES: dict[str, Any] = {
    "OneCycleLR": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=[0.2, 0.4], total_steps=20),
    "CyclicLR": partial(torch.optim.lr_scheduler.CyclicLR, base_lr=[0.1, 0.2], max_lr=[0.2, 0.4]),
}


@pytest.mark.parametrize("name", list(CYCLES))
@pytest.mark.parametrize(
    ("others", "why"),
    [
        (ROWWISE, r"the optimizer of '\*' has none"),
        (optim.Momentum(), "here some have betas instead"),
    ],
)
def test_momentum_that_not_all_groups_have_is_not_cycled(name: str, others: Any, why: str) -> None:
    module = trained(optimizer={"a": ADAM, "*": others})
    with pytest.raises(ValueError, match=f"{why}; make it with cycle_momentum=False"):
        CYCLES[name](module.optimizer)
    assert (group_of(module, 0)["beta1"], group_of(module, 1).get("momentum", 0.9)) == (0.9, 0.9)
    scheduler = CYCLES[name](module.optimizer, cycle_momentum=False)
    rates = []
    for step in range(3):
        train(module, seeds=[step])
        module.optimizer.step()  # type: ignore[union-attr]
        scheduler.step()
        rates.append([group_of(module, place)["lr"] for place in (0, 1)])
    assert rates[0] < rates[1] < rates[2] and all(second == pytest.approx(2 * first) for first, second in rates)
    assert group_of(module, 0)["betas"] == (0.9, 0.999)


@pytest.mark.parametrize("name", list(CYCLES))
def test_momentum_that_all_groups_have_is_cycled(name: str) -> None:
    module = trained(optimizer={"a": ADAM, "*": optim.RowwiseAdam()})
    scheduler = CYCLES[name](module.optimizer)
    module.optimizer.step()  # type: ignore[union-attr]
    scheduler.step()
    assert all(0.8 < group_of(module, place)["beta1"] < 0.95 for place in (0, 1))
    assert group_of(module, 0)["beta1"] == group_of(module, 1)["beta1"] != 0.9


def test_a_rate_may_be_a_tensor() -> None:
    rate = torch.tensor(0.1)
    module = trained(optimizer={"a": ADAM, "b": optim.Adam(lr=rate)})
    live = group_of(module, 1)["lr"]
    live.fill_(0.0)
    before = snapshot(module)["tables.b.weight"]
    train(module, seeds=[0])
    assert torch.equal(before, module.weight("b")) and not isinstance(group_of(module, 0)["lr"], Tensor)


def test_the_optimizers_own_state_dict() -> None:
    module, twin = trained(optimizer=SAME), trained(optimizer=SAME)
    assert module.optimizer is not None and twin.optimizer is not None
    group_of(module, 1)["lr"] = 0.7
    twin.optimizer.load_state_dict(copy.deepcopy(module.optimizer.state_dict()))
    assert [group_of(twin, place)["lr"] for place in (0, 1)] == [0.1, 0.7]
    swapped = trained(optimizer={"b": ADAM, "a": ADAM})
    assert swapped.optimizer is not None
    for other, message in ((swapped, "name='a' is not allowed"), (trained(), "2 parameter groups; allowed: 1")):
        with pytest.raises(ValueError, match=message):
            other.optimizer.load_state_dict(module.optimizer.state_dict())
    for copied in (copy.deepcopy(module.optimizer), pickle.loads(pickle.dumps(module.optimizer))):
        assert [group["lr"] for group in copied.param_groups] == [0.1, 0.7]


# ---- Accumulated and scaled gradients --------------------------------------------------------------------


@trained_backend
def test_accumulated_gradients_and_their_norm(backend: Any) -> None:
    modules = [trained(backend, optimizer=given, accumulate=True) for given in (SAME, ADAM)]
    norms = []
    for module in modules:
        for turn in range(2):
            train(module, backend, range(2 * turn, 2 * turn + 2))
            norms.append(module.clip_grad_norm_(0.5))
            module.step()
    assert torch.equal(norms[0], norms[2]) and torch.equal(norms[1], norms[3]) and norms[0] > 0.5
    module, twin = modules
    assert steps(module) == 2 and differing(snapshot(module), snapshot(twin)) == []


@trained_backend
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_gradient_that_is_not_finite_stops_all_rules(backend: Any, accumulate: bool) -> None:
    modules = [trained(backend, optimizer=given, accumulate=accumulate) for given in (SAME, ADAM)]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for module in modules:
        module.use_grad_scaler(scaler)
        for seed, factor in enumerate((1.0, torch.inf, 1.0)):
            result = module(*draw(backend, seed))
            result.backward(8.0 * factor * torch.ones_like(result))
            assert verdict(module) == (0 if factor == 1 else torch.inf)
            assert module.optimizer is not None
            module.optimizer.step()
    module, twin = modules
    assert steps(module) == 2 and differing(snapshot(module), snapshot(twin)) == []


def test_a_query_for_other_gradients_updates_nothing() -> None:
    module = trained(optimizer=SAME)
    values, offsets, weights = draw()
    weights.requires_grad_()
    with nothing_changes(module):
        torch.autograd.grad(module(values, offsets, weights).sum(), [weights])
    with nothing_changes(module):
        module(values, offsets, weights).sum().backward(inputs=[weights])


# ---- Copies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["state dict", "deepcopy", "pickle"])
def test_loaded_modules_train_to_the_same_bits(way: str) -> None:
    given = MAPPINGS["the rest in padding"]
    module = trained(optimizer=given)
    train(module, seeds=[0])
    twin = trained(optimizer=given) if way == "state dict" else None
    if twin is not None:
        twin.load_state_dict(snapshot(module))
    else:
        group_of(module, 1)["lr"] = 0.05
        twin = copy.deepcopy(module) if way == "deepcopy" else pickle.loads(pickle.dumps(module))
        assert group_of(twin, 1)["lr"] == 0.05
    for each in (module, twin):
        train(each, seeds=[1, 2])
    assert steps(twin) == 3 and differing(snapshot(module), snapshot(twin)) == []


def test_numbers_set_on_meta_are_kept() -> None:
    module = EmbeddingCollection(SPEC, "meta", "reference", optimizer=MAPPINGS["the rest in padding"])
    group_of(module, 1)["lr"] = 0.05
    module.to_empty(device="cpu")
    twin = trained(optimizer={"b": ADAM, "*": optim.RowwiseAdagrad(lr=0.05)})
    module.load_state_dict(twin.state_dict())
    for each in (module, twin):
        train(each)
    assert differing(snapshot(module), snapshot(twin)) == []


# ---- Graphs -------------------------------------------------------------------------------------------


@pytest.fixture
def _fresh_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield


@pytest.mark.usefixtures("_fresh_graphs")
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_the_same_ids_twice_in_a_compiled_graph(compiler: str) -> None:
    def towers(module: EmbeddingCollection, *batch: Any) -> Tensor:
        return module(*batch) * 3 + module(*batch) * 0.5

    given = MAPPINGS["the rest in padding"]
    module, twin = trained(optimizer=given), trained(optimizer=given)
    counter: Any = CompileCounterWithBackend(compiler)  # type: ignore[no-untyped-call]
    compiled = torch.compile(towers, backend=counter, fullgraph=True)
    for seed in range(3):
        group_of(module, 1)["lr"] = group_of(twin, 1)["lr"] = 0.1 + seed
        compiled(module, *draw()).sum().backward()
        towers(twin, *draw()).sum().backward()
    assert counter.frame_count == 1
    assert steps(module) == 6 and differing(snapshot(module), snapshot(twin)) == []


@every_backend
def test_the_operators_check_their_arguments(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, twin = (trained(backend, WITH_ROWS, optimizer=SAME), trained(backend, WITH_ROWS))
    monkeypatch.setattr(lookups, "must_dispatch", lambda values: True)
    for each in (module, twin):
        results = each.forward_dict(*draw(backend, spec=WITH_ROWS))
        sum(result.pow(2).sum() for result in results.values()).backward()  # type: ignore[union-attr]
    assert differing(snapshot(module), snapshot(twin)) == []
    numbers = module.trainer.numbers
    assert numbers is not None
    numbers.hyper = numbers.hyper[:-1].clone()
    with nothing_changes(module), pytest.raises(ValueError, match=r"hyper: .* allowed: contiguous torch.float64 \(10,"):
        module.forward_dict(*draw(backend, spec=WITH_ROWS))["x"].sum().backward()


# ---- How a module is printed --------------------------------------------------------------------------


def test_a_printed_module_names_its_optimizers() -> None:
    module = trained("cpu", optimizer=MAPPINGS["the rest in padding"], accumulate=True)
    assert "optimizer={b: adam(lr=0.1, " in repr(module) and ", *: rowwise_adagrad(lr=0.3, " in repr(module)
    told = ef.explain(module)
    for role in ("kernel of the update in a backward", "kernel of the update in step()"):
        assert f"{role} (b): backward_adam_cpu" in told and f"{role} (*): backward_rowwise_adagrad_cpu" in told
    assert told.count("nothing is tuned for tables of several rules") >= 4


def test_a_mapping_for_one_table_trains_it() -> None:
    module, twin = trained(spec=ONE, optimizer={"t": ADAM}), trained(spec=ONE)
    for each in (module, twin):
        each(*draw(spec=ONE)).sum().backward()
    assert differing(snapshot(module), snapshot(twin)) == []
