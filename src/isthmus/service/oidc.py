"""Sign-in at an OpenID Connect provider: authorization code with PKCE (Core 1.0; RFC 7636, 9207).

    provider = Provider(settings.oidc)
    address, pending = await provider.begin()               # address for the browser, and its cookie
    grant = await provider.finish(parameters, pending)      # the person, by a verified ID token
    grant = await provider.renew(grant)                     # the person as the provider sees them now

The state of a sign-in under way is sealed in a cookie of that browser: nobody can finish another person's
sign-in, and unauthenticated callers use no memory. Endpoints come from the discovery document, keys from its
JWKS, which is read again when a token names a key that is not in it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote_plus, urlencode, urlsplit

import httpx
import jwt
from cryptography.fernet import Fernet, InvalidToken

from isthmus.errors import ConfigError
from isthmus.files import private_file
from isthmus.service.certificates import trusting
from isthmus.service.people import Person
from isthmus.service.security import Caller
from isthmus.service.sessions import Grant, NotSignedIn, Reason
from isthmus.service.settings import OidcSettings, is_safe_address

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA")
"""Accepted signature algorithms of ID tokens; never `none`, never a shared secret."""
LEEWAY, PENDING, FRESH, AGAIN = 60, 600, 3600.0, 60.0
"""Seconds: tolerated difference between clocks; duration of a sign-in; validity of discovery document and
keys; and pause between two attempts to find an unknown key."""
SECONDS, MOST_BYTES = 10.0, 1 << 20
"""Seconds and bytes that one answer of the provider may take."""


class Provider:
    """Client of one OpenID Connect provider, with which the broker is registered."""

    def __init__(self, settings: OidcSettings, *, clock: Callable[[], float] = time.time) -> None:
        self.settings, self._clock = settings, clock
        file = settings.client_secret_file
        self._secret = "" if file is None else private_file(file).read_text(encoding="utf-8").strip()
        if file is not None and not self._secret:
            raise ConfigError(
                f"{file} is empty", key="oidc.client_secret_file", expected="the client's secret"
            )
        self._seal = Fernet(Fernet.generate_key())
        self._tls = trusting(settings.authority)
        self._metadata: tuple[float, dict[str, Any]] = (-FRESH, {})
        self._keys: tuple[float, list[jwt.PyJWK]] = (-FRESH, [])

    @property
    def host(self) -> str:
        """Host name by which people know the provider."""
        return urlsplit(self.settings.issuer).hostname or ""

    @property
    def secure(self) -> bool:
        """Whether browsers reach the broker over TLS."""
        return self.settings.address.startswith("https:")

    async def begin(self) -> tuple[str, str]:
        """Begin a sign-in. Returns the provider's address, and the sealed state for the browser."""
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        challenge = urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        address = await self._endpoint("authorization_endpoint")
        there = _with(
            address,
            response_type="code",
            client_id=self.settings.client_id,
            redirect_uri=self.settings.redirect,
            scope=self.settings.scope,
            state=state,
            nonce=nonce,
            code_challenge=challenge,
            code_challenge_method="S256",
        )
        return there, self._seal.encrypt(json.dumps([state, nonce, verifier]).encode()).decode()

    async def finish(self, parameters: Mapping[str, str], pending: str) -> Grant:
        """Finish a sign-in with the browser's `pending` state. Returns a grant; raises NotSignedIn."""
        try:
            state, nonce, verifier = json.loads(self._seal.decrypt(pending, ttl=PENDING))
        except InvalidToken:
            raise NotSignedIn("again", "the sign-in was not begun in this browser, or too long ago") from None
        if not hmac.compare_digest(parameters.get("state", "").encode(), state.encode()):
            raise NotSignedIn("again", "the sign-in that ends is not the one that was begun")
        metadata = await self._discovered()
        named = parameters.get("iss")
        if named != self.settings.issuer and (
            named is not None or metadata.get("authorization_response_iss_parameter_supported") is True
        ):
            raise NotSignedIn("provider", "the answer is not of the provider that was asked")
        if "code" not in parameters:
            raise NotSignedIn("denied", "the provider signed nobody in")
        tokens = await self._tokens(
            grant_type="authorization_code",
            code=parameters["code"],
            redirect_uri=self.settings.redirect,
            code_verifier=verifier,
        )
        return await self._grant(tokens, nonce=nonce)

    async def renew(self, grant: Grant) -> Grant:
        """Ask the provider about the person again; raises NotSignedIn if it refuses or does not answer."""
        tokens = await self._tokens(grant_type="refresh_token", refresh_token=grant.refresh)
        return await self._grant({"refresh_token": grant.refresh, **tokens}, subject=grant.subject)

    async def end_address(self) -> str | None:
        """Address of the provider's own sign-out page; None if it has none."""
        if (await self._discovered()).get("end_session_endpoint") is None:
            return None
        return _with(await self._endpoint("end_session_endpoint"), client_id=self.settings.client_id)

    async def _grant(
        self, tokens: Mapping[str, Any], *, nonce: str | None = None, subject: str | None = None
    ) -> Grant:
        """Make a grant from tokens, checked by a sign-in's `nonce` or a renewal's earlier `subject`."""
        token, settings = tokens.get("id_token"), self.settings
        if token is None and subject is None:
            raise NotSignedIn("provider", "the provider sent no ID token")
        claims: dict[str, Any] = {"sub": subject} if token is None else await self._claims(str(token), nonce)
        if None in (token, _at(claims, settings.groups_claim), _at(claims, settings.id_claim)):
            claims |= await self._user_info(tokens, claims["sub"])
        if subject is not None and claims["sub"] != subject:
            raise NotSignedIn("denied", "the provider answers for another person")
        now, refresh = self._clock(), str(tokens.get("refresh_token") or "")
        wait = 60 * settings.minutes
        ends = float(claims["exp"]) if token is not None else now
        return Grant(
            self._caller(claims),
            str(claims["sub"]),
            due=now + wait if refresh else ends,
            until=now + 2 * wait if refresh else ends,
            refresh=refresh,
        )

    def _caller(self, claims: Mapping[str, Any]) -> Caller[Any]:
        """Return the caller for the claims, with the scopes of their groups; raises NotSignedIn."""
        settings, name = self.settings, _at(claims, self.settings.id_claim)
        if not isinstance(name, str) or (
            settings.id_claim == "email" and claims.get("email_verified") is not True
        ):
            raise NotSignedIn("provider", f"the provider vouches for no {settings.id_claim} of the person")
        claim = _at(claims, settings.groups_claim)
        groups = frozenset(
            map(str, [claim] if isinstance(claim, str) else claim if isinstance(claim, list) else [])
        )
        scopes = frozenset(scope for group in (*groups, "*") for scope in settings.groups.get(group, ()))
        if not scopes:
            raise NotSignedIn("groups", f"{name!r} has no group of [oidc.groups]: {sorted(groups)[:50]}")
        passed = groups if "*" in settings.silo_groups else groups & {*settings.groups, *settings.silo_groups}
        try:
            person = Person(name, passed).check()
        except ConfigError as error:
            raise NotSignedIn("provider", f"{name!r} cannot be passed on to silos: {error}") from None
        label = next(
            (claims[each] for each in ("name", "preferred_username", "email") if claims.get(each)), name
        )
        return Caller(name, scopes, person=person, label=str(label)[:80])

    async def _claims(self, token: str, nonce: str | None) -> dict[str, Any]:
        """Verify that an ID token was signed for this client and this sign-in. Returns its claims."""
        client = self.settings.client_id
        try:
            key = await self._key(jwt.get_unverified_header(token))
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=ALGORITHMS,
                audience=client,
                issuer=self.settings.issuer,
                leeway=LEEWAY,
                options={"require": ["iss", "sub", "aud", "exp", "iat"]},
            )
        except (jwt.PyJWTError, ValueError, TypeError, KeyError) as error:
            raise NotSignedIn("provider", f"its ID token cannot be believed: {error}") from None
        several = isinstance(claims["aud"], list) and len(claims["aud"]) > 1
        if claims.get("azp", None if several else client) != client:
            raise NotSignedIn("provider", "its ID token was issued to another client")
        if nonce is not None and not hmac.compare_digest(
            str(claims.get("nonce", "")).encode(), nonce.encode()
        ):
            raise NotSignedIn("provider", "its ID token is of another sign-in")
        return claims

    async def _key(self, header: Mapping[str, Any]) -> jwt.PyJWK:
        """Return the provider's key that a token names; an unknown one is looked up at most once a minute."""
        age = self._clock() - self._keys[0]
        key = self._key_here(header)
        if age > FRESH or (key is None and age > AGAIN):
            address = await self._endpoint("jwks_uri")
            keys = jwt.PyJWKSet.from_dict(await self._ask("GET", address)).keys
            self._keys = self._clock(), [each for each in keys if each.public_key_use in (None, "sig")]
            key = self._key_here(header)
        if key is None:
            raise jwt.InvalidKeyError("the provider has no such key")
        return key

    def _key_here(self, header: Mapping[str, Any]) -> jwt.PyJWK | None:
        for key in self._keys[1]:
            if key.algorithm_name == header.get("alg") and header.get("kid") in (None, key.key_id):
                return key
        return None

    async def _user_info(self, tokens: Mapping[str, Any], subject: str) -> dict[str, Any]:
        """Return the claims of the user info endpoint; {} if there is none but an ID token."""
        address = (await self._discovered()).get("userinfo_endpoint")
        if address is None or not tokens.get("access_token"):
            if "id_token" in tokens:
                return {}
            raise NotSignedIn("provider", "the provider does not say who the person is by now")
        bearer = {"authorization": f"Bearer {tokens['access_token']}"}
        place = await self._endpoint("userinfo_endpoint")
        claims = await self._ask("GET", place, refusal="denied", headers=bearer)
        if claims.get("sub") != subject:
            raise NotSignedIn("provider", "the provider answers for another person")
        return {name: value for name, value in claims.items() if name not in ("exp", "iss", "aud")}

    async def _tokens(self, **form: str) -> dict[str, Any]:
        """Request tokens from the token endpoint, with the client's secret or, by PKCE alone, without."""
        methods = (await self._discovered()).get("token_endpoint_auth_methods_supported")
        form |= {"client_id": self.settings.client_id}
        basic = bool(self._secret) and (not isinstance(methods, list) or "client_secret_basic" in methods)
        if self._secret and not basic:
            form |= {"client_secret": self._secret}
        quoted = map(quote_plus, (self.settings.client_id, self._secret))  # form-encoded: RFC 6749, 2.3.1
        auth = httpx.BasicAuth(*quoted) if basic else None
        place = await self._endpoint("token_endpoint")
        return await self._ask("POST", place, refusal="denied", data=form, auth=auth)

    async def _endpoint(self, name: str) -> str:
        address = (await self._discovered()).get(name)
        if not isinstance(address, str) or not is_safe_address(address):
            raise NotSignedIn("provider", f"its discovery document has no {name} under https")
        return address

    async def _discovered(self) -> dict[str, Any]:
        """Return the provider's discovery document, at most an hour old."""
        if self._clock() - self._metadata[0] > FRESH:
            issuer = self.settings.issuer
            document = await self._ask("GET", f"{issuer.rstrip('/')}/.well-known/openid-configuration")
            if document.get("issuer") != issuer:
                raise NotSignedIn("provider", "its discovery document is of another issuer")
            self._metadata = self._clock(), document
        return self._metadata[1]

    async def _ask(
        self, method: str, address: str, *, refusal: Reason = "provider", **options: Any
    ) -> dict[str, Any]:
        """Request a JSON object from the provider, without following redirects. `refusal` is the reason
        reported for a 4xx status."""
        try:
            async with (
                httpx.AsyncClient(verify=self._tls, timeout=SECONDS) as client,
                client.stream(method, address, **options) as reply,
            ):
                body = b""
                async for part in reply.aiter_bytes():
                    body += part
                    if len(body) > MOST_BYTES:
                        raise NotSignedIn("provider", "it answers with more than a megabyte")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NotSignedIn("provider", f"{self.host} does not answer: {type(error).__name__}") from None
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            document = None
        if reply.status_code != 200 or not isinstance(document, dict):
            code = document.get("error") if isinstance(document, dict) else None
            named = f" ({code})" if isinstance(code, str) and re.fullmatch("[a-z_]{1,40}", code) else ""
            reason: Reason = refusal if 400 <= reply.status_code < 500 else "provider"
            raise NotSignedIn(reason, f"{self.host} answers with status {reply.status_code}{named}")
        return document


def _with(address: str, **query: str) -> str:
    return f"{address}{'&' if '?' in address else '?'}{urlencode(query)}"


def _at(claims: Mapping[str, Any], path: str) -> Any:
    """Return a claim by its name, or by a path of names: `realm_access.roles`."""
    if path in claims:
        return claims[path]
    value: Any = claims
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
