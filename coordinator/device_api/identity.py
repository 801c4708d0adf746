"""The calling device, identified only by the certificate of its connection or from a trusted proxy.

A proxy that ends TLS forwards the certificate in the header `X-Client-Cert`: PEM, URL-encoded, as nginx produces it with
`$ssl_client_escaped_cert` and Envoy with `%DOWNSTREAM_PEER_CERT%`. It is accepted from the addresses in the settings
only, and verified here again. The header's name is fixed: a proxy replaces the header that it is configured for, and
would pass on a forged one of another name with somebody else's certificate.

The device's state is read for every request, so a revocation takes effect on the next one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from ipaddress import ip_address, ip_network
from typing import Annotated
from urllib.parse import unquote

from cryptography import x509
from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool

from coordinator.accounts.enrolment import require_active
from coordinator.context.services import ServicesDep
from coordinator.db import devices
from coordinator.errors import Refusal

FORWARDED = "x-client-cert"


async def calling_device(request: Request, services: ServicesDep) -> AsyncIterator[str]:
    """The id of the active device that makes this request, which counts toward the device's limits until it is answered.

    Raises:
        Refusal: 401 `no_certificate`, `foreign_certificate`, `expired`, `not_yet_valid`; 403 `revoked`,
            `unknown_device`, `pending`; 429 `too_many_requests`.
    """
    certificate = _client_certificate(request, services.settings.trusted_proxies)
    if certificate is None:
        raise Refusal(
            401, "no_certificate", "the device API needs the client certificate of an enrolled device"
        )
    # OpenSSL accepted any chain up to our CA; a device's certificate is signed by the CA itself.
    device = services.authority.verify(certificate, services.clock())
    with services.limits.request(device):
        require_active(await run_in_threadpool(services.database.read, lambda at: devices.find(at, device)))
        yield device


CallerDep = Annotated[str, Depends(calling_device)]
"""Type of a route's parameter that receives the id of the calling device."""


def _client_certificate(request: Request, trusted: tuple[str, ...]) -> x509.Certificate | None:
    state = request.scope["state"]
    if _is_trusted(state.get("peer_address", ""), trusted):
        forwarded = request.headers.getlist(FORWARDED)
        if len(forwarded) > 1:
            raise Refusal(401, "foreign_certificate", f"the proxy forwarded {len(forwarded)} certificates")
        if forwarded and forwarded[0]:
            pem = unquote(forwarded[0]).encode()
            return _parse(x509.load_pem_x509_certificate, pem, f"{FORWARDED} holds no certificate in PEM")
    der: bytes | None = state.get("peer_certificate")
    if der is None:
        return None
    return _parse(x509.load_der_x509_certificate, der, "this certificate cannot be read")


def _is_trusted(address: str, trusted: tuple[str, ...]) -> bool:
    if not trusted or not address:
        return False
    peer = ip_address(address.partition("%")[0])
    mapped = getattr(peer, "ipv4_mapped", None)
    return any((mapped or peer) in ip_network(each, strict=False) for each in trusted)


def _parse(load: Callable[[bytes], x509.Certificate], encoded: bytes, problem: str) -> x509.Certificate:
    try:
        return load(encoded)
    except (
        Exception
    ) as error:  # the parser may raise anything on untrusted bytes, and on what only OpenSSL accepts
        raise Refusal(401, "foreign_certificate", problem) from error
