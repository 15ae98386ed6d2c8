"""The unit files, judged by the real systemd-analyze and held against what the sidecar really knows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar import config
from tests.support.tools import needed

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
SYSTEM, SOCKET, USER = "hermes-sidecar.service", "hermes-sidecar.socket", "user/hermes-sidecar.service"
MOST_EXPOSURE = 1.5

pytestmark = pytest.mark.e2e


def analyze(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    program = needed("systemd-analyze", package="systemd")
    return subprocess.run(
        [program, *arguments],
        env={"PATH": os.environ["PATH"], "HOME": str(home), "XDG_RUNTIME_DIR": str(home)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def lines_of(unit: str) -> dict[str, list[str]]:
    """The unit's settings by key, comments left out."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / unit).read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def set_up(directory: Path) -> None:
    """The units as somebody has them who put the sidecar where the tests have it."""
    command = Path(sys.executable).with_name("hermes-sidecar")
    assert command.is_file()
    for unit in (SYSTEM, SOCKET, USER):
        text = (UNITS / unit).read_text()
        (directory / unit).parent.mkdir(exist_ok=True)
        (directory / unit).write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={command}", text, flags=re.MULTILINE))


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["verify", "--man=no", SYSTEM, SOCKET], id="system"),
        pytest.param(["--user", "verify", "--man=no", USER], id="user"),
    ],
)
def test_systemd_has_nothing_to_say_against_the_units(arguments: list[str], tmp_path: Path) -> None:
    set_up(tmp_path)

    judged = analyze(*(str(tmp_path / word) if "." in word else word for word in arguments), home=tmp_path)

    assert (judged.returncode, judged.stdout + judged.stderr) == (0, "")


def test_misspelt_setting_would_be_noticed(tmp_path: Path) -> None:
    set_up(tmp_path)
    unit = tmp_path / SYSTEM
    unit.write_text(unit.read_text().replace("ProtectHome=", "ProtectHomes="))

    assert "ProtectHomes" in analyze("verify", "--man=no", str(unit), home=tmp_path).stderr


def test_exposure_is_small(tmp_path: Path) -> None:
    """`systemd-analyze security` counts from 0 (nothing left to take away) to 10."""
    judged = analyze(
        "security",
        "--offline=true",
        "--no-pager",
        f"--threshold={MOST_EXPOSURE * 10:.0f}",
        str(UNITS / SYSTEM),
        home=tmp_path,
    )

    exposure = re.search(r"Overall exposure level for hermes-sidecar.service: ([\d.]+)", judged.stdout)
    assert exposure is not None, judged.stderr
    assert float(exposure[1]) <= MOST_EXPOSURE
    assert judged.returncode == 0


@pytest.mark.parametrize("unit", [SYSTEM, USER])
def test_units_name_a_command_that_exists(unit: str) -> None:
    (start,) = lines_of(unit)["ExecStart"]
    program, *arguments = start.split()
    answered = subprocess.run(
        [sys.executable, "-m", "sidecar", *arguments, "--help"], capture_output=True, timeout=20, check=False
    )

    assert Path(program).name == "hermes-sidecar"
    assert answered.returncode == 0


@pytest.mark.parametrize("unit", [SYSTEM, SOCKET, USER])
def test_units_name_only_settings_that_exist(unit: str) -> None:
    described = config.describe(config.Settings())
    text = (UNITS / unit).read_text()
    section_names = "|".join(config.Settings.model_fields)

    for section, key in re.findall(rf"\b({section_names})\.([a-z_]+)\b", text):
        assert re.search(rf"^\[{section}\]\n(?:.+\n)*(?:# )?{key} ", described, re.MULTILINE), f"{section}.{key}"
    for name in re.findall(r"HERMES_SIDECAR_([A-Z_]+)", text):
        section, _, key = name.lower().partition("__")
        assert (section, key) == ("gateway", "token") or key in type(getattr(config.Settings(), section)).model_fields


def test_credentials_have_the_names_that_the_sidecar_looks_for(tmp_path: Path) -> None:
    for value in lines_of(SYSTEM)["LoadCredential"]:
        credential = tmp_path / value.partition(":")[0]
        credential.write_text("a-secret-of-the-test\n")
        credential.chmod(0o400)

    settings = config.from_mapping({}, {"CREDENTIALS_DIRECTORY": str(tmp_path)})

    assert len(list(tmp_path.iterdir())) == 2
    assert settings.gateway.token is not None
    assert [client.token for client in settings.listen.client_tokens] == [b"a-secret-of-the-test"]


def test_socket_unit_holds_the_port_that_the_sidecar_would_bind() -> None:
    listen = config.Settings().listen

    assert lines_of(SOCKET)["ListenStream"] == [f"{listen.host}:{listen.port}"]


@pytest.mark.parametrize("unit", [SYSTEM, USER])
def test_systemd_waits_longer_than_the_default_grace(unit: str) -> None:
    (limit_s,) = lines_of(unit)["TimeoutStopSec"]

    assert float(limit_s) > config.Settings().shutdown.grace_s + 10


def test_no_unit_holds_a_secret() -> None:
    for unit in (SYSTEM, SOCKET, USER):
        lines = lines_of(unit)
        assert "Environment" not in lines
        assert not any("TOKEN" in value for values in lines.values() for value in values)
