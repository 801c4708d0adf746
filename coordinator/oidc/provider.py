"""An OpenID provider, as its discovery document describes it.

    1. `authorization_url`   where the browser goes: code flow with PKCE (RFC 7636), state and nonce
    2. `redeem`              code -> ID token, at the token endpoint; no other token is used or kept
    3. `claims`              what the ID token says, once its signature, issuer, audience, times and nonce are right

The document and the keys are kept for an hour. A token with an unknown key fetches the keys again, once a minute at most. A provider
that is down is asked again after ten seconds: until then nobody waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from coordinator.errors import Refusal
from coordinator.oidc.configuration import Configuration
from coordinator.oidc.fetching import Fetcher, Unavailable
from coordinator.oidc.id_tokens import check_id_token
from coordinator.oidc.pending import PendingSignIn
from edge_client.wire.strict import printable

if TYPE_CHECKING:
    from authlib.oauth2.client import OAuth2Client
    from joserfc.jwk import KeySet

DISCOVERY_PATH = "/.well-known/openid-configuration"
_KEPT_SECONDS = 3600.0
_REFRESH_SECONDS = 60.0
_DOWN_SECONDS = 10.0
_ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri")


class Provider:
    """The provider of a configuration. Its calls block for as long as the provider takes: run them in `threads`.

    Raises from every call: Refusal: 503 `oidc_unavailable`: the provider cannot be reached, or its documents are unusable.
    """

    def __init__(self, configuration: Configuration, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.configuration = configuration
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="oidc")
        self._fetcher = Fetcher(configuration.issuer)
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._document: tuple[dict[str, Any], float] | None = None
        """And when it was fetched."""
        self._keys: tuple[KeySet, float] | None = None
        self._failure: tuple[Unavailable, float] | None = None

    def authorization_url(self, pending: PendingSignIn, state: str) -> str:
        """The address at which the provider asks the user to sign in."""
        endpoint = self._discovered()["authorization_endpoint"]
        url, _ = self._client(pending).create_authorization_url(
            endpoint, state=state, code_verifier=pending.verifier, nonce=pending.nonce
        )
        return str(url)

    def redeem(self, code: str, pending: PendingSignIn) -> str:
        """The ID token for a code.

        Raises:
            Refusal: 401 `oidc_code`: the provider refuses the code, as one that was used; 503 `oidc_unavailable`.
        """
        from authlib.oauth2.base import OAuth2Error

        try:
            answer = self._client(pending).fetch_token(
                self._discovered()["token_endpoint"], code=code, code_verifier=pending.verifier
            )
        except OAuth2Error as error:
            raise Refusal(
                401,
                "oidc_code",
                f"the provider refuses the code of this sign-in: {printable(str(error.error))[:80]}",
            ) from None
        except (Unavailable, ValueError) as error:
            raise self._unavailable(error) from None
        id_token = answer.get("id_token")
        if not isinstance(id_token, str):
            raise self._unavailable(Unavailable("it answered without an ID token"))
        return id_token

    def claims(self, id_token: str, pending: PendingSignIn, now: datetime) -> Mapping[str, Any]:
        """The claims of an ID token for a sign-in. Raises: Refusal: as `check_id_token`."""
        try:
            return self._check(id_token, self._provider_keys(_KEPT_SECONDS), pending, now)
        except Refusal as refused:
            if refused.code != "id_token_signature":
                raise
        # The provider may have new keys.
        return self._check(id_token, self._provider_keys(_REFRESH_SECONDS), pending, now)

    def require_own_answer(self, issuer: str | None) -> None:
        """Requires that an answer to the browser is this provider's, where providers say so (RFC 9207).

        Raises:
            Refusal: 401 `oidc_issuer`.
        """
        says_so = self._discovered().get("authorization_response_iss_parameter_supported") is True
        if (issuer is None and says_so) or issuer not in (None, self.configuration.issuer):
            raise Refusal(401, "oidc_issuer", "this answer is of another provider; sign in again")

    def _check(self, id_token: str, keys: KeySet, pending: PendingSignIn, now: datetime) -> Mapping[str, Any]:
        return check_id_token(
            id_token,
            keys,
            issuer=self.configuration.issuer,
            client_id=self.configuration.client_id,
            nonce=pending.nonce,
            begun_at=pending.begun_at,
            now=now,
        )

    def _client(self, pending: PendingSignIn) -> OAuth2Client:
        from authlib.oauth2.client import OAuth2Client

        methods = self._discovered().get("token_endpoint_auth_methods_supported", ["client_secret_basic"])
        by_header = "client_secret_basic" in methods if isinstance(methods, list) else True
        secret = self.configuration.client_secret
        return OAuth2Client(
            self._fetcher,
            self.configuration.client_id,
            secret or None,
            token_endpoint_auth_method=("client_secret_basic" if by_header else "client_secret_post")
            if secret
            else "none",
            scope=self.configuration.scope,
            redirect_uri=pending.redirect_uri,
            code_challenge_method="S256",
        )

    def _discovered(self) -> dict[str, Any]:
        with self._lock:
            now = self._monotonic()
            if self._document is not None and now - self._document[1] < _KEPT_SECONDS:
                return self._document[0]
            if self._failure is not None and now - self._failure[1] < _DOWN_SECONDS:
                raise self._unavailable(self._failure[0])
            try:
                self._document = self._discover(), now
            except Unavailable as error:
                self._failure = error, self._monotonic()
                raise self._unavailable(error) from None
            return self._document[0]

    def _discover(self) -> dict[str, Any]:
        issuer = self.configuration.issuer
        document = self._fetcher.get_json(issuer.rstrip("/") + DISCOVERY_PATH)
        if document.get("issuer") != issuer:
            raise Unavailable(
                f"it calls itself {printable(str(document.get('issuer')))[:200]}, --oidc-issuer says {issuer}"
            )
        for name in _ENDPOINTS:
            if not isinstance(document.get(name), str) or not urlsplit(document[name]).hostname:
                raise Unavailable(f"its discovery document has no {name}")
            self._fetcher.require_protected(document[name])
        return document

    def _provider_keys(self, kept_seconds: float) -> KeySet:
        url = self._discovered()["jwks_uri"]
        with self._lock:
            now = self._monotonic()
            if self._keys is None or now - self._keys[1] >= kept_seconds:
                try:
                    self._keys = _import_keys(self._fetcher.get_json(url)), now
                except Unavailable as error:
                    raise self._unavailable(error) from None
            return self._keys[0]

    def _unavailable(self, error: Exception) -> Refusal:
        return Refusal(
            503,
            "oidc_unavailable",
            f"sign-in at {self.configuration.host} does not work at the moment: {printable(str(error))[:300]}",
        )


def _import_keys(document: Mapping[str, Any]) -> KeySet:
    """Public keys for signatures; others are left out, most of all symmetric ones, which a provider never publishes."""
    from joserfc.errors import JoseError
    from joserfc.jwk import KeySet, import_key

    keys = []
    listed = document.get("keys")
    for data in listed if isinstance(listed, list) else []:
        if not isinstance(data, dict) or data.get("kty") not in ("RSA", "EC", "OKP"):
            continue
        if data.get("use", "sig") != "sig":
            continue
        try:
            keys.append(import_key(data))
        except (JoseError, ValueError, TypeError):
            continue
    if not keys:
        raise Unavailable("it publishes no key for signatures")
    return KeySet(keys)
