"""The benchmark's plot: for each workload, the speedup over each peer and the share of the machine's limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.suites import FORWARD, Suite
from benchmarks.workloads import BenchWorkload
from embforge.tuner.bench.report import BenchReport

INK, MUTED, GRID = "#1f2933", "#66727f", "#e4e8ec"
COLORS = {"torch": "#e4572e", "fbgemm": "#4c6ef5", "limit": "#2b8a6e"}
LABELS = {"torch": "torch.nn.EmbeddingBag", "fbgemm": "FBGEMM CPU TBE"}
GROUP_TITLES = {"large": "tables far past the cache", "cache": "tables in the cache", "overhead": "one sample"}
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "axes.axisbelow": True,
    "axes.edgecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "x",
    "grid.color": GRID,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "svg.hashsalt": "embforge",
}


def draw(
    path: Path, workloads: Sequence[BenchWorkload], reports: Sequence[BenchReport], suite: Suite = FORWARD
) -> None:
    """Writes the plot to a file. It needs matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    heights = _heights(workloads)
    with rc_context(STYLE):
        figure = Figure(figsize=(10, 1.3 + 0.27 * max(heights)), layout="constrained")
        speed, share = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        _draw_speed(speed, heights, reports, suite)
        _draw_share(share, heights, reports, suite)
        speed.set_yticks(heights, [w.name for w in workloads])
        speed.set_ylim(max(heights) + 0.8, -1.0)
        for group, height in _titles(workloads, heights):
            speed.text(-0.02, height, GROUP_TITLES[group], transform=speed.get_yaxis_transform(),
                       ha="right", va="center", color=MUTED, fontsize=8, style="italic")  # fmt: skip
        figure.savefig(path, metadata={"Date": None})


def _draw_speed(axes: Any, heights: list[float], reports: Sequence[BenchReport], suite: Suite) -> None:
    """Draws one dot per peer with its 95 % interval, on a logarithmic scale of how much faster we are."""
    for name, color in COLORS.items():
        points = [(r.ratios[name], y) for r, y in zip(reports, heights, strict=True) if name in r.ratios]
        if not points:
            continue
        medians, at = [p.median for p, _ in points], [y for _, y in points]
        axes.hlines(at, [p.low for p, _ in points], [p.high for p, _ in points], color=color, linewidth=2, alpha=0.5)
        axes.scatter(medians, at, s=34, color=color, label=LABELS[name], zorder=3, edgecolor="white", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.axvline(1, color=INK, linewidth=1)
    asked = suite.targets.over_peers
    axes.axvline(asked, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    _name_line(axes, asked, f"target {asked:g}×")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.9), high * 1.1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.set_title("How many times as fast embforge is as …", loc="left", fontsize=11, color=INK, pad=22)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=2, frameon=False, fontsize=9,
                handletextpad=0.2, borderpad=0)  # fmt: skip


def _draw_share(axes: Any, heights: list[float], reports: Sequence[BenchReport], suite: Suite) -> None:
    """Draws one bar per workload: its share of the speed at which rows can be read (in training, changed) at all."""
    shares = [(r.limit_share.median, y) for r, y in zip(reports, heights, strict=True) if r.limit_share]
    axes.barh([y for _, y in shares], [s for s, _ in shares], height=0.55, color=COLORS["limit"], alpha=0.85)
    for value, y in shares:
        inside = value > 0.15
        style = {"x": value - 0.02, "ha": "right", "color": "white"} if inside else {"x": value + 0.02, "color": MUTED}
        axes.text(y=y, s=f"{value:.0%}", va="center", fontsize=8, **style)
    axes.axvline(1, color=INK, linewidth=1)
    asked = suite.targets.of_limit_large
    axes.axvline(asked, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    _name_line(axes, asked, f"target {asked:.0%}", left=True)
    axes.set_xlim(0, max([1.04, *(s + 0.04 for s, _ in shares)]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_title(f"Share of the {suite.limit}", loc="left", fontsize=11, color=INK, pad=22)


def _name_line(axes: Any, x: float, text: str, *, left: bool = False) -> None:
    """Writes the name of a dashed line in small print at its top."""
    axes.annotate(text, (x, 1.0), xycoords=("data", "axes fraction"), xytext=(-2 if left else 2, -7),
                  textcoords="offset points", ha="right" if left else "left", fontsize=7.5, color=MUTED)  # fmt: skip


def _heights(workloads: Sequence[BenchWorkload]) -> list[float]:
    """The height of each workload, counted in rows from the top, with room for a title where a group begins."""
    heights, height = [], -1.0
    for index, workload in enumerate(workloads):
        begins = index == 0 or workloads[index - 1].group != workload.group
        height += 2.0 if begins else 1.0
        heights.append(height)
    return heights


def _titles(workloads: Sequence[BenchWorkload], heights: list[float]) -> list[tuple[str, float]]:
    """Each group with the height of its title."""
    first: dict[str, float] = {}
    for workload, height in zip(workloads, heights, strict=True):
        first.setdefault(workload.group, height - 1.0)
    return list(first.items())
