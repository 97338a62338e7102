"""A small OpenID Connect provider with real keys that can be told to lie, and a broker that trusts it.

What a provider does by itself is tested against another, in tests/journeys/test_signin.py.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import time
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import httpx
import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from starlette.applications import Starlette
from starlette.responses import JSONResponse, RedirectResponse
from starlette.routing import Route

from isthmus.service.api import broker_app
from isthmus.service.broker import Broker
from isthmus.service.oidc import Provider
from isthmus.service.security import ApiKeys, Gate
from isthmus.service.sessions import Sessions
from isthmus.service.settings import PEER_LIMITS, BrokerSettings, OidcSettings, SiloAddress
from silo_stand_in import Loop, StandIn

SECRET = "a secret / of the client"
ADA = {"sub": "u-17", "name": "Ada Lovelace", "groups": ["doctors", "canteen"]}
GROUPS = {"doctors": ("search", "feedback"), "operators": ("admin",)}

KEYS = {
    "RS256": rsa.generate_private_key(public_exponent=65537, key_size=2048),
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
}


def jwk(algorithm, kid, private):
    kind = {"RS256": jwt.algorithms.RSAAlgorithm, "ES256": jwt.algorithms.ECAlgorithm}
    public = kind.get(algorithm, jwt.algorithms.OKPAlgorithm).to_jwk(private.public_key(), as_dict=True)
    return {**public, "kid": kid, "use": "sig", "alg": algorithm}


class IdentityProvider:
    """Signs in whoever `person` is, without a question."""

    def __init__(self):
        self.person, self.algorithm, self.kid = dict(ADA), "RS256", "one"
        self.published = [jwk("RS256", "one", KEYS["RS256"])]
        self.claims, self.metadata, self.redirect, self.answer = {}, {}, {}, {}
        """What differs from the truth: in an ID token, in the discovery document, on the way back, in the
        answer of the token endpoint."""
        self.token = None
        """Makes ID tokens of claims, in place of a signature."""
        self.status, self.method = 200, "basic"
        self.requests, self.codes, self.refreshes = [], {}, {}
        self.issuer = ""
        self.app = Starlette(
            routes=[
                Route("/.well-known/openid-configuration", self.discovery),
                Route("/authorize", self.authorize),
                Route("/token", self.tokens, methods=["POST"]),
                Route("/userinfo", self.user_info),
                Route("/jwks", self.jwks),
            ]
        )

    async def discovery(self, request):
        names = ("authorize", "token", "userinfo", "jwks")
        keys = ("authorization_endpoint", "token_endpoint", "userinfo_endpoint", "jwks_uri")
        places = {key: f"{self.issuer}/{name}" for key, name in zip(keys, names, strict=True)}
        document = {"issuer": self.issuer, **places, "authorization_response_iss_parameter_supported": True}
        return JSONResponse({**document, **self.metadata})

    async def jwks(self, request):
        self.requests.append("jwks")
        return JSONResponse({"keys": self.published})

    async def authorize(self, request):
        query = dict(request.query_params)
        code = secrets.token_urlsafe(8)
        self.codes[code] = query
        back = {"code": code, "state": query["state"], "iss": self.issuer, **self.redirect}
        back = {name: text for name, text in back.items() if text is not None}
        return RedirectResponse(f"{query['redirect_uri']}?{urlencode(back)}", 303)

    async def tokens(self, request):
        form = dict(parse_qsl((await request.body()).decode()))
        self.requests.append(form["grant_type"])
        if self.status != 200:
            return JSONResponse({"error": "temporarily_unavailable"}, self.status)
        basic = base64.b64decode(request.headers.get("authorization", "").partition(" ")[2]).decode()
        ways = {"basic": basic, "post": f"{form['client_id']}:{form.get('client_secret', '')}"}
        wanted = {"basic": "isthmus:a+secret+%2F+of+the+client", "post": f"isthmus:{SECRET}", "none": None}
        if ways.get(self.method) != wanted[self.method] or (self.method == "none" and basic):
            return JSONResponse({"error": "invalid_client"}, 401)
        if form["grant_type"] == "refresh_token":
            asked = self.refreshes.pop(form["refresh_token"], None)
        else:
            asked = self.codes.pop(form["code"], None)
            if asked is not None:
                digest = hashlib.sha256(form["code_verifier"].encode()).digest()
                challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
                same = (challenge, form["redirect_uri"]) == (asked["code_challenge"], asked["redirect_uri"])
                asked = asked if same else None
        if asked is None:
            return JSONResponse({"error": "invalid_grant"}, 400)
        refresh = secrets.token_urlsafe(8)
        self.refreshes[refresh] = {name: text for name, text in asked.items() if name != "nonce"}
        tokens = {"id_token": self.id_token(asked), "access_token": "access", "refresh_token": refresh}
        answer = {**tokens, "token_type": "Bearer", **self.answer}
        return JSONResponse({name: text for name, text in answer.items() if text is not None})

    async def user_info(self, request):
        self.requests.append("userinfo")
        return JSONResponse(self.person | self.answer.get("userinfo", {}))

    def id_token(self, asked):
        now = int(time.time())
        claims = {"iss": self.issuer, "aud": "isthmus", "iat": now, "exp": now + 300, **self.person}
        claims |= {"nonce": asked["nonce"]} if "nonce" in asked else {}
        claims = {name: value for name, value in {**claims, **self.claims}.items() if value is not None}
        if self.token is not None:
            return self.token(claims)
        return jwt.encode(claims, KEYS[self.algorithm], self.algorithm, headers={"kid": self.kid})


class SignInSite:
    """A broker in front of a silo that answers, and the provider that its people come from."""

    def __init__(self, folder, **changes):
        self.now = [time.time()]
        self.loop, self.silo, self.provider = Loop(), StandIn("north"), IdentityProvider()
        silo, provider = (
            f"http://127.0.0.1:{self.loop.serve(app).port}" for app in (self.silo, self.provider.app)
        )
        self.provider.issuer = provider
        secret = folder / "oidc.secret"
        secret.write_text(SECRET + "\n")
        secret.chmod(0o600)
        oidc = OidcSettings(
            provider, "isthmus", "http://127.0.0.1:1", GROUPS, client_secret_file=secret, **changes
        )
        keys = ApiKeys(folder / "api-keys.json")
        self.admin = {"x-api-key": keys.add("root", scopes=["admin"])}
        settings = BrokerSettings(
            folder=folder / "broker",
            keys=keys.path,
            oidc=oidc,
            node_key="a key for nodes",
            silos={"north": SiloAddress(silo, people=True, identities=True)},
            share_statistics=False,
            deadline_ms=10_000,
            limits=PEER_LIMITS,  # many tests share it, and a quick machine has them sign in at once
        )

        async def made():
            return Broker(settings)

        self.client = Provider(oidc, clock=lambda: self.now[0])
        self.sessions = Sessions(keys, self.client, clock=lambda: self.now[0])
        app = broker_app(self.loop.run(made()), Gate(keys=keys, sessions=self.sessions))
        self.url = f"http://127.0.0.1:{self.loop.serve(app, lifespan='on').port}"
        self.client.settings = replace(oidc, address=self.url)
        self.plain = self.browser()
        """Has no cookies."""

    def browser(self):
        return httpx.Client(base_url=self.url, timeout=15, verify=False)  # there is no TLS to set up

    def way(self, browser):
        """From the page to the provider; the address that it sends the browser back to."""
        to = browser.get("/v1/signin")
        assert to.status_code == 303
        return self.plain.get(to.headers["location"]).headers["location"]

    def sign_in(self, browser=None):
        """A browser that was at the provider, and what became of it: "" or the reason why it is not in."""
        browser = browser or self.browser()
        back = browser.get(self.way(browser))
        assert back.status_code == 303
        place = back.headers["location"]
        return browser, parse_qs(urlsplit(place).fragment.partition("?")[2]).get("signin", [""])[0]

    def sent_person(self):
        """What the silo was last told of who asks, unchecked."""
        payload = self.silo.asked[-1][2][b"isthmus-person"].decode().partition(".")[0]
        return json.loads(base64.urlsafe_b64decode(payload + "=="))


@contextmanager
def signing_in(folder, **changes):
    site = SignInSite(folder, **changes)
    try:
        yield site
    finally:
        site.loop.close()
