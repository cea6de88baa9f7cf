"""The cases by which a candidate is verified before it is timed: difficult and real batches, with the right answers.

An answer is right if it has the bits of the reference's; one NaN is as good as another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from embforge.codegen.layout import CollectionLayout
from embforge.codegen.plan import Plan
from embforge.codegen.plans import keeps_for_backward
from embforge.inputs import Batch
from embforge.launch.gradients import Gradients
from embforge.launch.reference.backward import put_rows
from embforge.number_formats import as_indexable
from embforge.result_elements import divisor_location, pooled_location, sequence_location, winner_location
from embforge.tuner.judge.fixtures import TableFixture, drawn_fixture, gradients_for
from embforge.verify.cases import Case, draw_batch
from embforge.verify.probes import FEW_FOR_ALL, FEW_FOR_ONE, FEW_SPECIAL, shrunk
from embforge.verify.training_run import CASES, bits_of

TRAINED_ROWS = 200
"""The most rows of the small tables that are trained, because all rows are compared after every call."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FORWARD_RESULTS = ("pooled", "sequence", "divisors", "winners")

Answer = dict[str, Tensor]
"""Results and everything that a call changed, by names for messages."""


@dataclass(frozen=True, eq=False)
class VerificationCase:
    """A call, and the reference's answer to it."""

    label: str
    op: str
    fixture: TableFixture
    batch: Batch
    gradients: Gradients | None
    bounds_check: str
    rows: tuple[Tensor, ...]
    """For each table, the rows that this call or an earlier one may change; none for a forward."""
    before: Answer
    """The content of these rows before the call."""
    expected: Answer


def cases_of(plan: Plan, real: TableFixture, batches: Mapping[str, Batch], seed: int) -> list[VerificationCase]:
    """The cases for kernels of the plan's op: small tables and difficult batches first, then one batch per workload.

    `batches` are those of the tables `real`, by the workload's name.
    """
    cases = [*_difficult_cases(plan, real.device, seed)]
    for name, batch in batches.items():
        cases.append(_verification_case(f"a batch of {name}", plan, real, batch, "error", _touched(plan, real, batch)))
    return cases


def answer_of(kernel: Any, case: VerificationCase) -> Answer:
    """The kernel's answer; numbers that it does not write are NaN. Exceptions of the kernel are raised."""
    with _no_leftovers():
        return _called(kernel, case)


def difference(layout: CollectionLayout, case: VerificationCase, got: Answer) -> str | None:
    """The first difference from the right answer: its place, the expected and the actual number; None if equal."""
    for name, want in case.expected.items():
        have = got[name]
        if want.shape != have.shape:
            return f"{name}: expected shape {tuple(want.shape)}, got {tuple(have.shape)}"
        if torch.equal(_whole_numbers(want), _whole_numbers(have)):
            continue
        wrong = (bits_of(want) != bits_of(have)).any(dim=1)
        if bool(wrong.any()):
            element = int(wrong.int().argmax())
            came = f"expected {want.flatten()[element].item()!r}, got {have.flatten()[element].item()!r}"
            return f"{_place(layout, case, name, element)}: {came}"
    return None


def _difficult_cases(plan: Plan, device: torch.device, seed: int) -> Iterator[VerificationCase]:
    if plan.op.startswith("forward"):
        small = shrunk(plan.spec)
        for special, cases in ((False, FEW_FOR_ALL + FEW_FOR_ONE), (True, FEW_SPECIAL)):
            fixture = drawn_fixture(small, None, device, seed, special)
            for number, case in enumerate(cases):
                label = f"{case}, special numbers" if special else str(case)
                batch = _batch(fixture, case, plan.id_dtype, seed + number)
                yield _verification_case(label, plan, fixture, batch, "zero" if case.bad_ids else "error", ())
        return
    fixture = drawn_fixture(shrunk(plan.spec, TRAINED_ROWS), plan.update, device, seed, special=False)
    everything = tuple(torch.arange(table.shape[0], device=device) for table in fixture.tables)
    # Each case continues from the state after the reference's answer to the previous one.
    for number, case in enumerate(CASES):
        batch = _batch(fixture, case, plan.id_dtype, seed + number)
        yield _verification_case(str(case), plan, fixture, batch, "zero", everything)


