"""The plan of the house: which module may import which.

Every module of `sidecar/` stands on one floor and imports only from its own floor and those below, without cycles.
Imports are read with `ast`, so those inside functions and under TYPE_CHECKING count as well: a type that has to be
borrowed from above is a sign that it lives in the wrong place.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "sidecar"

# Lowest first. `x/*` stands for everything below the folder x; an exact name counts before such a pattern. The bare
# name of a folder is its `__init__`. Modules that are planned but not written yet have their place already.
FLOORS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "pure",
        (
            ".",
            "faults",
            "config",
            "config/*",
            "rules",
            "relay",
            "relay/wire",
            "relay/fields",
            "relay/admission",
            "relay/answer_heads",
            "relay/answers",
            "relay/chunked",
            "relay/destinations",
            "relay/familiar",
            "relay/repeats",
            "relay/request",
            "relay/routes",
            "relay/stream",
            "relay/usage",
            "sessions",
            "sessions/sources",
            "sessions/mapping",
            "guard",
            "guard/*",
            "capabilities",
            "capabilities/model",
            "capabilities/judgement",
            "capabilities/observed",
            "capabilities/wording",
            "capabilities/report",
        ),
    ),
    (
        "adapters",
        (
            "relay/connecting",
            "relay/leaving",
            "relay/pool",
            "relay/upstream",
            "compiled",
            "sockets",
            "telemetry",
            "telemetry/*",
            "sessions/store",
            "sessions/store/*",
            "demo",
            "demo/*",
        ),
    ),
    (
        "work",
        (
            "relay/handler",
            "relay/preparation",
            "relay/shared",
            "relay/silence",
            "relay/downstream",
            "relay/tunnel",
            "sessions/lineage",
            "capabilities/asking",
            "capabilities/probes",
            "capabilities/monitor",
            "upstreams",
            "backend",
        ),
    ),
    ("surface", ("surface", "surface/*", "verify", "verify/*")),
    ("composition", ("app",)),
    ("process", ("supervisor", "server", "process")),
    ("command line", ("cli", "commands", "__main__")),
)

# What a pure module leaves to the floors above: the event loop, the network, threads and processes.
IMPURE = frozenset({"aiohttp", "asyncio", "multiprocessing", "socket", "ssl", "subprocess", "threading", "uvloop"})

# Module and library -> why that use is none of those.
EXCEPTIONS = {("config/checks", "ssl"): "reads the certificates of gateway.ca_file; opens no connection"}


@dataclass(frozen=True)
class Import:
    """One import: the module of ours, or the name of somebody else's package, and the line it stands on."""

    target: str
    line: int
    is_ours: bool


def module_names(root: Path) -> dict[str, Path]:
    """Every module below `root`/sidecar as `relay/wire` -> its file; a folder's `__init__` is the folder itself."""
    found: dict[str, Path] = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        inner = path.relative_to(root / PACKAGE)
        name = inner.parent if inner.name == "__init__.py" else inner.with_suffix("")
        found[name.as_posix()] = path
    return found


def imports_of(name: str, path: Path, modules: Mapping[str, Path]) -> Iterator[Import]:
    """Every import statement in the file, wherever it stands. `from sidecar.relay import wire` means the module
    `relay/wire` if there is one, else something in `relay/__init__`."""
    package = name if path.name == "__init__.py" else Path(name).parent.as_posix()
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _import(alias.name, node.lineno, modules)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            for alias in node.names:
                inner = _import(f"{base}.{alias.name}", node.lineno, modules)
                names_a_module = inner.is_ours and inner.target in modules
                yield inner if names_a_module else _import(base, node.lineno, modules)


def complaints(root: Path) -> list[str]:
    """One sentence for each module that breaks the plan; empty when the house stands."""
    modules = module_names(root)
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        floor = floor_of(name)
        file = path.relative_to(root).as_posix()
        if floor is None:
            found.append(
                f"{file} stands on no floor: give it the lowest one that fits in FLOORS, {Path(__file__).name}."
            )
            continue
        graph[name] = set()
        for item in imports_of(name, path, modules):
            where = f"{file}:{item.line}"
            if not item.is_ours:
                library = item.target.partition(".")[0]
                if floor == 0 and library in IMPURE and (name, library) not in EXCEPTIONS:
                    found.append(
                        f"{where} imports {item.target}, but the pure floor neither waits nor talks to the network:"
                        " leave that to the caller above, and take its result as an argument."
                    )
                continue
            graph[name].add(item.target)
            theirs = floor_of(item.target)
            if theirs is not None and theirs > floor:
                found.append(
                    f"{where} climbs from {FLOORS[floor][0]} to {FLOORS[theirs][0]} by importing {item.target}:"
                    " move what it needs down, or let the module above hand it in."
                )
    found += [
        f"{' -> '.join(loop)} is a cycle of imports: move what both need into a third." for loop in _cycles(graph)
    ]
    return found


def floor_of(name: str) -> int | None:
    """The number of the floor that `name` stands on, or None."""
    for number, (_, members) in enumerate(FLOORS):
        if name in members:
            return number
    for number, (_, members) in enumerate(FLOORS):
        if any(fnmatchcase(name, member) for member in members):
            return number
    return None


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """The dotted name that a `from … import` starts from, its leading dots resolved against `package`."""
    if node.level == 0:
        return node.module or ""
    parts = [PACKAGE, *(part for part in package.split("/") if part != ".")]
    parts = parts[: len(parts) - (node.level - 1)]
    return ".".join([*parts, node.module] if node.module else parts)


