"""Compiles the hot path with mypyc: the same typed Python, as C. All else about the package stands in pyproject.toml.

Without a C compiler or Python's headers the modules stay Python: all works, at about a third of the speed.
SIDECAR_COMPILE=never leaves them so, SIDECAR_COMPILE=always fails where they cannot be compiled.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

COMPILED = (
    "guard/credentials",
    "guard/hosts",
    "guard/isolation",
    "relay/admission",
    "relay/answer_heads",
    "relay/answers",
    "relay/downstream",
    "relay/familiar",
    "relay/fields",
    "relay/handler",
    "relay/pool",
    "relay/preparation",
    "relay/shared",
    "relay/silence",
    "relay/stream",
    "relay/upstream",
    "relay/wire",
    "sessions/mapping",
    "sessions/lineage",
    "telemetry/cells",
    "telemetry/exchanges",
    "telemetry/recent",
)
"""The modules that every request or every piece of an answer runs through, under `sidecar/`."""

WISH = os.environ.get("SIDECAR_COMPILE", "where possible")


def extensions() -> list[Extension]:
    """What is to be compiled; nothing where it cannot be. Raises SystemExit where it must be, and cannot."""
    if WISH == "never":
        return []
    why_not = _why_not()
    if why_not is None:
        from mypyc.build import mypycify

        sources = [f"sidecar/{name}.py" for name in COMPILED]
        return list(mypycify(["--ignore-missing-imports", *sources], group_name="sidecar._compiled"))
    if WISH == "always":
        sys.exit(f"The hot path cannot be compiled: {why_not}.")
    print(
        f"The hot path stays Python, at a third of the speed, since it cannot be compiled: {why_not}.", file=sys.stderr
    )
    return []


def _why_not() -> str | None:
    if sys.implementation.name != "cpython":
        return "mypyc writes C for CPython only"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler ({compiler}; on Debian: apt-get install gcc)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers are missing (on Debian: apt-get install python3-dev)"
    return None


class Build(build_ext):
    """All modules or none: a half-compiled hot path would not start."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as exc:
            if WISH == "always":
                raise
            print(f"The hot path stays Python, since compiling it failed: {exc}", file=sys.stderr)
            self.extensions.clear()


setup(ext_modules=extensions(), cmdclass={"build_ext": Build})
