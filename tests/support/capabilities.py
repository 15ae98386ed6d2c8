"""The document of `/capabilities` as tests hold it: against its schema, and in short."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema

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
