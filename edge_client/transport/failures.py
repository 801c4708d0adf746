"""Errors of requests, and how long to wait after them.

The coordinator refused (`ServerRefused`, with its code), or it could not be reached: `Unreachable` covers whatever urllib3
raises; a retry may help.
"""

from __future__ import annotations

import random
import ssl
from collections.abc import Callable, Mapping
from typing import Any

import urllib3

from edge_client.wire.strict import loads, printable

LONGEST_WAIT_SECONDS = 3600.0
"""Longest wait that a coordinator can impose on a device."""

_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
"""OpenSSL's reasons for an answer that is not TLS; they differ by version."""

_NOT_YET_VALID, _EXPIRED = 9, 10  # X509_V_ERR_…, openssl/x509_vfy.h

SOON_SECONDS, SOON_FOR_SECONDS = 5.0, 60.0
"""A coordinator that counted on this device and went away is probably restarting: for the first minute it is tried
at least this often."""


class Unreachable(Exception):
    """No valid answer; worth another try later. The message is for people."""


class WrongClock(Unreachable):
    """The coordinator's certificate is not valid by this machine's clock."""


class CertificateExpired(Exception):
    """The coordinator no longer accepts this device's certificate because of its dates."""


class Cancelled(Exception):
    """The daemon cancelled the work."""


class ServerRefused(Exception):
    """The coordinator's refusal: HTTP status, its stable code, its message, further details."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        details: Mapping[str, Any] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{message} ({status} {code})")
        self.status = status
        self.code = code
        self.message = message
        self.details = details or {}
        self.retry_after = retry_after

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status >= 500 or self.status in (408, 425, 429)


def refusal(response: urllib3.BaseHTTPResponse, content: bytes) -> Exception:
    """The error for a refusing response. Without the coordinator's error document it comes from an intermediary."""
    try:
        document: Any = loads(content, "refusal")
        details = dict(document["error"])
        code, message = printable(str(details.pop("code")), 60), printable(str(details.pop("message")))
    except (ValueError, KeyError, TypeError):
        reason = printable(response.reason or "", 100)
        code, message, details = "unknown", f"HTTP {response.status} {reason}".strip(), {}
    return ServerRefused(
        response.status, code, message, details, _seconds(response.headers.get("Retry-After"))
    )


def _seconds(text: str | None) -> float | None:
    try:
        return min(max(0.0, float(text)), LONGEST_WAIT_SECONDS) if text else None
    except ValueError:
        return None


def translate(error: BaseException, where: str) -> Exception:
    """The error for an exception of urllib3, by its underlying cause."""
    cause = _tls_cause(error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        if cause.verify_code in (_NOT_YET_VALID, _EXPIRED):
            return WrongClock(f"{where}: its certificate is not valid now: {cause.verify_message}")
        return Unreachable(
            f"{where} is not the coordinator this device enrolled with: {cause.verify_message}; "
            "if it was moved or set up again, enroll again"
        )
    if isinstance(cause, ssl.SSLError) and "CERTIFICATE_EXPIRED" in str(cause).upper().replace(" ", "_"):
        return CertificateExpired(f"{where} says that this device's certificate has expired")
    if isinstance(cause, ssl.SSLError) and cause.reason in _NOT_TLS:
        return Unreachable(
            f"{where} answers, but not in TLS: it may be the operator's port (8080 unless set), which devices do not use; "
            "use the address that `fedloop device token` prints, with the device port (8443 unless set)"
        )
    return Unreachable(f"{where} cannot be reached: {_reason(error)}")


def _tls_cause(error: BaseException | None) -> BaseException | None:
    seen = 0
    while error is not None and not isinstance(error, ssl.SSLError) and seen < 10:
        inner = [
            each
            for each in (error.__cause__, error.__context__, *error.args)
            if isinstance(each, BaseException)
        ]
        error = inner[0] if inner else None
        seen += 1
    return error


def _reason(error: BaseException) -> str:
    text = str(error)
    return text.rpartition(": ")[2] if "HTTPSConnection" in text else text or type(error).__name__


class Backoff:
    """Waiting time after the n-th failure in a row: uniform up to min(longest, first · 2ⁿ), full jitter.

    Full jitter spreads devices that failed together better than any other scheme (Brooker 2015). `at_least`, which the
    coordinator may ask for, is added. `at_most` lowers the limit while the coordinator is expected back soon.
    """

    def __init__(
        self, rng: random.Random, *, first_seconds: float = 1.0, longest_seconds: float = 300.0
    ) -> None:
        self._rng = rng
        self._first = first_seconds
        self._longest = longest_seconds
        self._failures = 0

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, at_least: float | None = None, *, at_most: float | None = None) -> float:
        """Seconds to wait now."""
        longest = self._longest if at_most is None else min(at_most, self._longest)
        ceiling = min(longest, self._first * 2**self._failures)
        self._failures += ceiling < longest
        return (at_least or 0.0) + self._rng.uniform(0.0, ceiling)


class RetrySchedule:
    """`at`: when to try again, by `now`; 0: the last try did not fail."""

    def __init__(self, now: Callable[[], float], rng: random.Random) -> None:
        self._now = now
        self._backoff = Backoff(rng)
        self._expected_since: float | None = None
        self.at = 0.0

    def succeeded(self) -> None:
        self._backoff.succeeded()
        self._expected_since = None
        self.at = 0.0

    def failed(self, at_least: float | None, *, expected_back: bool) -> None:
        """Schedules the next try. `expected_back`: the coordinator counted on this device before the failure."""
        now = self._now()
        if expected_back and self._expected_since is None:
            self._expected_since = now
        soon = self._expected_since is not None and now - self._expected_since < SOON_FOR_SECONDS
        self.at = now + self._backoff.failed(at_least, at_most=SOON_SECONDS if soon else None)
