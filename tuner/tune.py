"""Tunes a kernel: searches plans, races the best of them against the default, and stores what the finals decide."""

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
"""The search leaves this share of the budget for the finals, but at most this many seconds. Without a budget, the
finals take this many seconds."""
ADVICE_SHOWN = 3

Event = SearchEvent | Racing


@dataclass(frozen=True, eq=False)
class TuneResult:
    """What a run found and did. `report_of(result.study)` makes a report of it for people."""

    task: Task
    study: optuna.Study
    """The study with all its trials, also those of earlier runs and of other processes."""
    storage: str
    """The URL of the study's storage, without a password."""
    finished: int
    """How many trials this run finished."""
    best: Params
    """The params that the run decided for: the default's unless others are faster."""
    race: Race | None
    """None if this run held no finals."""
    records: tuple[Record, ...]
    paths: tuple[Path, ...]
    """Where the records were stored; empty if they were not."""
    unstored: str
    """Why workloads have no record; empty if all have one."""
    ledger: dict[str, float]
    """Wall-clock seconds of this run by phase."""


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

    `trials` limits the number of trials in this run; with 0 nothing runs, and the result describes the study as it is.
    With `budget` None the search ends when the trials or the points of the space are used up. `baseline` has fields of
    a plan from which the search starts instead of the default. With `store` None nothing is stored. A run that was
    interrupted continues if this is called again with the same arguments.

    `ToolchainError` without a compiler, or if `on` is "cuda" and there is no GPU; `StorageError`, `JudgeError` and
    `RaceError` as their modules describe, and errors of the arguments as `task_of` describes.
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
        name, about, url = task.name, task.about(), storage or default_url()  # errors of the task come first
        study = Trials(open_storage(url), name, task.space, about=about, uri_of=lambda params: task.plan(params).uri)
    before = {} if store is None else _stored_before(task, directory_of(store, spec.origin))
    finished, finals = 0, None
    if trials != 0:
        finished, finals = _run(task, study, before, ledger, budget, trials, seed, progress)
    notes = _notes(task, finals)
    records, unstored = ((), "no finals were held") if finals is None else _records(task, finals, before, notes)
    paths = () if store is None else tuple(save(record, store, origin=spec.origin) for record in records)
    seconds = ledger.seconds
    if finals is not None:
        study.tell_about(
            {
                "finals": finals_data(finals),
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
        best=task.default if finals is None or not finals.decision.ships else finals.leader.params,
        race=finals,
        records=records,
        paths=paths,
        unstored=unstored,
        ledger=seconds,
    )


def finals_data(finals: Race) -> dict[str, Any]:
    """A race as plain data: the decision's fields, `leader` (params), `samples`, `others`, `failed` and `clocks`."""
    failed = {uri: {"kind": outcome.kind} | asdict(outcome) for uri, outcome in finals.failed.items()}
    data = asdict(finals.decision) | {
        "leader": asdict(finals.leader.params),
        "samples": finals.samples,
        "others": finals.others,
        "failed": failed,
        "clocks": finals.clocks,
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
    """Searches, then races the best. Returns how many trials were finished, and the finals."""
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
        builder.close()  # plans that will not be measured must not be compiled during the finals
        start, waited = time.monotonic(), judge.seconds[WAITING]
        finals = race(
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
    return finished, finals


def _notes(task: Task, finals: Race | None) -> tuple[str, ...]:
    """Remarks for people: whether rounds were taken again, and advice on the layout of tables."""
    retaken = 0 if finals is None else finals.retaken
    blocks = "1 block of rounds was" if retaken == 1 else f"{retaken} blocks of rounds were"
    busy = [f"finals: {blocks} taken again, because other processes used the CPUs"] if retaken else []
    layout_advice = advice(layout_of(task.spec, task.update), task.target)[:ADVICE_SHOWN]
    return (*busy, *(advice_on_table.sentence for advice_on_table in layout_advice))


def _stored_before(task: Task, directory: Path) -> dict[str, Record]:
    """By workload: the records that the store already holds for this task."""
    stored = {workload: read_file(directory / file_name(task.key(workload))) for workload in task.workloads}
    return {workload: record for workload, record in stored.items() if isinstance(record, Record)}


def _finalists(task: Task, study: Trials, before: Mapping[str, Record]) -> list[Params]:
    """The candidates for the finals: the best of all trials of any process, the baseline, and the stored params that
    the result would replace."""
    timed = [(o.score, n, params) for n, (params, o) in study.outcomes().items() if isinstance(o, Timed)]
    best = [params for _, _, params in sorted(timed, key=lambda t: t[:2]) if params != task.default][:FINALISTS]
    others = [task.baseline] if task.baseline else []
    others += [settle(task.space, params_of(record.key, record.params)) for record in before.values()]
    return list(dict.fromkeys([*best, *others]))


def _records(
    task: Task, finals: Race, before: Mapping[str, Record], notes: tuple[str, ...]
) -> tuple[tuple[Record, ...], str]:
    """One record for each workload for which the finals decided, and why the other workloads have none.

    If the finals decide for the default, the default is stored, so that the search is not repeated in vain. If they are
    undecided, nothing is stored, because an earlier record rests on a decision. A plan that was tuned for several
    workloads at once does not replace a record with a larger gain.
    """
    decision, created, versions = finals.decision, datetime.now(UTC).isoformat(timespec="seconds"), task.versions()
    if not decision.ships and not decision.settled:
        stays = "; what was stored before stays" if before else ""
        remedy = "tune again on a quieter machine" if decision.disturbed else "give them more time or a quieter machine"
        reason = f" ({decision.disturbed})" if decision.disturbed else ""
        return (), f"the finals ended undecided{reason}{stays}: {remedy}"
    best = finals.leader.params if decision.ships else task.default
    if not decision.ships:
        notes = (f"{decision.why}; that candidate: {finals.leader.params}", *notes)
    records, left_out = [], []
    for workload, times in finals.samples.items():
        gain, floor = decision.gains[workload], decision.noise_floors[workload]
        better = workload in before and before[workload].gain.median > gain.median and len(task.workloads) > 1
        if decision.ships and (gain.median <= 1 + floor or better):
            left_out.append(workload)
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
    if not left_out:
        return tuple(records), ""
    return tuple(records), f"the gain is not above the noise floor or the stored result's on {', '.join(left_out)}"
