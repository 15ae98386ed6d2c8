"""What is said about compiled modules: which there are, and which are of another source than the one beside them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import setup
from sidecar import compiled
from tests.support.documents import ROOT

OURS = EXTENSION_SUFFIXES[0]
"""What the name of a module that was compiled for this Python ends in."""
SETUP = "../setup.py"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Two sources, both compiled and recorded, beside a setup.py; one more that stays Python."""
    folder = tmp_path / "sidecar"
    (folder / "relay").mkdir(parents=True)
    for name in ("relay/wire", "relay/pool", "relay/tunnel"):
        (folder / f"{name}.py").write_text(f"# {name}\n")
    for name in ("relay/wire", "relay/pool", compiled.LIBRARY):
        (folder / f"{name}{OURS}").touch()
    (tmp_path / "setup.py").write_text("# the list\n")
    (folder / compiled.RECORD).write_text(compiled.record(["relay/wire.py", "relay/pool.py", SETUP], folder))
    return folder


def test_compiled_modules_are_named_without_the_library_that_they_share(package: Path) -> None:
    assert compiled.modules(package) == ["relay/pool", "relay/wire"]


def test_what_was_just_compiled_is_current(package: Path) -> None:
    assert compiled.stale(package) == []
    assert compiled.is_current(package)


def test_changed_source_is_stale_whatever_the_times_say(package: Path) -> None:
    (package / "relay/wire.py").write_text("# changed\n")
    (package / f"relay/wire{OURS}").touch()

    assert compiled.stale(package) == ["relay/wire"]
    assert not compiled.is_current(package)


def test_touched_source_is_not_stale(package: Path) -> None:
    (package / "relay/wire.py").touch()

    assert compiled.stale(package) == []


def test_compiled_module_without_its_source_is_stale(package: Path) -> None:
    (package / "relay/wire.py").unlink()

    assert compiled.stale(package) == ["relay/wire"]


def test_compiled_modules_without_a_record_are_all_stale(package: Path) -> None:
    (package / compiled.RECORD).unlink()

    assert compiled.stale(package) == ["relay/pool", "relay/wire"]
    assert not compiled.is_current(package)


def test_compiled_module_that_was_not_recorded_is_stale(package: Path) -> None:
    (package / f"relay/tunnel{OURS}").touch()

    assert compiled.stale(package) == ["relay/tunnel"]
    assert not compiled.is_current(package)


def test_other_setup_makes_nothing_stale_but_asks_for_compiling(package: Path) -> None:
    (package / SETUP).write_text("# another list\n")

    assert compiled.stale(package) == []
    assert not compiled.is_current(package)


def test_module_compiled_for_another_python_is_not_compiled(package: Path) -> None:
    (package / f"relay/wire{OURS}").rename(package / "relay/wire.cpython-39-other.so")

    assert compiled.modules(package) == ["relay/pool"]
    assert not compiled.is_current(package)


def test_pure_package_is_neither_stale_nor_current(tmp_path: Path) -> None:
    (tmp_path / "wire.py").touch()

    assert (compiled.modules(tmp_path), compiled.stale(tmp_path)) == ([], [])
    assert not compiled.is_current(tmp_path)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is GNU's")
def test_record_is_one_that_sha256sum_understands(package: Path) -> None:
    check = subprocess.run(["sha256sum", "--check", compiled.RECORD], cwd=package, capture_output=True, timeout=10)

    assert check.returncode == 0, check.stderr


def test_all_modules_that_setup_names_exist() -> None:
    assert list(setup.COMPILED) == sorted(set(setup.COMPILED))
    assert [name for name in setup.COMPILED if not (compiled.PACKAGE / f"{name}.py").is_file()] == []


def test_only_compiled_modules_have_constants_that_are_compiled_in() -> None:
    """A `Final` of another module would be, too, and changing it there would change nothing here until a compile."""
    with_constants = [
        path for path in compiled.PACKAGE.rglob("*.py") if re.search(r"\bFinal\b", path.read_text("utf-8"))
    ]

    names = {path.relative_to(compiled.PACKAGE).with_suffix("").as_posix() for path in with_constants}
    assert names <= set(setup.COMPILED)


def test_all_of_them_are_compiled_or_none() -> None:
    assert compiled.modules() in ([], list(setup.COMPILED))


def test_python_takes_what_is_said_to_be_compiled() -> None:
    program = "import sidecar.relay.wire as wire; print(wire.__file__)"
    end = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )

    assert end.stdout.strip().endswith(".py") == ("relay/wire" not in compiled.modules())


def test_run_of_the_tests_ends_at_once_where_a_compiled_module_is_stale(package: Path) -> None:
    """The real conftest, beside the made-up package."""
    for name in ("__init__", "compiled"):
        (package / f"{name}.py").write_bytes((compiled.PACKAGE / f"{name}.py").read_bytes())
    tests = package.parent / "tests"
    tests.mkdir()
    (tests / "conftest.py").write_bytes((ROOT / "tests" / "conftest.py").read_bytes())
    (package / "relay/wire.py").write_text("# changed\n")

    end = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests"],
        cwd=package.parent,
        env={"PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert end.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: sidecar/relay/wire.py is not what was compiled" in end.stderr
    assert "make compiled" in end.stderr
