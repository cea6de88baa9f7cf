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
from embforge.tuner.judge.fixtures import Arena, drawn_arena, gradients_for
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
class Question:
    """A call, and the reference's answer to it."""

    label: str
    op: str
    arena: Arena
    batch: Batch
    gradients: Gradients | None
    bounds_check: str
    rows: tuple[Tensor, ...]
    """For each table, the rows that this call or an earlier one may change; none for a forward."""
    before: Answer
    """The content of these rows before the call."""
    expected: Answer


def questions_of(plan: Plan, real: Arena, batches: Mapping[str, Batch], seed: int) -> list[Question]:
    """The cases for kernels of the plan's op: small tables and difficult batches first, then one batch per workload.

    `batches` are those of the tables `real`, by the workload's name.
    """
    asked = [*_odd_questions(plan, real.device, seed)]
    for name, batch in batches.items():
        asked.append(_question(f"a batch of {name}", plan, real, batch, "error", _touched(plan, real, batch)))
    return asked


def ask(kernel: Any, question: Question) -> Answer:
    """The kernel's answer; numbers that it does not write are NaN. Exceptions of the kernel are raised."""
    with _no_leftovers():
        return _called(kernel, question)


def difference(layout: CollectionLayout, question: Question, got: Answer) -> str | None:
    """The first difference from the right answer: its place, the expected and the actual number; None if equal."""
    for name, want in question.expected.items():
        have = got[name]
        if want.shape != have.shape:
            return f"{name}: expected shape {tuple(want.shape)}, got {tuple(have.shape)}"
        if torch.equal(_whole_numbers(want), _whole_numbers(have)):
            continue
        wrong = (bits_of(want) != bits_of(have)).any(dim=1)
        if bool(wrong.any()):
            element = int(wrong.int().argmax())
            came = f"expected {want.flatten()[element].item()!r}, got {have.flatten()[element].item()!r}"
            return f"{_place(layout, question, name, element)}: {came}"
    return None


def _odd_questions(plan: Plan, device: torch.device, seed: int) -> Iterator[Question]:
    if plan.op.startswith("forward"):
        small = shrunk(plan.spec)
        for special, cases in ((False, FEW_FOR_ALL + FEW_FOR_ONE), (True, FEW_SPECIAL)):
            arena = drawn_arena(small, None, device, seed, special)
            for number, case in enumerate(cases):
                label = f"{case}, special numbers" if special else str(case)
                batch = _batch(arena, case, plan.id_dtype, seed + number)
                yield _question(label, plan, arena, batch, "zero" if case.bad_ids else "error", ())
        return
    arena = drawn_arena(shrunk(plan.spec, TRAINED_ROWS), plan.update, device, seed, special=False)
    everything = tuple(torch.arange(table.shape[0], device=device) for table in arena.tables)
    for number, case in enumerate(
        CASES
    ):  # each continues from the state after the reference's answer to the previous one
        batch = _batch(arena, case, plan.id_dtype, seed + number)
        yield _question(str(case), plan, arena, batch, "zero", everything)


def _question(
    label: str, plan: Plan, arena: Arena, batch: Batch, bounds_check: str, rows: tuple[Tensor, ...]
) -> Question:
    gradients = None
    if not plan.op.startswith("forward"):
        keeps = keeps_for_backward(arena.spec)
        gradients = gradients_for(arena, batch, arena.reference("forward_train", plan.id_dtype) if keeps else None)
    question = Question(label, plan.op, arena, batch, gradients, bounds_check, rows, {}, {})
    question = replace(question, before=_changed(question))
    return replace(question, expected=_called(arena.reference(plan.op, plan.id_dtype), question))


def _called(kernel: Any, question: Question) -> Answer:
    _put_back(question)
    found = kernel(*question.arena.arguments(question.op, question.batch, question.gradients, question.bounds_check))
    if question.arena.device.type == "cuda":
        torch.cuda.synchronize()
    kernel.check()
    return _answer(question, found)


@contextmanager
def _no_leftovers() -> Iterator[None]:
    """Makes torch fill all new memory, which might otherwise still contain the previous kernel's right answer."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _batch(arena: Arena, case: Case, id_dtype: str, seed: int) -> Batch:
    drawn = draw_batch(arena.spec, replace(case, id_dtype=id_dtype), seed, arena.device)
    return Batch(drawn.values, drawn.offsets, drawn.weights, case.batch, None)


def _touched(plan: Plan, arena: Arena, batch: Batch) -> tuple[Tensor, ...]:
    """For each table, the rows that the batch's ids name."""
    if plan.op.startswith("forward"):
        return ()
    ids: list[list[Tensor]] = [[] for _ in arena.tables]
    for placed in plan.layout.features:
        begin, end = (int(batch.offsets[(placed.index + more) * batch.batch]) for more in (0, 1))
        ids[placed.table_index].append(batch.values[begin:end].long())
    return tuple(torch.cat(parts).unique() for parts in ids)


def _watched(question: Question) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Names, live tensors, and the rows of them that are compared."""
    for holder, rows in zip(question.arena.holders, question.rows, strict=False):  # a forward watches nothing
        name = holder.layout.table.name
        yield f"table {name!r}", holder.weight, rows
        for state, view in holder.states().items():
            yield f"{state} of table {name!r}", view, rows


def _changed(question: Question) -> Answer:
    """The present content of the watched rows and the counters."""
    found = {name: _take(live, rows) for name, live, rows in _watched(question)}
    return found | {"counters": question.arena.counters.clone()} if found else found


def _put_back(question: Question) -> None:
    if not question.before:
        return
    for name, live, rows in _watched(question):
        put_rows(live, rows, question.before[name])
    question.arena.counters.copy_(question.before["counters"])


def _take(live: Tensor, rows: Tensor) -> Tensor:
    return as_indexable(live)[rows].view(live.dtype)


def _whole_numbers(tensor: Tensor) -> Tensor:
    """The bits of a tensor, in a form that can be compared fast."""
    return tensor.contiguous().view(BITS[tensor.dtype.itemsize])


def _answer(question: Question, found: Any) -> Answer:
    if question.op == "backward":
        return {"verdict": found} | _changed(question)
    if question.op == "reduce":
        names = [holder.layout.table.name for holder in question.arena.holders]
        rows = {f"rows of table {name!r}": of_table for name, (of_table, _) in zip(names, found, strict=True)}
        return rows | {f"gradients of table {name!r}": g for name, (_, g) in zip(names, found, strict=True)}
    if question.op == "weight_gradient":
        return {"gradient of weights": found}
    return {name: part for name, part in zip(FORWARD_RESULTS, found, strict=False) if part is not None and part.numel()}


def _place(layout: CollectionLayout, question: Question, name: str, element: int) -> str:
    places = {"pooled": pooled_location, "divisors": divisor_location, "winners": winner_location}
    if name in places:
        return f"{name}: {places[name](layout, element)}"
    if name == "sequence":
        return f"{name}: {sequence_location(layout, question.batch.offsets, question.batch.batch, element)}"
    for watched, live, rows in _watched(question):
        if name == watched:
            row, column = divmod(element, live.shape[1] if live.dim() > 1 else 1)
            return f"{name}, row {int(rows[row])}, column {column}"
    return f"{name}, element {element}"
