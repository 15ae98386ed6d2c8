"""Judging answers, pure: what an answer to a probe proves, compared with the answer of a path that cannot exist.

Law: what a backend answers to everything proves nothing. A page, a redirect or a 401 for every path is no capability.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from sidecar.capabilities.model import Cause, Finding

Failure = Literal["unreachable", "timeout", "broken"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back on one question; at most 64 KiB of the body."""

    path: str
    status: int | None = None
    content_type: str = ""
    allow: str = ""
    server: str = ""
    body: bytes = b""
    is_whole: bool = True
    failure: Failure | None = None
    detail: str = ""
    """For a failure: what happened, in words."""
    asked_at: float = 0.0

    @property
    def is_success(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    @property
    def is_page(self) -> bool:
        return "html" in self.content_type or self.body.lstrip()[:15].lower().startswith((b"<!doctype", b"<html"))

    @property
    def document(self) -> Any:
        """The body as JSON; `_NO_JSON` where it is none or was cut."""
        if not self.is_whole or self.is_page:
            return _NO_JSON
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return _NO_JSON


_NO_JSON = object()
_LIST_BEGINS = re.compile(rb'\s*(?:\[|\{(?!\s*"error"))')
_DOCUMENT_FAMILIES = ("memory", "config")
"""Families whose answer is one document rather than a list."""


def is_alike(answer: Answer, control: Answer) -> bool:
    """Whether the backend treats this path like one that cannot exist."""
    if answer.status is None or answer.status != control.status:
        return False
    if not answer.is_success:
        return True
    if answer.is_page and control.is_page:
        return True
    if answer.body == control.body or not (answer.is_whole or control.is_whole):
        return True
    ours, theirs = answer.document, control.document
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() or ("error" in ours and "error" in theirs)
    return isinstance(ours, list) and isinstance(theirs, list)


def judge_family(name: str, answer: Answer, control: Answer) -> Finding:
    """What an answer to `GET /api/<family>` proves."""
    if answer.failure is not None:
        return _finding(answer, None, Cause.FAILED, f"it could not be asked: {answer.detail}")
    if answer.status in (401, 403):
        if is_alike(answer, control):
            return _finding(answer, None, Cause.CREDENTIALS, "it asks for credentials on every path, so nothing shows")
        return _finding(answer, None, Cause.CREDENTIALS, "the route asks for authentication that the sidecar has not")
    if answer.status in (404, 410, 501):
        return _finding(answer, False, Cause.NO_ROUTE, "there is no such route")
    if answer.status == 405:
        if is_alike(answer, control):
            return _finding(answer, None, Cause.UNPROVEN, "it answers every path with 405")
        return _finding(answer, True, Cause.PRESENT, "the route exists", probed=True)
    if not answer.is_success:
        return _finding(answer, None, Cause.FAILED, f"it answers {answer.status}, which shows nothing")
    if is_alike(answer, control):
        if answer.is_page:
            return _finding(answer, None, Cause.UNPROVEN, "it answers every path with a web page")
        return _finding(answer, False, Cause.NO_ROUTE, "it answers like a path that does not exist")
    if _is_content(name, answer):
        return _finding(answer, True, Cause.PRESENT, "the route answers", probed=True)
    return _finding(answer, None, Cause.UNPROVEN, "it answers something that is not such a list")


def _is_content(name: str, answer: Answer) -> bool:
    if not answer.is_whole:  # a long list was cut at the limit: its beginning must do
        return "json" in answer.content_type and _LIST_BEGINS.match(answer.body) is not None
    document = answer.document
    if isinstance(document, list):
        return True
    if not isinstance(document, dict) or document.get("error"):
        return False
    if any(isinstance(value, list) for value in document.values()):
        return True
    return name in _DOCUMENT_FAMILIES and bool(document)


def judge_models(answer: Answer, control: Answer) -> Finding:
    """What an answer to `GET /v1/models` proves."""
    if answer.failure is not None:
        return _finding(answer, None, Cause.FAILED, f"it could not be asked: {answer.detail}")
    if answer.status in (401, 403):
        return _finding(answer, None, Cause.CREDENTIALS, "the route asks for authentication that the sidecar has not")
    if answer.is_success and not is_alike(answer, control) and models_of(answer) is not None:
        return _finding(answer, True, Cause.PRESENT, "the models are listed", probed=True)
    if answer.is_success and not answer.is_whole and not is_alike(answer, control) and _is_content("models", answer):
        return _finding(answer, True, Cause.PRESENT, "a long list of models begins", probed=True)
    if answer.status in (404, 405, 501) or (answer.is_success and is_alike(answer, control) and not answer.is_page):
        return _finding(answer, False, Cause.NO_ROUTE, "there is no such route")
    return _finding(answer, None, Cause.UNPROVEN, "it answers something that is no list of models")


def models_of(answer: Answer) -> list[dict[str, Any]] | None:
    """The models in an OpenAI list, or None if the answer is none."""
    document = answer.document
    listed = document.get("data", document.get("models")) if isinstance(document, dict) else document
    if not isinstance(listed, list) or (isinstance(document, dict) and document.get("error")):
        return None
    return [model for model in listed if isinstance(model, dict)]


def judge_chat(answer: Answer, control: Answer, models: Finding, *, is_declared: bool) -> Finding:
    """What an answer to `GET /v1/chat/completions` proves; a POST would cost a model's answer."""
    if is_declared:
        return _finding(answer, True, Cause.PRESENT, "the backend declares it", evidence="declared")
    takes_post = answer.status == 405 and ("POST" in answer.allow or not answer.allow)
    if takes_post and (not is_alike(answer, control) or ("POST" in answer.allow and "POST" not in control.allow)):
        return _finding(answer, True, Cause.PRESENT, "the route takes POST", probed=True)
    if answer.status in (400, 422) and not is_alike(answer, control):
        return _finding(answer, True, Cause.PRESENT, "the route answers, and asks for a body", probed=True)
    if answer.status in (401, 403) and not is_alike(answer, control):
        return _finding(answer, True, Cause.PRESENT, "the route answers, and asks for a key", probed=True)
    if models.available is True:
        return _finding(answer, True, Cause.PRESENT, "the backend lists models as OpenAI does", probed=True)
    if answer.failure is not None:
        return _finding(answer, None, Cause.FAILED, f"it could not be asked: {answer.detail}")
    if answer.status in (401, 403):
        return _finding(answer, None, Cause.CREDENTIALS, "it asks for credentials on every path, so nothing shows")
    if answer.status == 404:
        return _finding(answer, False, Cause.NO_ROUTE, "there is no such route")
    if answer.is_page:
        return _finding(answer, False, Cause.UNPROVEN, "a web page answers there")
    return _finding(answer, None, Cause.UNPROVEN, f"it answers {answer.status}, which shows nothing")


def judge_health(answer: Answer, control: Answer, models: Finding) -> Finding:
    """What an answer to a health route proves; a backend that lists its models is well enough without one."""
    if answer.is_success and not answer.is_page and not is_alike(answer, control):
        return _finding(answer, True, Cause.PRESENT, "the health route answers", probed=True)
    if answer.status is not None and answer.status >= 500:
        return _finding(answer, False, Cause.FAILED, f"the health route answers {answer.status}")
    if models.available is True:
        return Finding(
            True, "probe", Cause.PRESENT, "it has no health route, but lists models", models.path, models.http_status,
            "gateway", models.checked_at,
        )  # fmt: skip
    if answer.failure is not None:
        return _finding(answer, None, Cause.FAILED, f"it could not be asked: {answer.detail}")
    if answer.status == 404:
        return _finding(answer, False, Cause.NO_ROUTE, "there is no such route")
    return _finding(answer, None, Cause.UNPROVEN, f"it answers {answer.status}, which shows nothing")


def _finding(
    answer: Answer,
    available: bool | None,
    cause: Cause,
    reason: str,
    *,
    probed: bool = False,
    evidence: Literal["declared", "probe", "none"] = "none",
) -> Finding:
    if probed or available is False:
        evidence = "probe"
    return Finding(
        available,
        evidence,
        cause,
        reason,
        answer.path,
        answer.status,
        "gateway" if available else None,
        answer.asked_at or None,
    )


@dataclass(frozen=True, slots=True)
class Identity:
    """What a backend says of itself."""

    kind: str
    version: str | None = None
    images: bool | None = None
    images_path: str | None = None


_TOKEN_IN_PAGE = re.compile(rb'__HERMES_SESSION_TOKEN__\s*=\s*"([!-~]{8,512}?)"')


def dashboard_token(page: Answer) -> bytes | None:
    """The session token in the dashboard's page, or None."""
    match = _TOKEN_IN_PAGE.search(page.body) if page.is_success else None
    return match[1] if match else None


def is_dashboard_page(page: Answer) -> bool:
    return page.is_page and b"__HERMES_SESSION_TOKEN__" in page.body


def declared_by(answer: Answer) -> dict[str, Any] | None:
    """The features in hermes-agent's `/v1/capabilities`, or None if this is none."""
    document = answer.document
    if not answer.is_success or not isinstance(document, dict):
        return None
    features = document.get("features")
    if not isinstance(features, dict) or not str(document.get("object", "")).endswith("capabilities"):
        return None
    return features


def text(answer: Answer, key: str) -> str | None:
    """A short string from a JSON object."""
    document = answer.document
    value = document.get(key) if answer.is_success and isinstance(document, dict) else None
    return value if isinstance(value, str) and len(value) <= 64 and value.isprintable() else None


def is_litellm(liveliness: Answer, control: Answer) -> bool:
    return liveliness.is_success and not is_alike(liveliness, control) and b"alive" in liveliness.body[:200]


def may_ask_health(liveliness: Answer, control: Answer, models: Answer) -> bool:
    """Whether `/health` is certain to be free.

    LiteLLM's calls every model, and is told by its `/health/liveliness`. SGLang's generates a token.
    """
    if owner_of(models) == "sglang":
        return False
    if liveliness.is_success:
        return is_alike(liveliness, control)
    return liveliness.status in (404, 405)


def owner_of(models: Answer) -> str:
    """`owned_by` of the first model, in lower case; empty where there is none."""
    for model in models_of(models) or []:
        return str(model.get("owned_by", "")).lower()[:64]
    return ""


def reads_images(models: Answer) -> bool | None:
    """Whether some model's metadata in a model list says that it reads images; None where none says anything."""
    if not models.is_whole:  # OpenRouter's list is far longer than what is read
        return True if models.is_success and _IMAGE_INPUT.search(models.body) else None
    verdict: bool | None = None
    for model in models_of(models) or []:
        modalities = _input_modalities(model)
        if modalities is not None:
            verdict = bool(verdict) or "image" in modalities
        elif model.get("type") in ("vlm", "llm"):  # LM Studio, /api/v0/models
            verdict = bool(verdict) or model["type"] == "vlm"
        elif (
            model.get("supports_vision") is True
        ):  # LiteLLM, /model_group/info; its False means "not in my list" as well
            verdict = True
    return verdict


def props_read_images(props: Answer) -> bool | None:
    """The same from llama.cpp's `/props`."""
    document = props.document
    modalities = document.get("modalities") if props.is_success and isinstance(document, dict) else None
    vision = modalities.get("vision") if isinstance(modalities, dict) else None
    return vision if isinstance(vision, bool) else None


_IMAGE_INPUT = re.compile(rb'"input_modalities"\s*:\s*\[[^\]]{0,200}"image"')


def _input_modalities(model: dict[str, Any]) -> list[Any] | None:
    """As OpenRouter and llama.cpp publish them."""
    architecture = model.get("architecture")
    modalities = architecture.get("input_modalities") if isinstance(architecture, dict) else None
    return modalities if isinstance(modalities, list) else None
