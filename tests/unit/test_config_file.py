"""config/sidecar.toml is the reference for people: complete, equal to the defaults, and valid in every line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import trustme

from sidecar.config import Settings, load
from sidecar.config.words import keys

FILE = Path(__file__).parents[2] / "config" / "sidecar.toml"

# A key that is commented out, as `# key = value` at the start of a line. Prose never looks like that.
_OPTIONAL = re.compile(r"^# ([a-z_]+ = .+)$", re.MULTILINE)


def every_key_spoken_out() -> str:
    return _OPTIONAL.sub(r"\1", FILE.read_text())


def test_file_is_equal_to_the_defaults() -> None:
    assert load(FILE, {}).model_dump() == Settings().model_dump()


def test_every_setting_stands_in_the_file() -> None:
    values = tomllib.loads(every_key_spoken_out())

    assert {f"{section}.{key}" for section, part in values.items() for key in part} == keys()


def test_only_settings_without_a_default_are_commented_out() -> None:
    without_default = {
        f"{name}.{key}"
        for name, section in Settings().model_dump().items()
        for key, value in section.items()
        if value is None
    }
    written = {f"{section}.{key}" for section, part in tomllib.loads(FILE.read_text()).items() for key in part}

    assert keys() - written == without_default


def test_optional_keys_are_valid_once_spoken_out(tmp_path: Path) -> None:
    for name in ("client-tokens", "gateway-token"):
        (tmp_path / name).write_text("t0ken\n")
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    path = tmp_path / "sidecar.toml"
    path.write_text(every_key_spoken_out().replace("/etc/hermes-sidecar", str(tmp_path)))

    settings = load(path, {}).model_dump()

    assert [key for section in settings.values() for key, value in section.items() if value is None] == []


@pytest.mark.parametrize("key", sorted(keys()))
def test_every_setting_has_a_comment_of_its_own(key: str) -> None:
    section, name = key.split(".")
    part = FILE.read_text().split(f"[{section}]\n", 1)[1]

    above = part[: re.search(rf"^(# )?{name} = ", part, re.MULTILINE).start()].rstrip("\n")  # type: ignore[union-attr]

    # [admin] explains both of its keys at once, above the section.
    assert section == "admin" or above.rsplit("\n", 1)[-1].startswith("# ")
