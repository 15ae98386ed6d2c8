"""Programs that some tests need and that pip does not install."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


def needed(*names: str, package: str) -> Path:
    """The first of these programs that is there. Without any the test is skipped; in CI that is a failure instead."""
    for name in names:
        if (found := shutil.which(name)) is not None:
            return Path(found)
    reason = f"{names[0]} is not here (Debian: apt-get install {package})"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
