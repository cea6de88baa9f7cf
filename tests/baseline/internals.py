"""All that the baseline takes from inside the package or from other tests. If a module moves, only this file changes.

Everything else here uses public names: `import embforge as ef`.
"""

from __future__ import annotations

import platform
import sqlite3
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

from conformance import stage_cases  # noqa: F401
from support.replay_judge import NoBuilder, ReplayJudge
from support.sharded.ranks import run_ranks  # noqa: F401

import embforge as ef
from benchmarks.oracle_cases import Oracle, read_oracle, write_oracle
from embforge.cli.gen import emit
from embforge.codegen import cache
from embforge.codegen.build import build, source_of
from embforge.codegen.machine import find_compiler
from embforge.codegen.manifest import read_manifest  # noqa: F401
from embforge.codegen.params import CpuBackwardParams, params_type
from embforge.codegen.plan import Plan
from embforge.codegen.plans import training_plans, update_named
from embforge.codegen.stages import StagePlan
from embforge.codegen.target import target_named
from embforge.codegen.targets import toolchain_of
from embforge.codegen.targets.cuda.nvrtc import nvrtc_fingerprint
from embforge.codegen.tuned.choose import choose
from embforge.codegen.tuned.record import Gain, Hardware, Key, Record, Traffic
from embforge.codegen.tuned.shape import shape_of
from embforge.launch.grouped import RulePart, grouped_text, rule_parts
from embforge.launch.kernels import Program
from embforge.operators.exported import ExportedLookup
from embforge.trace.file_format import read_trace  # noqa: F401
from embforge.tuner.judge.outcome import WrongAnswer
from embforge.tuner.search.space import Space
from embforge.tuner.store import save as save_tuned  # noqa: F401
from embforge.tuner.study import claims
from embforge.tuner.study.sampler import sampler_for
from embforge.tuner.study.storage import open_storage
from embforge.tuner.study.study import search
from embforge.tuner.study.trials import Trials
from embforge.tuner.workload.workload import make_batch, parse

PlanOrStages = Any
"""A `Plan` or a `StagePlan`."""


# ---- kernels ---------------------------------------------------------------------------------------------------------


def kernel_plans(
    spec: ef.CollectionSpec,
    target: str,
    arch: str,
    optimizer: Any = None,
    *,
    id_dtype: str = "int64",
    params: Any = None,
    accumulate: bool = False,
) -> dict[str, Plan]:
    """All plans of training a spec, by what they are for, each kernel once."""
    chosen = params or params_type(target, "forward")()
    update = None if optimizer is None else optimizer.update
    plans = training_plans(spec, target, arch, id_dtype, chosen, None, update, accumulate)
    return {name: plan for name, plan in plans.items() if name != "train" or plan != plans["forward"]}


def stages_plan(target: str, arch: str, formats: Sequence[str]) -> StagePlan:
    """The library of stages for some number formats."""
    return StagePlan(target, arch, *formats)


def kernel_binary(plan: PlanOrStages) -> bytes:
    """The plan's cubin or shared library, from the cache or compiled."""
    return build(plan).binary.read_bytes()


def source_text(plan: PlanOrStages) -> str:
    return source_of(plan)


def compile_text(plan: PlanOrStages, text: str) -> bytes:
    """The binary of a changed source, compiled in the way of the plan's own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"kernel{target_named(plan.target).source_suffix}"
        path.write_text(text, encoding="utf-8")
        return toolchain_of(plan.target).compile(plan, path)


def host_compiler() -> str:
    """The C++ compiler, its linker and the processor that they are for."""
    compiler = find_compiler()
    said = subprocess.run([*compiler.command, "-Wl,--version"], capture_output=True, text=True, check=False)
    linker = next(iter(said.stdout.splitlines()), "unknown linker")
    return f"{compiler.version}, {linker}, {platform.machine()}"


def cuda_compiler() -> str:
    """The version of NVRTC and of the headers it takes."""
    facts = nvrtc_fingerprint("any")
    return f"{facts['compiler']}, headers {facts['headers']}"


def program_text(plan: Plan) -> str:
    """The plan as a traced graph of the process that made it holds it."""
    return Program(plan).text


def plan_of_program(text: str) -> Plan:
    return Program.from_text(text).plan


def grouped_program_text(plans: Sequence[Plan]) -> str:
    """The text of one update by several rules, each of which trains one table."""
    return grouped_text([RulePart(program_text(plan), (place,), 3 * place, 3) for place, plan in enumerate(plans)])


def parts_of_grouped(text: str) -> list[tuple[str, list[int], int, int]]:
    """The URI, tables and numbers of every part."""
    parts = rule_parts(text)
    return [(plan_of_program(p.program).uri, list(p.tables), p.first_number, p.numbers) for p in parts]


def exported_text(spec: ef.CollectionSpec, target: str, params: Any, batch_size: int | None) -> str:
    """A lookup as an exported graph holds it."""
    return ExportedLookup(target, "int64", spec, params, batch_size).text


def exported_resolve_text(spec: ef.CollectionSpec, target: str) -> str:
    """The step before it that turns ids into rows."""
    return ExportedLookup(target, "int64", spec, op="resolve").text


def exported_lookup(text: str) -> ExportedLookup:
    return ExportedLookup.from_text(text)


def rule_in_file(path: Path) -> Any:
    """The update of a rule's JSON file, as `--train RULE.json` reads it."""
    return update_named(str(path))


def cache_entry_is_accepted(directory: Path, key: str) -> bool:
    return cache.load(directory, key) is not None


def compiled_entry(plan: Plan) -> Path:
    """The directory of the plan's entry in the cache."""
    return build(plan).binary.parent


