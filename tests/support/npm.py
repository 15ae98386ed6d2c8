"""Packages from npm for tests, each installed once below `.cache`, without running anything that they bring along.

Where one cannot be had, the test is skipped with the reason; in CI (environment variable CI) that is a failure instead.
"""

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


@functools.cache
def npm_package(name: str, version: str) -> Path:
    """The folder of that package in exactly this version."""
    npm = needed("npm", package="npm")
    home = _CACHE / f"npm-{name}-{version}"
    home.mkdir(parents=True, exist_ok=True)
    package = home / "node_modules" / name
    command = [
        *(str(npm), "install", "--prefix", str(home), "--no-audit", "--no-fund", "--ignore-scripts"),
        f"{name}@{version}",
    ]
    # One test run installs it, others wait: two at once would spoil it.
    with home.with_name(home.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / ".complete").exists():
            try:
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S)
            except (OSError, subprocess.SubprocessError) as exc:
                reason = f"{name} {version} is not available: {exc} {getattr(exc, 'stderr', '') or ''}"[:600]
                if os.environ.get("CI"):
                    pytest.fail(reason, pytrace=False)
                pytest.skip(reason)
            (home / ".complete").touch()
    return package
