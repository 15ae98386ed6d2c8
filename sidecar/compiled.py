"""Which modules run compiled, and whether each was compiled from the source that stands beside it.

setup.py records the SHA-256 of each source when it compiles, and here they are compared. Times would not do: git, pip
and rsync set them as they please, so the compiled file may well be the younger one and still be of another source. The
record is part of the wheel, so an installed sidecar is judged by the same rule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

PACKAGE = Path(__file__).parent
RECORD = "_compiled.sha256"
"""The record's name in the package; `sha256sum --check` understands it as well."""
LIBRARY = "_compiled__mypyc"
"""The machine code of all compiled modules; it has no source of its own."""


def modules(package: Path = PACKAGE) -> list[str]:
    """What this Python takes from a compiled file, as `relay/wire`; compiled for another Python is not compiled."""
    found = (path for suffix in EXTENSION_SUFFIXES for path in package.rglob(f"*{suffix}"))
    names = (path.with_name(path.name.partition(".")[0]) for path in found if _is_loadable(path))
    return sorted(name.relative_to(package).as_posix() for name in set(names) if name.name != LIBRARY)


def stale(package: Path = PACKAGE) -> list[str]:
    """Those of `modules` whose source is another one now, or gone, or was not recorded."""
    recorded = _recorded(package)
    return [name for name in modules(package) if recorded.get(f"{name}.py") != _digest(package / f"{name}.py")]


def is_current(package: Path = PACKAGE) -> bool:
    """Whether compiling again would change nothing: everything that was recorded is compiled and as it was."""
    recorded = _recorded(package)
    inside = {name.removesuffix(".py") for name in recorded if not name.startswith("../")}
    return (
        bool(inside)
        and inside == set(modules(package))
        and all(_digest(package / name) == digest for name, digest in recorded.items())
    )


def record(names: Iterable[str], package: Path = PACKAGE) -> str:
    """The record of files as they are now; their names are relative to the package."""
    return "".join(f"{_digest(package / name)}  {name}\n" for name in names)


def _recorded(package: Path) -> dict[str, str]:
    try:
        lines = (package / RECORD).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def _digest(path: Path) -> str:
    """Of a file that is not there: something that no file has."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return "missing"


def _is_loadable(path: Path) -> bool:
    """`wire.so` would be loaded, `wire.cpython-312-….so` only by the Python whose suffix that is."""
    return path.name[len(path.name.partition(".")[0]) :] in EXTENSION_SUFFIXES
