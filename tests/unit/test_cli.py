"""The command line as a person or a script meets it: what it prints, and how it exits."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from sidecar import __version__, cli, compiled
from tests.support.capabilities import conforming

SECRET = "s3cr3t-Marker"
LIMIT_S = 30
NOBODY = "http://127.0.0.1:9"  # the port of an old service that no machine runs any more


def run(*arguments: str, home: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with nothing of this machine's configuration."""
    clean = {"PATH": os.environ["PATH"], "HOME": str(home), **environ}
    command = [sys.executable, "-m", "sidecar", *arguments]
    return subprocess.run(command, env=clean, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_unknown_key_ends_check_and_serve_with_the_nearest_key(tmp_path: Path) -> None:
    config = tmp_path / "sidecar.toml"
    config.write_text("[listen]\nprot = 1\n[gateway]\nurl = 'ftp://h'\n")
    lines = (
        "hermes-sidecar: listen.prot: there is no such key; the nearest known one is listen.port\n"
        "hermes-sidecar: gateway.url: must begin with http:// or https://\n"
    )

    ends = [run(*command, "--config", str(config), home=tmp_path) for command in (["check"], ["serve"], [])]

    assert [(end.returncode, end.stdout, end.stderr) for end in ends] == [(2, "", lines)] * 3


def test_unknown_variable_ends_it(tmp_path: Path) -> None:
    end = run("check", home=tmp_path, HERMES_SIDECAR_PORT="9000")

    assert (end.returncode, end.stdout) == (2, "")
    assert end.stderr == (
        "hermes-sidecar: HERMES_SIDECAR_PORT: there is no such variable;"
        " the nearest known one is HERMES_SIDECAR_LISTEN__PORT\n"
    )


def test_check_shows_what_is_in_effect_and_no_secret(tmp_path: Path) -> None:
    tokens_file = tmp_path / "tokens"
    tokens_file.write_text(f"ann:{SECRET}\n")
    config = tmp_path / "sidecar.toml"
    config.write_text(f"[listen]\nworkers = 3\ntokens_file = '{tokens_file}'\n")

    end = run("check", "--config", str(config), home=tmp_path, HERMES_SIDECAR_GATEWAY__TOKEN=SECRET)

    assert (end.returncode, end.stderr) == (0, "")
    assert {"workers = 3", "# client tokens: set", "# token: set", f"# file: {config}"} & {
        line.split(",")[0] for line in end.stdout.splitlines()
    } == {"workers = 3", "# client tokens: set", "# token: set", f"# file: {config}"}
    assert SECRET not in end.stdout


def test_config_of_the_command_beats_that_before_it(tmp_path: Path) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text("[listen]\nport = 1\n")
    second.write_text("[listen]\nport = 2\n")

    before = run("--config", str(first), "check", home=tmp_path)
    both = run("--config", str(first), "check", "--config", str(second), home=tmp_path)

    assert ["port = 1" in before.stdout.splitlines(), "port = 2" in both.stdout.splitlines()] == [True, True]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        pytest.param(["chek"], "No such command 'chek'", id="unknown-command"),
        pytest.param(["check", "--port", "1"], "No such option: --port", id="unknown-option"),
        pytest.param(["serve", f"--token={SECRET}"], "No such option: --token", id="secret-as-an-option"),
        pytest.param(["check", "--config"], "Option '--config' requires an argument", id="option-without-value"),
        pytest.param(["check", "--config", "/no/such.toml"], "/no/such.toml: the file cannot be read", id="no-file"),
    ],
)
def test_unusable_command_line_is_one_line_and_exit_2(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    end = run(*arguments, home=tmp_path)

    assert (end.returncode, end.stdout, end.stderr.count("\n")) == (2, "", 1)
    assert end.stderr.startswith(f"hermes-sidecar: {complaint}")
    assert SECRET not in end.stderr


@pytest.mark.parametrize("command", [[], ["serve"], ["check"], ["probe"], ["verify"], ["demo"]])
def test_help_offers_the_config_and_no_option_for_a_secret(command: list[str], tmp_path: Path) -> None:
    end = run(*command, "--help", home=tmp_path)

    options = {word for word in end.stdout.split() if word.startswith("--")}
    allowed = {"--config", "--help", "--version", "--once", "--json", "--rotation"}
    allowed |= {"--install-completion", "--show-completion"}
    assert (end.returncode, end.stderr, "--config" in options, options - allowed) == (0, "", True, set())


def test_probe_of_nothing_is_words_and_exit_1(tmp_path: Path) -> None:
    end = run("probe", home=tmp_path, HERMES_SIDECAR_GATEWAY__URL=NOBODY, HERMES_SIDECAR_GATEWAY__TOKEN=SECRET)

    assert (end.returncode, end.stderr) == (1, "")
    assert end.stdout.startswith(f"The gateway at {NOBODY} could not be reached: nothing listens there")
    assert "\nStatus     disconnected\n" in end.stdout
    assert end.stdout.endswith("\nNext: Start the gateway (hermes gateway run), or correct gateway.url.\n")
    assert [mark in end.stdout for mark in ("\x1b", SECRET, "Traceback")] == [False] * 3


def test_probe_as_json_is_the_document_of_the_capabilities_page(tmp_path: Path) -> None:
    end = run("probe", "--json", home=tmp_path, HERMES_SIDECAR_GATEWAY__URL=NOBODY)

    document = conforming(json.loads(end.stdout))
    assert (end.returncode, end.stderr, document["status"]) == (1, "", "disconnected")


def test_probe_is_coloured_on_a_terminal_and_as_wide_as_that(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 60, 0, 0))
        subprocess.run(
            [sys.executable, "-m", "sidecar", "probe"],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
                "TERM": "xterm",
                "HERMES_SIDECAR_GATEWAY__URL": NOBODY,
            },
            stdout=theirs,
            timeout=LIMIT_S,
            check=False,
        )
        os.write(theirs, b"end")  # so that there is something to read in any case
        shown = os.read(ours, 100_000).decode()
    finally:
        os.close(ours)
        os.close(theirs)

    assert "\x1b[31mdisconnected\x1b[0m" in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert max(len(line) for line in plain if not line.startswith("Gateway ")) <= 60


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    heavy = ("aiohttp", "pydantic", "sidecar.config", "rich")
    program = (
        "import sys; from sidecar.cli import main; code = main(['--help']);"
        f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr); sys.exit(code)"
    )

    end = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=Path.cwd()
    )

    assert (end.returncode, end.stderr) == (0, "[]\n")


@pytest.mark.parametrize(("modules", "form"), [([], "pure Python"), (["relay/wire"], "compiled")])
def test_version_says_whether_the_hot_path_is_compiled(
    modules: list[str], form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiled, "modules", lambda: modules)

    code = cli.main(["--version"])

    assert (code, capsys.readouterr().out) == (0, f"hermes-sidecar {__version__} ({form})\n")


def test_reader_that_leaves_is_no_traceback(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    try:
        end = subprocess.run(
            [sys.executable, "-m", "sidecar", "check"],
            env=environ,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    finally:
        os.close(writer)

    assert (end.returncode, end.stderr) == (1, "")
