"""Predictions as a picture: one SVG that loads nothing, a column a world size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from embforge.codegen.planner.cost import PHASES
from embforge.codegen.planner.simulate import Simulation

WIDTH = 980
PANEL_WIDTH, PANEL_HEIGHT = 400, 200
COLUMNS, ROWS = (70, 560), (120, 410)
"""Left and upper edges of the panels."""
COLOURS = ("#1463c4", "#0d7a4a", "#7fb2ee", "#f0a04b", "#8a4fc7", "#cc2f3b")
INK, MUTED, LINE = "#17202b", "#5d6b7c", "#dfe4ea"
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


@dataclass(frozen=True)
class Panel:
    """Columns of stacked parts."""

    title: str
    unit: str
    stacks: tuple[tuple[float, ...], ...]
    """Of each world size, its parts from the bottom up."""
    parts: tuple[str, ...]
    limit: float | None = None
    """A line that must not be passed."""
    limit_name: str = ""
    dots: bool = False
    """Parts stand beside each other as dots, not upon each other; the axis begins at 1."""


def draw(simulations: Sequence[Simulation], title: str, notes: Sequence[str]) -> str:
    """The picture's text."""
    panels = (_time(simulations), _memory(simulations), _bytes(simulations), _imbalance(simulations))
    labels = [f"{one.world_size:,}" for one in simulations]
    lines, bottom = _wrapped(notes), ROWS[1] + PANEL_HEIGHT + 56
    height = bottom + 14 * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" '
        f'font-size="12" fill="{INK}" role="img" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        _text(24, 34, title, size=18, weight=600),
        _text(
            24, 56, "Predicted by embforge's cost model from the assumptions below; nothing here was run.", MUTED, 13
        ),
    ]
    for number, panel in enumerate(panels):
        parts.append(_panel(panel, labels, COLUMNS[number % 2], ROWS[number // 2]))
    parts += [_text(24, bottom + 14 * row, line, MUTED, 10.5) for row, line in enumerate(lines)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _time(simulations: Sequence[Simulation]) -> Panel:
    stacks = tuple(tuple(1e3 * one.phases[name].high for name in PHASES) for one in simulations)
    return Panel("Step, by phase (its slowest rank)", "ms", stacks, PHASES)


def _memory(simulations: Sequence[Simulation]) -> Panel:
    limit = max(one.limit for one in simulations)
    scale, unit = _unit(max(limit, *(one.memory.high for one in simulations)))
    stacks = tuple((one.memory.high / scale, (one.total.high - one.memory.high) / scale) for one in simulations)
    return Panel(
        "Memory of the fullest rank", unit, stacks, ("rows and states", "buffers"), limit / scale, "may be used"
    )


def _bytes(simulations: Sequence[Simulation]) -> Panel:
    found = [
        (
            sum(spread.high for spread in one.node_bytes.values()),
            sum(spread.high for spread in one.rail_bytes.values()),
            one.replica_bytes,
        )
        for one in simulations
    ]
    scale, unit = _unit(max(sum(parts) for parts in found))
    stacks = tuple(tuple(part / scale for part in parts) for parts in found)
    return Panel(
        "Bytes that a rank sends a step, at most", unit, stacks, ("inside its node", "by its rail", "all-reduce")
    )


def _imbalance(simulations: Sequence[Simulation]) -> Panel:
    stacks = tuple((one.work.imbalance, one.memory.imbalance) for one in simulations)
    return Panel("Imbalance: the highest rank over the mean", "×", stacks, ("lookup and update", "memory"), dots=True)


def _panel(panel: Panel, labels: Sequence[str], left: float, top: float) -> str:
    bottom, right = top + PANEL_HEIGHT, left + PANEL_WIDTH
    highest = max([max(stack) if panel.dots else sum(stack) for stack in panel.stacks])
    if panel.limit is not None and panel.limit < 4 * highest:
        highest = max(highest, panel.limit)
    low = 1.0 if panel.dots else 0.0
    step = _round_step(max(highest - low, 0.02 if panel.dots else 1e-9) / 5)
    count = max(1, math.ceil((highest - low) / step - 1e-9))

    def at(value: float) -> float:
        return bottom - (value - low) / (count * step) * PANEL_HEIGHT

    parts = [_text(left, top - 34, panel.title, size=14, weight=600)]
    for tick in range(count + 1):
        value = low + tick * step
        y = at(value)
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="{LINE}"/>')
        parts.append(_text(left - 6, y + 4, f"{value:.6g}", MUTED, anchor="end"))
    parts.append(_text(left - 6, top - 10, panel.unit, MUTED, anchor="end"))
    room = PANEL_WIDTH / len(labels)
    for number, (label, stack) in enumerate(zip(labels, panel.stacks, strict=True)):
        middle = left + room * (number + 0.5)
        parts.append(_dots(stack, middle, at) if panel.dots else _bar(panel, stack, middle, min(44.0, room * 0.62), at))
        parts.append(_text(middle, bottom + 16, label, MUTED, anchor="middle"))
    parts.append(_text(left + PANEL_WIDTH / 2, bottom + 31, "ranks", MUTED, anchor="middle"))
    if panel.limit is not None:
        y, beyond = (at(panel.limit), "") if panel.limit <= low + count * step else (top - 4.0, "↑ ")
        parts.append(
            f'<path d="M{left} {y:.1f}H{right}" stroke="{COLOURS[5]}" stroke-dasharray="5 4"/>' if not beyond else ""
        )
        words = f"{beyond}{panel.limit:.3g} {panel.unit} {panel.limit_name}"
        parts.append(_text(right, y - 5, words, COLOURS[5], 11, anchor="end"))
    return "\n".join([*parts, _legend(panel, left, top - 14)])


def _bar(panel: Panel, stack: Sequence[float], middle: float, width: float, at: Callable[[float], float]) -> str:
    parts, sum_ = [], 0.0
    for number, value in enumerate(stack):
        y, height = at(sum_ + value), at(sum_) - at(sum_ + value)
        sum_ += value
        tip = f"<title>{escape(panel.parts[number])}: {value:.4g} {panel.unit}</title>"
        parts.append(
            f'<rect x="{middle - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{COLOURS[number]}">{tip}</rect>'
        )
    return "".join(parts) + _text(middle, at(sum_) - 4, f"{sum_:.3g}", INK, 11, anchor="middle")


def _dots(stack: Sequence[float], middle: float, at: Callable[[float], float]) -> str:
    return "".join(
        f'<circle cx="{middle + 12 * (number - (len(stack) - 1) / 2):.1f}" cy="{at(value):.1f}" r="5" '
        f'fill="{COLOURS[number]}"><title>{value:.3f}</title></circle>'
        for number, value in enumerate(stack)
    )


def _legend(panel: Panel, left: float, y: float) -> str:
    parts, x = [], left
    for number, name in enumerate(panel.parts):
        if any(stack[number] for stack in panel.stacks):
            parts.append(f'<rect x="{x:.1f}" y="{y - 8}" width="9" height="9" rx="2" fill="{COLOURS[number]}"/>')
            parts.append(_text(x + 13, y, name, MUTED, 11))
            x += 25 + 6.2 * len(name)
    return "".join(parts)


def _text(
    x: float, y: float, words: str, colour: str = INK, size: float = 12, *, weight: int = 400, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )


def _wrapped(notes: Sequence[str], most: int = 178) -> list[str]:
    lines: list[str] = []
    for note in notes:
        line = ""
        for word in note.split():
            if line and len(line) + 1 + len(word) > most:
                lines.append(line)
                line = "  "
            line = f"{line} {word}" if line else word
        lines.append(line)
    return lines


def _unit(value: float) -> tuple[float, str]:
    return next(((scale, name) for scale, name in UNITS if value >= scale), UNITS[-1])


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in STEPS if factor * power >= step * (1 - 1e-9))