def _verification_case(
    label: str, plan: Plan, fixture: TableFixture, batch: Batch, bounds_check: str, rows: tuple[Tensor, ...]
) -> VerificationCase:
    gradients = None
    if not plan.op.startswith("forward"):
        keeps = keeps_for_backward(fixture.spec)
        gradients = gradients_for(fixture, batch, fixture.reference("forward_train", plan.id_dtype) if keeps else None)
    case = VerificationCase(label, plan.op, fixture, batch, gradients, bounds_check, rows, {}, {})
    case = replace(case, before=_changed(case))
    return replace(case, expected=_called(fixture.reference(plan.op, plan.id_dtype), case))


def _called(kernel: Any, case: VerificationCase) -> Answer:
    _put_back(case)
    results = kernel(*case.fixture.arguments(case.op, case.batch, case.gradients, case.bounds_check))
    if case.fixture.device.type == "cuda":
        torch.cuda.synchronize()
    kernel.check()
    return _answer(case, results)


@contextmanager
def _no_leftovers() -> Iterator[None]:
    """Makes torch fill all new memory, which might otherwise still contain the previous kernel's right answer."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _batch(fixture: TableFixture, case: Case, id_dtype: str, seed: int) -> Batch:
    drawn = draw_batch(fixture.spec, replace(case, id_dtype=id_dtype), seed, fixture.device)
    return Batch(drawn.values, drawn.offsets, drawn.weights, case.batch, None)


def _touched(plan: Plan, fixture: TableFixture, batch: Batch) -> tuple[Tensor, ...]:
    """For each table, the rows that the batch's ids name."""
    if plan.op.startswith("forward"):
        return ()
    ids: list[list[Tensor]] = [[] for _ in fixture.tables]
    for feature in plan.layout.features:
        begin, end = (int(batch.offsets[(feature.index + more) * batch.batch]) for more in (0, 1))
        ids[feature.table_index].append(batch.values[begin:end].long())
    return tuple(torch.cat(parts).unique() for parts in ids)


def _watched(case: VerificationCase) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Names, live tensors, and the rows of them that are compared."""
    for holder, rows in zip(case.fixture.holders, case.rows, strict=False):  # a forward watches nothing
        name = holder.layout.table.name
        yield f"table {name!r}", holder.weight, rows
        for state, view in holder.states().items():
            yield f"{state} of table {name!r}", view, rows


def _changed(case: VerificationCase) -> Answer:
    """The present content of the watched rows and the counters."""
    contents = {name: _take(live, rows) for name, live, rows in _watched(case)}
    return contents | {"counters": case.fixture.counters.clone()} if contents else contents


def _put_back(case: VerificationCase) -> None:
    if not case.before:
        return
    for name, live, rows in _watched(case):
        put_rows(live, rows, case.before[name])
    case.fixture.counters.copy_(case.before["counters"])


def _take(live: Tensor, rows: Tensor) -> Tensor:
    return as_indexable(live)[rows].view(live.dtype)


def _whole_numbers(tensor: Tensor) -> Tensor:
    """The bits of a tensor, in a form that can be compared fast."""
    return tensor.contiguous().view(BITS[tensor.dtype.itemsize])


def _answer(case: VerificationCase, results: Any) -> Answer:
    if case.op == "backward":
        return {"verdict": results} | _changed(case)
    if case.op == "reduce":
        names = [holder.layout.table.name for holder in case.fixture.holders]
        rows = {f"rows of table {name!r}": of_table for name, (of_table, _) in zip(names, results, strict=True)}
        return rows | {f"gradients of table {name!r}": g for name, (_, g) in zip(names, results, strict=True)}
    if case.op == "weight_gradient":
        return {"gradient of weights": results}
    return {
        name: part for name, part in zip(FORWARD_RESULTS, results, strict=False) if part is not None and part.numel()
    }


def _place(layout: CollectionLayout, case: VerificationCase, name: str, element: int) -> str:
    places = {"pooled": pooled_location, "divisors": divisor_location, "winners": winner_location}
    if name in places:
        return f"{name}: {places[name](layout, element)}"
    if name == "sequence":
        return f"{name}: {sequence_location(layout, case.batch.offsets, case.batch.batch, element)}"
    for watched, live, rows in _watched(case):
        if name == watched:
            row, column = divmod(element, live.shape[1] if live.dim() > 1 else 1)
            return f"{name}, row {int(rows[row])}, column {column}"
    return f"{name}, element {element}"