def _import(dotted: str, line: int, modules: Mapping[str, Path]) -> Import:
    head, _, rest = dotted.partition(".")
    if head != PACKAGE:
        return Import(dotted, line, is_ours=False)
    return Import(rest.replace(".", "/") or ".", line, is_ours=True)


def _cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Every cycle that a depth-first walk meets, each as the modules on it with the first one repeated at the end."""
    loops: list[list[str]] = []
    done: set[str] = set()

    def walk(name: str, trail: list[str]) -> None:
        if name in trail:
            loops.append([*trail[trail.index(name) :], name])
            return
        if name in done:
            return
        for target in sorted(graph.get(name, ())):
            walk(target, [*trail, name])
        done.add(name)

    for name in sorted(graph):
        walk(name, [])
    return loops


# The house as it is


def test_imports_only_go_down_and_never_in_circles() -> None:
    found = complaints(ROOT)

    assert not found, "\n" + "\n".join(found)


def test_no_module_is_named_on_two_floors() -> None:
    members = [member for _, floor in FLOORS for member in floor]

    assert sorted(members) == sorted(set(members))


@pytest.mark.parametrize(("name", "library"), EXCEPTIONS)
def test_exception_is_still_needed(name: str, library: str) -> None:
    modules = module_names(ROOT)

    assert library in {item.target for item in imports_of(name, modules[name], modules)}


# The checker itself, on made-up houses


def house(tmp_path: Path, files: Mapping[str, str]) -> Path:
    """A tree in which each of `files` (name below sidecar/ -> source) stands, with the `__init__` files it needs."""
    for name, source in files.items():
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    for folder in {path.parent for path in (tmp_path / PACKAGE).rglob("*.py")} | {tmp_path / PACKAGE}:
        (folder / "__init__.py").touch()
    return tmp_path


CLIMB = "climbs from pure to adapters by importing relay/pool"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        pytest.param("relay/fields.py", "from sidecar.relay.pool import Pool\n", id="from-the-module"),
        pytest.param("relay/fields.py", "from sidecar.relay import pool\n", id="from-the-package"),
        pytest.param("relay/fields.py", "import sidecar.relay.pool\n", id="plain-import"),
        pytest.param("relay/fields.py", "from . import pool\n", id="relative-sibling"),
        pytest.param("relay/fields.py", "from .pool import Pool\n", id="relative-module"),
        pytest.param("sessions/mapping.py", "from ..relay.pool import Pool\n", id="relative-through-the-parent"),
        pytest.param("relay/__init__.py", "from .pool import Pool\n", id="relative-in-an-init"),
        pytest.param("__init__.py", "from .relay import pool\n", id="relative-in-the-top-init"),
        pytest.param("faults.py", "def late() -> None:\n    import sidecar.relay.pool\n", id="inside-a-function"),
        pytest.param(
            "config.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sidecar.relay.pool import Pool\n",
            id="under-type-checking",
        ),
    ],
)
def test_climbing_import_is_found_in_every_spelling(tmp_path: Path, name: str, source: str) -> None:
    root = house(tmp_path, {"relay/pool.py": "class Pool: ...\n", name: source})

    (complaint,) = complaints(root)

    assert complaint.startswith(f"sidecar/{name}:{len(source.splitlines())} ")
    assert CLIMB in complaint


def test_imports_down_and_sideways_are_welcome(tmp_path: Path) -> None:
    root = house(
        tmp_path,
        {
            "faults.py": "import json\n",
            "relay/wire.py": "from sidecar import faults\nfrom sidecar.faults import Fault\n",
            "relay/pool.py": "import asyncio\nfrom sidecar.relay import wire\n",
            "relay/upstream.py": "from .pool import Pool\n",
            "cli.py": "from sidecar import __version__, faults\nimport sidecar.relay.upstream\n",
        },
    )

    assert complaints(root) == []


def test_cycle_on_one_floor_is_found(tmp_path: Path) -> None:
    root = house(
        tmp_path,
        {
            "relay/handler.py": "from sidecar.relay.downstream import Downstream\n",
            "relay/downstream.py": "def late() -> None:\n    from sidecar.relay.tunnel import Tunnel\n",
            "relay/tunnel.py": "from . import handler\n",
        },
    )

    (complaint,) = complaints(root)

    assert complaint.startswith("relay/downstream -> relay/tunnel -> relay/handler -> relay/downstream is a cycle")


def test_module_without_a_floor_is_told_what_to_do(tmp_path: Path) -> None:
    root = house(tmp_path, {"relay/novelty.py": ""})

    (complaint,) = complaints(root)

    assert complaint.startswith("sidecar/relay/novelty.py stands on no floor: give it the lowest one that fits")


@pytest.mark.parametrize("library", sorted(IMPURE))
def test_pure_module_that_reaches_for_the_machine_is_found(tmp_path: Path, library: str) -> None:
    root = house(tmp_path, {"guard/hosts.py": f"import re\nimport {library}\n", "relay/pool.py": f"import {library}\n"})

    (complaint,) = complaints(root)

    assert complaint.startswith(f"sidecar/guard/hosts.py:2 imports {library}, but the pure floor")


def test_submodule_of_an_impure_library_is_found_in_a_pure_module(tmp_path: Path) -> None:
    root = house(tmp_path, {"config.py": "from asyncio.events import AbstractEventLoop\n"})

    (complaint,) = complaints(root)

    assert complaint.startswith("sidecar/config.py:1 imports asyncio.events, but the pure floor")
