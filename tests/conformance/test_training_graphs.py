"""Training where torch changes or checks graphs: torch.compile, dispatch modes, opcheck."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from embforge import optim
from embforge.collection import EmbeddingCollection
from embforge.launch.reference import backward as reference_backward
from embforge.operators import lookup as ops
from embforge.training.calls import Programs


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield


def towers(module: EmbeddingCollection, *batch: Any) -> Tensor:
    """Looks up the same ids twice in one module. Only products and sums, which compilers do not round differently."""
    return module(*batch) * 3 + module(*batch) * 0.5


# ---- The same module twice -------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_two_towers_in_one_graph_are_two_updates(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Adam, for which one update by twice the gradient gives different rows."""
    module, twin = trained(), trained()
    compiled = torch.compile(towers, backend=compiler, fullgraph=True)
    for seed in range(2):
        towers(twin, *draw(seed=seed)).sum().backward()
    seen, kernel = [], reference_backward.ReferenceBackward.__call__

    def spying(self: Any, metadata: Any, tables: list[Tensor], *rest: Any) -> Tensor:
        seen.append([table.data_ptr() for table in tables])
        return kernel(self, metadata, tables, *rest)

    monkeypatch.setattr(reference_backward.ReferenceBackward, "__call__", spying)
    for seed in range(2):
        compiled(module, *draw(seed=seed)).sum().backward()
    assert steps(module) == 4 and differing(snapshot(module), snapshot(twin)) == []
    if compiler == "inductor":  # what users run: tables are updated where they are, never copied
        assert seen == [[module.weight(name).data_ptr() for name in "ab"]] * 4


@trained_backend
def test_two_towers_in_eager_code(backend: Any) -> None:
    module, twin = trained(backend), trained(backend)
    towers(module, *draw(backend)).sum().backward()
    first, second = twin(*draw(backend)), twin(*draw(backend))
    (second * 0.5).sum().backward()  # autograd goes backwards through calls
    (first * 3).sum().backward()
    assert steps(module) == 2 and differing(snapshot(module), snapshot(twin)) == []


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_compiled_module_called_twice(compiler: str) -> None:
    """Two graphs, whose second backward runs after the first has changed rows and counters."""
    module, twin = trained(), trained()
    compiled = torch.compile(module, backend=compiler, fullgraph=True)
    for seed in range(2):
        (compiled(*draw(seed=seed)) * 3 + compiled(*draw(seed=seed + 5)) * 0.5).sum().backward()
        (twin(*draw(seed=seed)) * 3 + twin(*draw(seed=seed + 5)) * 0.5).sum().backward()
    assert steps(module) == 4 and differing(snapshot(module), snapshot(twin)) == []


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_gradients_of_weights_in_a_compiled_graph(compiler: str) -> None:
    module, twin = trained(), trained()
    compiled = torch.compile(module, backend=compiler, fullgraph=True)
    for seed in range(2):
        values, offsets, weights = draw(seed=seed)
        ours, theirs = weights.clone().requires_grad_(), weights.clone().requires_grad_()
        compiled(values, offsets, ours).sum().backward()
        twin(values, offsets, theirs).sum().backward()
        assert torch.equal(ours.grad, theirs.grad)
    assert differing(snapshot(module), snapshot(twin)) == []


def test_gradients_of_weights_in_compiled_towers_are_refused() -> None:
    """As in eager code. In one graph they are refused at compilation, in two graphs when the second backward runs."""
    values, offsets, weights = draw()
    weights.requires_grad_()
    module = trained()
    with nothing_changes(module), pytest.raises(Exception, match="gradient of per-sample weights needs the rows"):
        torch.compile(towers, backend="aot_eager", fullgraph=True)(module, values, offsets, weights).sum().backward()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    loss = (compiled(values, offsets, weights) + compiled(values, offsets, weights)).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert steps(module) == 1


# ---- What else a compiler must not break -----------------------------------------------------------------


