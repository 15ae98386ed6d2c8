"""The document of `/capabilities` as tests hold it: against its schema, and in short."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema

from tests.support.raw_client import ask
from tests.support.scripted_upstream import Received
from tests.support.wire import LIMIT_S

SCHEMA: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[2] / "docs" / "reference" / "capabilities.schema.json").read_text("utf-8")
)
_VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def conforming(document: Any) -> dict[str, Any]:
    """`document`, if it is what the schema promises; else the test fails with every difference."""
    differences = [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message}" for error in _VALIDATOR.iter_errors(document)
    ]
    assert not differences, "\n".join(differences)
    assert isinstance(document, dict)
    return document


def in_short(document: Mapping[str, Any]) -> str:
    """The capabilities as signs: `+` there, `-` not there, `?` not known; core, then enhanced."""
    signs = {True: "+", False: "-", None: "?"}
    layers = (document["coreCapabilities"], document["enhancedCapabilities"])
    return " ".join("".join(signs[value] for value in layer.values()) for layer in layers)


async def refreshed(url: str, *, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """What the sidecar finds now."""
    answer = await ask(url, "POST", "/capabilities/refresh", limit_s=limit_s)
    assert answer.status == 200
    return conforming(answer.json())


async def known(url: str) -> dict[str, Any]:
    """What it says from memory."""
    answer = await ask(url, "GET", "/capabilities")
    assert (answer.status, answer.value("Content-Type")) == (200, "application/json; charset=utf-8")
    return conforming(answer.json())


def count_probes(requests: Sequence[Received]) -> int:
    """How many probes an upstream has seen: each begins with a path that cannot exist."""
    return sum(request.target.startswith(b"/hermes-sidecar-") for request in requests)
