"""Small bar plots, pure: numbers in, the `d` of an SVG path out."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH, HEIGHT = 120, 32
"""Of the plot's view box. One bar is one unit wide, and the newest stands at the right."""


def bars(values: Sequence[float | None]) -> str:
    """A vertical line for each value above zero; the highest is as high as the plot."""
    newest = list(values)[-WIDTH:]
    most = max((value for value in newest if value), default=0)
    left = WIDTH - len(newest) + 0.5
    return "".join(
        f"M{left + index:g} {HEIGHT}V{HEIGHT - max(1.0, value / most * HEIGHT):.4g}"
        for index, value in enumerate(newest)
        if value
    )
