"""Three tuning tasks with spaces so small that every point can be measured, and ten runs of the tuner on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embforge.codegen.errors import TunedError
from embforge.codegen.params import Params, params_from
from embforge.codegen.reading.documents import read_json
from embforge.codegen.spec import CollectionSpec
from embforge.tuner.study.task import Task, task_of

FOLDER = Path(__file__).with_name("oracles")


@dataclass(frozen=True)
class Case:
    """A tuning task: a spec, a workload, and a rule if the backward is tuned."""

    name: str
    workload: str
    train: str | None = None

    @property
    def spec_file(self) -> Path:
        return FOLDER / f"{self.name}.toml"

    @property
    def table_file(self) -> Path:
        return FOLDER / f"{self.name}.json"

    def task(self, baseline: Mapping[str, Any] | None = None) -> Task:
        """The tuner's task for this case on this machine."""
        spec = CollectionSpec.from_toml(self.spec_file)
        return task_of(spec, train=self.train, workloads=[self.workload], baseline=baseline)


CASES = {
    case.name: case
    for case in (
        Case("tokens", "zipf:1.05,len=fixed:1,batch=8192"),
        Case("bags", "zipf:1.05,len=geo:20,batch=512"),
        Case("updates", "zipf:1.05,len=geo:10,batch=64", train="sgd"),
    )
}


@dataclass(frozen=True)
class Try:
    """A run of `embforge tune` on a case. `baseline` has the fields of a poor start; if empty, the default is used."""

    case: str
    baseline: Mapping[str, Any]
    seed: int

    def __str__(self) -> str:
        start = " ".join(f"{name}={value}" for name, value in self.baseline.items()) or "the default"
        return f"{self.case} from {start}"


TRIES = tuple(
    Try(case, baseline, seed)
    for seed, (case, baseline) in enumerate(
        (
            ("tokens", {}),
            ("tokens", {"threads": 1, "prefetch_bytes": 0}),
            ("tokens", {"stores": "streaming", "prefetch_level": 1, "prefetch_bytes": 1024, "grain_bytes": 1048576}),
            ("bags", {}),
            ("bags", {"threads": 1, "prefetch_bytes": 0, "stores": "streaming"}),
            ("bags", {"grain_bytes": 1048576, "prefetch_bytes": 32768, "rows_unrolled": 4}),
            ("bags", {"prefetch_level": 1, "prefetch_bytes": 1024, "grain_bytes": 16384}),
            ("updates", {}),
            ("updates", {"threads": 1, "prefetch_bytes": 0}),
            ("updates", {"grain_bytes": 1048576, "prefetch_level": 1, "prefetch_bytes": 1024}),
        )
    )
)


@dataclass(frozen=True)
class Oracle:
    """The measurements of every point of a case's space."""

    ratios: Mapping[Params, float]
    """Each point's time divided by the default's."""
    best: Params
    """The fastest point in the finals."""
    facts: Mapping[str, Any]
    """The hardware, the versions, and how it was measured."""


def read_oracle(case: Case) -> Oracle:
    """Reads the table of a case that is checked in. `TunedError` names a file that cannot be read."""
    op = "forward" if case.train is None else "backward"
    try:
        data = read_json(case.table_file)
        names = data["fields"]

        def params(values: list[Any]) -> Params:
            return params_from("cpu", dict(zip(names, values, strict=True)), op)

        ratios = {params(values): ratio for *values, ratio in data["points"]}
        return Oracle(ratios, params(data["best"]), data["facts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TunedError(
            f"{case.table_file}: not a table of measured points ({type(error).__name__}: {error}); measure it again by "
            "`python -m benchmarks.oracle measure`"
        ) from error


def write_oracle(case: Case, oracle: Oracle) -> None:
    """Writes the table of a case: one line per point, the fastest first."""
    names = list(vars(oracle.best))
    rows = sorted(oracle.ratios.items(), key=lambda item: item[1])
    lines = ",\n  ".join(json.dumps([*vars(params).values(), round(ratio, 4)]) for params, ratio in rows)
    head = {"fields": names, "best": list(vars(oracle.best).values()), "facts": oracle.facts}
    text = json.dumps(head, indent=1)[:-2] + f',\n "points": [\n  {lines}\n ]\n}}\n'
    case.table_file.write_text(text)
