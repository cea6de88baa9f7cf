"""Writes the README's number and chart from the last full run of lookups: `python -m benchmarks.headline`."""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.output import DOCS, RESULTS, ROOT, replace_between
from benchmarks.plot import INK, MUTED, STYLE

LATEST = RESULTS / "latest.json"
README, CHART = ROOT / "README.md", DOCS / "speed.svg"
BEGIN, END = "<!-- headline: written by make bench -->", "<!-- end of headline -->"
ROWS = {
    "large": "batches, tables far\npast the cache",
    "cache": "batches, tables\nin the cache",
    "overhead": "one sample",
}
FASTER, SLOWER = "#2b8a6e", "#e4572e"
OVER_LINES = {"facecolor": "white", "edgecolor": "none", "pad": 1}
PEERS = "the faster of torch.nn.EmbeddingBag and FBGEMM"


def write_headline(record: dict[str, Any], readme: Path = README, chart: Path = CHART) -> None:
    """Writes the number into the README, between markers, and draws the chart. `ValueError` without the markers."""
    replace_between(readme, BEGIN, END, headline(record))
    draw(chart, record)


def headline(record: dict[str, Any]) -> str:
    """The README's sentence: the geometric mean, and the conditions under which it was measured."""
    machine, speedups = record["machine"], batches(record)
    text = (
        f"**{geometric_mean(speedups):.1f} times as fast** as {PEERS} at lookups on a CPU: the geometric mean of "
        f"{len(speedups)} workloads, {min(speedups):.1f} to {max(speedups):.1f} times, in one run on "
        f"{machine['threads']} threads ({machine['cpu']})."
    )
    return textwrap.fill(text, 80, break_on_hyphens=False) + "\n"


def batches(record: dict[str, Any]) -> list[float]:
    """The speedups over the faster peer. Workloads of one sample are left out, because they measure call overhead."""
    return [entry["speedup"] for entry in record["workloads"] if entry["group"] != "overhead"]


def draw(path: Path, record: dict[str, Any]) -> None:
    """Draws the chart: one dot per workload and one row per group, on a logarithmic scale of speedups."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    machine, mean = record["machine"], geometric_mean(batches(record))
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 3.1), layout="constrained")
        axes: Any = figure.subplots()
        axes.set_xscale("log", base=2)
        axes.axvline(1, color=INK, linewidth=1)
        axes.axvline(mean, color=FASTER, linewidth=1, linestyle=(0, (4, 3)))
        for row, group in enumerate(ROWS):
            _draw_row(axes, row, [entry for entry in record["workloads"] if entry["group"] == group])
        axes.set_yticks(range(len(ROWS)), ROWS.values())
        axes.set_ylim(len(ROWS) - 0.4, -0.6)
        axes.set_xlim(0.85, 10)
        axes.set_xticks([1, 2, 4, 8], ["1×", "2×", "4×", "8×"])
        axes.minorticks_off()
        for x, text, color in ((1, "as fast", INK), (mean, f"{mean:.1f}×, the batches' geometric mean", FASTER)):
            axes.text(x, -0.63, text, ha="center", va="bottom", color=color, fontsize=8.5)
        figure.suptitle(f"Lookups on a CPU: times as fast as {PEERS}", x=0.01, ha="left", fontsize=11)
        axes.set_xlabel(
            f"A dot is a workload. {machine['threads']} threads ({machine['cpu']}), torch "
            f"{machine['torch'].partition('+')[0]}, FBGEMM {machine['fbgemm']}, {machine['date'][:10]}, one run.",
            fontsize=8,
        )
        figure.savefig(path, metadata={"Date": None})


def _draw_row(axes: Any, row: int, entries: list[dict[str, Any]]) -> None:
    """Draws the workloads of one row. Dots of nearly equal speedups are stacked, and the slowest and the fastest have
    their names below them."""
    entries = sorted(entries, key=lambda entry: entry["speedup"])
    stacked: dict[int, int] = {}
    for entry in entries:
        speed = entry["speedup"]
        column = round(math.log2(speed) * 14)
        stacked[column] = stacked.get(column, -1) + 1
        color = FASTER if speed >= 1 else SLOWER
        axes.scatter(speed, row - 0.16 * stacked[column], s=38, color=color, edgecolor="white", linewidth=0.8, zorder=3)
    for entry in (entries[0], entries[-1]):
        text = f"{entry['name'].removesuffix(', cached')}: {entry['speedup']:.2g}×"
        axes.annotate(text, (entry["speedup"], row), xytext=(0, -8), textcoords="offset points", ha="center", va="top",
                      fontsize=7.5, color=MUTED, bbox=OVER_LINES)  # fmt: skip


def main() -> None:
    """Writes the number and the chart from the results that are checked in."""
    write_headline(json.loads(LATEST.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
