"""Why a request brought no answer, in words: what urllib3 raises and what the coordinator refuses, told apart.

The coordinator refused (`ServerRefused`, with its code), or it could not be reached (`Unreachable`), where a retry may help.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

import urllib3

from edge_client.wire.strict import loads, printable

LONGEST_WAIT_SECONDS = 3600.0
"""However long a coordinator tells a device to stay away, it asks again after this."""

_NOT_YET_VALID, _EXPIRED = 9, 10  # X509_V_ERR_…, openssl/x509_vfy.h


class Unreachable(Exception):
    """No answer, or none that makes sense; worth another try later. The message is for people."""


class WrongClock(Unreachable):
    """The coordinator's certificate is not valid by this machine's clock."""


class CertificateExpired(Exception):
    """The coordinator does not take this device's certificate any more because of its dates."""


class Cancelled(Exception):
    """A transfer was given up because the daemon has something better to do."""


class ServerRefused(Exception):
    """The coordinator's refusal: HTTP status, its stable code, its words, further details."""

    def __init__(
        self,
        status: int,
        code: str,
        words: str,
        details: Mapping[str, Any] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{words} ({status} {code})")
        self.status = status
        self.code = code
        self.words = words
        self.details = details or {}
        self.retry_after = retry_after

    @property
    def passing(self) -> bool:
        """The same request may be taken later."""
        return self.status >= 500 or self.status in (408, 425, 429)


def refusal(response: urllib3.BaseHTTPResponse, content: bytes) -> Exception:
    """A refusal in the coordinator's own words; of another kind it comes from somebody between."""
    try:
        document: Any = loads(content, "refusal")
        details = dict(document["error"])
        code, words = printable(str(details.pop("code")), 60), printable(str(details.pop("message")))
    except (ValueError, KeyError, TypeError):
        reason = printable(response.reason or "", 100)
        code, words, details = "unknown", f"HTTP {response.status} {reason}".strip(), {}
    return ServerRefused(response.status, code, words, details, _seconds(response.headers.get("Retry-After")))


def _seconds(text: str | None) -> float | None:
    try:
        return min(max(0.0, float(text)), LONGEST_WAIT_SECONDS) if text else None
    except ValueError:
        return None


def failure(error: BaseException, where: str) -> Exception:
    """What urllib3 wraps, unwrapped and in words."""
    cause = _tls_cause(error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        if cause.verify_code in (_NOT_YET_VALID, _EXPIRED):
            return WrongClock(f"{where}: its certificate is not valid now: {cause.verify_message}")
        return Unreachable(
            f"{where} is not the coordinator this device enrolled with: {cause.verify_message}; "
            "if it was moved or made anew, enroll again"
        )
    if isinstance(cause, ssl.SSLError) and "CERTIFICATE_EXPIRED" in str(cause).upper().replace(" ", "_"):
        return CertificateExpired(f"{where} says that this device's certificate has expired")
    return Unreachable(f"{where} cannot be reached: {_words(error)}")


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


def _words(error: BaseException) -> str:
    text = str(error)
    return text.rpartition(": ")[2] if "HTTPSConnection" in text else text or type(error).__name__
