"""Compiles the hot path with mypyc: the same typed Python, as C. All else about the package stands in pyproject.toml.

Without a C compiler or Python's headers the modules stay Python: all works, for more work of the processor.
SIDECAR_COMPILE=never leaves them so, SIDECAR_COMPILE=always fails where they cannot be compiled.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent))  # where pip builds, only installed packages can be imported
from sidecar import compiled

COMPILED = (
    "capabilities/asking",
    "capabilities/observed",
    "guard/credentials",
    "guard/hosts",
    "guard/isolation",
    "relay/admission",
    "relay/answer_heads",
    "relay/answers",
    "relay/chunked",
    "relay/connecting",
    "relay/destinations",
    "relay/downstream",
    "relay/familiar",
    "relay/fields",
    "relay/handler",
    "relay/pool",
    "relay/preparation",
    "relay/repeats",
    "relay/request",
    "relay/routes",
    "relay/shared",
    "relay/silence",
    "relay/stream",
    "relay/upstream",
    "relay/usage",
    "relay/wire",
    "sessions/lineage",
    "sessions/mapping",
    "telemetry/cells",
    "telemetry/exchanges",
    "telemetry/lines",
    "telemetry/recent",
    "telemetry/record",
)
"""The modules that every request or every piece of an answer runs through, under `sidecar/`."""

_FEW_DETOURS = ("-fvisibility=hidden", "-fno-semantic-interposition", "-fno-plt")
"""Nobody replaces a function of ours when the library is loaded, so calls need not ask where it is."""

_RARE = """\
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <CPy.h>
__typeof__(CPy_AddTraceback) CPy_AddTraceback __attribute__((cold));
__typeof__(CPy_AttributeError) CPy_AttributeError __attribute__((cold));
__typeof__(CPy_TypeError) CPy_TypeError __attribute__((cold));
__typeof__(CPy_TypeErrorTraceback) CPy_TypeErrorTraceback __attribute__((cold));
"""
"""Read before every C file: what leads to an exception stands apart, so that less code has to come into the cache."""

WISH = os.environ.get("SIDECAR_COMPILE", "where possible")
PACKAGE = Path("sidecar")


def extensions() -> list[Extension]:
    """What makes this a package with compiled modules; nothing where they stay Python.

    Only a stand-in: the true ones are made when they are built, since that takes seconds and pip asks for this list
    several times. Raises SystemExit where the modules must be compiled and cannot be.
    """
    if WISH == "never":
        return []
    why_not = why_not_compiled()
    if why_not is None:
        return [Extension(f"{PACKAGE}.{compiled.LIBRARY}", sources=[])]
    if WISH == "always":
        sys.exit(f"The hot path cannot be compiled: {why_not}.")
    print(f"The hot path stays Python: {why_not}.", file=sys.stderr)
    return []


def why_not_compiled() -> str | None:
    """What this machine lacks to compile them, or None."""
    if sys.implementation.name != "cpython":
        return "mypyc writes C for CPython only"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler, {compiler} (on Debian: apt-get install gcc python3-dev)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers are missing (on Debian: apt-get install python3-dev)"
    return None


def remove_compiled(folder: Path) -> None:
    """Removes them, whichever Python they are for: one that meets a mixture would not start."""
    for path in folder.rglob("*.so"):
        path.unlink()


class Build(build_ext):
    """All modules or none: a half-compiled hot path would not start."""

    def run(self) -> None:
        if not self.extensions:
            return
        try:
            self._compile()
        except (Exception, SystemExit) as exc:  # mypyc exits where mypy has a complaint
            if WISH == "always":
                raise
            self.extensions = []
            remove_compiled(Path(self.build_lib))
            print(f"The hot path stays Python, since compiling it failed: {exc!r}", file=sys.stderr)

    def _compile(self) -> None:
        from mypyc.build import mypycify

        sources = [f"{name}.py" for name in COMPILED]
        if self.inplace:
            remove_compiled(PACKAGE)
        # Before anything is read: a source that is changed meanwhile is then found to be another one.
        record = compiled.record([*sources, *(["../setup.py"] if self.inplace else [])], PACKAGE)
        # Where pip builds, no package of others is installed, so strict checks would complain: `make types` has them.
        options = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
        paths = [str(PACKAGE / source) for source in sources]
        group = f"{PACKAGE}.{compiled.LIBRARY.removesuffix('__mypyc')}"
        true_ones: Any = mypycify([*options, *paths], group_name=group, opt_level="2")
        for extension in true_ones:  # a new compiler's new warning is no reason to go without
            flags = [word for word in extension.extra_compile_args if word != "-Werror"]
            extension.extra_compile_args = [*flags, *(_FEW_DETOURS if os.name == "posix" else ())]
            if os.name == "posix" and extension.name.endswith(compiled.LIBRARY):
                extension.extra_compile_args += ["-include", str(self._rare())]
        self.distribution.ext_modules = true_ones
        # setuptools has to look at the true ones; of its options this is the one that does not stand a second look.
        self.swig_opts = None  # type: ignore[assignment]
        self.finalized = False
        self.ensure_finalized()
        self._remove_leftovers()
        super().run()
        (PACKAGE if self.inplace else Path(self.build_lib, PACKAGE)).joinpath(compiled.RECORD).write_text(record)

    def _rare(self) -> Path:
        header = Path(self.build_temp, "rare.h")
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(_RARE)
        return header

    def _remove_leftovers(self) -> None:
        """What an earlier build left that is no longer compiled: it would come along in the wheel."""
        folder = Path(self.build_lib, PACKAGE)
        for path in folder.rglob("*.so"):
            if path.relative_to(folder).as_posix().partition(".")[0] not in {*COMPILED, compiled.LIBRARY}:
                path.unlink()


if __name__ == "__main__":
    setup(ext_modules=extensions(), cmdclass={"build_ext": Build})
