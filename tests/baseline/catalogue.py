"""All cases whose results have digests, and how to compute them on each backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from baseline import module_results, sharded_results, stage_results
from baseline.digests import Digests
from baseline.functional_results import functional_results

BACKENDS = ("reference", "cpu", "simt")
"""Backends that give the same bits, so a case has one digest for all of them."""


@dataclass(frozen=True)
class ResultCase:
    """A case: its name, and how its digests are computed on a backend."""

    name: str
    run: Callable[[str], Digests]
    quick: bool
    backends: tuple[str, ...] = BACKENDS
    quick_backends: tuple[str, ...] = BACKENDS
    """The backends on which `make test` runs the case, if it is quick."""

    def digests(self, backend: str) -> Digests:
        """Computes the digests; on the CPU with one thread and with two, which must agree."""
        with _threads(1):
            found = self.run(backend)
        if backend == "cpu":
            with _threads(2):
                again = self.run(backend)
            assert again == found, f"{self.name}: two threads give other results than one: {_differing(found, again)}"
        return found


def result_cases() -> list[ResultCase]:
    """All cases with results."""
    modules = [
        ResultCase(
            case.name,
            lambda backend, case=case: case.run(case, backend),  # type: ignore[misc]
            quick=case.name in module_results.QUICK,
            quick_backends=module_results.QUICK.get(case.name, ()),
        )
        for case in module_results.CASES
    ]
    stages = [
        ResultCase(
            f"stages in {name} formats",
            lambda backend, formats=formats: stage_results.stage_results(backend, formats),  # type: ignore[misc]
            quick=name == "usual",
        )
        for name, formats in stage_results.FORMATS.items()
    ]
    sharded = [
        ResultCase(
            case.name,
            lambda backend, case=case: sharded_results.sharded_results(case, backend),  # type: ignore[misc]
            quick=case.name == sharded_results.QUICK,
            quick_backends=("reference",),
        )
        for case in sharded_results.CASES
    ]
    functional = ResultCase("functional", lambda _: functional_results(), True, ("cpu",), ("cpu",))
    return [*modules, *stages, *sharded, functional]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _differing(one: Digests, other: Digests) -> str:
    return ", ".join(sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name)))
