"""The table that `hermes-sidecar probe` prints."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

from sidecar.capabilities.model import Cause, DashboardFacts, Finding, GatewayFacts, Picture
from sidecar.capabilities.report import document
from sidecar.surface.terminal import print_capabilities

YES = Finding(True, "probe", Cause.PRESENT, "there", "/x", 200, "gateway")
NO = Finding(False, "probe", Cause.NO_ROUTE, "there is no such route")
FINDINGS = {"chatCompletions": YES, "sessions": YES, "memory": NO, "config": NO, "skills": YES, "jobs": YES}
SEEN = Picture(GatewayFacts(True, "hermes-agent", "0.19.0", findings=FINDINGS), has_token=True, probed_at=1.0)


def printed(picture: Picture) -> str:
    out = StringIO()
    print_capabilities(document(picture, "http://127.0.0.1:8642", 0.0), out)
    return out.getvalue()


def test_table_for_a_gateway_alone() -> None:
    assert (
        printed(SEEN)
        == """\
Chat works; memory and config are not available on this backend.

Status     partial
Gateway    http://127.0.0.1:8642  hermes-agent 0.19.0, key set
Dashboard  not set

Core                        Served by  Evidence
health           not known  -          none      Whether the backend is well is not known yet.
chatCompletions  yes        gateway    probe     Chat works.
models           not known  -          none      Whether this backend lists models is not known yet.
streaming        not known  -          none      Not known until the first streamed answer; no model is called
                                                 to find out.
images           not known  -          none      Not known until the first answered image; no model is called
                                                 to find out.

Enhanced                    Served by  Evidence
sessions         yes        gateway    probe     Session history is kept on the server.
skills           yes        gateway    probe     Skills can be browsed.
memory           no         -          probe     Memory browser requires the memory API.
config           no         -          probe     Settings editor requires the config API.
jobs             yes        gateway    probe     Scheduled jobs can be managed.

Next: Start the dashboard (hermes dashboard) and set dashboard.url.
"""
    )


def test_each_next_step_names_what_it_brings() -> None:
    seen = replace(SEEN, gateway=replace(SEEN.gateway, findings=FINDINGS | {"sessions": NO}))

    assert printed(seen).splitlines()[-2:] == [
        "Next, for sessions: Upgrade hermes-agent: newer gateways serve it themselves.",
        "Next, for memory, config: Start the dashboard (hermes dashboard) and set dashboard.url.",
    ]


def test_where_nothing_is_to_be_done_nothing_is_said() -> None:
    dashboard = {name: replace(YES, served_by="dashboard") for name in ("memory", "config")}
    seen = replace(
        SEEN,
        dashboard=DashboardFacts("http://127.0.0.1:9119", True, "0.19.0", findings=dashboard),
        fill=("memory", "config"),
    )

    lines = printed(seen).splitlines()
    assert "Next" not in lines[-1]
    assert "Dashboard  http://127.0.0.1:9119  0.19.0" in lines
    assert "memory           yes        dashboard  probe     Memory can be browsed." in lines


def test_words_of_a_backend_are_no_markup() -> None:
    seen = replace(SEEN, gateway=replace(SEEN.gateway, version="[red]1[/red] :smile:"))

    assert "hermes-agent [red]1[/red] :smile:, key set" in printed(seen)


def test_dashboard_that_is_down() -> None:
    seen = replace(SEEN, dashboard=DashboardFacts("http://127.0.0.1:9119", False))

    assert "Dashboard  http://127.0.0.1:9119  does not answer" in printed(seen).splitlines()
