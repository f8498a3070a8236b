"""Reliability diagrams as an SVG file, one panel a slot; nothing to install.

A point is a bin: mean predicted survival to the right, realised survival upwards, area by the number of rounds.
On the diagonal the prediction is right; below it, too confident.
"""

from __future__ import annotations

from html import escape

import numpy as np

from dspark.calibrate.metrics import Reliability
from dspark.calibrate.report import Group, Slot

__all__ = ["reliability_svg"]

_SIDE, _GAP, _LEFT, _TOP = 170, 62, 50, 64  # pixels
_COLUMNS = 4
_BEFORE, _AFTER = "#d95f02", "#1b6ca8"


def reliability_svg(group: Group) -> str:
    """The diagram of a group's slots, before (orange rings) and after (blue discs)."""
    columns = min(_COLUMNS, len(group.slots))
    rows = -(-len(group.slots) // _COLUMNS)
    width, height = _LEFT + columns * (_SIDE + _GAP), _TOP + rows * (_SIDE + _GAP)
    title = (
        f"{group.name}: {group.rounds} held-out rounds of {group.prompts} prompts, mean ECE "
        f"{group.ece_before:.2%} before, {group.ece_after:.2%} after, floor {group.floor:.2%}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="13">{escape(title)}</text>',
        f'<text x="10" y="38"><tspan fill="{_BEFORE}">&#9675; before</tspan>  '
        f'<tspan fill="{_AFTER}">&#9679; after</tspan>  right: predicted survival, up: realised</text>',
    ]
    for i, slot in enumerate(group.slots):
        x, y = _LEFT + i % _COLUMNS * (_SIDE + _GAP), _TOP + i // _COLUMNS * (_SIDE + _GAP)
        parts += [f'<g transform="translate({x},{y})">', *_panel(slot), "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def _panel(slot: Slot) -> list[str]:
    heading = f"slot {slot.slot}: ECE {slot.before.ece:.2%} to {slot.after.ece:.2%}"
    return [
        f'<text x="0" y="-5">{heading}</text>',
        f'<rect width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#999"/>',
        f'<line x1="0" y1="{_SIDE}" x2="{_SIDE}" y2="0" stroke="#bbb" stroke-dasharray="4 3"/>',
        *(
            f'<text x="{v * _SIDE:g}" y="{_SIDE + 14}" text-anchor="middle">{v:g}</text>'
            f'<text x="-5" y="{(1 - v) * _SIDE + 4:g}" text-anchor="end">{v:g}</text>'
            for v in (0.0, 0.5, 1.0)
        ),
        *_points(slot.before.reliability, f'fill="none" stroke="{_BEFORE}" stroke-width="1.3"'),
        *_points(slot.after.reliability, f'fill="{_AFTER}" fill-opacity="0.65"'),
    ]


def _points(reliability: Reliability, style: str) -> list[str]:
    total = max(int(reliability.count.sum()), 1)
    radius = 1.5 + 12 * np.sqrt(reliability.count / total) / 2
    return [
        f'<circle cx="{p * _SIDE:.1f}" cy="{(1 - r) * _SIDE:.1f}" r="{size:.1f}" {style}>'
        f"<title>{n} rounds: predicted {p:.3f}, realised {r:.3f}</title></circle>"
        for p, r, n, size in zip(
            reliability.predicted, reliability.realised, reliability.count, radius, strict=True
        )
    ]
