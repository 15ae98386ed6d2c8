"""The capabilities document as a table for people, in colours only where a terminal shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

_LAYERS = {"Core": "coreCapabilities", "Enhanced": "enhancedCapabilities"}
_STATUS_COLOURS = {"enhanced": "green", "partial": "green", "connected": "yellow", "disconnected": "red"}
_WORDS = {True: ("yes", "green"), False: ("no", "red"), None: ("not known", "yellow")}
_WIDTH = 110
"""In a file or a pipe; a terminal has a width of its own."""


def print_capabilities(document: Mapping[str, Any], file: TextIO) -> None:
    """The sentence and the status word, who was asked, a row for each capability, and the next steps."""
    # Everything is a Text: what a backend says of itself is no markup.
    console = Console(file=file, width=None if file.isatty() else _WIDTH, highlight=False, emoji=False)
    status = document["status"]
    steps = _steps(document)
    with console.capture() as captured:
        console.print(Text(document["message"], "bold"))
        console.print()
        console.print(Text.assemble("Status     ", (status, _STATUS_COLOURS[status])))
        for line in _servers(document):
            console.print(Text(line), soft_wrap=True)
        console.print()
        console.print(_table(document))
        for step, names in steps.items():
            subject = f", for {', '.join(names)}" if len(steps) > 1 else ""
            console.print(Text(f"Next{subject}: {step}"))
    # The table pads its columns up to the last one, and ends with an empty row.
    file.writelines(line.rstrip() + "\n" for line in captured.get().rstrip().splitlines())


def _servers(document: Mapping[str, Any]) -> list[str]:
    gateway, dashboard = document["gateway"], document["dashboard"]
    kind = " ".join(part for part in (gateway["kind"], gateway["version"]) if part) or "does not answer"
    lines = [f"Gateway    {gateway['url']}  {kind}, key {gateway['token']}"]
    if dashboard["url"] is None:
        lines.append("Dashboard  not set")
    else:
        state = dashboard["version"] or ("answers" if dashboard["reachable"] else "does not answer")
        lines.append(f"Dashboard  {dashboard['url']}  {state}")
    return lines


def _table(document: Mapping[str, Any]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for _ in range(4):
        table.add_column(no_wrap=True)
    table.add_column()
    for title, layer in _LAYERS.items():
        table.add_row(*(Text(word, "bold") for word in (title, "", "Served by", "Evidence", "")))
        for name in document[layer]:
            detail = document["details"][name]
            word, colour = _WORDS[detail["available"]]
            served_by = Text(detail["servedBy"] or "-")
            table.add_row(Text(name), Text(word, colour), served_by, Text(detail["evidence"]), Text(detail["message"]))
        table.add_row()
    return table


def _steps(document: Mapping[str, Any]) -> dict[str, list[str]]:
    """Each next step with the capabilities that it would bring."""
    steps: dict[str, list[str]] = {}
    for name, detail in document["details"].items():
        if detail["unlock"] is not None:
            steps.setdefault(detail["unlock"], []).append(name)
    return steps
