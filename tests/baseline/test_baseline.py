"""Results and machine code have the digests of `digests.json`: quick cases in `make test`, all cases in `make soak`."""

from __future__ import annotations

import pytest

from baseline.catalogue import ResultCase, result_cases
from baseline.code_cases import COMPILERS, CodeCase, code_cases
from baseline.digests import Digests
from baseline.recorded import FILE, differences, message, read_recorded

OTHER_COMPILER = "the baseline's machine code is of another compiler"
RECORDED = read_recorded()


def result_parameters(quick: bool) -> list[object]:
    chosen = [case for case in result_cases() if case.quick or not quick]
    pairs = [(case, backend) for case in chosen for backend in (case.quick_backends if quick else case.backends)]
    return [pytest.param(case, backend, id=f"{case.name} on {backend}") for case, backend in pairs]


def code_parameters(quick: bool) -> list[object]:
    return [pytest.param(case, id=case.name) for case in code_cases() if case.quick or not quick]


def compare(name: str, recorded: Digests, found: Digests) -> None:
    lines = differences(recorded, found)
    assert not lines, message(name, lines)


def check_code(case: CodeCase) -> None:
    if case.target == "cuda":
        pytest.importorskip("cuda.core")
    if COMPILERS[case.target]() != RECORDED.compilers[case.target]:
        pytest.skip(OTHER_COMPILER)
    compare(case.name, RECORDED.code[case.name], case.digests())


@pytest.mark.parametrize(("case", "backend"), result_parameters(quick=True))
def test_results_of_quick_cases_have_their_digests(case: ResultCase, backend: str) -> None:
    compare(case.name, RECORDED.results[case.name], case.digests(backend))


@pytest.mark.parametrize("case", code_parameters(quick=True))
def test_machine_code_of_quick_cases_has_its_digests(case: CodeCase) -> None:
    check_code(case)


@pytest.mark.soak
@pytest.mark.parametrize(("case", "backend"), result_parameters(quick=False))
def test_results_of_all_cases_have_their_digests(case: ResultCase, backend: str) -> None:
    compare(case.name, RECORDED.results[case.name], case.digests(backend))


@pytest.mark.soak
@pytest.mark.parametrize("case", code_parameters(quick=False))
def test_machine_code_of_all_cases_has_its_digests(case: CodeCase) -> None:
    check_code(case)


def test_the_file_holds_exactly_the_cases() -> None:
    assert RECORDED.results.keys() == {case.name for case in result_cases()}
    assert RECORDED.code.keys() == {case.name for case in code_cases()}
    assert FILE.stat().st_size < 200_000
    assert FILE.read_text(encoding="utf-8") == RECORDED.to_json()


def test_a_difference_is_listed_with_its_name() -> None:
    recorded = {"a": "1", "b": "2", "gone": "3"}
    assert differences(recorded, recorded) == []
    lines = differences(recorded, {"a": "1", "b": "9", "new": "4"})
    assert lines == ["b: recorded 2, now 9", "gone: recorded 3, now missing", "new: recorded not recorded, now 4"]
    many = message("case", [str(number) for number in range(20)])
    assert many.splitlines()[0] == "case: not as in digests.json" and many.endswith("... and 12 more")