def test_numbers_change_without_recompiling() -> None:
    module, twin = trained(), trained()
    counter: Any = CompileCounterWithBackend("aot_eager")  # type: ignore[no-untyped-call]
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for step in range(3):
        for each in (module, twin):
            assert each.optimizer is not None
            each.optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            each.optimizer.param_groups[0]["beta1"] = 0.8 + step / 100
        compiled(*draw(seed=step)).sum().backward()
        twin(*draw(seed=step)).sum().backward()
    assert steps(module) == 3 and differing(snapshot(module), snapshot(twin)) == []
    assert counter.frame_count <= 2  # the second with dynamic shapes


def test_a_frozen_table_in_a_compiled_graph() -> None:
    module, twin = trained(), trained()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for names in ((), ("a",), ("a", "b")):
        for each, call in ((module, compiled), (twin, twin)):
            each.unfreeze()
            if names:
                each.freeze(*names)
            found = call(*draw())
            if len(names) < 2:
                found.sum().backward()
            assert found.requires_grad == (len(names) < 2)
    assert steps(module) == 2 and differing(snapshot(module), snapshot(twin)) == []


def test_a_gradient_scaler_in_a_compiled_graph() -> None:
    module, twin = trained(), trained()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    module.use_grad_scaler(scaler)
    assert module.optimizer is not None
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for step in range(3):
        module.optimizer.zero_grad()
        loss = compiled(*draw(seed=step)).sum() * (torch.inf if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(module.optimizer)
        scaler.update()
        if step != 1:
            twin(*draw(seed=step)).sum().backward()
    assert steps(module) == 2 and scaler.get_scale() == 128.0
    assert differing(snapshot(module), snapshot(twin)) == []


@pytest.mark.parametrize("more", [{"accumulate": True}, {"optimizer": None}], ids=str)
def test_what_no_graph_holds_breaks_it(more: dict[str, Any]) -> None:
    """Sparse gradients and accumulated ones: the call runs in Python, the rest is compiled."""
    module, twin = trained(**more), trained(**more)

    def model(module: EmbeddingCollection, *batch: Any) -> Tensor:
        return (module(*batch) * 2).relu()

    torch.compile(model, backend="aot_eager")(module, *draw()).sum().backward()
    model(twin, *draw()).sum().backward()
    for name in "ab" if "optimizer" in more else "":
        ours, theirs = module.weight(name).grad, twin.weight(name).grad
        assert ours is not None and theirs is not None and ours.is_coalesced()
        assert torch.equal(ours.to_dense(), theirs.to_dense())
    module.step()
    twin.step()
    assert differing(snapshot(module), snapshot(twin)) == []


def test_a_profiled_step_trains_once() -> None:
    module, twin = trained(spec=WITH_ROWS), trained(spec=WITH_ROWS)
    batch = draw(spec=WITH_ROWS)
    with torch.profiler.profile() as profile:
        sum(part.sum() for part in module.forward_dict(*batch).values()).backward()  # type: ignore[union-attr]
    sum(part.sum() for part in twin.forward_dict(*batch).values()).backward()  # type: ignore[union-attr]
    assert {"embforge::lookup_train", "embforge::update_"} <= {event.key for event in profile.key_averages()}
    assert steps(module) == 1 and differing(snapshot(module), snapshot(twin)) == []


def test_states_in_padding_survive_a_graph() -> None:
    """A graph that is not reinplaced copies tables with their padding, which holds this rule's state of table `a`."""
    more = {"optimizer": optim.RowwiseAdagrad(lr=0.1)}
    module, twin = trained(**more), trained(**more)
    compiled = torch.compile(towers, backend="aot_eager", fullgraph=True)
    values, offsets, weights = draw()
    values[:1] = 59  # the last row's state is the last number in memory
    compiled(module, values, offsets, weights).sum().backward()
    towers(twin, values, offsets, weights).sum().backward()
    assert float(module.optimizer_state("a")["s"][59]) > 0
    assert steps(module) == 2 and differing(snapshot(module), snapshot(twin)) == []


@pytest.mark.parametrize("more", [{}, {"accumulate": True}, {"optimizer": None}], ids=str)
def test_modes_that_watch_operators_do_not_stop_training(more: dict[str, Any]) -> None:
    module, twin = trained(**more), trained(**more)
    with FlopCounterMode(display=False):
        module(*draw()).sum().backward()
        module.step()
    twin(*draw()).sum().backward()
    twin.step()
    assert differing(snapshot(module), snapshot(twin)) == []
    if more.get("optimizer", True) is None:
        assert module.weight("a").grad is not None
    else:
        assert steps(module) == 1


# ---- The operators ---------------------------------------------------------------------------------------


def _arguments(module: EmbeddingCollection, backend: Any, weighted: bool) -> tuple[Any, ...]:
    values, offsets, weights = draw(backend, spec=module.spec)
    rows = [int(offsets[24] - offsets[18])]
    programs: Programs = module.programs[torch.int64]
    return values, offsets, weights if weighted else None, module._blocks(), rows, programs


@every_backend
@pytest.mark.parametrize("weighted", [True, False])
def test_the_training_operators_pass_opcheck(backend: Any, weighted: bool) -> None:
    """Checks every operator of training with a spec that has all kinds of results."""
    module = trained(backend, WITH_ROWS)
    values, offsets, weights, tables, rows, programs = _arguments(module, backend, weighted)
    numbers, device = module.trainer.numbers, device_of(backend)
    assert numbers is not None
    states = module.table_memory().states
    anchor = torch.zeros(1, device=device, requires_grad=True)
    more = (tables, states, anchor, numbers.hyper, numbers.counters, rows, programs.train, programs.backward)
    train = (values, offsets, weights, *more, programs.weight_gradient, "error", [True, True])
    torch.library.opcheck(ops.lookup_train, train)
    pooled, sequence, divisors, winners = (found.detach() for found in ops.lookup_train(*train))
    given = (torch.randn_like(pooled), torch.randn_like(sequence), values, offsets, weights, divisors, winners)
    update: Any = torch.ops.embforge.update_.default
    last = (tables, states, numbers.hyper, numbers.counters, programs.backward, "error", [True, False])
    torch.library.opcheck(update, (*given, *last))
    of_weights: Any = torch.ops.embforge.weight_gradient.default
    torch.library.opcheck(of_weights, (*given, tables, programs.weight_gradient, "error"))


def _wrong(name: str) -> Callable[[list[Any]], None]:
    places = {"grad_pooled": 0, "grad_sequence": 1, "values": 2, "divisors": 5, "winners": 6, "states": 8}

    def change(arguments: list[Any]) -> None:
        given = arguments[places[name]]
        arguments[places[name]] = [s[:1] for s in given] if name == "states" else given[:-1]

    return change


@pytest.mark.parametrize("name", ["grad_pooled", "grad_sequence", "values", "divisors", "winners", "states"])
def test_arguments_that_kernels_would_trust_are_checked(name: str) -> None:
    module = trained(spec=WITH_ROWS, optimizer=optim.Adam())
    values, offsets, weights, tables, rows, programs = _arguments(module, "reference", False)
    numbers = module.trainer.numbers
    assert numbers is not None
    states = module.table_memory().states
    train = (tables, states, numbers.anchor, numbers.hyper, numbers.counters, rows, programs.train, programs.backward)
    found = ops.lookup_train(values, offsets, weights, *train, programs.weight_gradient, "error", [True, True])
    pooled, sequence, divisors, winners = (tensor.detach() for tensor in found)
    arguments: list[Any] = [pooled, sequence, values, offsets, weights, divisors, winners]
    arguments += [tables, states, numbers.hyper, numbers.counters, programs.backward, "error", [True, True]]
    _wrong(name)(arguments)
    with nothing_changes(module), pytest.raises(ValueError, match=name):
        torch.ops.embforge.update_(*arguments)


def test_the_plain_operator_has_no_gradient() -> None:
    module = trained(optimizer=None)
    values, offsets, weights = draw()
    tables = [module.weight(table.name) for table in SPEC.tables]
    programs: Programs = module.programs[torch.int64]
    found = ops.lookup(values, offsets, weights, tables, [], programs.forward, "error")[0]
    with pytest.raises(RuntimeError, match="embforge::lookup has no gradient"):
        found.sum().backward()
