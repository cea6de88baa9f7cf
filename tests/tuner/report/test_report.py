"""The report: its numbers are those of the study, it loads nothing, and a real browser reports no error."""

from __future__ import annotations

import html
import math
import re
import shutil
import subprocess
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from embforge.codegen.params import CpuParams, CudaParams
from embforge.codegen.tuned.record import Gain, Hardware
from embforge.tuner.judge.outcome import KINDS
from embforge.tuner.report.charts import Axis, axis_of, forest, history
from embforge.tuner.report.data import Comparison, Finals, Report, Trial, finals_of
from embforge.tuner.report.page import differing, page, show_seconds, write_report
from embforge.tuner.search.space import Removed
from embforge.tuner.study.decision import Decision, decide

STYLE = Path(__file__).parents[3] / "templates" / "report" / "style.css"
WHY = {"wrong-answer": "output[3, 17] is 0.25 and must be <0.5> & no less", "launch-failed": "SIGSEGV in forward_cpu"}


def sample(count: int = 80, params: Any = CpuParams, target: str = "cpu", *, ships: bool = True) -> Report:
    """A study with every outcome in it, and scores that a formula gives."""
    choices = {item.name: item.metadata["choices"] for item in fields(params)}
    default = asdict(params())
    trials = []
    for number in range(count):
        values = {
            name: options[(number * (3 + place)) % len(options)]
            for place, (name, options) in enumerate(choices.items())
        }
        kind = KINDS[number // 7 % 6] if number % 7 == 3 else "timed"
        score = math.exp(0.3 * math.sin(number)) if kind == "timed" else None
        figures = {"registers": 32 + number, "spill_bytes": 0, "shared_bytes": 9216, "occupancy": 0.75}
        build = {"binary_bytes": 20480, "resources": [figures] if target == "cuda" else []}
        trials.append(Trial(number, values, kind, score, WHY.get(kind, ""), {"verifying": 1.5}, build))
    gain = Gain(1.234, 1.221, 1.251) if ships else Gain(1.002, 0.991, 1.009)
    compared = (
        Comparison("uniform,batch=2048", 1.2e-3, 9.7e-4, gain),
        Comparison("zipf:1.05,len=geo:20,batch=2048", 8.2e-4, 7.1e-4, Gain(1.155, 1.12, 1.19)),
    )
    gains, floors = {c.workload: c.gain for c in compared}, dict.fromkeys((c.workload for c in compared), 0.01)
    decision = Decision(ships, "it is faster", True, gain, gains, 0.0082, floors, 3e-6, {}, None, 40)
    finals = Finals(decision, compared)
    return Report(
        title="dlrm: forward on cpu",
        study="dlrm-1a2b3c4d",
        created="2026-01-02 03:04 UTC",
        target=target,
        hardware=Hardware(
            "cpu", "Some Processor", {"vendor": "Acme", "simd": "avx2"}, {"cores": 2, "l2_bytes": 1 << 20}
        ),
        clocks={"cpu": 2450},
        workloads=tuple(c.workload for c in compared),
        cache="warm",
        versions={"embforge": "0.1.0"},
        spec_toml='name = "dlrm"\n',
        command="embforge tune dlrm --budget 3m",
        anchor="the default",
        fields=choices,
        size=math.prod(map(len, choices.values())),
        points=count + 5,
        removed=(Removed("no level", "without prefetching its level does nothing", 48),),
        docs={item.name: item.metadata["doc"] for item in fields(params)},
        default=default,
        best=trials[-1].params if trials else None,
        leader=trials[-1].params if trials else None,
        trials=tuple(trials),
        finals=finals if trials else None,
        importances={name: 1 / len(choices) for name in choices} if count >= 30 else {},
        ledger={"starting": 2.0, "compiling": 30.0, "timing": 60.0, "bookkeeping": 8.0} if trials else {},
        notes=("A row of 40 bytes is not whole cache lines.",),
    )


def numbers(text: str, attribute: str) -> list[float]:
    return [float(value) for value in re.findall(rf'\b{attribute}="(-?[\d.]+)"', text)]


def section(text: str, name: str) -> str:
    found = re.search(rf'<section[^>]*id="{name}">(.*?)</section>', text, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_every_trial_is_drawn_at_its_score() -> None:
    report = sample()
    drawing = section(page(report), "history")
    dots = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="[\d.]+"><title>trial (\d+): ([^\n<]*)', drawing)
    assert sorted(int(number) for _, _, number, _ in dots) == list(range(80))
    timed = {int(number): (float(y), float(said)) for _, y, number, said in dots if report.trials[int(number)].score}
    assert len(timed) == sum(trial.kind == "timed" for trial in report.trials)
    scores = {trial.number: trial.score for trial in report.trials}
    for number, (_, said) in timed.items():
        assert said == pytest.approx(scores[number], abs=6e-4)
    order = sorted(timed, key=lambda number: -scores[number])  # type: ignore[operator]
    heights = [timed[number][0] for number in order]
    assert heights == sorted(heights)  # slower is higher up
    across = [float(x) for x, _, number, _ in sorted(dots, key=lambda dot: int(dot[2]))]
    assert across == sorted(across)


def test_best_so_far_never_rises_and_ends_at_the_best() -> None:
    drawn = history(
        [(0, "timed", 1.0), (1, "timed", 1.2), (2, "timed-out", None), (3, "timed", 0.8), (4, "timed", 0.9)]
    )
    by_number = {dot.number: dot for dot in drawn.dots}
    assert set(by_number) == {0, 1, 3, 4} and [lane.kind for lane in drawn.lanes] == ["timed-out"]
    first, best = by_number[0], by_number[3]
    assert drawn.best == f"M{first.x} {first.y}H{best.x}V{best.y}H{drawn.right}"


def test_axis_is_logarithmic_shows_everything_and_names_round_values() -> None:
    axis = axis_of([0.5, 2.0], 300, 0)
    assert axis.at(1) == pytest.approx(150, abs=0.2) and 0 < axis.at(2) < axis.at(0.5) < 300
    for low, high in ((0.99, 1.02), (0.7, 1.3), (0.2, 30), (0.999, 1.0001)):
        ticks = Axis(low, high, 0, 100).ticks()
        assert "1×" in {tick.label for tick in ticks} and 2 <= len(ticks) <= 9
        assert all(0 <= tick.at <= 100 for tick in ticks)
        for tick in ticks:
            assert Axis(low, high, 0, 100).at(float(tick.label[:-1])) == pytest.approx(tick.at, abs=0.2)


def test_gains_and_intervals_are_the_finals() -> None:
    report = sample()
    text = section(page(report), "finals")
    assert report.finals is not None
    for compared in report.finals.comparisons:
        gain = compared.gain
        assert f"<b>{gain.median:.3f}×</b>" in text and f"{gain.low:.3f} to {gain.high:.3f}" in text
        assert show_seconds(compared.default_seconds) in text and show_seconds(compared.best_seconds) in text
    drawn = forest({"w": (1.2, 1.1, 1.3)}, 0.05)
    (interval,) = drawn.intervals
    assert drawn.one < drawn.band[1] < interval.low < interval.x < interval.high
    assert drawn.band[0] < drawn.one
    assert "1.23× the default's speed (95 %: 1.22 to 1.25)" in html.unescape(page(report))
    assert "The default stays" in page(sample(ships=False))


def test_finals_are_decided_by_their_samples() -> None:
    default = tuple(1e-3 * (1 + 0.01 * math.sin(n)) for n in range(24))
    times = {
        "default": default,
        "leader": tuple(0.8 * t for t in default),
        "duplicate": tuple(0.801 * t for t in default),
        "default's duplicate": tuple(1.001 * t for t in default),
    }
    finals = finals_of({"uniform": times})
    (compared,) = finals.comparisons
    assert finals.decision == decide({"uniform": times}) and finals.decision.ships
    assert compared.default_seconds == pytest.approx(median(default))
    assert compared.gain.median == pytest.approx(1.25) == compared.default_seconds / compared.best_seconds


def test_slices_count_every_timed_trial_once_a_field() -> None:
    report = sample()
    text = section(page(report), "slices")
    timed = [trial for trial in report.trials if trial.score is not None]
    for name, options in report.fields.items():
        figure = text[text.index(f"<code>{name}</code>") :].split("</figure>")[0]
        assert sum(numbers(figure, "data-count")) == len(timed)
        assert figure.count("h0") == len(timed)
        for option in options:
            scores = [trial.score for trial in timed if trial.params[name] == option and trial.score is not None]
            if scores:
                said = f"{name} = {option}: {len(scores)} timed, best {min(scores):.3f}, median {median(scores):.3f}"
                assert said in figure


def test_outcomes_are_counted_and_failures_named_as_text_not_as_html() -> None:
    report = sample()
    text = section(page(report), "outcomes")
    counts = dict(re.findall(r'data-kind="([\w-]+)" data-count="(\d+)"', text))
    assert {kind: int(count) for kind, count in counts.items()} == {
        kind: sum(trial.kind == kind for trial in report.trials) for kind in KINDS
    }
    assert int(counts["wrong-answer"]) > 0 and html.escape(WHY["wrong-answer"]) in text
    assert WHY["wrong-answer"] not in text


def test_cuda_trials_have_resources_and_cpu_pages_say_that_there_are_none() -> None:
    cuda, cpu = section(page(sample(40, CudaParams, "cuda")), "trials"), section(page(sample()), "trials")
    fastest = min((t for t in sample(40, CudaParams, "cuda").trials if t.score), key=lambda t: t.score or 0)
    assert f">{fastest.build['resources'][0]['registers']}</td>" in cuda and "9,216 B" in cuda and "75%" in cuda
    assert "seconds that a trial took instead" in cpu and "20.5 kB" in cpu and "1.50 s" in cpu


def test_too_few_trials_for_importances_are_reported() -> None:
    assert "from 30 on" in section(page(sample(20)), "importances")
    shares = numbers(section(page(sample()), "importances"), "data-share")
    assert len(shares) == len(fields(CpuParams)) and sum(shares) == pytest.approx(1)


def test_page_is_self_contained_small_and_whole(tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    write_report(out, sample(900, CudaParams, "cuda"))
    text = out.read_text(encoding="utf-8")
    assert out.stat().st_size < 300_000 and list(tmp_path.iterdir()) == [out]
    assert not re.search(r"(?:src|href)=\"(?!data:)", text) and "http://" not in text and "https://" not in text
    assert "@import" not in text and "url(" not in text


def test_values_are_shown_with_three_digits() -> None:
    assert [show_seconds(s) for s in (2.5, 1.234e-3, 45.67e-6, 812.3e-6, 3e-8)] == [
        "2.50 s",
        "1.23 ms",
        "45.7 µs",
        "812 µs",
        "30 ns",
    ]
    assert differing({"a": (4, 2), "b": 1}, {"a": (4, 4), "b": 1}) == "a=4x2"
    assert differing({"b": 1}, {"b": 1}) == "the default"


def luminance(colour: str) -> float:
    digits = colour * 2 if len(colour) == 3 else colour
    channels = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_is_readable_in_both_themes(theme: int) -> None:
    colours = dict(
        re.findall(r"--([\w-]+): #([0-9a-f]{3,6})", STYLE.read_text().split(":root {")[theme + 1].split("}")[0])
    )
    for name in ("ink", "muted", "accent", "good", *KINDS):
        for ground in ("card", "page") if name != "good" else ("card",):
            light, dark = sorted((luminance(colours[name]), luminance(colours[ground])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{name} on {ground}"


LONG = "trace:recordings/2026-01/evening-traffic-of-the-home-page.npz,len=skew:4:400:0.04,batch=2048"


def test_no_workload_is_cut_and_every_mark_is_explained() -> None:
    report = sample()
    assert report.finals is not None
    compared = (replace(report.finals.comparisons[0], workload=LONG),)
    text = page(replace(report, finals=replace(report.finals, comparisons=compared)))
    assert LONG in section(text, "finals").split("<svg")[0] and "…" not in text
    for name, marks in {
        "finals": ("median of the paired rounds", "95 % interval", "as fast as the default", "noise floor: a gain"),
        "history": ("that was timed", "the fastest so far", "1×: the time of the default", "a trial that failed"),
        "slices": (
            "a trial",
            "median of the choice",
            "its fastest trial",
            "the time of the default",
            "what is used now",
        ),
    }.items():
        key = section(text, name).split('<ul class="key">')[1].split("</ul>")[0]
        assert all(mark in key for mark in marks), name


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def browse(path: Path, scratch: Path, size: str, *flags: str) -> tuple[str, str]:
    """The document after its script ran, and what the browser's console said."""
    quiet = "--disable-background-networking --disable-component-update --disable-sync --disable-quic --no-first-run"
    command = [CHROMIUM or "", "--headless", "--no-sandbox", "--disable-gpu", *quiet.split(), *flags]
    command += [f"--user-data-dir={scratch}", f"--window-size={size}", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=600, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize(
    ("report", "size"),
    [(sample(), "1100,900"), (sample(40, CudaParams, "cuda", ships=False), "500,900"), (sample(0), "1100,900")],
    ids=["wide", "narrow", "empty"],
)
def test_a_browser_reports_no_error(report: Report, size: str, tmp_path: Path) -> None:
    write_report(tmp_path / "out.html", report)
    document, said = browse(tmp_path / "out.html", tmp_path / "profile", size)
    assert said == ""
    assert re.search(r"<html[^>]* data-checked=\"well\"", document), document[:300]
    assert "data-error" not in document.split(">", 2)[1]
    assert document.count("<section") == 9


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_browser_check_can_fail(tmp_path: Path) -> None:
    report = sample(8)
    far = replace(report.trials[0], score=1.0)
    text = (
        page(replace(report, trials=(far, *report.trials[1:])))
        .replace('cx="', 'cx="9', 1)
        .replace("<script>", "<script>nowhere();</script><script>")
    )
    (tmp_path / "out.html").write_text(text)
    document, said = browse(tmp_path / "out.html", tmp_path / "profile", "1100,900")
    assert "nowhere is not defined" in said and "drawn outside" in document.split(">", 2)[1]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_browser_check_finds_labels_that_overlap(tmp_path: Path) -> None:
    text = page(sample(8))
    (tmp_path / "out.html").write_text(re.sub(r'(<text class="tick[^>]*) x="[\d.]+"', r'\1 x="150"', text))
    document, _ = browse(tmp_path / "out.html", tmp_path / "profile", "1100,900")
    assert "overlaps" in document.split(">", 2)[1]
