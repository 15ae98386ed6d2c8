"""Credentials, pure: who may use the sidecar, and which key goes on to the gateway.

Law: comparisons take the same time for every token, and no credential is ever part of a fault.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from sidecar.faults import client_token_required
from sidecar.relay.wire import Field


@dataclass(frozen=True, slots=True)
class Client:
    """A client that showed a token of ours; `namespace` stands before its session ids when clients are kept apart."""

    namespace: bytes = b""


ANYONE: Final = Client()


@dataclass(frozen=True, slots=True)
class CredentialPolicy:
    """The gateway's key, and the clients' tokens as hashes; neither shows in a repr."""

    gateway_token: bytes | None = field(default=None, repr=False)
    clients: tuple[tuple[bytes, Client], ...] | None = field(default=None, repr=False)
    """(SHA-256 of the token, its client); None: no token is asked for."""

    @classmethod
    def of(
        cls, gateway_token: bytes | None, tokens: Iterable[tuple[str | None, bytes]] | None, *, isolate: bool
    ) -> CredentialPolicy:
        if tokens is None:
            return cls(gateway_token)
        clients = tuple(
            (hashlib.sha256(token).digest(), Client(f"{name}-".encode() if isolate and name else b""))
            for name, token in tokens
        )
        return cls(gateway_token, clients)

    def admit(self, authorization: list[Field], *, is_open: bool = False) -> Client:
        """The client that this Authorization names. Raises the fault `client_token_required`, unless `is_open`.

        Hashes of one length are compared, each with every token, so the time tells neither which token was near nor
        how long one is.
        """
        if self.clients is None or is_open:
            return ANYONE
        found: Client | None = None
        if len(authorization) == 1:
            shown = hashlib.sha256(_bearer(authorization[0][1])).digest()
            for token_hash, client in self.clients:
                if hmac.compare_digest(shown, token_hash):
                    found = client
        if found is None:
            raise client_token_required()
        return found

    def to_upstream(self, authorization: list[Field]) -> list[Field]:
        """The Authorization lines for the gateway: the client's own, or the configured key where it has none."""
        if self.clients is None:
            for _, value in authorization:
                if _has_credential(value):
                    return authorization
        if self.gateway_token is None:
            return []
        return [(b"Authorization", b"Bearer " + self.gateway_token)]

    def to_dashboard(self, authorization: list[Field]) -> list[Field]:
        """The client's own Authorization for the dashboard; never a client token or the gateway's key."""
        if self.clients is not None:
            return []
        key = None if self.gateway_token is None else hashlib.sha256(self.gateway_token).digest()
        return [
            line
            for line in authorization
            if key is None or not hmac.compare_digest(hashlib.sha256(_bearer(line[1])).digest(), key)
        ]


@lru_cache(maxsize=256)
def _has_credential(value: bytes) -> bool:
    """`Bearer` with nothing after it is what a frontend sends when its key field was left empty."""
    scheme, _, credential = value.strip(b" \t").partition(b" ")
    return bool(credential.strip(b" \t")) or (bool(scheme) and scheme.lower() not in (b"bearer", b"basic"))


def _bearer(value: bytes) -> bytes:
    scheme, _, token = value.partition(b" ")
    return token.strip(b" \t") if scheme.lower() == b"bearer" else b""
