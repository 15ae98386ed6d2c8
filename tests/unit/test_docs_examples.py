"""Every code block of the docs is at least what it claims to be: settings load, JSON parses, commands exist."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from sidecar import config
from sidecar.config.words import keys, variable
from tests.support.documents import ROOT, Block, blocks, blocks_of, runnable

_PROGRAMS = {
    "curl",
    "docker",
    "export",
    "hermes",
    "hermes-sidecar",
    "install",
    "journalctl",
    "kill",
    "loginctl",
    "make",
    "mkdir",
    "npm",
    "openssl",
    "pip",
    "pipx",
    "podman",
    "pre-commit",
    "promtool",
    "python",
    "sudo",
    "systemctl",
    "systemd-analyze",
}
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=\S*")
_COMMANDS = {"serve", "check", "probe", "verify", "demo", "--version", "--install-completion"}
_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def named(*languages: str) -> pytest.MarkDecorator:
    """A test for each block in these languages."""
    found = blocks(*languages)
    return pytest.mark.parametrize("block", found, ids=[block.place for block in found])


@named("toml")
def test_settings_load(block: Block, tmp_path: Path) -> None:
    """Files that an example names are made first; everything else has to be right as it stands."""
    (tmp_path / "gateway-token").write_text("a-key-of-the-gateway\n")
    (tmp_path / "client-tokens").write_text("ann:a-token-of-hers\n")
    text = block.text.replace("/etc/hermes-sidecar/", f"{tmp_path}/")

    settings = config.from_mapping(tomllib.loads(text))

    assert settings.model_dump(exclude_unset=True)


@named("json")
def test_json_parses(block: Block) -> None:
    assert json.loads(block.text)


@named("yaml")
def test_yaml_parses(block: Block) -> None:
    assert yaml.safe_load(block.text)


@named("python")
def test_python_compiles(block: Block) -> None:
    assert ast.parse(block.text).body


def shell_commands(text: str) -> list[list[str]]:
    """The words of each command, assignments before it left out; a pipe or `&&` begins another one."""
    commands = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        for part in re.split(r"\s(?:\||&&|;)\s", re.sub(r"(^|\s)#.*", "", line)):
            words = part.split()
            while words and _ASSIGNMENT.fullmatch(words[0]):
                del words[0]
            if words:
                commands.append(words)
    return commands


@named("sh", "bash", "console")
def test_shell_is_correct_and_its_commands_exist(block: Block) -> None:
    syntax = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=10, check=False)

    assert syntax.stderr == ""
    for words in shell_commands(block.text):
        program = re.sub(r"^\S*/bin/", "", words[0])
        assert program in _PROGRAMS, words
        if program == "make":
            assert {word for word in words[1:] if "=" not in word} <= _TARGETS, words
        elif program == "hermes-sidecar" and len(words) > 1:
            assert words[1] in _COMMANDS, words


@named("sh", "bash", "console")
def test_variables_of_a_command_are_settings(block: Block) -> None:
    variables = dict(re.findall(r"\b(HERMES_SIDECAR_[A-Z_]+)=(\S+)", block.text))
    variables.pop("HERMES_SIDECAR_CONFIG", None)

    assert config.from_mapping({}, variables)


def test_variables_of_the_container_are_settings() -> None:
    text = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")

    named = set(re.findall(r"HERMES_SIDECAR_[A-Z_]+", text))

    assert named
    assert named <= {variable(key) for key in keys()}


def test_tutorial_and_how_to_have_blocks_that_are_run() -> None:
    folders = {Path(block.page).parent.name for block in runnable("sh", "python", "js", "nginx", "caddy")}

    assert {"tutorial", "how-to"} <= folders


def test_blocks_are_found_with_their_marks_and_without_their_indent() -> None:
    text = (
        "a\n\n1. b\n\n   <!-- run, with x, prints: y, z -->\n   ```sh\n   make demo\n     two\n   ```\n\n"
        "```json\n{}\n```\n"
    )

    first, second = blocks_of("page.md", text)

    assert (first.language, first.text, first.line) == ("sh", "make demo\n  two\n", 6)
    assert first.run is not None
    assert (first.run.needs, first.run.prints) == ("x", "y, z")
    assert (second.language, second.text, second.run) == ("json", "{}\n", None)
