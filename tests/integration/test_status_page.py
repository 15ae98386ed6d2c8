"""The status page as it is served: what it says at first, what it must never say, and who may read it."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from sidecar.demo.gateway import DemoGateway
from sidecar.telemetry.lines import short_hash
from tests.support.backends import HERMES, answering_by, as_json, hermes_gateway
from tests.support.chat import turn
from tests.support.raw_client import ask
from tests.support.scripted_upstream import scripted_upstream
from tests.support.sidecars import running_sidecar

PAGE = "/sidecar/"
FILES = {
    PAGE: "text/html; charset=utf-8",
    "/sidecar/style.css": "text/css; charset=utf-8",
    "/sidecar/page.js": "text/javascript; charset=utf-8",
    "/sidecar/icon.svg": "image/svg+xml; charset=utf-8",
    "/sidecar/state.json": "application/json; charset=utf-8",
}
HOSTILE = """</dd><script>document.title="owned"</script>'&"""
KEY = "gateway-Key-0123456789"


def visible(page: bytes) -> str:
    """The page's text, without markup; what stands in templates is left out."""
    body = page.decode().partition("<template")[0]
    return html.unescape(" ".join(re.sub(r"<[^>]*>", " ", body).split()))


async def test_page_says_everything_before_any_script_runs() -> None:
    gateway = await DemoGateway.start()
    try:
        async with running_sidecar(gateway.url, probes=True) as sidecar:
            await ask(sidecar.url, "POST", "/capabilities/refresh")
            for session in ("one", "one", "two"):
                await turn(sidecar.url, "hello", [("X-Hermes-Session-Key", session)], streamed=True)

            answer = await ask(sidecar.url, "GET", PAGE)

            text = visible(answer.body)
            assert answer.status == 200
            assert "Partial Chat works; skills, memory, config and scheduled jobs are not available" in text
            assert f"Address {gateway.url} Kind hermes-sidecar-demo Version" in text
            assert "Yes Session history Session history is kept on the server." in text
            assert "No Memory Memory browser requires the memory API. To unlock:" in text
            assert "Not known Images" in text
            assert f"{short_hash(b'two')} x-hermes-session-key 1 No" in text
            assert f"{short_hash(b'one')} x-hermes-session-key 2 No" in text
            assert "Complete 3" in text
            assert f"HERMES_API_URL= {sidecar.url}" in text
            assert re.search(r"last probed \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", text)
    finally:
        await gateway.stop()


@pytest.mark.parametrize(("path", "content_type"), FILES.items())
async def test_file_and_its_headers(path: str, content_type: str) -> None:
    async with running_sidecar("http://127.0.0.1:1") as sidecar:
        answer = await ask(sidecar.url, "GET", path)
        head = await ask(sidecar.url, "HEAD", path)

        assert (answer.status, head.status) == (200, 200)
        for one in (answer, head):
            assert one.value("Content-Type") == content_type
            assert one.value("Cache-Control") == "no-store"
            assert one.value("X-Content-Type-Options") == "nosniff"


async def test_policy_lets_in_nothing_but_the_pages_own_files() -> None:
    async with running_sidecar("http://127.0.0.1:1") as sidecar:
        answer = await ask(sidecar.url, "GET", PAGE)

        policy = dict(part.split(" ", 1) for part in (answer.value("Content-Security-Policy") or "").split("; "))
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "img-src": "'self'",
            "connect-src": "'self'",
            "form-action": "'self'",
            "base-uri": "'none'",
            "frame-ancestors": "'none'",
            "require-trusted-types-for": "'script'",
            "trusted-types": "'none'",
        }
        assert answer.value("Referrer-Policy") == "same-origin"


@pytest.mark.parametrize(
    "path", ["/sidecar/index.html", "/sidecar/nothing.js", "/sidecar/..%2fpages.py", "/sidecar/a/b"]
)
async def test_file_that_does_not_exist_is_an_envelope(path: str) -> None:
    async with running_sidecar("http://127.0.0.1:1") as sidecar:
        answer = await ask(sidecar.url, "GET", path)

        assert (answer.status, answer.value("X-Hermes-Sidecar-Error")) == (404, "capability_unavailable")
        assert answer.json()["error"]["hint"] == "The status page is at /sidecar/."


async def test_query_changes_nothing() -> None:
    async with running_sidecar("http://127.0.0.1:1") as sidecar:
        answer = await ask(sidecar.url, "GET", PAGE + "?status=<script>")

        assert answer.status == 200
        assert b"status=<script>" not in answer.body


