"""What is handed out: wheel and sdist build clean, and install and run where nothing else of ours is.

The wheel is compiled where this machine can compile; CI can. The plain one is built from the sdist.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import setup
from sidecar import __version__, compiled
from tests.support.documents import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

_LIMIT_S = 300.0
_CAN_COMPILE = setup.why_not_compiled() is None
_SUFFIX = EXTENSION_SUFFIXES[0]
_OFFLINE = re.compile(r"Could not find a version|No matching distribution|Temporary failure in name|Connection")


@dataclass(frozen=True, slots=True)
class Built:
    wheel: Path
    sdist: Path


def run(*command: str | Path, cwd: Path, environ: Mapping[str, str] | None = None) -> str:
    """What the command prints; where it needs a package that cannot be had, the test is skipped, in CI it fails."""
    env = {"PATH": os.environ["PATH"], "HOME": str(cwd), **(environ or {})}
    kept = ("PIP_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT", "REQUESTS_CA")
    env |= {name: value for name, value in os.environ.items() if name.upper().startswith(kept)}
    end = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    said = end.stdout + end.stderr
    if end.returncode != 0 and _OFFLINE.search(said) and not os.environ.get("CI"):
        pytest.skip(reason=f"the package index cannot be reached: {said[-300:]}")
    assert end.returncode == 0, said
    return said


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    wish = {"SIDECAR_COMPILE": "always" if _CAN_COMPILE else "never"}
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder, environ=wish)
    (wheel,), (sdist,) = list(folder.glob("*.whl")), list(folder.glob("*.tar.gz"))
    return Built(wheel, sdist)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of a fresh environment that has the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", built.wheel, cwd=folder)
    return python.parent


@pytest.fixture(scope="module")
def plain(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the sdist that was built as on a machine without a compiler."""
    folder = tmp_path_factory.mktemp("plain")
    run(
        *(
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--disable-pip-version-check",
            "--no-cache-dir",
            "--no-deps",
        ),
        *("--wheel-dir", folder, built.sdist),
        cwd=folder,
        environ={"SIDECAR_COMPILE": "never"},
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def sources() -> set[str]:
    """The package's files in this clone, without what was compiled here."""
    return {
        str(path.relative_to(ROOT))
        for path in compiled.PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in {".so", ".pyc"} and path.name != compiled.RECORD
    }


def package_in(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("sidecar/")}


def test_index_would_take_both_without_a_complaint(built: Built, tmp_path: Path) -> None:
    said = run(sys.executable, "-m", "twine", "check", "--strict", built.wheel, built.sdist, cwd=tmp_path)

    assert said.count("PASSED") == 2
    assert "WARNING" not in said


def test_wheel_has_the_package_with_its_files_and_nothing_else(built: Built) -> None:
    names = zipfile.ZipFile(built.wheel).namelist()
    made = {f"sidecar/{name}{_SUFFIX}" for name in (*setup.COMPILED, compiled.LIBRARY)} | {f"sidecar/{compiled.RECORD}"}

    assert package_in(built.wheel) == sources() | (made if _CAN_COMPILE else set())
    assert "sidecar/py.typed" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"sidecar", "hermes_sidecar"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_plain_wheel_fits_every_machine_and_has_the_sources_alone(plain: Path) -> None:
    assert plain.name.endswith("-py3-none-any.whl")
    assert package_in(plain) == sources()


def test_sdist_has_what_a_wheel_is_made_of(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE"} | sources() <= names
    assert not {name for name in names if name.endswith((".so", ".c", compiled.RECORD))}


def test_installed_command_tells_its_version_and_whether_it_is_compiled(installed: Path, tmp_path: Path) -> None:
    form = "compiled" if _CAN_COMPILE else "pure Python"

    assert run(installed / "hermes-sidecar", "--version", cwd=tmp_path) == f"hermes-sidecar {__version__} ({form})\n"


def test_installed_modules_are_those_that_were_compiled(installed: Path, tmp_path: Path) -> None:
    said = run(installed / "python", "-c", "from sidecar import compiled as c; print(c.stale())", cwd=tmp_path)

    assert said == "[]\n"


def test_installed_module_runs_and_checks_the_configuration(installed: Path, tmp_path: Path) -> None:
    said = run(installed / "python", "-m", "sidecar", "check", cwd=tmp_path)

    assert "[listen]" in said


def test_installed_demo_proves_continuity_and_serves_its_page(installed: Path, tmp_path: Path) -> None:
    said = run(
        installed / "hermes-sidecar", "demo", "--once", cwd=tmp_path, environ={"HERMES_SIDECAR_LISTEN__PORT": "0"}
    )

    assert "OK: Both turns landed in session" in said


def test_plain_wheel_proves_continuity_as_well(plain: Path, installed: Path, tmp_path: Path) -> None:
    python = installed / "python"  # for the libraries; the sidecar is the plain one, which stands before the other
    where = {"PYTHONPATH": str(tmp_path / "plain"), "HERMES_SIDECAR_LISTEN__PORT": "0"}
    target = ("--no-deps", "--target", tmp_path / "plain")
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *target, plain, cwd=tmp_path)

    version = run(python, "-m", "sidecar", "--version", cwd=tmp_path, environ=where)
    said = run(python, "-m", "sidecar", "demo", "--once", cwd=tmp_path, environ=where)

    assert version == f"hermes-sidecar {__version__} (pure Python)\n"
    assert "OK: Both turns landed in session" in said
