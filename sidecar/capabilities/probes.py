"""The questions: what the gateway and the dashboard are asked, and in which order."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace

from sidecar.capabilities.asking import Place, ask
from sidecar.capabilities.judgement import (
    Answer,
    Identity,
    dashboard_token,
    declared_by,
    is_dashboard_page,
    is_litellm,
    judge_chat,
    judge_family,
    judge_health,
    judge_models,
    may_ask_health,
    owner_of,
    props_read_images,
    reads_images,
    text,
)
from sidecar.capabilities.model import ENHANCED, Cause, DashboardFacts, Finding, GatewayFacts

_CHAT = "/v1/chat/completions"
_DEMO = "hermes-sidecar-demo"
_DASHBOARD_PATHS = {
    "sessions": "/api/sessions",
    "skills": "/api/skills",
    "memory": "/api/memory",
    "config": "/api/config",
    "jobs": "/api/cron/jobs",
}


async def probe_gateway(place: Place) -> GatewayFacts:
    """What the gateway is and can do. Asks about a dozen questions, most of them at once. Never raises."""
    nowhere = f"/hermes-sidecar-{secrets.token_hex(6)}"
    control = await ask(place, nowhere)
    if control.failure is not None:
        return _unreachable(control)
    models = await ask(place, "/v1/models")
    answers = await _ask_all(
        place, f"/api{nowhere}", "/v1/capabilities", _CHAT, "/health/liveliness", "/",
        *(f"/api/{family}" for family in ENHANCED),
    )  # fmt: skip
    api_control, liveliness, front = answers[f"/api{nowhere}"], answers["/health/liveliness"], answers["/"]
    features = declared_by(answers["/v1/capabilities"])
    health = await _health(place, liveliness, control, models)
    says = text(health, "platform") or text(answers["/v1/capabilities"], "platform")
    if says == _DEMO:
        identity = Identity(_DEMO, text(health, "version"))
    elif features is not None or says == "hermes-agent":
        identity = Identity("hermes-agent", text(health, "version"))
    else:
        identity = await _identify(place, control, models, liveliness, front)

    findings = {name: judge_family(name, answers[f"/api/{name}"], api_control) for name in ENHANCED}
    has_api_skills = findings["skills"].available
    if has_api_skills is not True and identity.kind == "hermes-agent":  # LiteLLM's /v1/skills asks its providers
        below_v1 = judge_family("skills", await ask(place, "/v1/skills"), control)
        if below_v1.available is True or below_v1.cause is Cause.CREDENTIALS:
            findings["skills"] = below_v1
    findings["models"] = judge_models(models, control)
    chat_declared = bool(features and features.get("chat_completions"))
    findings["chatCompletions"] = judge_chat(answers[_CHAT], control, findings["models"], is_declared=chat_declared)
    findings["health"] = judge_health(health, control, findings["models"])
    findings["streaming"] = _streaming(features, answers["/v1/capabilities"])
    findings["images"] = _images(identity, models)
    if features:
        findings = {name: _with_declared(name, finding, features) for name, finding in findings.items()}
    return GatewayFacts(
        reachable=True,
        kind=identity.kind,
        version=identity.version,
        trouble=_trouble(identity, control, findings["chatCompletions"]),
        forwards_session_key=bool(features and features.get("session_key_header")),
        findings=findings,
        has_api_skills=has_api_skills,
    )


async def _ask_all(place: Place, *paths: str) -> dict[str, Answer]:
    return dict(zip(paths, await asyncio.gather(*(ask(place, path) for path in paths)), strict=True))


async def _health(place: Place, liveliness: Answer, control: Answer, models: Answer) -> Answer:
    """The health route that costs nothing: some answer `/health` by running a model."""
    if is_litellm(liveliness, control):
        return liveliness
    if may_ask_health(liveliness, control, models):
        return await ask(place, "/health")
    return Answer("/health", failure="broken", detail="it is not certain that asking costs no token")


async def _identify(place: Place, control: Answer, models: Answer, liveliness: Answer, front: Answer) -> Identity:
    """The kind and version of a backend that is no hermes-agent, from what it says of itself."""
    if is_dashboard_page(front):
        status = await ask(place, "/api/status")
        return Identity("hermes-dashboard", text(status, "version"))
    if is_litellm(liveliness, control):
        groups = await ask(place, "/model_group/info")
        return Identity("litellm", images=reads_images(groups), images_path="/model_group/info")
    if front.is_success and b"Ollama is running" in front.body[:200]:
        return Identity("ollama", text(await ask(place, "/api/version"), "version"))
    owner = owner_of(models)
    if owner == "llamacpp" or "llama.cpp" in control.server:
        images = reads_images(models)
        if images is not None:
            return Identity("llama.cpp", images=images, images_path="/v1/models")
        return Identity("llama.cpp", images=props_read_images(await ask(place, "/props")), images_path="/props")
    if owner == "vllm":
        return Identity("vllm", text(await ask(place, "/version"), "version"))
    if owner == "sglang":
        return Identity("sglang")
    if b"Unexpected endpoint" in control.body[:500] or owner == "organization_owner":
        local = await ask(place, "/api/v0/models")
        return Identity("lm-studio", images=reads_images(local), images_path="/api/v0/models")
    if b'"input_modalities"' in models.body and b'"supported_parameters"' in models.body:
        return Identity("openrouter", images=reads_images(models), images_path="/v1/models")
    return Identity("generic", images=reads_images(models), images_path="/v1/models")


def _streaming(features: dict[str, object] | None, declared: Answer) -> Finding:
    if features and features.get("chat_completions_streaming") is True:
        return _declared(declared, "the backend declares it")
    return Finding(reason="nothing has shown it yet", cause=Cause.UNPROVEN)


def _images(identity: Identity, models: Answer) -> Finding:
    if identity.images is None:
        return Finding(reason="the backend does not say", cause=Cause.UNPROVEN)
    cause, reason = (
        (Cause.PRESENT, "a model's metadata says so")
        if identity.images
        else (Cause.NO_ROUTE, "no model's metadata says so")
    )
    return Finding(
        identity.images,
        "declared",
        cause,
        reason,
        identity.images_path,
        200,
        "gateway" if identity.images else None,
        models.asked_at,
    )


_FEATURE_OF = {"sessions": "session_resources", "skills": "skills_api", "chatCompletions": "chat_completions"}


def _with_declared(name: str, finding: Finding, features: dict[str, object]) -> Finding:
    """A feature that the backend declares and the sidecar could not see for itself, for want of a key, say."""
    feature = _FEATURE_OF.get(name)
    if feature is None or finding.available is not None or features.get(feature) is not True:
        return finding
    return replace(
        finding,
        available=True,
        evidence="declared",
        cause=Cause.PRESENT,
        served_by="gateway",
        reason="the backend declares it",
    )


def _declared(answer: Answer, reason: str) -> Finding:
    return Finding(True, "declared", Cause.PRESENT, reason, answer.path, answer.status, "gateway", answer.asked_at)


def _unreachable(control: Answer) -> GatewayFacts:
    checked_at = control.asked_at
    gone = Finding(None, "none", Cause.UNREACHABLE, "the gateway could not be asked", checked_at=checked_at)
    findings: dict[str, Finding] = dict.fromkeys(("models", "streaming", "images", *ENHANCED), gone)
    down = Finding(False, "probe", Cause.UNREACHABLE, control.detail, checked_at=checked_at)
    findings |= {"health": down, "chatCompletions": down}
    trouble = control.detail if control.failure == "unreachable" else f"The gateway does not answer: {control.detail}."
    return GatewayFacts(
        reachable=control.failure == "broken", trouble=trouble, failure=control.failure, findings=findings
    )


def _trouble(identity: Identity, control: Answer, chat: Finding) -> str | None:
    """Why chat is not usable, where it is not."""
    if identity.kind == "hermes-dashboard":
        return (
            "A web page answers at gateway.url: that is the Hermes dashboard, not the gateway. Point gateway.url to "
            "the gateway's port (8642), and dashboard.url to this one."
        )
    if chat.available is True:
        return None
    if control.is_success and control.is_page:
        return "A web page answers every path at gateway.url; it is probably the port of a dashboard or another site."
    if control.status in (401, 403):
        return "The backend refuses everything without a key. Give the sidecar the key (gateway.token_file)."
    if control.status is not None and 300 <= control.status < 400:
        return "The backend sends every path elsewhere (a redirect). Correct gateway.url."
    return f"Something answers at gateway.url, but chat is not there: {chat.reason}."


# The dashboard


async def probe_dashboard(place: Place, url: str) -> DashboardFacts:
    """What the dashboard is and can do, with the token that its page hands out. Never raises."""
    page = await ask(place, "/")
    if page.failure is not None:
        return DashboardFacts(url, reachable=False, trouble=page.detail)
    status = await ask(place, "/api/status")
    token = dashboard_token(page)
    if token is None:
        trouble = "dashboard.url answers, but not with the Hermes dashboard's page; correct dashboard.url."
        return DashboardFacts(url, reachable=True, version=text(status, "version"), trouble=trouble)
    asking = replace(place, fields=[*place.fields, (b"X-Hermes-Session-Token", token)])
    nowhere = f"/api/hermes-sidecar-{secrets.token_hex(6)}"
    answers = await _ask_all(asking, nowhere, *_DASHBOARD_PATHS.values())
    findings = {}
    for name, path in _DASHBOARD_PATHS.items():
        finding = judge_family(name, answers[path], answers[nowhere])
        findings[name] = replace(finding, served_by="dashboard" if finding.available else None)
    return DashboardFacts(url, True, text(status, "version"), token, None, findings)


async def read_dashboard_token(place: Place) -> bytes | None:
    """The token that the dashboard hands out now; it is new at each start of the dashboard."""
    return dashboard_token(await ask(place, "/"))