def gen(plans: Sequence[Plan], directory: Path) -> None:
    """As `embforge gen --sources-only`."""
    emit(plans, directory, sources_only=True)


# ---- tuned results and studies ---------------------------------------------------------------------------------------

HARDWARE = Hardware(
    kind="cpu",
    name="a processor of the baseline",
    identity={"vendor": "baseline", "simd": "avx2"},
    sizes={"cores": 4, "l2_bytes": 1 << 20, "l3_bytes": 1 << 24},
)
TRAFFIC = Traffic(2048, 3, 1.05)


def tuned_record(spec: ef.CollectionSpec, op: str, rule: str | None, params: dict[str, Any]) -> Record:
    """A result as `embforge tune` stores it."""
    return Record(
        key=Key(op, "cpu", rule, shape_of(spec), HARDWARE, TRAFFIC, "int64", "warm"),
        params=params,
        workload="zipf:1.05,batch=2048",
        gain=Gain(1.23, 1.2, 1.26),
        noise_floor=0.008,
        samples={"default": (1.23e-4, 1.25e-4), "best": (1e-4, 1.01e-4), "duplicate": (1e-4, 1e-4)},
        versions={"embforge": "0.1.0", "torch": "2.13.0"},
        created="2026-01-31T12:00:00+00:00",
        study="forward-cpu-avx2-baseline-0123456789",
        notes=("a note",),
    )


def chosen(spec: ef.CollectionSpec, op: str, rule: str | None, hardware: Hardware = HARDWARE) -> tuple[Any, str]:
    """The plan fields that the stores give for that hardware, and why."""
    choice = choose(op, "cpu", spec, hardware, rule=rule, traffic=TRAFFIC)
    return choice.params, choice.why


def near_and_far_hardware() -> tuple[Hardware, Hardware]:
    """Hardware like HARDWARE with other sizes, and of another kind."""
    more = {**HARDWARE.sizes, "cores": 8}
    return replace(HARDWARE, sizes=more), replace(HARDWARE, identity={**HARDWARE.identity, "simd": "avx512"})


BackwardParams = CpuBackwardParams
STUDY = "baseline"


def study_space() -> Space:
    """A space of eight points: two fields with choices, all others with their defaults."""
    choices = {"prefetch_bytes": (0, 1024, 4096, 16384), "tile_vectors": (4, 8)}
    every = {field.name: choices.get(field.name, (field.default,)) for field in fields(ef.CpuParams)}
    default = ef.CpuParams()
    points = tuple(
        ef.CpuParams(**{**vars(default), "prefetch_bytes": ahead, "tile_vectors": tile})
        for ahead in choices["prefetch_bytes"]
        for tile in choices["tile_vectors"]
    )
    return Space("forward", "cpu", "avx2", every, len(points), points, ())


def study_plan(spec: ef.CollectionSpec, params: Any) -> Plan:
    return Plan("forward", "cpu", "avx2", "int64", spec, params)


def run_study(url: str, spec: ef.CollectionSpec, *, most: int | None = None) -> int:
    """Continues the study in that storage with fixed times, and returns how many trials it finished. The trials
    do not name this machine."""
    space = study_space()
    times = {
        params: WrongAnswer("given") if number == 3 else {"uniform,batch=64": 1e-4 * (1 + number / 8)}
        for number, params in enumerate(space.points)
    }
    trials = Trials(
        open_storage(url), STUDY, space, about={"spec": spec.to_toml()}, uri_of=lambda p: study_plan(spec, p).uri
    )
    judge = ReplayJudge(times, space.default, seed=0)
    sampler = sampler_for(space, seed=0)
    with mock.patch.object(claims, "_host", return_value="baseline"):
        return search(trials, sampler, lambda p: study_plan(spec, p), NoBuilder(), judge, ahead=2, most=most)


def database_bytes(path: Path) -> bytes:
    """A SQLite database as one file without free pages, while others have it open."""
    with tempfile.TemporaryDirectory() as folder, closing(sqlite3.connect(path)) as database:
        copy = Path(folder) / "copy"
        database.execute("VACUUM INTO ?", (str(copy),))
        return copy.read_bytes()


def study_outcomes(url: str) -> dict[str, dict[str, Any]]:
    """By the number of a trial: its point and its outcome, as plain data."""
    trials = Trials(open_storage(url), STUDY, study_space())
    return {
        str(number): {"params": dict(vars(params)), "kind": outcome.kind, "score": getattr(outcome, "score", None)}
        for number, (params, outcome) in sorted(trials.outcomes().items())
    }


@dataclass(frozen=True)
class _OracleAt:
    """The part of an oracle that reading and writing its file needs."""

    table_file: Path
    train: str | None = None


def write_oracle_file(path: Path) -> None:
    """Writes a space of which every point was measured, in the format of benchmarks/oracles."""
    points = study_space().points
    ratios = {params: 0.75 + number / 16 for number, params in enumerate(points)}
    facts = {"hardware": asdict(HARDWARE), "versions": {"embforge": "0.1.0"}, "rounds": 40}
    write_oracle(_OracleAt(path), Oracle(ratios, points[0], facts))  # type: ignore[arg-type]


def oracle_in_file(path: Path) -> dict[str, Any]:
    """What the file says, as plain data."""
    oracle = read_oracle(_OracleAt(path))  # type: ignore[arg-type]
    ratios = [[vars(params), ratio] for params, ratio in oracle.ratios.items()]
    return {"best": vars(oracle.best), "ratios": ratios, "facts": oracle.facts}


def workload_batch(spec: ef.CollectionSpec, text: str, seed: int) -> Any:
    """A batch of a workload, as the tuner draws it."""
    return make_batch(spec, parse(text), seed)
