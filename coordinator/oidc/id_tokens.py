"""Checks of an ID token: OpenID Connect Core 1.0, section 3.1.3.7, and RFC 8725.

Each refusal has a code of its own: the signature, issuer, audience, times and nonce are what an attacker may change one by one.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from coordinator.errors import Refusal

if TYPE_CHECKING:
    from joserfc.jwk import KeySet

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures by a key pair. No `none`, and no HMAC: its key would be the client's secret, or the provider's public key."""
LEEWAY_SECONDS = 60
"""By which the clocks of provider and coordinator may differ."""
MAX_CHARACTERS = 64 * 1024


def check_id_token(
    text: str, keys: KeySet, *, issuer: str, client_id: str, nonce: str, begun_at: datetime, now: datetime
) -> Mapping[str, Any]:
    """The claims of a token that this provider made for this client and this sign-in.

    `begun_at`: when the sign-in began; an older token belongs to another one.

    Raises:
        Refusal: 401 `id_token_signature`, `id_token_malformed`, `id_token_issuer`, `id_token_audience`, `id_token_nonce`,
            `id_token_expired`.
    """
    claims = _verified_claims(text, keys)
    given = claims.get("nonce")
    if claims.get("iss") != issuer:
        raise Refusal(401, "id_token_issuer", f"the ID token is of another issuer than {issuer}")
    if not _is_for(claims, client_id):
        raise Refusal(
            401, "id_token_audience", "the ID token was issued to another client than this coordinator"
        )
    if not isinstance(given, str) or not hmac.compare_digest(given.encode(), nonce.encode()):
        raise Refusal(401, "id_token_nonce", "the ID token belongs to another sign-in; sign in again")
    _require_current(claims, begun_at, now)
    subject = claims.get("sub")
    if not isinstance(subject, str) or not 0 < len(subject) <= 255:
        raise Refusal(401, "id_token_malformed", "the ID token names no subject")
    return claims


def _verified_claims(text: str, keys: KeySet) -> Mapping[str, Any]:
    # Imported with the first sign-in: most coordinators have no provider.
    from joserfc import jwt
    from joserfc.errors import JoseError

    try:
        if len(text) > MAX_CHARACTERS:
            raise ValueError("too long")
        claims: dict[str, Any] = jwt.decode(text, keys, algorithms=ALGORITHMS).claims
    except (JoseError, ValueError, TypeError, RecursionError) as error:
        raise Refusal(
            401,
            "id_token_signature",
            f"the ID token is not signed with a key of the provider: {type(error).__name__}",
        ) from None
    return claims


def _is_for(claims: Mapping[str, Any], client_id: str) -> bool:
    audience = claims.get("aud")
    audiences = audience if isinstance(audience, list) else [audience]
    party = claims.get("azp")
    if client_id not in audiences:
        return False
    return party == client_id or (party is None and len(audiences) == 1)


def _require_current(claims: Mapping[str, Any], begun_at: datetime, now: datetime) -> None:
    times = {name: claims[name] for name in ("exp", "iat", "nbf") if name in claims}
    if not {"exp", "iat"} <= times.keys() or not all(_is_time(each) for each in times.values()):
        raise Refusal(
            401, "id_token_malformed", "the ID token does not say when it was issued and when it ends"
        )
    seconds = now.timestamp()
    if (
        seconds >= times["exp"] + LEEWAY_SECONDS
        or times.get("nbf", 0) > seconds + LEEWAY_SECONDS
        or not begun_at.timestamp() - LEEWAY_SECONDS <= times["iat"] <= seconds + LEEWAY_SECONDS
    ):
        raise Refusal(
            401,
            "id_token_expired",
            "the ID token has expired, or is not of this sign-in's time; compare the clocks of provider and coordinator",
        )


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
