"""Real programs for tests, each installed once from PyPI into a venv of its own below `.cache`.

They pin their own versions of the libraries that the sidecar uses, so they never share the project's venv. Where one
cannot be had, the test is skipped with the reason; in CI (environment variable CI) that is a failure instead.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

_CACHE = Path(__file__).resolve().parents[2] / ".cache"
_INSTALL_LIMIT_S = 600.0


@functools.cache
def own_venv(distribution: str, version: str, *requirements: str) -> Path:
    """The venv that has `distribution` in this version, made with `requirements` if need be.

    `<DISTRIBUTION>_VENV` in the environment names another place for it.
    """
    variable = distribution.upper().replace("-", "_") + "_VENV"
    venv = Path(os.environ.get(variable, _CACHE / f"{distribution}-{version}"))
    venv.parent.mkdir(parents=True, exist_ok=True)
    # One test run makes it, others wait: two at once would spoil it.
    with venv.with_name(venv.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_installed(venv, requirements):
            _install(venv, f"{distribution} {version}", requirements)
    return venv


def free_port() -> int:
    """A port that was free a moment ago, for a program that cannot be told to take any."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_installed(venv: Path, requirements: tuple[str, ...]) -> bool:
    """Whether the venv has all of `name`, `name==version` or `name[extra]==version`."""
    wanted = [re.fullmatch(r"([\w-]+)(?:\[\w+\])?(?:==(.+))?", requirement) for requirement in requirements]
    pairs = [match.groups() for match in wanted if match]
    question = (
        f"import importlib.metadata as m; assert all(m.version(n) == v if v else m.version(n) for n, v in {pairs})"
    )
    try:
        answer = subprocess.run([venv / "bin" / "python", "-c", question], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0


def _install(venv: Path, what: str, requirements: tuple[str, ...]) -> None:
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    for command in ([sys.executable, "-m", "venv", "--clear", str(venv)], [*pip, *requirements]):
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S)
        except subprocess.CalledProcessError as exc:
            _unavailable(what, f"`{' '.join(command)}` failed: {exc.stderr.strip()[-600:]}")
        except (OSError, subprocess.TimeoutExpired) as exc:
            _unavailable(what, f"`{' '.join(command)}`: {exc}")


def _unavailable(what: str, why: str) -> NoReturn:
    reason = f"{what} is not available: {why}"
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
