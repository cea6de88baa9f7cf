"""Everything together: a task is searched, its best raced against the default, and what the finals say is stored."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import optuna

from embforge.codegen.layout import layout_of
from embforge.codegen.params import Params
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.target import target_named
from embforge.codegen.tuned.document import params_of
from embforge.codegen.tuned.record import Gain, Record
from embforge.codegen.tuned.shape import file_name
from embforge.codegen.tuned.stores import read_file
from embforge.tuner.estimate.layout_advice import advice
from embforge.tuner.judge.bench_judge import BenchJudge
from embforge.tuner.judge.builder import Builder
from embforge.tuner.judge.judge import Cache
from embforge.tuner.judge.ledger import RACING, STARTING, WAITING, Ledger
from embforge.tuner.judge.messages import Setup
from embforge.tuner.judge.outcome import Timed
from embforge.tuner.search.space import settle
from embforge.tuner.store import Where, directory_of, save
from embforge.tuner.study.decision import DEFAULT, DUPLICATES, LEADER
from embforge.tuner.study.race import FINALISTS, Race, Racing, race
from embforge.tuner.study.sampler import sampler_for
from embforge.tuner.study.storage import default_url, masked, open_storage
from embforge.tuner.study.study import SearchEvent, search
from embforge.tuner.study.task import Task, builders, task_of
from embforge.tuner.study.trials import Trials
from embforge.tuner.workload.workload import Workload

FINALS_SHARE, FINALS_SECONDS = 0.25, 45.0
"""What the search leaves of the budget for the finals, the lesser of the two; without a budget they take so long."""
ADVICE_SHOWN = 3

Event = SearchEvent | Racing


@dataclass(frozen=True, eq=False)
class TuneResult:
    """What a run found and did. `report_of(result.study)` is the same and more, for people."""

    task: Task
    study: optuna.Study
    """All its trials, also those of earlier runs and of other processes."""
    storage: str
    """Its URL, without a password."""
    finished: int
    """Trials of this run."""
    best: Params
    """What ships: the default unless something is faster."""
    race: Race | None
    """None if this run held no finals."""
    records: tuple[Record, ...]
    paths: tuple[Path, ...]
    """Where the records were stored; empty if they were not."""
    unstored: str
    """Why a workload has no record, in a sentence; empty if all have one."""
    ledger: dict[str, float]
    """Wall seconds of this run by phase."""


def tune(
    spec: CollectionSpec,
    *,
    on: str = "cpu",
    train: str | None = None,
    workloads: Sequence[str | Workload] = (),
    budget: float | None = 180.0,
    trials: int | None = None,
    baseline: Mapping[str, Any] | None = None,
    seed: int = 0,
    storage: str | None = None,
    store: Where | None = "user",
    cache: Cache = "warm",
    id_dtype: str = "int64",
    progress: Callable[[Event], object] = lambda event: None,
) -> TuneResult:
    """Tunes a spec's forward, or with `train` (a rule's name) its backward, for about `budget` seconds.

    `trials`: at most so many in this run; 0 runs nothing and tells what the study holds. `budget` None: until the
    trials or the space end. `baseline`: fields that the search starts from instead of the default. `store` None keeps
    the result to the caller. An interrupted run goes on where it was when it is called again with the same arguments.

    `ToolchainError` without a compiler, or if `on` is "cuda" and there is no GPU; `StorageError`, `JudgeError`,
    `RaceError` as their modules say; errors of the arguments as `task_of` says.
    """
    ledger = Ledger()
    with ledger.phase(STARTING):
        task = task_of(
            spec,
            on=on,
            train=train,
            workloads=workloads,
            baseline=baseline,
            cache=cache,
            id_dtype=id_dtype,
        )
        name, about, url = task.name, task.about(), storage or default_url()  # what is wrong with the task comes first
        study = Trials(open_storage(url), name, task.space, about=about, uri_of=lambda params: task.plan(params).uri)
    before = {} if store is None else _stored_before(task, directory_of(store, spec.origin))
    finished, found = 0, None
    if trials != 0:
        finished, found = _run(task, study, before, ledger, budget, trials, seed, progress)
    notes = _notes(task, found)
    records, unstored = ((), "no finals were held") if found is None else _records(task, found, before, notes)
    paths = () if store is None else tuple(save(record, store, origin=spec.origin) for record in records)
    seconds = ledger.seconds
    if found is not None:
        study.tell_about(
            {
                "finals": finals_data(found),
                "finals_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "ledger": seconds,
                "notes": list(notes),
                "stored": [str(path) for path in paths],
            }
        )
    return TuneResult(
        task=task,
        study=study.study,
        storage=masked(url),
        finished=finished,
        best=task.default if found is None or not found.decision.ships else found.leader.params,
        race=found,
        records=records,
        paths=paths,
        unstored=unstored,
        ledger=seconds,
    )


def finals_data(found: Race) -> dict[str, Any]:
    """A race as plain data: the decision's fields, `leader` (params), `samples`, `others`, `failed` and `clocks`."""
    failed = {uri: {"kind": outcome.kind} | asdict(outcome) for uri, outcome in found.failed.items()}
    data = asdict(found.decision) | {
        "leader": asdict(found.leader.params),
        "samples": found.samples,
        "others": found.others,
        "failed": failed,
        "clocks": found.clocks,
    }
    plain: dict[str, Any] = json.loads(json.dumps(data))
    return plain


