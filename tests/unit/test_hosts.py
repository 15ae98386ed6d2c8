"""Who may come in by name: Host against DNS rebinding, Origin and fetch metadata against foreign pages."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.faults import Fault, FaultCode
from sidecar.guard.hosts import (
    PROGRAM,
    Admission,
    DoorPolicy,
    check_host,
    check_origin,
    preflight_fields,
    vary_on_origin,
)
from sidecar.relay.fields import REQUEST_WATCHED, Watched, sort_out
from sidecar.relay.wire import Field
from tests.unit.grammar import VALUES, any_case

LOOPBACK = DoorPolicy.of("127.0.0.1", [], [])
NAMED = DoorPolicy.of("10.0.0.5", ["sidecar.lan", "fd00::5"], [])
FRONTEND = DoorPolicy.of("127.0.0.1", [], ["http://localhost:3000", "https://chat.example", "app://obsidian.md"])
ANYONE = DoorPolicy.of("127.0.0.1", [], ["*"])

EXPOSED = {
    b"x-hermes-session-id",
    b"x-claude-session-id",
    b"x-hermes-session-key",
    b"x-claude-session-key",
    b"x-hermes-friendly-id",
    b"x-claude-friendly-id",
    b"x-request-id",
    b"x-hermes-sidecar-session",
    b"x-hermes-sidecar-error",
}
"""What the reference page promises that a page may read."""


def watched(*lines: Field) -> Watched:
    return sort_out([*lines], REQUEST_WATCHED)[1]


def host_fault(*lines: Field, policy: DoorPolicy, authority: bytes | None = None, minor: int = 1) -> str | None:
    """The code of the fault that these Host lines lead to, or None where they are let in."""
    try:
        check_host(watched(*lines), authority, minor, policy)
    except Fault as fault:
        return fault.code.code
    return None


def origin_fault(
    *lines: Field, policy: DoorPolicy, method: bytes = b"POST", path: bytes = b"/v1/chat/completions"
) -> str | None:
    """The code of the fault that these lines lead to at the address localhost:8650, or None where they are let in."""
    try:
        check_origin(method, path, watched((b"Host", b"localhost:8650"), *lines), policy)
    except Fault as fault:
        return fault.code.code
    return None


# --- Host ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        pytest.param(b"localhost", id="localhost"),
        pytest.param(b"LocalHost", id="localhost-in-any-case"),
        pytest.param(b"localhost:8650", id="own-port"),
        pytest.param(b"localhost:1", id="another-port"),
        pytest.param(b"localhost:99999", id="port-that-cannot-be"),
        pytest.param(b"127.0.0.1", id="ipv4"),
        pytest.param(b"127.0.0.1:8650", id="ipv4-with-port"),
        pytest.param(b"[::1]", id="ipv6"),
        pytest.param(b"[::1]:8650", id="ipv6-with-port"),
    ],
)
def test_loopback_names_are_let_in_on_any_port(host: bytes) -> None:
    assert host_fault((b"Host", host), policy=LOOPBACK) is None
    assert host_fault((b"hOST", host), policy=NAMED) is None


@pytest.mark.parametrize(
    ("host", "policy"),
    [
        pytest.param(b"10.0.0.5:8650", NAMED, id="bound-address"),
        pytest.param(b"sidecar.lan", NAMED, id="allowed-name"),
        pytest.param(b"Sidecar.LAN:443", NAMED, id="allowed-name-in-any-case-with-port"),
        pytest.param(b"[fd00::5]:8650", NAMED, id="allowed-ipv6"),
        pytest.param(b"[FD00::5]", NAMED, id="allowed-ipv6-in-any-case"),
        pytest.param(b"[fd00::1]:8650", DoorPolicy.of("fd00::1", [], []), id="bound-ipv6"),
        pytest.param(b"sidecar.lan", DoorPolicy.of("::1", ["SIDECAR.lan"], []), id="allowed-in-any-case"),
    ],
)
def test_own_names_are_let_in(host: bytes, policy: DoorPolicy) -> None:
    assert host_fault((b"Host", host), policy=policy) is None


@pytest.mark.parametrize("policy", [pytest.param(LOOPBACK, id="loopback"), pytest.param(NAMED, id="named")])
@pytest.mark.parametrize(
    "host",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"evil.example", id="foreign-name"),
        pytest.param(b"evil.example:8650", id="foreign-name-with-our-port"),
        pytest.param(b"127.0.0.1.evil.com", id="begins-like-loopback"),
        pytest.param(b"localhost.evil.com", id="begins-like-localhost"),
        pytest.param(b"evil-localhost", id="ends-like-localhost"),
        pytest.param(b"evil.localhost", id="below-localhost"),
        pytest.param(b"sidecar.lan.evil.com", id="begins-like-an-allowed-name"),
        pytest.param(b"xsidecar.lan", id="ends-like-an-allowed-name"),
        pytest.param(b"sidecarxlan", id="dot-is-no-wildcard"),
        pytest.param(b"localhost.", id="dot-at-the-end"),
        pytest.param(b".localhost", id="dot-in-front"),
        pytest.param(b"user@localhost", id="user"),
        pytest.param(b"localhost@evil.com", id="localhost-as-user"),
        pytest.param(b"localhost:8650@evil.com", id="localhost-and-port-as-user"),
        pytest.param(b"evil.com#localhost", id="fragment"),
        pytest.param(b"localhost/", id="slash"),
        pytest.param(b"localhost\\.evil.com", id="backslash"),
        pytest.param(b"localhost?", id="query"),
        pytest.param(b"localhost,evil.com", id="list"),
        pytest.param(b"localhost evil.com", id="blank"),
        pytest.param(b"localhost:", id="empty-port"),
        pytest.param(b"localhost:99999x", id="port-with-letter"),
        pytest.param(b"localhost:123456", id="port-of-six-digits"),
        pytest.param(b"localhost:-1", id="negative-port"),
        pytest.param(b"localhost:86 50", id="blank-in-port"),
        pytest.param(b"localhost:8650:8650", id="two-ports"),
        pytest.param("localhost:８６５０".encode(), id="port-in-wide-digits"),
        pytest.param(b"::1", id="ipv6-without-brackets"),
        pytest.param(b"[::1", id="half-a-bracket"),
        pytest.param(b"[::1]x", id="letter-behind-the-bracket"),
        pytest.param(b"[::1].evil.com", id="name-behind-the-bracket"),
        pytest.param(b"[localhost]", id="name-in-brackets"),
        pytest.param(b"[127.0.0.1]", id="ipv4-in-brackets"),
        pytest.param(b"[::ffff:127.0.0.1]", id="mapped-ipv4"),
        pytest.param(b"[::1%25lo]", id="zone"),
        pytest.param(b"[0:0:0:0:0:0:0:1]", id="ipv6-spelled-out"),
        pytest.param(b"0.0.0.0", id="any-address"),
        pytest.param(b"0.0.0.0:8650", id="any-address-with-port"),
        pytest.param(b"[::]", id="any-ipv6-address"),
        pytest.param(b"127.1", id="short-ipv4"),
        pytest.param(b"127.0.0.2", id="another-loopback-address"),
        pytest.param(b"0x7f.1", id="hexadecimal-ipv4"),
        pytest.param(b"2130706433", id="ipv4-as-a-number"),
        pytest.param(b"0177.0.0.1", id="octal-ipv4"),
        pytest.param(b"127.0.0.1\x00", id="nul"),
        pytest.param(b"localhost\n", id="line-break"),
        pytest.param("ｌocalhost".encode(), id="wide-letter"),
        pytest.param("localhoſt".encode(), id="long-s"),
        pytest.param(b"localhost\xff", id="byte-over-0x7f"),
        pytest.param(b"localhost\xad", id="soft-hyphen"),
        pytest.param("127。0。0。1".encode(), id="wide-dots"),
        pytest.param(b"*", id="star"),
        pytest.param(b"null", id="null"),
    ],
)
def test_other_hosts_are_refused(host: bytes, policy: DoorPolicy) -> None:
    assert host_fault((b"Host", host), policy=policy) == "host_not_allowed"
    assert host_fault((b"Host", b"localhost"), policy=policy, authority=host) == "host_not_allowed"
    assert host_fault((b"Host", b"localhost:8650"), policy=policy) is None


@pytest.mark.parametrize(
    ("lines", "authority", "minor", "code"),
    [
        pytest.param([], None, 1, "invalid_request", id="none-in-http-1.1"),
        pytest.param([], None, 0, "host_not_allowed", id="none-in-http-1.0"),
        pytest.param([], b"localhost", 1, "invalid_request", id="none-beside-an-absolute-target"),
        pytest.param([], b"localhost", 0, "host_not_allowed", id="none-beside-an-absolute-target-in-http-1.0"),
        pytest.param([b"localhost", b"localhost"], None, 1, "invalid_request", id="two"),
        pytest.param([b"localhost", b"evil.com"], None, 1, "invalid_request", id="two-that-differ"),
        pytest.param([b"localhost"], b"localhost:8650", 1, None, id="absolute-target-of-ours"),
        pytest.param([b"localhost"], b"127.0.0.1", 1, None, id="absolute-target-with-another-name-of-ours"),
        pytest.param([b"localhost"], b"evil.com", 1, "host_not_allowed", id="absolute-target-elsewhere"),
        pytest.param([b"evil.com"], b"localhost", 1, "host_not_allowed", id="absolute-target-cannot-make-up-for-host"),
        pytest.param([b"localhost"], b"", 1, "host_not_allowed", id="absolute-target-without-a-name"),
        pytest.param([b"localhost"], b"user@localhost", 1, "host_not_allowed", id="absolute-target-with-a-user"),
        pytest.param([b"localhost"], None, 0, None, id="ours-in-http-1.0"),
    ],
)
def test_host_lines_and_targets(lines: list[bytes], authority: bytes | None, minor: int, code: str | None) -> None:
    found = host_fault(*((b"Host", value) for value in lines), policy=LOOPBACK, authority=authority, minor=minor)

    assert found == code


PARTS = b"localhost LOCALHOST 127.0.0.1 [::1] sidecar.lan evil.com 8650 0 : . @ [ ] / % \\ , \xff".split(b" ")
AUTHORITIES = VALUES | st.lists(st.sampled_from([*PARTS, b" "]), max_size=5).map(b"".join)


@given(AUTHORITIES)
@example(b"localhost:8650")
@example(b"[::1]")
def test_only_names_of_the_list_are_let_in(host: bytes) -> None:
    """No Host that a browser could be rebound to is let in: whatever is accepted is, in lower case and without its
    port, a name of the list."""
    names = {b"localhost", b"127.0.0.1", b"[::1]", b"10.0.0.5", b"sidecar.lan", b"[fd00::5]"}

    is_let_in = host_fault((b"Host", host), policy=NAMED) is None

    assert is_let_in == (re.sub(rb":[0-9]{1,5}\Z", b"", host.lower()) in names)


@given(st.sampled_from((b"localhost", b"sidecar.lan", b"[fd00::5]")).flatmap(any_case), st.integers(0, 65535))
def test_names_of_the_list_are_let_in_in_any_case_on_any_port(host: bytes, port: int) -> None:
    """For any case and any port."""
    assert host_fault((b"Host", b"%b:%d" % (host, port)), policy=NAMED) is None


# --- Origin ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [pytest.param(LOOPBACK, id="none-allowed"), pytest.param(FRONTEND, id="some-allowed")]
)
@pytest.mark.parametrize(
    "origin",
    [
        pytest.param(b"http://localhost:8650", id="own"),
        pytest.param(b"http://LOCALHOST:8650", id="own-in-capitals"),
        pytest.param(b"http://127.0.0.1:8650", id="own-by-another-name"),
        pytest.param(b"http://[::1]:8650", id="own-by-ipv6"),
        pytest.param(b"https://localhost:8650", id="own-behind-tls"),
    ],
)
def test_own_origin_is_let_in(origin: bytes, policy: DoorPolicy) -> None:
    assert origin_fault((b"Origin", origin), policy=policy) is None


@pytest.mark.parametrize(
    "origin",
    [
        pytest.param(b"http://localhost:3000", id="loopback"),
        pytest.param(b"HTTP://Localhost:3000", id="in-capitals"),
        pytest.param(b"https://chat.example", id="default-port"),
        pytest.param(b"app://obsidian.md", id="desktop-shell"),
    ],
)
def test_allowed_origin_is_let_in(origin: bytes) -> None:
    assert origin_fault((b"Origin", origin), policy=FRONTEND) is None
    assert origin_fault((b"Origin", origin), policy=LOOPBACK) == "origin_not_allowed"


FOREIGN = [
    pytest.param(b"", id="empty"),
    pytest.param(b"null", id="null"),
    pytest.param(b"NULL", id="null-in-capitals"),
    pytest.param(b"*", id="star"),
    pytest.param(b"http://evil.example", id="foreign"),
    pytest.param(b"http://evil.example:8650", id="foreign-with-our-port"),
    pytest.param(b"http://localhost", id="our-name-without-port"),
    pytest.param(b"http://localhost:3001", id="our-name-with-another-port"),
    pytest.param(b"http://localhost:30000", id="begins-like-an-allowed-one"),
    pytest.param(b"http://localhost:3000.evil.com", id="allowed-one-as-a-subdomain"),
    pytest.param(b"http://localhost:3000@evil.com", id="allowed-one-as-a-user"),
    pytest.param(b"http://localhost:3000/", id="allowed-one-with-a-slash"),
    pytest.param(b"http://localhost:3000 http://evil.com", id="two-in-a-line"),
    pytest.param(b"https://localhost:3000", id="allowed-one-with-another-scheme"),
    pytest.param(b"https://chat.example:443", id="allowed-one-with-its-default-port"),
    pytest.param(b"https://chat.example.evil.com", id="allowed-name-as-a-subdomain"),
    pytest.param(b"https://evilchat.example", id="ends-like-an-allowed-one"),
    pytest.param(b"http://chat.example", id="allowed-name-without-tls"),
    pytest.param(b"http://user@localhost:8650", id="own-with-a-user"),
    pytest.param(b"http://localhost:8650/x", id="own-with-a-path"),
    pytest.param(b"http://localhost.:8650", id="own-with-a-dot"),
    pytest.param(b"http://127.1:8650", id="short-ipv4"),
    pytest.param(b"http://0.0.0.0:8650", id="any-address"),
    pytest.param(b"localhost:8650", id="no-scheme"),
    pytest.param(b"//localhost:8650", id="no-scheme-but-slashes"),
    pytest.param(b"ws://localhost:8650", id="websocket-scheme"),
    pytest.param(b"file://", id="file"),
    pytest.param(b"chrome-extension://abcdefgh", id="extension"),
    pytest.param(b"app://obsidian.md.evil", id="begins-like-a-desktop-shell"),
    pytest.param(b"http://localhost:8650\xff", id="byte-over-0x7f"),
]


@pytest.mark.parametrize("origin", FOREIGN)
def test_other_origins_are_refused(origin: bytes) -> None:
    assert origin_fault((b"Origin", origin), policy=FRONTEND) == "origin_not_allowed"
    assert origin_fault((b"Origin", origin), policy=FRONTEND, method=b"GET", path=b"/sidecar/") == "origin_not_allowed"


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([b"http://localhost:3000", b"http://localhost:3000"], id="allowed-twice"),
        pytest.param([b"http://localhost:3000", b"http://evil.com"], id="allowed-then-foreign"),
        pytest.param([b"http://evil.com", b"http://localhost:3000"], id="foreign-then-allowed"),
        pytest.param([b"", b"http://localhost:3000"], id="empty-then-allowed"),
    ],
)
def test_several_origins_are_refused(lines: list[bytes]) -> None:
    assert origin_fault(*((b"Origin", value) for value in lines), policy=FRONTEND) == "origin_not_allowed"


@pytest.mark.parametrize(
    ("origin", "is_let_in"),
    [
        pytest.param(b"http://evil.example", True, id="http"),
        pytest.param(b"https://evil.example:444", True, id="https"),
        pytest.param(b"null", False, id="null"),
        pytest.param(b"Null", False, id="null-in-any-case"),
        pytest.param(b"", False, id="empty"),
        pytest.param(b"http://a b", False, id="blank"),
        pytest.param(b"http://user@evil.example", False, id="user"),
        pytest.param(b"http://evil.example/x", False, id="path"),
    ],
)
def test_star_lets_every_page_in_but_the_ones_without_origin(origin: bytes, is_let_in: bool) -> None:
    assert (origin_fault((b"Origin", origin), policy=ANYONE) is None) == is_let_in


def test_origin_of_a_name_that_only_the_port_shares_is_not_our_own() -> None:
    """Host and Origin are both what a rebound page would send; Host was judged before, and Origin is too."""
    lines = watched((b"Host", b"localhost:8650"), (b"Origin", b"http://rebound.example:8650"))

    with pytest.raises(Fault) as caught:
        check_origin(b"GET", b"/capabilities", lines, LOOPBACK)

    assert caught.value.code is FaultCode.ORIGIN_NOT_ALLOWED


@given(VALUES | st.builds(b"%b%b%b".__mod__, st.tuples(VALUES, st.just(b"http://localhost:3000"), VALUES)))
def test_only_own_and_allowed_origins_are_let_in(origin: bytes) -> None:
    """For any Origin: accepted only if it is, in lower case, one of the list or our own name with our port."""
    names = (b"localhost", b"127.0.0.1", b"[::1]")
    own = {b"%b://%b:8650" % (scheme, name) for scheme in (b"http", b"https") for name in names}

    is_let_in = origin_fault((b"Origin", origin), policy=FRONTEND) is None

    assert is_let_in == (origin.lower() in own | FRONTEND.origins)


# --- Fetch metadata --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([], id="nothing"),
        pytest.param([(b"sec-fetch-mode", b"cors")], id="nodes-fetch"),
        pytest.param([(b"Sec-Fetch-Site", b"same-origin")], id="same-origin"),
        pytest.param([(b"Sec-Fetch-Site", b"same-site")], id="same-site"),
        pytest.param([(b"Sec-Fetch-Site", b"none")], id="typed-by-a-person"),
        pytest.param([(b"Sec-Fetch-Site", b"")], id="empty"),
        pytest.param([(b"Sec-Fetch-Dest", b"empty"), (b"Sec-Fetch-Mode", b"no-cors")], id="no-site"),
        pytest.param([(b"Referer", b"http://evil.example/")], id="referer-is-no-origin"),
    ],
)
def test_programs_are_welcome(lines: list[Field]) -> None:
    for method in (b"GET", b"POST", b"OPTIONS"):
        head = watched((b"Host", b"localhost:8650"), *lines)

        assert check_origin(method, b"/v1/models", head, LOOPBACK) is PROGRAM
    assert Admission(cors=(), is_preflight=False) == PROGRAM


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([(b"Sec-Fetch-Site", b"cross-site")], id="alone"),
        pytest.param([(b"sec-fetch-site", b"Cross-Site")], id="other-case"),
        pytest.param([(b"Sec-Fetch-Site", b"none"), (b"Sec-Fetch-Site", b"cross-site")], id="second-line"),
        pytest.param([(b"Sec-Fetch-Site", b"none, cross-site")], id="in-a-list"),
        pytest.param(
            [(b"Sec-Fetch-Site", b"cross-site"), (b"Sec-Fetch-Mode", b"no-cors"), (b"Sec-Fetch-Dest", b"image")],
            id="image",
        ),
        pytest.param(
            [(b"Sec-Fetch-Site", b"cross-site"), (b"Sec-Fetch-Mode", b"navigate"), (b"Sec-Fetch-Dest", b"document")],
            id="navigation-elsewhere",
        ),
    ],
)
def test_foreign_pages_without_origin_are_refused(lines: list[Field]) -> None:
    assert origin_fault(*lines, policy=FRONTEND, method=b"GET", path=b"/v1/models") == "origin_not_allowed"
    assert origin_fault(*lines, policy=ANYONE, method=b"GET", path=b"/v1/models") == "origin_not_allowed"


def test_allowed_origin_may_be_another_site() -> None:
    lines = (b"Origin", b"https://chat.example"), (b"Sec-Fetch-Site", b"cross-site")

    assert origin_fault(*lines, policy=FRONTEND) is None
    assert origin_fault(*lines, policy=LOOPBACK) == "origin_not_allowed"


NAVIGATION = {b"Sec-Fetch-Site": b"cross-site", b"Sec-Fetch-Mode": b"navigate", b"Sec-Fetch-Dest": b"document"}


@pytest.mark.parametrize(
    ("method", "path", "changes", "is_let_in"),
    [
        pytest.param(b"GET", b"/sidecar/", {}, True, id="link-to-the-status-page"),
        pytest.param(b"GET", b"/sidecar/", {b"Sec-Fetch-User": b"?1"}, True, id="link-that-a-person-clicked"),
        pytest.param(b"POST", b"/sidecar/", {}, False, id="form"),
        pytest.param(b"HEAD", b"/sidecar/", {}, False, id="head"),
        pytest.param(b"GET", b"/sidecar/app.js", {}, False, id="its-files"),
        pytest.param(b"GET", b"/sidecar", {}, False, id="no-slash"),
        pytest.param(b"GET", b"/capabilities", {}, False, id="another-own-page"),
        pytest.param(b"GET", b"/v1/models", {}, False, id="the-gateways-page"),
        pytest.param(b"GET", b"/sidecar/", {b"Sec-Fetch-Dest": b"iframe"}, False, id="in-a-frame"),
        pytest.param(b"GET", b"/sidecar/", {b"Sec-Fetch-Dest": b"embed"}, False, id="embedded"),
        pytest.param(b"GET", b"/sidecar/", {b"Sec-Fetch-Mode": b"no-cors"}, False, id="no-navigation"),
        pytest.param(b"GET", b"/sidecar/", {b"Sec-Fetch-Mode": b""}, False, id="no-mode"),
        pytest.param(b"GET", b"/sidecar/", {b"Origin": b"null"}, False, id="with-an-origin"),
    ],
)
def test_a_person_may_follow_a_link_to_the_status_page(
    method: bytes, path: bytes, changes: dict[bytes, bytes], is_let_in: bool
) -> None:
    fault = origin_fault(*(NAVIGATION | changes).items(), policy=LOOPBACK, method=method, path=path)

    assert fault == (None if is_let_in else "origin_not_allowed")


# --- What a browser is told ------------------------------------------------------------------------------------------


def admitted(*lines: Field, method: bytes = b"POST") -> Admission:
    return check_origin(method, b"/v1/chat/completions", watched((b"Host", b"localhost:8650"), *lines), FRONTEND)


@pytest.mark.parametrize("origin", [b"http://localhost:3000", b"https://chat.example", b"http://localhost:8650"])
def test_allowed_origin_may_read_the_answer(origin: bytes) -> None:
    (allow, expose) = admitted((b"Origin", origin)).cors

    assert allow == (b"Access-Control-Allow-Origin", origin)
    assert expose[0] == b"Access-Control-Expose-Headers"
    assert {name.strip().lower() for name in expose[1].split(b",")} >= EXPOSED


@pytest.mark.parametrize(
    ("method", "lines", "is_preflight"),
    [
        pytest.param(b"OPTIONS", [(b"Access-Control-Request-Method", b"POST")], True, id="preflight"),
        pytest.param(b"OPTIONS", [(b"access-control-request-method", b"PATCH")], True, id="in-lower-case"),
        pytest.param(b"OPTIONS", [], False, id="plain-options"),
        pytest.param(b"OPTIONS", [(b"Access-Control-Request-Headers", b"x")], False, id="headers-alone"),
        pytest.param(b"GET", [(b"Access-Control-Request-Method", b"POST")], False, id="another-method"),
        pytest.param(b"options", [(b"Access-Control-Request-Method", b"POST")], False, id="methods-have-a-case"),
    ],
)
def test_what_is_a_preflight(method: bytes, lines: list[Field], is_preflight: bool) -> None:
    admission = admitted((b"Origin", b"http://localhost:3000"), *lines, method=method)

    assert admission.is_preflight == is_preflight


def test_preflight_without_origin_is_a_programs_question() -> None:
    head = watched((b"Host", b"localhost:8650"), (b"Access-Control-Request-Method", b"POST"))

    assert check_origin(b"OPTIONS", b"/v1/models", head, FRONTEND) is PROGRAM


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param([], [], id="no-headers-asked"),
        pytest.param(
            [(b"Access-Control-Request-Headers", b"authorization,content-type,x-hermes-session-id,idempotency-key")],
            [(b"Access-Control-Allow-Headers", b"authorization,content-type,x-hermes-session-id,idempotency-key")],
            id="asked-headers",
        ),
        pytest.param(
            [(b"Access-Control-Request-Headers", b"x-stainless-os, dangerously-allow-browser")],
            [(b"Access-Control-Allow-Headers", b"x-stainless-os, dangerously-allow-browser")],
            id="sdk-headers",
        ),
        pytest.param(
            [(b"Access-Control-Request-Headers", b"a"), (b"Access-Control-Request-Headers", b"b")],
            [(b"Access-Control-Allow-Headers", b"a, b")],
            id="two-lines",
        ),
        pytest.param([(b"Access-Control-Request-Headers", b"a\xff")], [], id="no-names"),
        pytest.param([(b"Access-Control-Request-Headers", b"")], [], id="empty"),
        pytest.param(
            [(b"Access-Control-Request-Private-Network", b"true")],
            [(b"Access-Control-Allow-Private-Network", b"true")],
            id="private-network",
        ),
        pytest.param([(b"Access-Control-Request-Private-Network", b"false")], [], id="no-private-network"),
    ],
)
def test_preflight_answer(lines: list[Field], expected: list[Field]) -> None:
    answer = preflight_fields(watched((b"Access-Control-Request-Method", b"PATCH"), *lines))
    methods = dict(answer)[b"Access-Control-Allow-Methods"]

    assert {method.strip() for method in methods.split(b",")} >= {b"GET", b"POST", b"PUT", b"PATCH", b"DELETE"}
    assert [
        line for line in answer if line[0] not in (b"Access-Control-Allow-Methods", b"Access-Control-Max-Age")
    ] == expected


@pytest.mark.parametrize(
    ("lines", "added"),
    [
        pytest.param([], [(b"Vary", b"Origin")], id="none"),
        pytest.param([b"Accept-Encoding"], [(b"Vary", b"Origin")], id="others"),
        pytest.param([b"Original"], [(b"Vary", b"Origin")], id="similar"),
        pytest.param([b"Origin"], [], id="there"),
        pytest.param([b"accept", b"Cookie ,ORIGIN"], [], id="there-in-any-case-on-any-line"),
        pytest.param([b"*"], [], id="star"),
    ],
)
def test_vary_on_origin(lines: list[bytes], added: list[Field]) -> None:
    assert vary_on_origin(lines) == added
