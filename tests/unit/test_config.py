"""What the configuration accepts, what it refuses, and in which words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from sidecar.config import ClientToken, ConfigFaults, Settings, describe, from_mapping, load

SECRET = "s3cr3t-Marker"


def faults(values: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigFaults) as caught:
        from_mapping(values, environ or {})
    return caught.value.faults


def keyed(*lines: str, path: Path) -> str:
    """A file with these lines, for the keys that name one."""
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


# --- Single values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        pytest.param("listen.host", "", "is not a host name", id="host-empty"),
        pytest.param("listen.host", "*", "is not a host name", id="host-star"),
        pytest.param("listen.host", "http://localhost", "is not a host name", id="host-with-scheme"),
        pytest.param("listen.host", "fe80::1%eth0", "has an IPv6 zone", id="host-with-zone"),
        pytest.param("listen.port", 65536, "must be at most 65535", id="port-too-high"),
        pytest.param("listen.port", -1, "must be at least 0", id="port-negative"),
        pytest.param("listen.port", "8650", "must be a whole number", id="port-as-text"),
        pytest.param("listen.port", True, "must be a whole number", id="port-as-bool"),
        pytest.param("listen.port", 8650.5, "must be a whole number", id="port-with-fraction"),
        pytest.param("listen.unix_socket", "", "is no path", id="socket-empty"),
        pytest.param("listen.unix_socket", "/run/" + "x" * 103, "is longer than the 107 bytes", id="socket-too-long"),
        pytest.param("listen.unix_socket", "~no-such-user/s", "no such home directory", id="socket-unknown-home"),
        pytest.param("listen.unix_socket", "/run/a\nb", "is no path", id="socket-with-line-break"),
        pytest.param("listen.unix_socket", "/run/a\udcff", "is no path", id="socket-not-utf8"),
        pytest.param("listen.unix_socket", 5, "must be a path in quotes", id="socket-number"),
        pytest.param("listen.workers", 0, "must be at least 1", id="workers-none"),
        pytest.param("listen.workers", 257, "must be at most 256", id="workers-too-many"),
        pytest.param("listen.allowed_hosts", "a", "must be a list", id="hosts-no-list"),
        pytest.param("listen.allowed_hosts", ["http://a"], "is not a host name", id="hosts-with-scheme"),
        pytest.param("listen.allowed_hosts", ["*"], "is not a host name", id="hosts-wildcard"),
        pytest.param("listen.allowed_hosts", ["a:b"], "is not a host name", id="hosts-word-as-port"),
        pytest.param("listen.allowed_hosts", ["a b"], "is not a host name", id="hosts-with-blank"),
        pytest.param("listen.allowed_origins", [5], "must be text in quotes", id="origin-number"),
        pytest.param("listen.allowed_origins", ["localhost:3000"], "is not an origin", id="origin-without-scheme"),
        pytest.param("listen.allowed_origins", ["http://a/"], "write only scheme, host", id="origin-with-slash"),
        pytest.param("listen.allowed_origins", ["http://a/b"], "write only scheme, host", id="origin-with-path"),
        pytest.param("listen.allowed_origins", ["http://a?b"], "write only scheme, host", id="origin-with-query"),
        pytest.param("listen.allowed_origins", ["http://*.a"], "neither a name", id="origin-wildcard-name"),
        pytest.param("listen.allowed_origins", ["http://"], "has no host", id="origin-without-host"),
        pytest.param("listen.allowed_origins", ["http://a:99999"], "has a port that is not", id="origin-bad-port"),
        pytest.param("listen.allowed_origins", ["null"], "cannot be allowed", id="origin-null"),
        pytest.param("listen.isolate_clients", "yes", "must be true or false", id="bool-as-text"),
        pytest.param("gateway.url", "", "must begin with http", id="gateway-empty"),
        pytest.param("gateway.url", "ftp://h", "must begin with http", id="gateway-ftp"),
        pytest.param("gateway.url", "h:8642", "must begin with http", id="gateway-without-scheme"),
        pytest.param("gateway.url", "http://", "has no host", id="gateway-without-host"),
        pytest.param("gateway.url", "http://:80", "has no host", id="gateway-only-port"),
        pytest.param("gateway.url", "http://h:0", "has a port that is not", id="gateway-port-0"),
        pytest.param("gateway.url", "http://h:65536", "has a port that is not", id="gateway-port-too-high"),
        pytest.param("gateway.url", "http://h:x", "has a port that is not", id="gateway-port-word"),
        pytest.param("gateway.url", "http://[::1", "has a host that cannot be read", id="gateway-open-bracket"),
        pytest.param("gateway.url", "http://a_b-/", "neither a name", id="gateway-bad-name"),
        pytest.param("gateway.url", "http://h?a", "must not have a query", id="gateway-query"),
        pytest.param("gateway.url", "http://h/?", "must not have a query", id="gateway-empty-query"),
        pytest.param("gateway.url", "http://h#a", "must not have a fragment", id="gateway-fragment"),
        pytest.param("gateway.url", "http://h/#", "must not have a fragment", id="gateway-empty-fragment"),
        pytest.param("gateway.url", "http://h/a b", "holds blanks", id="gateway-blank"),
        pytest.param("gateway.url", "http://h\n/a", "holds blanks", id="gateway-line-break"),
        pytest.param("gateway.url", "http://h\\a", "holds blanks, backslashes", id="gateway-backslash"),
        pytest.param("gateway.url", "http://bücher.example", "outside ASCII", id="gateway-not-ascii"),
        pytest.param("gateway.url", "http://h/a|b", "cannot stand in a request target", id="gateway-prefix-bar"),
        pytest.param("gateway.url", "http://h/%zz", "cannot stand in a request target", id="gateway-prefix-escape"),
        pytest.param("gateway.url", "http://h/a/../b", "empty or dot segments", id="gateway-prefix-dots"),
        pytest.param("gateway.url", "http://h//a", "empty or dot segments", id="gateway-prefix-empty-segment"),
        pytest.param("gateway.url", "http://h/v1/chat/completions", "address of one route", id="gateway-route"),
        pytest.param("gateway.ca_file", "", "is no path", id="ca-empty"),
        pytest.param("gateway.ca_file", "/no/such.pem", "cannot be read (No such file", id="ca-missing"),
        pytest.param("gateway.connect_timeout_s", 0, "must be at least 0.01", id="connect-timeout-0"),
        pytest.param("gateway.connect_timeout_s", 301, "must be at most 300", id="connect-timeout-too-long"),
        pytest.param("gateway.idle_timeout_s", -1, "must be at least 0", id="idle-timeout-negative"),
        pytest.param("gateway.idle_timeout_s", float("inf"), "not inf or nan", id="idle-timeout-inf"),
        pytest.param("gateway.idle_timeout_s", float("nan"), "not inf or nan", id="idle-timeout-nan"),
        pytest.param("gateway.idle_timeout_s", True, "must be a number", id="idle-timeout-bool"),
        pytest.param("dashboard.url", "http://h?a", "must not have a query", id="dashboard-query"),
        pytest.param("dashboard.fill", ["chat"], "must be one of 'sessions', 'skills'", id="fill-unknown"),
        pytest.param("dashboard.fill", ["jobs", "jobs"], "names the same thing twice", id="fill-twice"),
        pytest.param("dashboard.mount", "dashboard", "must look like", id="mount-without-slash"),
        pytest.param("dashboard.mount", "/dashboard/", "must look like", id="mount-slash-at-end"),
        pytest.param("dashboard.mount", "/", "must look like", id="mount-root"),
        pytest.param("dashboard.mount", "/a/../b", "must not have dot segments", id="mount-dots"),
        pytest.param("dashboard.mount", "/metrics", "would hide paths", id="mount-own-path"),
        pytest.param("dashboard.mount", "/sidecar/dash", "would hide paths", id="mount-below-own-path"),
        pytest.param("dashboard.mount", "/v1", "would hide paths", id="mount-v1"),
        pytest.param("session.sources", [{}], "must name either a header or a body", id="source-empty"),
        pytest.param("session.sources", [{"header": "a", "body": "b"}], "must name either", id="source-both"),
        pytest.param("session.sources", ["X-Key"], "must be a table", id="source-text"),
        pytest.param("session.sources", [{"header": "X Key"}], "not the name of a header", id="source-bad-name"),
        pytest.param("session.sources", [{"header": "X-Key:"}], "not the name of a header", id="source-colon"),
        pytest.param("session.sources", [{"header": "Authorization"}], "who somebody is", id="source-authorization"),
        pytest.param("session.sources", [{"header": "cookie"}], "who somebody is", id="source-cookie"),
        pytest.param("session.sources", [{"header": "Host"}], "describes the message", id="source-host"),
        pytest.param("session.sources", [{"header": "X-Hermes-Session-Id"}], "always comes first", id="source-id"),
        pytest.param("session.sources", [{"body": "a..b"}], "names with dots between", id="source-body-path"),
        pytest.param("session.sources", [{"header": "a", "prefix": "a/"}], "cannot begin with", id="prefix-slash"),
        pytest.param("session.sources", [{"header": "a", "prefix": "a\\"}], "cannot begin with", id="prefix-backslash"),
        pytest.param("session.sources", [{"header": "a", "prefix": "a.."}], "cannot begin with", id="prefix-dots"),
        pytest.param("session.sources", [{"header": "a", "prefix": "C:x"}], "cannot begin with", id="prefix-drive"),
        pytest.param("session.sources", [{"header": "a", "prefix": "a b"}], "cannot begin with", id="prefix-blank"),
        pytest.param("session.sources", [{"header": "a", "prefix": "ü"}], "cannot begin with", id="prefix-not-ascii"),
        pytest.param("session.sources", [{"header": "a", "prefix": "a" * 65}], "at most 64", id="prefix-too-long"),
        pytest.param("session.sources", [{"header": "a", "prefix": "hs-"}], 'begins with "hs-"', id="prefix-hs"),
        pytest.param("session.sources", [{"header": "X-A"}, {"header": "x-a"}], "same place twice", id="source-twice"),
        pytest.param("session.sources", [{"body": "a"}, {"body": "a"}], "same place twice", id="body-source-twice"),
        pytest.param("session.skip_when", [{}], "must name either", id="condition-empty"),
        pytest.param("session.skip_when", [{"header": ""}], "not the name of a header", id="condition-bad-name"),
        pytest.param("session.forward_key", "yes", "one of 'auto', 'always' or 'never'", id="forward-key"),
        pytest.param("session.body_limit_bytes", 0, "must be at least 1", id="body-limit-0"),
        pytest.param("session.body_limit_bytes", 1 << 40, "must be at most 268435456", id="body-limit-huge"),
        pytest.param("store.url", "", 'must be "sqlite"', id="store-empty"),
        pytest.param("store.url", "sqlite:///", 'must be "sqlite"', id="store-without-path"),
        pytest.param("store.url", "postgres://h", 'must be "sqlite"', id="store-postgres"),
        pytest.param("store.url", "redis://h:6379/x", 'must be "sqlite"', id="store-redis-database"),
        pytest.param("store.url", "redis://h:0/0", "has a port that is not", id="store-redis-port"),
        pytest.param("probe.interval_s", 0, "must be at least 0.01", id="interval-0"),
        pytest.param("probe.retry_s", 86_401, "must be at most 86400", id="retry-too-long"),
        pytest.param("probe.timeout_s", 301, "must be at most 300", id="probe-timeout-too-long"),
        pytest.param("shutdown.grace_s", -0.1, "must be at least 0", id="grace-negative"),
        pytest.param("log.level", "INFO", "must be one of 'debug', 'info'", id="level-other-case"),
        pytest.param("log.format", "xml", "must be one of 'auto', 'console' or 'json'", id="format-unknown"),
    ],
)
def test_unusable_value_is_one_fault_that_names_the_key(key: str, value: object, reason: str) -> None:
    section, name = key.split(".")

    found = faults({section: {name: value}})

    assert [(line.startswith(key), reason in line) for line in found] == [(True, True)]


@pytest.mark.parametrize(
    ("given_url", "kept_url", "prefix"),
    [
        pytest.param("http://h:1", "http://h:1", "", id="plain"),
        pytest.param("http://h:1/", "http://h:1", "", id="slash"),
        pytest.param("http://h:1/v1", "http://h:1", "", id="v1"),
        pytest.param("http://h:1/v1/", "http://h:1", "", id="v1-slash"),
        pytest.param("http://h:1//v1//", "http://h:1", "", id="v1-many-slashes"),
        pytest.param("http://h:1/api/v1", "http://h:1/api", "/api", id="prefix-v1"),
        pytest.param("http://h:1/api", "http://h:1/api", "/api", id="prefix"),
        pytest.param("http://h:1/av1", "http://h:1/av1", "/av1", id="prefix-that-ends-like-v1"),
        pytest.param("http://h:1/v1/acc/openai", "http://h:1/v1/acc/openai", "/v1/acc/openai", id="v1-inside"),
        pytest.param("http://h:1/a%20b~", "http://h:1/a%20b~", "/a%20b~", id="escape-stays-as-written"),
        pytest.param("HTTP://H:1/Api", "http://h:1/Api", "/Api", id="case-of-the-path-counts"),
    ],
)
def test_gateway_url_loses_v1_and_keeps_a_real_prefix(given_url: str, kept_url: str, prefix: str) -> None:
    gateway = from_mapping({"gateway": {"url": given_url}}).gateway

    assert (gateway.url, gateway.path_prefix) == (kept_url, prefix)


@pytest.mark.parametrize(
    ("url", "scheme", "host", "port", "netloc"),
    [
        pytest.param("http://h", "http", "h", 80, "h", id="http-default"),
        pytest.param("https://h:443", "https", "h", 443, "h", id="https-default-written"),
        pytest.param("https://h:80", "https", "h", 80, "h:80", id="https-other"),
        pytest.param("http://[::1]:80/v1", "http", "::1", 80, "[::1]", id="ipv6-default"),
        pytest.param("http://[0:0::1]:81", "http", "::1", 81, "[::1]:81", id="ipv6-shortened"),
        pytest.param("http://H.Example.:81", "http", "h.example", 81, "h.example:81", id="name-in-capitals"),
    ],
)
def test_gateway_url_is_taken_apart(url: str, scheme: str, host: str, port: int, netloc: str) -> None:
    gateway = from_mapping({"gateway": {"url": url}}).gateway

    assert (gateway.scheme, gateway.host, gateway.port, gateway.netloc) == (scheme, host, port, netloc)


_SEGMENTS = st.lists(st.from_regex(r"[a-z][a-z0-9~_-]{0,5}", fullmatch=True).filter(lambda s: s != "v1"), max_size=3)


@given(
    segments=_SEGMENTS,
    ending=st.sampled_from(["", "/", "/v1", "/v1/", "//", "/v1//"]),
    authority=st.sampled_from(["h", "h:8080", "[::1]", "127.0.0.1:1"]),
    scheme=st.sampled_from(["http", "https", "HTTP"]),
)
def test_no_spelling_of_the_gateway_doubles_a_segment(
    segments: list[str], ending: str, authority: str, scheme: str
) -> None:
    """For any spelling, prefix + "/v1/x" is the real prefix and one v1."""
    prefix = "".join(f"/{segment}" for segment in segments)

    gateway = from_mapping({"gateway": {"url": f"{scheme}://{authority}{prefix}{ending}"}}).gateway

    assert f"{gateway.path_prefix}/v1/x" == f"{prefix}/v1/x"
    assert gateway.url == f"{gateway.scheme}://{gateway.netloc}{gateway.path_prefix}"


def test_dashboard_url_keeps_its_path() -> None:
    dashboard = from_mapping({"dashboard": {"url": "http://h:9119/v1/"}}).dashboard

    assert dashboard.url == "http://h:9119/v1"
    assert dashboard.base is not None
    assert dashboard.base.path_prefix == "/v1"


def test_allowed_hosts_are_kept_as_they_are_compared() -> None:
    listen = from_mapping({"listen": {"allowed_hosts": ["Chat.Example.", "box:8650", "[::1]:80", "FE80::1"]}}).listen

    assert listen.allowed_hosts == ("chat.example", "box", "::1", "fe80::1")


def test_allowed_origins_are_spelled_as_browsers_send_them() -> None:
    origins = [
        "HTTP://LocalHost:3000",
        "https://a:443",
        "http://[::1]:80",
        "app://obsidian.md",
        "chrome-extension://ab",
    ]

    listen = from_mapping({"listen": {"allowed_origins": origins}}).listen

    assert listen.allowed_origins == (
        "http://localhost:3000",
        "https://a",
        "http://[::1]",
        "app://obsidian.md",
        "chrome-extension://ab",
    )


# --- Unknown names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        pytest.param(
            {"listen": {"prot": 1}},
            "listen.prot: there is no such key; the nearest known one is listen.port",
            id="slip-of-the-pen",
        ),
        pytest.param(
            {"listen": {"token_file": "x"}},
            "listen.token_file: there is no such key; the nearest known one is gateway.token_file",
            id="key-of-another-section",
        ),
        pytest.param(
            {"gatway": {"url": "http://h"}},
            "gatway: there is no such section; the nearest known name is gateway",
            id="section",
        ),
        pytest.param(
            {"workers": 2},
            "workers: there is no such section; the nearest known name is listen.workers",
            id="no-section",
        ),
        pytest.param(
            {"session": {"sources": [{"heder": "x", "header": "x"}]}},
            "session.sources[0].heder: there is no such key; the nearest known one is header",
            id="inside-a-list",
        ),
        pytest.param(
            {"gateway": {"token": SECRET}},
            "gateway.token: no key stands in this file; write it into a file of its own and name that in"
            " gateway.token_file",
            id="the-key-itself",
        ),
        pytest.param({"log": 5}, "log: must be a table of keys and values", id="section-no-table"),
        pytest.param(
            {"listen": {"po\nrt": 1}},
            "listen.po?rt: there is no such key; the nearest known one is listen.port",
            id="line-break-in-a-key",
        ),
    ],
)
def test_unknown_name_in_the_file_is_told_with_the_nearest_known(values: dict[str, Any], fault: str) -> None:
    assert faults(values) == [fault]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        pytest.param("HERMES_SIDECAR_LISTEN__PROT", "HERMES_SIDECAR_LISTEN__PORT", id="slip-of-the-pen"),
        pytest.param("HERMES_SIDECAR_LISTEN_PORT", "HERMES_SIDECAR_LISTEN__PORT", id="one-underscore"),
        pytest.param("HERMES_SIDECAR_listen__port", "HERMES_SIDECAR_LISTEN__PORT", id="other-case"),
        pytest.param("HERMES_SIDECAR_PORT", "HERMES_SIDECAR_LISTEN__PORT", id="without-section"),
        pytest.param("HERMES_SIDECAR_TOKEN", "HERMES_SIDECAR_GATEWAY__TOKEN", id="the-key"),
        pytest.param("HERMES_SIDECAR_CONFIGS", "HERMES_SIDECAR_CONFIG", id="the-file"),
    ],
)
def test_unknown_variable_is_told_with_the_nearest_known(name: str, near: str) -> None:
    assert faults({}, {name: SECRET}) == [f"{name}: there is no such variable; the nearest known one is {near}"]


def test_all_faults_are_told_at_once_without_values_or_traces_of_the_library() -> None:
    values = {
        "listen": {"host": "0.0.0.0", "port": SECRET, "allowed_origins": [f"http://{SECRET}/"]},
        "gateway": {"url": f"http://u:{SECRET}@h", "token_file": f"/{SECRET}"},
        "admin": {"port": 1},
        SECRET.lower(): 1,
    }

    found = faults(values, {"HERMES_SIDECAR_PROBE__RETRY_S": SECRET, "HERMES_SIDECAR_GATEWAY__TOKENS": SECRET})

    assert [line.split(":")[0] for line in found] == [
        "HERMES_SIDECAR_GATEWAY__TOKENS",
        "listen.port",
        "listen.allowed_origins[0]",
        "gateway.url",
        "probe.retry_s",
        SECRET.lower(),
        "gateway.token_file",
        "listen.host",
        "admin.host",
    ]
    assert SECRET not in "\n".join(found)
    assert not [line for line in found if "pydantic" in line or "\n" in line]


@pytest.mark.parametrize(
    "url",
    [
        pytest.param(f"http://user:{SECRET}@h", id="user-and-password"),
        pytest.param(f"http://{SECRET}@h", id="user"),
        pytest.param(f"http://user:{SECRET}/x@h", id="slash-in-password"),
        pytest.param(f"http://user:{SECRET}#x@h", id="hash-in-password"),
    ],
)
@pytest.mark.parametrize("key", ["gateway.url", "dashboard.url"])
def test_url_with_user_info_is_refused_without_echo(key: str, url: str) -> None:
    section, name = key.split(".")

    found = faults({section: {name: url}})

    assert [line.startswith(f"{key}: must not hold a user name or a password") for line in found] == [True]
    assert SECRET not in found[0]


@pytest.mark.parametrize(
    "user_info",
    [
        pytest.param(SECRET, id="no-colon"),
        pytest.param("user:", id="no-password"),
        pytest.param(f":{SECRET}@", id="at-in-password"),
        pytest.param(f":{SECRET}/x", id="slash-in-password"),
        pytest.param(f":{SECRET}#x", id="hash-in-password"),
        pytest.param(f":{SECRET}%zz", id="bad-escape"),
        pytest.param(f":{SECRET} x", id="blank-in-password"),
        pytest.param(f":{SECRET}ü", id="not-ascii"),
    ],
)
def test_store_password_that_has_no_certain_end_is_refused_without_echo(user_info: str) -> None:
    found = faults({}, {"HERMES_SIDECAR_STORE__URL": f"redis://{user_info}@h:1/0"})

    assert [line.startswith('store.url: must have "user:password"') for line in found] == [True]
    assert SECRET not in found[0]


@pytest.mark.parametrize("user_info", [f":{SECRET}", f"user:{SECRET}", f"user:{SECRET}%2F%40:"])
def test_store_password_is_kept_for_the_connection_and_shown_nowhere(user_info: str) -> None:
    settings = from_mapping({}, {"HERMES_SIDECAR_STORE__URL": f"redis://{user_info}@h:1/0"})
    copied = settings.model_copy(update={"listen": settings.listen})

    shown = describe(settings)
    assert settings.store.url == "redis://h:1/0"
    assert copied.store.full_url.get_secret_value() == f"redis://{user_info}@h:1/0"
    assert 'url = "redis://h:1/0"\n# password: set\n' in shown
    assert not any(SECRET in text for text in (shown, repr(settings), str(settings.model_dump()), repr(copied.store)))


@pytest.mark.parametrize("url", ["sqlite", "memory", "sqlite:///a@b:c", "redis://h:1/0"])
def test_store_without_password_is_connected_to_as_written(url: str) -> None:
    store = from_mapping({"store": {"url": url}}).store

    assert [store.url, store.full_url.get_secret_value(), store.has_password] == [url, url, False]


# --- Several settings together ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "box.example"])
def test_open_bind_needs_tokens(host: str, tmp_path: Path) -> None:
    tokens_file = keyed("t0ken", path=tmp_path / "tokens")

    assert [line.split(":")[0] for line in faults({"listen": {"host": host}})] == ["listen.host"]
    assert from_mapping({"listen": {"host": host, "tokens_file": tokens_file}}).listen.host == host


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.9.9.9", "::1", "[::1]"])
def test_loopback_bind_needs_no_tokens(host: str) -> None:
    assert from_mapping({"listen": {"host": host}}).listen.client_tokens == ()


def test_any_origin_is_refused_while_the_gateway_token_is_set(tmp_path: Path) -> None:
    listen = {"allowed_origins": ["*"]}
    token_file = keyed(SECRET, path=tmp_path / "token")

    by_file = faults({"listen": listen, "gateway": {"token_file": token_file}})
    by_environment = faults({"listen": listen}, {"HERMES_SIDECAR_GATEWAY__TOKEN": SECRET})

    assert by_file == by_environment
    assert [line.split(":")[0] for line in by_file] == ["listen.allowed_origins"]
    assert from_mapping({"listen": listen}).listen.allowed_origins == ("*",)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        pytest.param(None, "needs listen.tokens_file", id="no-file"),
        pytest.param(["ann:t1", "t2"], "needs a name for every token", id="unnamed"),
        pytest.param(["ann:t1", "ann-lee:t2"], "cannot keep two of the clients apart", id="name-begins-another"),
    ],
)
def test_isolation_is_refused_where_clients_could_share_a_session(
    lines: list[str] | None, reason: str, tmp_path: Path
) -> None:
    listen: dict[str, Any] = {"isolate_clients": True}
    if lines is not None:
        listen["tokens_file"] = keyed(*lines, path=tmp_path / "tokens")

    found = faults({"listen": listen})

    assert [(line.split(":")[0], reason in line) for line in found] == [("listen.isolate_clients", True)]


def test_isolation_accepts_names_that_no_prefix_confuses(tmp_path: Path) -> None:
    tokens_file = keyed("ann:t1", "ann:t2", "anna:t3", path=tmp_path / "tokens")

    listen = from_mapping({"listen": {"isolate_clients": True, "tokens_file": tokens_file}}).listen

    assert [token.name for token in listen.client_tokens] == ["ann", "ann", "anna"]


@pytest.mark.parametrize(
    ("listen_host", "url"),
    [
        pytest.param("127.0.0.1", "http://127.0.0.1:8650", id="same"),
        pytest.param("127.0.0.1", "http://LOCALHOST:8650/v1", id="other-loopback-name"),
        pytest.param("::1", "http://localhost:8650", id="ipv6"),
        pytest.param("127.0.0.1", "http://0.0.0.0:8650", id="wildcard-asked"),
        pytest.param("0.0.0.0", "http://127.0.0.1:8650", id="wildcard-bound"),
        pytest.param("box.example", "http://box.example:8650", id="bound-name"),
    ],
)
@pytest.mark.parametrize("section", ["gateway", "dashboard"])
def test_upstream_that_is_the_sidecar_itself_is_refused(
    section: str, listen_host: str, url: str, tmp_path: Path
) -> None:
    listen = {"host": listen_host, "tokens_file": keyed("t", path=tmp_path / "tokens")}

    found = faults({"listen": listen, section: {"url": url}})

    assert found == [f"{section}.url: is the address that the sidecar itself listens on; it would call itself"]


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        pytest.param({"port": 0}, "http://127.0.0.1:8650", id="any-free-port"),
        pytest.param({}, "http://127.0.0.1:8642", id="other-port"),
        pytest.param({}, "http://gateway.example:8650", id="other-machine"),
    ],
)
def test_upstream_elsewhere_is_accepted(listen: dict[str, Any], url: str) -> None:
    assert from_mapping({"listen": listen, "gateway": {"url": url}}).gateway.url == url


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        pytest.param({"admin": {"host": "127.0.0.1"}}, "admin.port: is missing", id="admin-host-alone"),
        pytest.param({"admin": {"port": 1}}, "admin.host: is missing", id="admin-port-alone"),
        pytest.param(
            {"admin": {"host": "localhost", "port": 8650}}, "admin.port: is taken by listen.port", id="admin-on-listen"
        ),
        pytest.param(
            {"admin": {"host": "0.0.0.0", "port": 1}}, "admin.host: is not a loopback address", id="admin-open"
        ),
        pytest.param({"dashboard": {"mount": "/d"}}, "dashboard.mount: needs dashboard.url", id="mount-of-nothing"),
    ],
)
def test_settings_that_need_each_other(values: dict[str, Any], fault: str) -> None:
    assert [line.startswith(fault) for line in faults(values)] == [True]


def test_rule_over_a_faulty_key_stays_silent() -> None:
    found = faults({"listen": {"host": "0.0.0.0", "tokens_file": "/no/such/file"}})

    assert found == ["listen.tokens_file: names a file that cannot be read (No such file or directory)"]


# --- Secrets ---------------------------------------------------------------------------------------------------------


def test_gateway_token_is_read_from_its_file_and_stripped(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_bytes(b"  " + SECRET.encode() + b"\r\n\n")

    token = from_mapping({"gateway": {"token_file": str(token_file)}}).gateway.token

    assert token is not None
    assert token.get_secret_value() == SECRET


def test_gateway_token_of_the_environment_beats_the_file() -> None:
    values = {"gateway": {"token_file": "/no/such/file"}}

    token = from_mapping(values, {"HERMES_SIDECAR_GATEWAY__TOKEN": f"{SECRET}\n"}).gateway.token

    assert token is not None
    assert token.get_secret_value() == SECRET


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(b"", "names a file that is empty", id="empty"),
        pytest.param(b" \n", "names a file that is empty", id="blank"),
        pytest.param(b"s3cr3t-Marker\nX-Injected: 1", "one key of visible ASCII", id="line-break"),
        pytest.param(b"s3cr3t-Marker\0", "one key of visible ASCII", id="nul"),
        pytest.param("s3cr3t-Marker-é".encode(), "one key of visible ASCII", id="not-ascii"),
        pytest.param(b"s3cr3t-Marker" * 100_000, "is too large", id="huge"),
    ],
)
def test_unusable_gateway_token_is_a_fault_without_echo(content: bytes, reason: str, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_bytes(content)

    found = faults({"gateway": {"token_file": str(token_file)}})

    assert [(line.split(":")[0], reason in line) for line in found] == [("gateway.token_file", True)]
    assert SECRET not in found[0]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        pytest.param("", "is empty", id="empty"),
        pytest.param(f"{SECRET}\r\nX-Injected: 1", "does not hold one key", id="line-break"),
        pytest.param(f"{SECRET} {SECRET}", "does not hold one key", id="two"),
    ],
)
def test_unusable_token_in_the_environment_is_a_fault_without_echo(value: str, reason: str) -> None:
    found = faults({}, {"HERMES_SIDECAR_GATEWAY__TOKEN": value})

    assert [(line.split(":")[0], reason in line) for line in found] == [("HERMES_SIDECAR_GATEWAY__TOKEN", True)]
    assert SECRET not in found[0]


def test_client_tokens_are_read_a_line_each(tmp_path: Path) -> None:
    tokens_file = keyed("# for the house", "", "plain-token", "  ann : a:b= ", "ann:second", path=tmp_path / "tokens")

    listen = from_mapping({"listen": {"tokens_file": tokens_file}}).listen

    assert listen.client_tokens == (
        ClientToken(None, b"plain-token"),
        ClientToken("ann", b"a:b="),
        ClientToken("ann", b"second"),
    )


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        pytest.param([], "holds no token", id="empty"),
        pytest.param(["# nothing", ""], "holds no token", id="only-comments"),
        pytest.param(["ok", f"{SECRET} x"], "a line 2 that is not one token", id="blank-inside"),
        pytest.param(["ann:"], "a line 1 that is not one token", id="name-without-token"),
        pytest.param([f"{SECRET}é"], "a line 1 that is not one token", id="not-ascii"),
        pytest.param([f"a/b:{SECRET}"], "a line 1 whose name", id="name-with-slash"),
        pytest.param([f"hs:{SECRET}"], "a line 1 whose name", id="name-like-a-derived-id"),
        pytest.param([f"a..b:{SECRET}"], "a line 1 whose name", id="name-with-dots"),
        pytest.param([f":{SECRET}"], "a line 1 whose name", id="empty-name"),
        pytest.param([f"a:{SECRET}", f"b:{SECRET}"], "a line 2 with a token that stands in it already", id="twice"),
    ],
)
def test_unusable_tokens_file_is_a_fault_without_echo(lines: list[str], reason: str, tmp_path: Path) -> None:
    found = faults({"listen": {"tokens_file": keyed(*lines, path=tmp_path / "tokens")}})

    assert [(line.split(":")[0], reason in line) for line in found] == [("listen.tokens_file", True)]
    assert SECRET not in found[0]


@pytest.mark.parametrize("key", ["gateway.token_file", "listen.tokens_file"])
def test_key_pasted_in_the_place_of_a_path_is_not_echoed(key: str, tmp_path: Path) -> None:
    section, name = key.split(".")

    missing = faults({section: {name: SECRET}})
    directory = faults({section: {name: str(tmp_path)}})

    assert missing == [f"{key}: names a file that cannot be read (No such file or directory)"]
    assert directory == [f"{key}: names a file that cannot be read (Is a directory)"]


def test_credentials_of_systemd_are_used_where_no_file_is_named(tmp_path: Path) -> None:
    keyed(SECRET, path=tmp_path / "gateway-token")
    keyed("ann:t1", path=tmp_path / "client-tokens")
    elsewhere = tmp_path / "elsewhere"
    keyed("other", path=elsewhere)
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path)}

    found = from_mapping({}, environ)
    named = from_mapping({"gateway": {"token_file": str(elsewhere)}}, environ)

    assert (found.gateway.token_file, found.listen.tokens_file) == (
        tmp_path / "gateway-token",
        tmp_path / "client-tokens",
    )
    assert found.gateway.token is not None
    assert found.gateway.token.get_secret_value() == SECRET
    assert found.listen.client_tokens == (ClientToken("ann", b"t1"),)
    assert named.gateway.token is not None
    assert named.gateway.token.get_secret_value() == "other"


def test_credentials_directory_without_our_files_changes_nothing(tmp_path: Path) -> None:
    assert from_mapping({}, {"CREDENTIALS_DIRECTORY": str(tmp_path)}) == from_mapping({})


def test_no_text_of_the_settings_shows_a_secret(tmp_path: Path) -> None:
    tokens_file = keyed(f"ann:{SECRET}-client", path=tmp_path / "tokens")

    settings = from_mapping(
        {"listen": {"tokens_file": tokens_file}}, {"HERMES_SIDECAR_GATEWAY__TOKEN": f"{SECRET}-gateway"}
    )

    shown = [repr(settings), str(settings), repr(settings.gateway.token), repr(settings.listen.client_tokens)]
    shown += [describe(settings), json.dumps(settings.model_dump(mode="json"))]
    assert [text for text in shown if SECRET in text] == []


def test_secrets_of_one_configuration_do_not_reach_another() -> None:
    from_mapping({}, {"HERMES_SIDECAR_GATEWAY__TOKEN": SECRET})

    assert from_mapping({}).gateway.token is None


def test_certificate_authority_is_read(tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(ca_file))
    no_pem = keyed("no certificate", path=tmp_path / "text")

    assert from_mapping({"gateway": {"ca_file": str(ca_file)}}).gateway.ca_file == ca_file
    assert faults({"gateway": {"ca_file": no_pem}}) == [
        "gateway.ca_file: names a file without a certificate in PEM form"
    ]


# --- Where values come from ------------------------------------------------------------------------------------------


def test_environment_beats_the_file_and_reads_each_kind() -> None:
    environ = {
        "HERMES_SIDECAR_LISTEN__PORT": "0",
        "HERMES_SIDECAR_LISTEN__UNIX_SOCKET": "/run/s",
        "HERMES_SIDECAR_LISTEN__ALLOWED_HOSTS": '["a", "b"]',
        "HERMES_SIDECAR_SESSION__SOURCES": '[{"header": "X-Mine", "prefix": "m-"}]',
        "HERMES_SIDECAR_SESSION__FOLLOW_ROTATION": "no",
        "HERMES_SIDECAR_GATEWAY__IDLE_TIMEOUT_S": "2.5",
        "HERMES_SIDECAR_ADMIN__HOST": "::1",
        "HERMES_SIDECAR_ADMIN__PORT": "9000",
        "OTHER_PROGRAM": "x",
    }
    values = {"listen": {"port": 1, "workers": 2, "allowed_hosts": ["c"]}, "session": {"forward_key": "never"}}

    settings = from_mapping(values, environ)

    assert settings == from_mapping(
        {
            "listen": {"port": 0, "unix_socket": "/run/s", "workers": 2, "allowed_hosts": ["a", "b"]},
            "session": {
                "sources": [{"header": "X-Mine", "prefix": "m-"}],
                "follow_rotation": False,
                "forward_key": "never",
            },
            "gateway": {"idle_timeout_s": 2.5},
            "admin": {"host": "::1", "port": 9000},
        }
    )


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        pytest.param("LISTEN__ALLOWED_HOSTS", "a,b", "listen.allowed_hosts: is not valid JSON", id="list-no-json"),
        pytest.param("LISTEN__ALLOWED_HOSTS", '"a"', "listen.allowed_hosts: must be a list", id="json-no-list"),
        pytest.param("LISTEN__ALLOWED_HOSTS", "[" * 100_000, "listen.allowed_hosts: is not valid JSON", id="deep-json"),
        pytest.param("LISTEN__PORT", "x", "listen.port: must be a whole number", id="int"),
        pytest.param("LISTEN__PORT", "", "listen.port: must be a whole number", id="int-empty"),
        pytest.param("PROBE__RETRY_S", "5s", "probe.retry_s: must be a number", id="float"),
        pytest.param("SESSION__INJECT_BODY", "maybe", "session.inject_body: must be true or false", id="bool"),
        pytest.param("ADMIN__PORT", "x", "admin.port: must be a whole number", id="optional-int"),
    ],
)
def test_unusable_variable_is_a_fault_that_names_it(name: str, text: str, fault: str) -> None:
    found = faults({}, {f"HERMES_SIDECAR_{name}": text})

    assert [(line.startswith(fault), line.endswith(f"(from HERMES_SIDECAR_{name})")) for line in found] == [
        (True, True)
    ]


def write_port(path: Path, port: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"[listen]\nport = {port}\n")
    return path


def test_named_file_beats_the_variable_and_that_the_usual_place(tmp_path: Path) -> None:
    named, by_variable = write_port(tmp_path / "a.toml", 1), write_port(tmp_path / "b.toml", 2)
    usual = write_port(tmp_path / "xdg" / "hermes-sidecar" / "sidecar.toml", 3)
    in_home = write_port(tmp_path / ".config" / "hermes-sidecar" / "sidecar.toml", 4)
    places = {"XDG_CONFIG_HOME": str(tmp_path / "xdg"), "HOME": str(tmp_path)}
    variable = {"HERMES_SIDECAR_CONFIG": str(by_variable)}

    loaded = [
        load(named, places | variable),
        load(None, places | variable),
        load(None, places),
        load(None, places | {"XDG_CONFIG_HOME": "relative"}),
    ]

    assert [(s.listen.port, s.source_file) for s in loaded] == [
        (1, named),
        (2, by_variable),
        (3, usual),
        (4, in_home),
    ]


def test_no_file_anywhere_means_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.config.sources.SYSTEM_FILE", tmp_path / "etc.toml")

    settings = load(None, {"HOME": str(tmp_path), "HERMES_SIDECAR_CONFIG": ""})

    assert (settings, settings.source_file) == (from_mapping({}), None)
    assert settings == Settings()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(None, "the file cannot be read (No such file or directory)", id="missing"),
        pytest.param(b"[listen\n", "not valid TOML: ", id="not-toml"),
        pytest.param(b"a = 1\na = 2\n", "not valid TOML: ", id="key-twice"),
        pytest.param(b"a = '\xff'\n", "the file is not UTF-8 text", id="not-utf8"),
    ],
)
def test_unreadable_file_is_one_fault(content: bytes | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "sidecar.toml"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigFaults) as named:
        load(path, {})
    with pytest.raises(ConfigFaults) as by_variable:
        # The host would need a tokens file, which the unreadable file may well name: nothing is said about it.
        load(None, {"HERMES_SIDECAR_CONFIG": str(path), "HERMES_SIDECAR_LISTEN__HOST": "0.0.0.0"})

    assert [line.startswith(f"{path}: {reason}") for line in named.value.faults] == [True]
    assert [line.startswith(f"{path} (from HERMES_SIDECAR_CONFIG): {reason}") for line in by_variable.value.faults] == [
        True
    ]


def test_settings_are_frozen_and_the_given_mapping_is_left_alone() -> None:
    values: dict[str, Any] = {"listen": {"port": -1, "workers": 3}}

    faults(values)

    assert values == {"listen": {"port": -1, "workers": 3}}
    with pytest.raises(ValueError, match="frozen"):
        from_mapping({}).listen.port = 1


# --- Told back -------------------------------------------------------------------------------------------------------


def test_description_reads_back_as_the_same_settings(tmp_path: Path) -> None:
    values = {
        "listen": {"port": 0, "unix_socket": '/run/"odd"\\.sock', "allowed_hosts": ["a"]},
        "session": {"sources": [{"header": "X-A", "prefix": "a-"}, {"body": "metadata.chat_id"}]},
        "shutdown": {"grace_s": 0.5},
    }
    settings = from_mapping(values)
    path = tmp_path / "described.toml"
    path.write_text(describe(settings))

    assert load(path, {}).model_dump() == settings.model_dump()


def test_description_says_of_secrets_only_whether_they_are_set() -> None:
    bare, keyed_gateway = from_mapping({}), from_mapping({}, {"HERMES_SIDECAR_GATEWAY__TOKEN": SECRET})

    assert ["# token: not set" in describe(bare), "# token: set" in describe(keyed_gateway)] == [True, True]
