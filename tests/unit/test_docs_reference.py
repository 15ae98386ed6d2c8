"""The reference says what the code does: every setting with its default, every error, word, command and sentence."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from sidecar import cli, config, faults
from sidecar.capabilities.model import CORE, ENHANCED, STATUSES, Picture
from sidecar.capabilities.report import document
from sidecar.faults import Fault, FaultCode
from sidecar.relay.destinations import OWN_PATHS, OWN_TREE
from sidecar.telemetry.record import End
from tests.support.documents import ROOT, pages, rows_of, text_of

_ROW = re.compile(r"^\| `([a-z_.]+)`[^|]*\| (.+?) \| (.+) \|$", re.MULTILINE)
_KEY = re.compile(r"`(?:\[)?((?:listen|gateway|dashboard|session|store|probe|admin|shutdown|log)\.[a-z_]+)\b")
_TEST = re.compile(r"`((?:unit|conformance|integration|e2e)/\w+\.py)::(\w+)`")
SENTENCES = ("docs/how-to/troubleshooting.md", "docs/reference/status-words.md")


def settings_with_defaults() -> Iterator[tuple[str, str]]:
    """Each key of the configuration, as `section.key`, with its default as the settings page writes it."""
    section = ""
    for line in config.describe(config.Settings()).splitlines():
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            section = heading[1]
        elif given := re.fullmatch(r"(\w+) = (.+)", line):
            yield f"{section}.{given[1]}", f"`{given[2]}`"
        elif absent := re.fullmatch(r"# (\w+) is not set", line):
            yield f"{section}.{absent[1]}", "not set"


# Errors


@pytest.mark.parametrize("fault", FaultCode, ids=lambda fault: fault.code)
def test_each_error_has_its_row_and_its_section(fault: FaultCode) -> None:
    text = text_of("docs/reference/errors.md")
    section = re.search(rf"^### {fault.code}\n(.+?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE)

    assert f"| [`{fault.code}`](#{fault.code}) | {fault.status} | `{fault.error_type}` |" in text
    assert section is not None
    assert "**When:**" in section[1]
    assert "**Do:**" in section[1]


def test_errors_page_names_no_error_that_does_not_exist() -> None:
    sections = re.findall(r"^### (.+)$", text_of("docs/reference/errors.md"), re.MULTILINE)

    assert sorted(sections) == sorted(fault.code for fault in FaultCode)


def fault_messages() -> list[tuple[str, str]]:
    """Message and code of each fault that `sidecar.faults` makes, with … for what varies."""
    made = []
    for name, factory in inspect.getmembers(faults, inspect.isfunction):
        parameters = inspect.signature(factory).parameters.values()
        if name == "capability_unavailable" or inspect.signature(factory).return_annotation != "Fault":
            continue
        values: list[Any] = [7_237_632 if parameter.annotation in ("int", "float") else "…" for parameter in parameters]
        fault: Fault = factory(
            *(value for value, p in zip(values, parameters, strict=True) if p.kind != p.KEYWORD_ONLY)
        )
        message = re.sub(r"7237632|7\.23763e\+06|7068", "…", fault.message)
        made.append((message, fault.code.code))
    return made


@pytest.mark.parametrize(("message", "code"), fault_messages())
def test_each_message_of_an_error_stands_in_troubleshooting_beside_its_code(message: str, code: str) -> None:
    rows = rows_of(text_of("docs/how-to/troubleshooting.md"))

    assert f"[`{code}`" in [row[1].partition("]")[0] for row in rows if row[0] == message]


# Settings


def test_each_setting_stands_in_the_reference_with_its_real_default() -> None:
    rows = {key: default for key, default, _ in _ROW.findall(text_of("docs/reference/settings.md"))}
    # Four tables do not fit into a cell: the row links to the page that lists them.
    expected = dict(settings_with_defaults()) | {
        "session.sources": "[four headers](headers.md#which-session-id-is-sent)"
    }

    assert rows == expected


def test_default_sources_stand_in_the_headers_reference_in_their_order() -> None:
    text = text_of("docs/reference/headers.md").replace("\n", " ")
    named = [
        f"`{source.header}` (prefix `{source.prefix}`)" if source.prefix else f"`{source.header}`"
        for source in config.Settings().session.sources
    ]

    assert re.search(r",\s+".join(re.escape(name) for name in named), text)


@pytest.mark.parametrize("page", pages())
def test_no_page_names_a_setting_that_does_not_exist(page: str) -> None:
    known = {key for key, _ in settings_with_defaults()}
    told = document(Picture(), "http://127.0.0.1:8642", 0.0)  # /capabilities has a `gateway` and a `dashboard`, too
    known |= {f"{part}.{key}" for part in ("gateway", "dashboard") for key in told[part]}

    named = set(_KEY.findall(text_of(page)))

    assert named - known == set()


# Words


def test_each_status_word_and_capability_stands_on_the_status_page() -> None:
    first_cells = {row[0] for row in rows_of(text_of("docs/reference/status-words.md"))}

    assert {f"`{word}`" for word in (*STATUSES, *CORE, *ENHANCED)} <= first_cells


def test_each_end_of_an_exchange_stands_in_the_glossary() -> None:
    first_cells = {row[0] for row in rows_of(text_of("docs/reference/glossary.md"))}

    assert {f"`{end}`" for end in get_args(End)} <= first_cells


def sentences(module: Path) -> Iterator[str]:
    """The sentences for people in a module's code: texts that end like one, with … for what is put into them."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in formatted for part in ast.walk(node) if part is not node}
    for node in ast.walk(tree):
        if id(node) in docstrings or id(node) in parts:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if text.endswith(".") and " " in text and text.strip(" .…"):
            yield text.strip()


