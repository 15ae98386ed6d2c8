"""Node programs for tests: packages from npm, each set installed once into a folder of its own below `.cache`."""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.tools import needed

_CACHE = Path(__file__).resolve().parents[2] / ".cache"
_INSTALL_LIMIT_S = 300.0


_OLDEST_NODE = 20
"""What current packages still run on."""


def node() -> Path:
    """Node, new enough for current packages; the test is skipped where only an older one can be had."""
    program = needed("node", package="nodejs")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    if int(version.strip().lstrip("v").partition(".")[0]) < _OLDEST_NODE:
        pytest.skip(reason=f"Node {version.strip()} is older than {_OLDEST_NODE}")
    return program


@functools.cache
def own_node_folder(name: str, *packages: str) -> Path:
    """A folder in which a module finds `packages` (`name@version`). Skips the test, in CI fails it, without npm."""
    npm = needed("npm", package="npm")
    folder = _CACHE / f"node-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = "\n".join(packages)
    # One test run makes it, others wait.
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / ".installed"
        if not done.exists() or done.read_text() != wanted:
            command = [str(npm), "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S)
            except (OSError, subprocess.SubprocessError) as exc:
                said = getattr(exc, "stderr", None) or str(exc)
                reason = f"{', '.join(packages)} cannot be had: {said[-600:]}"
                if os.environ.get("CI"):
                    pytest.fail(reason, pytrace=False)
                pytest.skip(reason)
            done.write_text(wanted)
    return folder
