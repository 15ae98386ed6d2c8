"""Compiles the hot path in place if what is compiled is not what is written. The Makefile calls it with .venv's Python.

SIDECAR_COMPILE is obeyed as setup.py has it; `never` also removes what was compiled before, so that it does not run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sidecar import compiled

ROOT = Path(__file__).resolve().parents[1]
LOG = Path("build", "compile.log")


def main() -> int:
    """The exit code; a failure is one only where SIDECAR_COMPILE says `always`."""
    wish = os.environ.get("SIDECAR_COMPILE")
    if compiled.is_current() if wish != "never" else not compiled.modules():
        return 0
    sys.path.insert(0, str(ROOT))
    from setup import remove_compiled, why_not_compiled

    if wish == "never":
        remove_compiled(compiled.PACKAGE)
        return 0
    why_not = why_not_compiled() or _compile()
    if why_not is None:
        return 0
    remove_compiled(compiled.PACKAGE)
    print(f"The hot path stays Python: {why_not}. SIDECAR_COMPILE=never silences this.", file=sys.stderr)
    return 1 if wish == "always" else 0


def _compile() -> str | None:
    """Why it failed, or None."""
    print("Compiling the hot path (about half a minute, once)", flush=True)
    LOG.parent.mkdir(exist_ok=True)
    with LOG.open("w", encoding="utf-8") as log:
        end = subprocess.run(
            [sys.executable, "setup.py", "build_ext", "--inplace"],
            env={**os.environ, "SIDECAR_COMPILE": "always"},  # a failure is to be told, to us
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return None if end.returncode == 0 else f"compiling it failed, and {LOG} says why"


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
