"""Sign-in through a provider: what lies, mixes up, comes twice, comes late or comes from somebody else."""

from __future__ import annotations

import time

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from identity_provider import ADA, KEYS, IdentityProvider, jwk, signing_in
from isthmus.service import oidc
from isthmus.service.sessions import COOKIE

BODY = {"query": "tides"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with signing_in(tmp_path_factory.mktemp("signin")) as site:
        yield site


@pytest.fixture
def site(shared):
    """The site, with a provider that tells the truth and a clock that is right."""
    fresh, issuer = IdentityProvider(), shared.provider.issuer
    for name, value in vars(fresh).items():
        if name != "app":
            setattr(shared.provider, name, value)
    shared.provider.issuer = issuer
    shared.now[0] = time.time()
    shared.client._metadata, shared.client._keys = (-oidc.FRESH, {}), (-oidc.FRESH, [])
    shared.sessions._open.clear()
    return shared


@pytest.mark.parametrize("algorithm", KEYS)
def test_who_the_provider_signs_in_may_search(site, algorithm):
    site.provider.algorithm = algorithm
    site.provider.published = [jwk(algorithm, "one", KEYS[algorithm])]
    browser, refusal = site.sign_in()
    assert refusal == ""
    me = browser.get("/v1/me").json()
    assert (me["name"], me["label"]) == ("u-17", "Ada Lovelace")
    assert (me["scopes"], me["groups"]) == (["feedback", "search"], ["doctors"])
    assert browser.post("/v1/search", json=BODY).status_code == 200
    assert {name: site.sent_person()[name] for name in ("person", "groups", "silo")} == {
        "person": "u-17",
        "groups": ["doctors"],
        "silo": "north",
    }
    assert browser.delete("/v1/session").status_code == 204
    assert browser.get("/v1/me").status_code == 401


@pytest.mark.parametrize("method", ["post", "none"])
def test_a_client_says_who_it_is_as_the_provider_wants_it(site, method, monkeypatch):
    """In the form, or as a public client with nothing but PKCE."""
    site.provider.method = method
    assert site.sign_in()[1] == "denied"
    site.client._metadata = (-oidc.FRESH, {})
    if method == "none":
        monkeypatch.setattr(site.client, "_secret", "")
    else:
        site.provider.metadata = {"token_endpoint_auth_methods_supported": ["client_secret_post"]}
    assert site.sign_in()[1] == ""


def test_what_the_provider_is_sent(site):
    with site.browser() as browser:
        to = httpx.URL(browser.get("/v1/signin").headers["location"]).params
        cookie = browser.cookies["isthmus_signin"]
    assert to["response_type"] == "code"
    assert to["redirect_uri"] == f"{site.url}/v1/signin/callback"
    assert to["code_challenge_method"] == "S256"
    assert len({to["state"], to["nonce"], to["code_challenge"]}) == 3
    assert not any(to[name] in cookie for name in ("state", "nonce", "code_challenge"))


PUBLIC = (
    KEYS["RS256"]
    .public_key()
    .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
)
OTHER = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def hs256(claims):
    """Signed with the public key as a shared secret; PyJWT itself would not."""
    import base64
    import hashlib
    import hmac
    import json

    def part(data):
        return base64.urlsafe_b64encode(data).rstrip(b"=")

    head = part(json.dumps({"alg": "HS256", "typ": "JWT", "kid": "one"}).encode())
    text = head + b"." + part(json.dumps(claims).encode())
    return (text + b"." + part(hmac.new(PUBLIC, text, hashlib.sha256).digest())).decode()


TOKENS = {
    "none": lambda claims: jwt.encode(claims, None, "none", headers={"kid": "one"}),
    "hs256 with the public key": hs256,
    "another's key": lambda claims: jwt.encode(claims, OTHER, "RS256", headers={"kid": "one"}),
    "an unknown key": lambda claims: jwt.encode(claims, OTHER, "RS256", headers={"kid": "two"}),
    "another algorithm": lambda claims: jwt.encode(claims, KEYS["ES256"], "ES256", headers={"kid": "one"}),
    "not a token": lambda claims: "a.b.c",
}


@pytest.mark.parametrize("name", TOKENS)
def test_a_token_that_the_provider_did_not_sign(site, name):
    site.provider.token = TOKENS[name]
    browser, refusal = site.sign_in()
    assert refusal == "provider"
    assert browser.get("/v1/me").status_code == 401


@pytest.mark.parametrize(
    "claims",
    [
        {"nonce": "of another sign-in"},
        {"nonce": None},
        {"aud": "another client"},
        {"aud": ["isthmus", "another client"]},
        {"aud": ["isthmus", "another client"], "azp": "another client"},
        {"azp": "another client"},
        {"iss": "https://elsewhere.example"},
        {"exp": 1_000_000_000},
        {"exp": None},
        {"iat": 4_000_000_000},
        {"iat": None},
        {"sub": None},
        {"sub": 17},
    ],
    ids=str,
)
def test_a_token_for_something_else(site, claims):
    site.provider.claims = claims
    browser, refusal = site.sign_in()
    assert refusal == "provider"
    assert browser.get("/v1/me").status_code == 401


@pytest.mark.parametrize(
    ("back", "reason"),
    [
        ({"state": "guessed"}, "again"),
        ({"state": None}, "again"),
        ({"iss": "https://elsewhere.example"}, "provider"),
        ({"iss": None}, "provider"),
        ({"code": None, "error": "access_denied", "error_description": "<b>no</b>"}, "denied"),
        ({"code": "guessed"}, "denied"),
    ],
    ids=str,
)
def test_a_way_back_that_is_not_the_way_there(site, back, reason):
    site.provider.redirect = back
    browser, refusal = site.sign_in()
    assert refusal == reason
    assert browser.get("/v1/me").status_code == 401


def test_a_code_is_good_in_the_browser_that_began_and_once(site):
    victim, thief = site.browser(), site.browser()
    back = site.way(victim)
    site.way(thief)
    for browser in (thief, site.browser()):
        assert "signin=again" in browser.get(back).headers["location"]
    assert site.provider.requests.count("authorization_code") == 0, "the code was not even sent"
    assert victim.get(back).headers["location"] == "/"
    assert "signin=again" in victim.get(back).headers["location"], "the cookie is gone"
    victim.cookies.clear()
    assert victim.get(back).headers["location"] != "/"


def test_a_sign_in_ends_unfinished(site, monkeypatch):
    browser = site.browser()
    back = site.way(browser)
    monkeypatch.setattr(oidc, "PENDING", -1)
    assert "signin=again" in browser.get(back).headers["location"]


@pytest.mark.parametrize(
    "metadata",
    [
        {"issuer": "https://elsewhere.example"},
        {"token_endpoint": "http://elsewhere.example/token"},
        {"jwks_uri": "file:///etc/passwd"},
        {"authorization_endpoint": None},
    ],
    ids=lambda metadata: next(iter(metadata)),
)
def test_a_discovery_document_that_leads_elsewhere(site, metadata):
    site.provider.metadata = metadata
    browser = site.browser()
    to = browser.get("/v1/signin").headers["location"]
    if not to.startswith("/#"):
        to = browser.get(site.plain.get(to).headers["location"]).headers["location"]
    assert to == "/#/search?signin=provider"


@pytest.mark.parametrize(
    "lies",
    [
        {"metadata": {"jwks_uri": 7}},
        {"metadata": {"token_endpoint": "https://["}},
        {"metadata": {"userinfo_endpoint": "https://["}, "claims": {"groups": None}},
        {"published": [{"kty": "RSA", "n": "!", "e": "AQAB", "kid": "one", "alg": "RS256"}]},
        {"published": {"kty": "RSA"}},
        {"published": [7, {"kty": "EC", "crv": "P-256", "x": "", "y": "", "kid": "one"}]},
        {"answer": {"id_token": 7}},
        {"answer": {"id_token": {"a": 1}}},
        {"answer": {"id_token": None}},
        {"claims": {"exp": "tomorrow"}},
        {"claims": {"groups": None}, "answer": {"access_token": 7, "userinfo": {"sub": None}}},
    ],
    ids=str,
)
def test_whatever_a_provider_answers_is_no_failure_of_ours(site, lies):
    for name, lie in lies.items():
        setattr(site.provider, name, lie)
    assert site.sign_in()[1] in ("provider", "denied")


def test_keys_change_and_are_not_fetched_for_every_guess(site):
    assert site.sign_in()[1] == ""
    site.provider.kid, site.provider.algorithm = "two", "ES256"
    site.provider.published.append(jwk("ES256", "two", KEYS["ES256"]))
    assert site.sign_in()[1] == "provider", "looked for a minute ago"
    site.now[0] += oidc.AGAIN + 1
    assert site.sign_in()[1] == ""
    site.provider.kid = "three"
    assert [site.sign_in()[1] for _ in range(3)] == ["provider"] * 3
    assert site.provider.requests.count("jwks") == 2
    site.provider.published, site.provider.kid = [jwk("ES256", "two", KEYS["ES256"])], "one"
    site.provider.algorithm = "RS256"
    site.now[0] += oidc.FRESH + 1
    assert site.sign_in()[1] == "provider", "a key that was taken back"


class TestGroups:
    def test_nobody_gets_in_without_one_of_them(self, site):
        site.provider.person["groups"] = ["canteen"]
        browser, refusal = site.sign_in()
        assert refusal == "groups"
        assert browser.get("/v1/me").status_code == 401

    def test_they_may_come_with_the_user_info(self, site):
        site.provider.claims = {"groups": None}
        browser, refusal = site.sign_in()
        assert refusal == ""
        assert browser.get("/v1/me").json()["groups"] == ["doctors"]
        site.provider.answer = {"userinfo": {"sub": "somebody else"}}
        assert site.sign_in()[1] == "provider"

    @pytest.mark.parametrize("groups", [{"doctors": 1}, 7, [["doctors"]], None, "canteen"])
    def test_what_is_no_list_of_groups_gives_nothing(self, site, groups):
        site.provider.person["groups"] = groups
        assert site.sign_in()[1] == "groups"

    def test_an_email_is_an_id_only_if_it_was_verified(self, tmp_path):
        with signing_in(tmp_path, id_claim="email", silo_groups=("*",)) as site:
            site.provider.person["email"] = "ada@hospital.example"
            assert site.sign_in()[1] == "provider"
            site.provider.person["email_verified"] = True
            browser, _ = site.sign_in()
            assert browser.get("/v1/me").json()["name"] == "ada@hospital.example"
            assert browser.get("/v1/me").json()["groups"] == ["canteen", "doctors"]


class TestRenewal:
    def test_who_loses_a_group_loses_what_it_gave(self, site):
        site.provider.person["groups"] = ["doctors", "operators"]
        browser, _ = site.sign_in()
        assert browser.get("/v1/sessions").status_code == 200
        site.provider.person["groups"] = ["doctors"]
        site.now[0] += 14 * 60
        assert browser.get("/v1/sessions").status_code == 200
        site.now[0] += 2 * 60
        assert browser.get("/v1/sessions").status_code == 403
        assert browser.post("/v1/search", json=BODY).status_code == 200
        site.provider.person["groups"] = []
        site.now[0] += 16 * 60
        reply = browser.post("/v1/search", json=BODY)
        assert reply.status_code == 401
        assert "sign in again" in reply.json()["detail"]

    def test_who_is_gone_at_the_provider_is_gone_here(self, site):
        browser, _ = site.sign_in()
        site.provider.refreshes.clear()
        site.now[0] += 16 * 60
        assert browser.get("/v1/me").status_code == 401
        site.provider.refreshes["x"] = {}
        assert browser.get("/v1/me").status_code == 401, "for good"

    def test_a_provider_that_does_not_answer_is_waited_for_as_long_again(self, site):
        browser, _ = site.sign_in()
        site.provider.status = 503
        site.now[0] += 16 * 60
        assert [browser.get("/v1/me").status_code for _ in range(3)] == [200] * 3
        assert site.provider.requests.count("refresh_token") == 1, "not with every request"
        site.now[0] += 15 * 60
        assert browser.get("/v1/me").status_code == 401

    def test_it_goes_on_while_the_provider_agrees(self, site):
        browser, _ = site.sign_in()
        for _ in range(3):
            site.now[0] += 16 * 60
            assert browser.get("/v1/me").status_code == 200
        assert site.provider.requests.count("refresh_token") == 3

    def test_requests_at_once_renew_once(self, site):
        """A provider takes a refresh token that comes twice for stolen."""
        import asyncio

        browser, _ = site.sign_in()
        site.now[0] += 16 * 60

        async def requests():
            async with httpx.AsyncClient(base_url=site.url, cookies=browser.cookies, timeout=15) as client:
                replies = await asyncio.gather(*(client.get("/v1/me") for _ in range(8)))
                return {reply.status_code for reply in replies}

        assert asyncio.run(requests()) == {200}
        assert site.provider.requests.count("refresh_token") == 1

    def test_a_renewal_is_of_the_same_person(self, site):
        browser, _ = site.sign_in()
        site.provider.person["sub"] = "somebody else"
        site.provider.person["groups"] = ["operators"]
        site.now[0] += 16 * 60
        assert browser.get("/v1/sessions").status_code == 401

    def test_by_the_user_info_where_no_new_token_comes(self, site):
        browser, _ = site.sign_in()
        site.provider.answer = {"id_token": None}
        site.provider.person["groups"] = ["operators"]
        site.now[0] += 16 * 60
        assert browser.get("/v1/sessions").status_code == 200
        site.provider.metadata = {"userinfo_endpoint": None}
        site.now[0] += oidc.FRESH
        assert browser.get("/v1/me").status_code == 401

    def test_without_a_refresh_token_a_session_ends_with_the_id_token(self, site):
        site.provider.answer = {"refresh_token": None}
        browser, _ = site.sign_in()
        assert browser.get("/v1/me").status_code == 200
        site.now[0] += 301
        assert browser.get("/v1/me").status_code == 401


class TestRevocation:
    def test_an_administrator_ends_all_sessions_of_a_person(self, site):
        browsers = [site.sign_in()[0] for _ in range(2)]
        site.provider.person = {**ADA, "sub": "u-18", "name": "Bob"}
        other, _ = site.sign_in()
        listed = site.plain.get("/v1/sessions", headers=site.admin).json()["sessions"]
        assert [(each["person"], each["name"]) for each in listed] == [
            ("u-17", "Ada Lovelace"),
            ("u-17", "Ada Lovelace"),
            ("u-18", "Bob"),
        ]
        end = {"params": {"person": "u-17"}}
        assert other.delete("/v1/sessions", **end).status_code == 403
        assert site.plain.get("/v1/sessions").status_code == 401
        ended = site.plain.delete("/v1/sessions", headers=site.admin, **end)
        assert ended.json() == {"ended": 2}
        assert [each.get("/v1/me").status_code for each in (*browsers, other)] == [401, 401, 200]

    def test_a_session_that_rests_is_listed_and_ended_too(self, site):
        browser, _ = site.sign_in()
        site.now[0] += 3600
        assert len(site.plain.get("/v1/sessions", headers=site.admin).json()["sessions"]) == 1
        ended = site.plain.delete("/v1/sessions", headers=site.admin, params={"person": "u-17"})
        assert ended.json() == {"ended": 1}
        assert browser.get("/v1/me").status_code == 401

    def test_a_renewal_under_way_does_not_bring_a_session_back(self, site, monkeypatch):
        browser, _ = site.sign_in()
        renew = oidc.Provider.renew

        async def ended_meanwhile(provider, grant):
            site.sessions.end("u-17")
            return await renew(provider, grant)

        monkeypatch.setattr(oidc.Provider, "renew", ended_meanwhile)
        site.now[0] += 16 * 60
        assert browser.get("/v1/me").status_code == 401


def test_a_session_is_another_after_signing_in(site):
    """Who set a victim's cookie beforehand has nothing of it."""
    browser = site.browser()
    browser.cookies.set(COOKIE, "fixed", domain="127.0.0.1")
    assert site.sign_in(browser)[1] == ""
    assert browser.cookies.get(COOKIE, domain="127.0.0.1") != "fixed"
    assert site.plain.get("/v1/me", headers={"cookie": f"{COOKIE}=fixed"}).status_code == 401


def test_another_page_can_send_people_to_sign_in_and_no_further(site):
    away = {"sec-fetch-site": "cross-site"}
    with site.browser() as browser:
        assert browser.get("/v1/signin", headers=away).status_code == 303
        assert browser.get("/v1/signin/callback", headers=away).headers["location"].startswith("/#/")
        assert browser.delete("/v1/session", headers=away).status_code == 403


def test_keys_go_on_working_beside_it(site):
    assert site.plain.get("/v1/session").json() == {"key": True, "provider": "127.0.0.1"}
    assert site.plain.get("/v1/silos", headers=site.admin).status_code == 200


def test_secrets_of_a_sign_in_are_not_logged(site, caplog):
    caplog.set_level("INFO", "isthmus.access")
    browser, _ = site.sign_in()
    cookie = browser.cookies[COOKIE]
    grant = next(iter(site.sessions._open.values())).grant
    codes = [httpx.URL(site.way(site.browser())).params["code"]]
    for text in (cookie, grant.refresh, *codes):
        assert text not in caplog.text
        assert text not in repr(grant)
