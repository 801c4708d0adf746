"""The calling device, identified only by the certificate of its connection or from a trusted proxy.

A proxy that ends TLS forwards the certificate in the header `X-Client-Cert`: PEM, URL-encoded, as nginx produces it with
`$ssl_client_escaped_cert` and Envoy with `%DOWNSTREAM_PEER_CERT%`. It is accepted from the addresses in the settings
only, and verified here again. The header's name is fixed: a proxy replaces the header that it is configured for, and
would pass on a forged one of another name with somebody else's certificate.

The device's state is read for every request, so a revocation takes effect on the next one.

A relay makes the requests of its devices, which it has identified in the same way, and names the device in a header. It can name
only devices that belong to it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Annotated
from urllib.parse import unquote

from cryptography import x509
from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool

from coordinator.accounts.enrolment import require_active
from coordinator.context.services import Services, ServicesDep
from coordinator.db import devices
from coordinator.db.devices import DeviceRow
from coordinator.errors import Refusal
from edge_client.wire.relays import ON_BEHALF

FORWARDED = "x-client-cert"


@dataclass(frozen=True)
class Caller:
    """The device that a request is of, and the relay that makes it in its place, if one does."""

    device: DeviceRow
    relay: DeviceRow | None = None


async def identify(request: Request, services: ServicesDep) -> AsyncIterator[Caller]:
    """The active device whose request this is, which counts toward the device's limits until it is answered.

    Raises:
        Refusal: 401 `no_certificate`, `foreign_certificate`, `expired`, `not_yet_valid`; 403 `revoked`,
            `unknown_device`, `pending`, `not_yours`; 429 `too_many_requests`.
    """
    certificate = _client_certificate(request, services.settings.trusted_proxies)
    if certificate is None:
        raise Refusal(
            401, "no_certificate", "the device API needs the client certificate of an enrolled device"
        )
    # OpenSSL accepted any chain up to our CA; a device's certificate is signed by the CA itself.
    sender = services.authority.verify(certificate, services.clock())
    named = request.headers.get(ON_BEHALF)
    if named is None:
        with services.limits.request(sender):
            yield Caller(await _active(services, sender))
        return
    # Not against the relay's own limits: it has a request in progress for each of its devices that waits for work.
    with services.limits.request(f"{sender} for {named}"):
        relay = await _acting(services, sender)
        yield Caller(await _active(services, named, relay), relay)


async def calling_device(caller: Annotated[Caller, Depends(identify)]) -> str:
    return caller.device.id


async def calling_relay(caller: Annotated[Caller, Depends(identify)]) -> DeviceRow:
    """The relay that makes a request of its own. Raises: Refusal: 403 `no_relay`."""
    if not caller.device.is_relay or caller.relay is not None:
        raise Refusal(403, "no_relay", "this is for relays")
    return caller.device


async def relayed_device(caller: Annotated[Caller, Depends(identify)]) -> str:
    """The device in whose place a relay makes the request. Raises: Refusal: 403 `no_relay`."""
    if caller.relay is None:
        raise Refusal(403, "no_relay", "this is for relays, on behalf of their devices")
    return caller.device.id


CallerDep = Annotated[str, Depends(calling_device)]
"""Type of a route's parameter that receives the id of the calling device."""
RelayDep = Annotated[DeviceRow, Depends(calling_relay)]
"""The same for the relay that calls."""
RelayedDep = Annotated[str, Depends(relayed_device)]
"""The same for the device on whose behalf a relay calls."""


async def _acting(services: Services, relay: str) -> DeviceRow:
    """The relay that acts for a device. Its own troubles must not look like the device's, which would give up for good."""
    try:
        return await _active(services, relay)
    except Refusal as refusal:
        raise Refusal(503, "relay_unavailable", f"the relay of this device: {refusal}") from None


async def _active(services: Services, device: str, relay: DeviceRow | None = None) -> DeviceRow:
    """The active device of this id. `relay`: that it must belong to."""
    is_id = len(device) == 36 and device.isprintable()
    row = (
        await run_in_threadpool(services.database.read, lambda at: devices.find(at, device))
        if is_id
        else None
    )
    if relay is not None and (not relay.is_relay or row is None or row.relay != relay.id):
        raise Refusal(403, "not_yours", f"{device[:40]!r} is no device of this relay")
    return require_active(row)


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
