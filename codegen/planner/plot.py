"""Predictions drawn as one self-contained SVG, with one column per world size."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embforge.codegen.errors import PlanError, ToolchainError
from embforge.codegen.planner.cost import PHASES
from embforge.codegen.planner.simulate import Simulation
from embforge.codegen.reading.numbers import BYTES, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#1463c4", "#0d7a4a", "#7fb2ee", "#f0a04b", "#8a4fc7", "#cc2f3b")
INK, MUTED, LINE = "#17202b", "#5d6b7c", "#dfe4ea"
STYLE: Any = {
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.axisbelow": True,
    "axes.edgecolor": "none",
    "axes.labelcolor": MUTED,
    "grid.color": LINE,
    "figure.constrained_layout.h_pad": 0.12,
    "figure.constrained_layout.w_pad": 0.12,
    "svg.fonttype": "none",  # letters stay letters, which search and small files like
    "svg.hashsalt": "embforge",
}
ABOVE = "Predicted by embforge's cost model from the assumptions below; nothing here was run."
UNITS = tuple((1000.0**power, name) for power, name in enumerate(BYTES))[::-1]


@dataclass(frozen=True)
class Panel:
    """Numbers of every world size, in parts that are stacked."""

    title: str
    unit: str
    parts: dict[str, list[float]]
    """A number per world size."""
    limit: tuple[float, str] | None = None
    """What must not be passed, and how it is called."""
    stacked: bool = True
    """If not, the parts are dots next to each other."""


def draw(path: Path, simulations: Sequence[Simulation], title: str, notes: Sequence[str]) -> None:
    """Writes the picture. `ToolchainError` without matplotlib, `PlanError` for a format that it does not write."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ToolchainError(
            f"a plot needs matplotlib, which cannot be imported ({error}); "
            "pip install 'embforge[plots]' (from a clone: pip install '.[plots]')"
        ) from error
    kind = path.suffix.removeprefix(".") or "svg"
    panels = (_time(simulations), _memory(simulations), _bytes(simulations), _imbalance(simulations))
    lines = [line for note in notes for line in textwrap.wrap(note, 165, subsequent_indent="    ")]
    with rc_context(STYLE):
        figure = Figure(figsize=(10, 7 + 0.15 * len(lines)), layout="constrained")
        formats = figure.canvas.get_supported_filetypes()
        if kind not in formats:
            raise PlanError(f"plot {path}: format {kind!r} is not known; allowed: {', '.join(sorted(formats))}")
        figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.text(0.01, 1 - 0.45 / figure.get_figheight(), ABOVE, color=MUTED, va="top")
        for axes, panel in zip(figure.subplots(2, 2).flat, panels, strict=True):
            _draw_panel(axes, panel, [f"{one.world_size:,}" for one in simulations])
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7.5, color=MUTED)
        figure.savefig(path, format=kind, metadata={"Date": None} if kind == "svg" else None)


def _time(simulations: Sequence[Simulation]) -> Panel:
    parts = {name: [1e3 * one.phases[name].high for one in simulations] for name in PHASES}
    return Panel("Step, by phase (its slowest rank)", "ms", parts)


def _memory(simulations: Sequence[Simulation]) -> Panel:
    parts = {
        "rows and states": [one.memory.high for one in simulations],
        "buffers": [one.total.high - one.memory.high for one in simulations],
    }
    return _in_bytes("Memory of the fullest rank", parts, max(one.limit for one in simulations))


def _bytes(simulations: Sequence[Simulation]) -> Panel:
    parts = {
        "inside its node": [sum(spread.high for spread in one.node_bytes.values()) for one in simulations],
        "by its rail": [sum(spread.high for spread in one.rail_bytes.values()) for one in simulations],
        "all-reduce": [one.replica_bytes for one in simulations],
    }
    return _in_bytes("Bytes that a rank sends per step, at most", parts)


def _imbalance(simulations: Sequence[Simulation]) -> Panel:
    parts = {
        "lookup and update": [one.work.imbalance for one in simulations],
        "memory": [one.memory.imbalance for one in simulations],
    }
    return Panel("Imbalance: the highest rank over the mean", "×", parts, stacked=False)


def _in_bytes(title: str, parts: dict[str, list[float]], limit: float | None = None) -> Panel:
    """A panel whose unit suits its highest column."""
    highest = max(map(sum, zip(*parts.values(), strict=True)))
    scale, unit = next((pair for pair in UNITS if highest >= pair[0]), UNITS[-1])
    scaled = {name: [value / scale for value in values] for name, values in parts.items()}
    return Panel(title, unit, scaled, None if limit is None else (limit / scale, f"{size(limit)} may be used"))


def _draw_panel(axes: Axes, panel: Panel, labels: Sequence[str]) -> None:
    places = range(len(labels))
    sums = [0.0] * len(labels)
    for number, (name, values) in enumerate(panel.parts.items()):
        colour, label = COLOURS[number], name if any(values) else None
        if panel.stacked:
            bars = axes.bar(places, values, 0.6, sums, color=colour, label=label)
            sums = [below + value for below, value in zip(sums, values, strict=True)]
        else:
            beside = [place + 0.2 * (number - (len(panel.parts) - 1) / 2) for place in places]
            axes.plot(beside, values, "o", color=colour, label=label, clip_on=False)
    if panel.stacked:
        axes.bar_label(bars, [f"{value:.3g}" for value in sums], fontsize=8, padding=1)
        axes.set_ylim(0, 1.08 * max(sums) or 1)
    else:
        axes.set_ylim(bottom=1)
    if panel.limit is not None:
        _draw_limit(axes, *panel.limit, max(sums))
    axes.set_xticks(places, labels)
    axes.set_xlim(-0.6, max(len(labels), 4) - 0.4)
    axes.tick_params(length=0, pad=6)
    axes.grid(axis="y")
    axes.set_xlabel("ranks")
    axes.set_ylabel(panel.unit, rotation=0, ha="right")
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", pad=20)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(panel.parts), frameon=False, fontsize=8,
                borderaxespad=0, handlelength=1, handletextpad=0.4, columnspacing=1.2, labelcolor=MUTED)  # fmt: skip


def _draw_limit(axes: Axes, limit: float, words: str, highest: float) -> None:
    """A line that columns must not pass, or an arrow to it where it would make them small."""
    if limit < 4 * highest:
        axes.set_ylim(0, 1.08 * max(limit, highest))
        axes.axhline(limit, color=COLOURS[5], linestyle="--", linewidth=1)
        axes.annotate(words, (1, limit), xycoords=("axes fraction", "data"), xytext=(0, 3),
                      textcoords="offset points", ha="right", color=COLOURS[5])  # fmt: skip
    else:
        axes.annotate(f"↑ {words}", (1, 1), xycoords="axes fraction", xytext=(0, 4), textcoords="offset points",
                      ha="right", color=COLOURS[5])  # fmt: skip
