"""Curves of a training run as one SVG that loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

PANEL, GAP, TOP, LEFT = (250, 150), 80, 84, 64
INK, MUTED, LINE = "#17202b", "#5d6b7c", "#dfe4ea"
COLOURS = ("#1463c4", "#f0a04b", "#0d7a4a", "#cc2f3b", "#8a4fc7")

Points = Sequence[tuple[float, float]]


def draw(title: str, subtitle: str, panels: Mapping[str, Mapping[str, Points]], bars: Mapping[str, float]) -> str:
    """Panels of named lines over steps, side by side; then one of bars: bytes by name."""
    width = LEFT + (len(panels) + 1) * (PANEL[0] + GAP)
    height = TOP + PANEL[1] + 70
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" '
        f'font-size="12" fill="{INK}" role="img" aria-label="{escape(title)}">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _text(24, 30, title, size=17),
        _text(24, 50, subtitle, MUTED),
    ]
    for number, (name, lines) in enumerate(panels.items()):
        parts.append(_panel(name, lines, LEFT + number * (PANEL[0] + GAP)))
    parts.append(_bars("bytes between ranks, a step", bars, LEFT + len(panels) * (PANEL[0] + GAP)))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(name: str, lines: Mapping[str, Points], left: float) -> str:
    points = [point for line in lines.values() for point in line]
    low, high = min(y for _, y in points), max(y for _, y in points)
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    low, high, last = low - margin, high + margin, max(x for x, _ in points) or 1.0
    parts = [_text(left, TOP - 10, name)]
    for step in range(4):
        value = low + (high - low) * step / 3
        y = TOP + PANEL[1] * (1 - step / 3)
        parts.append(f'<line x1="{left}" x2="{left + PANEL[0]}" y1="{y:.1f}" y2="{y:.1f}" stroke="{LINE}"/>')
        parts.append(_text(left - 6, y + 4, _short(value), MUTED, anchor="end"))
        x = left + PANEL[0] * step / 3
        parts.append(_text(x, TOP + PANEL[1] + 18, f"{last * step / 3:.0f}", MUTED, anchor="middle"))
    for number, (label, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(
            f"{left + PANEL[0] * x / last:.1f},{TOP + PANEL[1] * (high - y) / (high - low):.1f}" for x, y in line
        )
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(lines) > 1:
            x, y = left + PANEL[0] / 2 * number, TOP + PANEL[1] + 44
            parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
            parts.append(_text(x + 15, y, label, MUTED))
    parts.append(_text(left + PANEL[0] / 2, TOP + PANEL[1] + 30, "step", MUTED, anchor="middle"))
    return "\n".join(parts)


def _bars(name: str, bars: Mapping[str, float], left: float) -> str:
    parts = [_text(left, TOP - 10, name)]
    if not bars:
        return "\n".join([*parts, _text(left, TOP + 14, "none: one rank", MUTED)])
    most, row = max(bars.values()), min(26.0, PANEL[1] / len(bars))
    for number, (label, value) in enumerate(bars.items()):
        y, length = TOP + number * row, (PANEL[0] - 150) * value / most
        parts.append(_text(left + 96, y + row / 2 + 4, label, MUTED, anchor="end"))
        parts.append(
            f'<rect x="{left + 102}" y="{y + 3:.1f}" width="{length:.1f}" height="{row - 6:.1f}" fill="{COLOURS[0]}"/>'
        )
        parts.append(_text(left + 108 + length, y + row / 2 + 4, _short(value)))
    return "\n".join(parts)


def _short(value: float) -> str:
    for unit, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g} {sign}"
    return f"{value:.3g}"


def _text(x: float, y: float, text: str, fill: str = INK, size: float = 12, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" fill="{fill}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(text)}</text>"