def _run(
    task: Task,
    study: Trials,
    before: Mapping[str, Record],
    ledger: Ledger,
    budget: float | None,
    most: int | None,
    seed: int,
    progress: Callable[[Event], object],
) -> tuple[int, Race]:
    """Searches, then races. How many trials were finished, and what the finals found."""
    end = float("inf") if budget is None else time.monotonic() - ledger.elapsed + budget
    reserve = 0.0 if budget is None else min(FINALS_SHARE * budget, FINALS_SECONDS)
    on_cpu, workers = target_named(task.target).is_native, builders(task)
    threads = task.hardware.sizes["cores"] if on_cpu else None
    setup = Setup(task.anchor.text, task.workloads, seed=seed, cache=task.cache, threads=threads)
    with closing(Builder(workers, pausable=on_cpu)) as builder, BenchJudge(setup, quiet=builder.paused) as judge:
        finished = search(
            study,
            sampler_for(task.space, task.seeds(), seed),
            task.plan,
            builder,
            judge,
            ahead=workers + 2,
            deadline=end - reserve,
            most=most,
            ledger=ledger,
            progress=progress,
        )
        builder.close()  # what nobody will measure must not be compiled beside the finals
        start, waited = time.monotonic(), judge.seconds[WAITING]
        found = race(
            judge,
            [task.plan(params) for params in _finalists(task, study, before)],
            task.plan(task.default),
            deadline=end if budget is not None else start + FINALS_SECONDS,
            seed=seed,
            cache=task.cache,
            progress=progress,
        )
        waited = judge.seconds[WAITING] - waited
        ledger.add(WAITING, waited)
        ledger.add(RACING, time.monotonic() - start - waited)
    return finished, found


def _notes(task: Task, found: Race | None) -> tuple[str, ...]:
    """What people should know beside the result."""
    retaken = 0 if found is None else found.retaken
    blocks = "1 block of rounds was" if retaken == 1 else f"{retaken} blocks of rounds were"
    busy = [f"finals: {blocks} taken again, because other processes used the CPUs"] if retaken else []
    layouts = advice(layout_of(task.spec, task.update), task.target)[:ADVICE_SHOWN]
    return (*busy, *(one.sentence for one in layouts))


def _stored_before(task: Task, directory: Path) -> dict[str, Record]:
    """What the store holds already for exactly this, by workload."""
    found = {workload: read_file(directory / file_name(task.key(workload))) for workload in task.workloads}
    return {workload: record for workload, record in found.items() if isinstance(record, Record)}


def _finalists(task: Task, study: Trials, before: Mapping[str, Record]) -> list[Params]:
    """The best of all trials, whoever ran them, the baseline, and what is to be replaced."""
    timed = [(o.score, n, params) for n, (params, o) in study.outcomes().items() if isinstance(o, Timed)]
    best = [params for _, _, params in sorted(timed, key=lambda t: t[:2]) if params != task.default][:FINALISTS]
    others = [task.baseline] if task.baseline else []
    others += [settle(task.space, params_of(record.key, record.params)) for record in before.values()]
    return list(dict.fromkeys([*best, *others]))


def _records(
    task: Task, found: Race, before: Mapping[str, Record], notes: tuple[str, ...]
) -> tuple[tuple[Record, ...], str]:
    """What the finals prove, a record a workload, and why some have none.

    Where the default stays beyond doubt, it is what is stored, so that nobody searches again in vain. A doubt stores
    nothing: what stood in the store was proven. A compromise over several workloads does not replace a better result.
    """
    decision, created, versions = found.decision, datetime.now(UTC).isoformat(timespec="seconds"), task.versions()
    if not decision.ships and not decision.settled:
        stays = "; what was stored before stays" if before else ""
        remedy = "tune again on a quieter machine" if decision.disturbed else "give them more time or a quieter machine"
        reason = f" ({decision.disturbed})" if decision.disturbed else ""
        return (), f"the finals ended undecided{reason}{stays}: {remedy}"
    best = found.leader.params if decision.ships else task.default
    if not decision.ships:
        notes = (f"{decision.why}; that candidate: {found.leader.params}", *notes)
    records, left = [], []
    for workload, times in found.samples.items():
        gain, floor = decision.gains[workload], decision.noise_floors[workload]
        better = workload in before and before[workload].gain.median > gain.median and len(task.workloads) > 1
        if decision.ships and (gain.median <= 1 + floor or better):
            left.append(workload)
            continue
        records.append(
            Record(
                key=task.key(workload),
                params=asdict(best),
                workload=workload,
                gain=gain if decision.ships else Gain(1.0, 1.0, 1.0),
                noise_floor=floor,
                samples={
                    "default": times[DEFAULT],
                    ("best" if decision.ships else "candidate"): times[LEADER],
                    "duplicate": times[DUPLICATES[LEADER]],
                },
                versions=versions,
                created=created,
                study=task.name,
                notes=notes,
            )
        )
    return tuple(records), f"not above the noise floor or the result before on {', '.join(left)}" if left else ""