async def test_backends_own_words_are_only_words() -> None:
    health = as_json({"status": "ok", "platform": "hermes-agent", "version": HOSTILE})
    async with (
        scripted_upstream(answering_by(hermes_gateway(routes={**HERMES, "/health": health}))) as upstream,
        running_sidecar(upstream.url, probes=True) as sidecar,
    ):
        await ask(sidecar.url, "POST", "/capabilities/refresh")
        page = (await ask(sidecar.url, "GET", PAGE)).body.decode()
        state = await ask(sidecar.url, "GET", "/sidecar/state.json")

        assert state.json()["gateway"]["version"] == HOSTILE
        assert HOSTILE not in page
        assert html.escape(HOSTILE) in page


async def test_nothing_secret_is_on_the_page() -> None:
    gateway = await DemoGateway.start(key=KEY)
    try:
        async with running_sidecar(gateway.url, environ={"HERMES_SIDECAR_GATEWAY__TOKEN": KEY}, probes=True) as sidecar:
            await turn(sidecar.url, "sesame-prompt", [("X-Hermes-Session-Key", "sesame-key")], streamed=True)
            page = await ask(sidecar.url, "GET", PAGE)
            state = await ask(sidecar.url, "GET", "/sidecar/state.json")

            assert short_hash(b"sesame-key") in state.body.decode()
            for answer in (page, state):
                assert "sesame" not in answer.body.decode()
                assert KEY not in answer.body.decode()
    finally:
        await gateway.stop()


async def test_button_without_scripts_probes_and_leads_back() -> None:
    async with (
        scripted_upstream(answering_by(hermes_gateway())) as upstream,
        running_sidecar(upstream.url, probes=True, probe={"interval_s": 600}) as sidecar,
    ):
        await ask(sidecar.url, "POST", "/capabilities/refresh")
        before = len(upstream.requests)

        answer = await ask(
            sidecar.url,
            "POST",
            "/sidecar/probe",
            f"Origin: {sidecar.url}".encode(),
            b"Sec-Fetch-Site: same-origin",
            b"Content-Type: application/x-www-form-urlencoded",
        )

        assert (answer.status, answer.value("Location")) == (303, "./")
        assert len(upstream.requests) > before


async def test_other_methods_are_told_which_ones_work() -> None:
    async with running_sidecar("http://127.0.0.1:1") as sidecar:
        answer = await ask(sidecar.url, "DELETE", PAGE)

        assert (answer.status, answer.value("Allow")) == (405, "GET, HEAD")


# The guard


async def test_foreign_name_gets_no_page() -> None:
    async with running_sidecar("http://127.0.0.1:1") as sidecar:
        for path in FILES:
            answer = await ask(sidecar.url, "GET", path, b"Host: evil.test")

            assert answer.status in (400, 421), path
            assert b"hermes-sidecar</h1>" not in answer.body


async def test_page_of_another_site_may_lead_a_person_here_and_nothing_else() -> None:
    foreign = b"Sec-Fetch-Site: cross-site"
    async with running_sidecar("http://127.0.0.1:1") as sidecar:
        link = await ask(sidecar.url, "GET", PAGE, foreign, b"Sec-Fetch-Mode: navigate", b"Sec-Fetch-Dest: document")
        frame = await ask(sidecar.url, "GET", PAGE, foreign, b"Sec-Fetch-Mode: navigate", b"Sec-Fetch-Dest: iframe")
        state = await ask(sidecar.url, "GET", "/sidecar/state.json", foreign, b"Sec-Fetch-Mode: no-cors")
        probe = await ask(sidecar.url, "POST", "/sidecar/probe", foreign, b"Origin: https://evil.test")

        assert [answer.status for answer in (link, frame, state, probe)] == [200, 403, 403, 403]


async def test_with_client_tokens_the_page_wants_one_as_well(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("laptop:client-Token-0123456789\n")
    tokens.chmod(0o600)
    async with running_sidecar("http://127.0.0.1:1", listen={"tokens_file": str(tokens)}) as sidecar:
        for path in FILES:
            without = await ask(sidecar.url, "GET", path)
            with_token = await ask(sidecar.url, "GET", path, b"Authorization: Bearer client-Token-0123456789")

            assert (without.status, without.value("X-Hermes-Sidecar-Error")) == (401, "client_token_required")
            assert with_token.status == 200
