"""Who is calling: the device whose certificate this connection, or a trusted proxy, has shown. Nothing else counts.

A proxy that ends TLS forwards the certificate in one header, `X-Client-Cert`: PEM, URL-encoded, as nginx makes it
with `$ssl_client_escaped_cert` and Envoy with `%DOWNSTREAM_PEER_CERT%`. It is believed from the addresses in the
settings only, and verified here again. There is one header and not a choice of them: a proxy replaces the one it is
set to, and would pass on another that a client made up, with a certificate of somebody else's in it.

State is looked up for every request, so a revocation acts on the next one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Annotated
from urllib.parse import unquote

from cryptography import x509
from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool

from coordinator.api.deps import Serving
from coordinator.db import devices
from coordinator.enrolment import admit
from coordinator.errors import Refusal

FORWARDED = "x-client-cert"


@dataclass(frozen=True)
class Caller:
    """A device that takes part, proven by its certificate."""

    id: str
    name: str
    group: str


async def calling_device(request: Request, services: Serving) -> AsyncIterator[Caller]:
    """The device that makes this request, which counts among its requests until it is answered.

    Raises:
        Refusal: 401 `no_certificate`, `foreign_certificate`, `expired`, `not_yet_valid`; 403 `revoked`,
            `unknown_device`, `pending`; 429 `too_many_requests`.
    """
    certificate = _shown(request, services.settings.trusted_proxies)
    if certificate is None:
        raise Refusal(
            401, "no_certificate", "the device API needs the client certificate of an enrolled device"
        )
    # OpenSSL took any chain up to our CA; a device's certificate is signed by the CA itself.
    device = services.authority.verify(certificate, services.clock())
    with services.limits.request(device):
        row = admit(await run_in_threadpool(services.database.read, lambda at: devices.find(at, device)))
        yield Caller(row.id, row.name, row.device_group)


Calling = Annotated[Caller, Depends(calling_device)]
"""The type of a route's argument that gets the calling device."""


def _shown(request: Request, trusted: tuple[str, ...]) -> x509.Certificate | None:
    state = request.scope["state"]
    if _is_trusted(state.get("peer_address", ""), trusted):
        forwarded = request.headers.getlist(FORWARDED)
        if len(forwarded) > 1:
            raise Refusal(401, "foreign_certificate", f"the proxy forwarded {len(forwarded)} certificates")
        if forwarded and forwarded[0]:
            return _parsed(unquote(forwarded[0]))
    der: bytes | None = state.get("peer_certificate")
    return None if der is None else _parsed_der(der)


def _is_trusted(address: str, trusted: tuple[str, ...]) -> bool:
    if not trusted or not address:
        return False
    peer = ip_address(address.partition("%")[0])
    mapped = getattr(peer, "ipv4_mapped", None)
    return any((mapped or peer) in ip_network(each, strict=False) for each in trusted)


def _parsed_der(der: bytes) -> x509.Certificate:
    try:
        return x509.load_der_x509_certificate(der)
    except Exception as error:  # a CA of one's own may have signed what only OpenSSL takes
        raise Refusal(401, "foreign_certificate", "this certificate cannot be read") from error


def _parsed(pem: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem.encode())
    except Exception as error:  # whatever a parser may say about bytes from outside
        raise Refusal(401, "foreign_certificate", f"{FORWARDED} holds no certificate in PEM") from error
