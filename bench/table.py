"""The figures of all rounds as one table: medians, and the sidecar's ratios. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple


class Row(NamedTuple):
    key: str
    text: str
    """With its unit."""
    higher_is_better: bool = False


ROWS = (
    Row("chats_32", "small JSON chats, 32 connections: requests/s", higher_is_better=True),
    Row("chats_128", "small JSON chats, 128 connections: requests/s", higher_is_better=True),
    Row("chats_p50_us", "… 32 connections: latency p50, µs"),
    Row("chats_p99_us", "… 32 connections: latency p99, µs"),
    Row("chats_cpu_us", "… 32 connections: processor time per request, µs"),
    Row("paced_50_p50_us", "50 streams of 50 events/s: delay p50, µs"),
    Row("paced_50_p99_us", "50 streams of 50 events/s: delay p99, µs"),
    Row("paced_200_p50_us", "200 streams of 50 events/s: delay p50, µs"),
    Row("paced_200_p99_us", "200 streams of 50 events/s: delay p99, µs"),
    Row("events_cpu_s", "… 200 streams: processor seconds per 100,000 events"),
    Row("idle_bytes", "memory per idle stream, bytes"),
    Row("first_byte_us", "first byte of a stream, p50, µs"),
    Row("full_mb_s", "streams at full speed: MB/s", higher_is_better=True),
    Row("upload_mb_s", "10 MB uploads: MB/s", higher_is_better=True),
)

Figures = Mapping[str, Sequence[float]]
"""A row's key to one value for each round."""


def table(by_peer: Mapping[str, Figures]) -> str:
    """Markdown: a column for each peer, and the sidecar's share of nginx and of the plain proxy where they ran."""
    peers = list(by_peer)
    bases = [base for base in ("nginx", "plain") if base in by_peer and "sidecar" in by_peer]
    lines = [["", *peers, *(f"sidecar / {base}" for base in bases)]]
    for row in ROWS:
        middle = {peer: median(by_peer[peer][row.key]) for peer in peers if by_peer[peer].get(row.key)}
        if middle:
            better = "more is better" if row.higher_is_better else "less is better"
            ratios = [_ratio(middle.get("sidecar"), middle.get(base)) for base in bases]
            lines.append([f"{row.text} ({better})", *(_number(middle.get(peer)) for peer in peers), *ratios])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join("| " + " | ".join(_padded(line, widths)) + " |" for line in lines)


def _padded(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *others = (cell.ljust(width) if not at else cell.rjust(width) for at, (cell, width) in _at(line, widths))
    return [first, *others]


def _at(line: Sequence[str], widths: Sequence[int]) -> enumerate[tuple[str, int]]:
    return enumerate(zip(line, widths, strict=True))


def _ratio(ours: float | None, theirs: float | None) -> str:
    return "" if ours is None or not theirs else f"{ours / theirs:.2f}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