@pytest.mark.parametrize(
    "name",
    [
        "capabilities/wording.py",
        "capabilities/probes.py",
        "process.py",
        "verify/judgement.py",
        "verify/rotation_judgement.py",
        "verify/wording.py",
    ],
)
def test_each_sentence_for_people_stands_in_the_docs(name: str) -> None:
    told = "\n".join(text_of(page) for page in SENTENCES)

    missing = [sentence for sentence in sentences(ROOT / "sidecar" / name) if sentence not in told]

    assert missing == []


def test_sentences_are_found_however_they_are_put_together(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""No sentence for people."""\nA = "One " "sentence."\nB = f"Two: {A}, {\'and x.\'}."\nC = "word."\n'
    )

    assert list(sentences(module)) == ["One sentence.", "Two: …, …."]


# Commands


def help_of(*command: str, capsys: pytest.CaptureFixture[str]) -> tuple[set[str], set[str]]:
    """The options and the commands that `--help` names."""
    assert cli.main([*command, "--help"]) == cli.EXIT_OK
    text = capsys.readouterr().out
    options = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)
    return set(options), set(re.findall(r"^  (\w+) ", text.partition("\nCommands:\n")[2], re.MULTILINE)) - {"Without"}


def options_in(text: str) -> set[str]:
    """The options that the tables in `text` begin their rows with."""
    return {option for row in rows_of(text) for option in re.findall(r"--[a-z-]+", row[0])}


def test_command_line_page_names_what_help_names(capsys: pytest.CaptureFixture[str]) -> None:
    general, _, rest = text_of("docs/reference/command-line.md").partition("\n## Commands\n")
    parts = re.split(r"^### (\w+)$", rest.partition("\n## Exit codes\n")[0], flags=re.MULTILINE)
    told = dict(zip(parts[1::2], parts[2::2], strict=True))

    options, commands = help_of(capsys=capsys)

    assert set(told) == commands
    assert options_in(general) == options
    for name, part in told.items():
        assert options_in(part) | {"--help"} == help_of(name, capsys=capsys)[0], name


def test_command_line_page_names_every_exit_code() -> None:
    told = {row[0] for row in rows_of(text_of("docs/reference/command-line.md").partition("## Exit codes")[2])}

    assert {"0", "1", "2", "130"} == {word for word in told if word.isdigit()}


# Promises


@pytest.mark.parametrize("page", pages())
def test_tests_that_a_page_names_exist(page: str) -> None:
    named = _TEST.findall(text_of(page))

    missing = [
        f"{file}::{name}"
        for file, name in named
        if not re.search(rf"^(?:async )?def {name}\(", text_of(f"tests/{file}"), re.MULTILINE)
    ]

    assert missing == []


def test_every_own_path_stands_on_the_http_page() -> None:
    told = set(re.findall(r"^\| `(?:GET|POST) (/\S*)` \|", text_of("docs/reference/http-behaviour.md"), re.MULTILINE))

    assert told == {path.decode() for path in (*OWN_PATHS, OWN_TREE)}


def test_every_promise_on_the_http_page_names_a_test() -> None:
    text = text_of("docs/reference/http-behaviour.md").partition("## Own paths")[0]

    without = [row for row in rows_of(text) if not _TEST.search(row[-1])]

    assert without == []
