"""Sign-in and sign-out of people at the broker's page: by an API key, or through an identity provider.

| path | |
|---|---|
| GET /v1/session | the ways to sign in |
| POST, DELETE /v1/session | sign in with an API key, and sign out |
| GET /v1/signin | to the provider, and from there to /v1/signin/callback, in the browser |
| GET /v1/signin/end | to the provider's own page for signing out |
| GET, DELETE /v1/sessions | list the sessions, and end those of one person: scope admin |
| GET /v1/keys · DELETE /v1/keys/ID | list the API keys, and revoke one: scope admin |
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from isthmus.errors import ConfigError
from isthmus.service import wire
from isthmus.service.apps import PROBLEMS
from isthmus.service.audit_log import audit
from isthmus.service.limits import CALLER, WRONG_KEY, HttpProblem
from isthmus.service.security import ApiKey, ApiKeys
from isthmus.service.sessions import (
    COOKIE,
    FORMER_COOKIE,
    LONGEST,
    SECURE_COOKIE,
    NotSignedIn,
    Sessions,
    SignInProvider,
    session_in,
)

OPEN = ("/v1/session", "/v1/signin", "/v1/signin/callback", "/v1/signin/end")
PENDING_COOKIE = "isthmus_signin"
_PENDING_SECONDS = 600
_log = logging.getLogger("isthmus.service")

router = APIRouter(responses=PROBLEMS)


@router.get("/v1/session")
async def ways_in(request: Request) -> wire.WaysIn:
    """Return the ways to sign in here: at the provider of this name, or with an API key."""
    sessions = _sessions(request)
    provider = None if sessions is None else sessions.provider
    return wire.WaysIn(
        key=sessions is not None and sessions.with_keys, provider="" if provider is None else provider.host
    )


@router.post("/v1/session", status_code=204, response_model=None)
async def open_session(body: wire.Session, request: Request) -> Response:
    """Sign in with an API key; from now on a cookie that no script can read stands for it."""
    sessions = _sessions(request)
    number = None if sessions is None else sessions.open(body.key)
    if number is None:
        request.scope[WRONG_KEY]()
        raise HttpProblem(401, "the API key is unknown, revoked or expired")
    # a proxy may terminate TLS; the browser's Origin shows how it reached the page
    secure = "https" in (request.url.scheme, request.headers.get("origin", "").partition(":")[0])
    answer = _signed_out(request, Response(status_code=204))
    return _signed_in(request, answer, number, secure=secure)


@router.delete("/v1/session", status_code=204, response_model=None)
async def close_session(request: Request) -> Response:
    """Sign out."""
    return _signed_out(request, Response(status_code=204))


@router.get("/v1/signin", include_in_schema=False)
async def begin(request: Request) -> Response:
    """Redirect a browser to the provider."""
    provider = _provider(request)
    try:
        address, pending = await provider.begin()
    except NotSignedIn as refusal:
        return _refused(refusal)
    secure = provider.secure
    answer = RedirectResponse(address, 303)
    # lax: the provider's page sends the browser back here
    answer.set_cookie(
        _pending_name(secure), pending, max_age=_PENDING_SECONDS, httponly=True, secure=secure, samesite="lax"
    )
    return answer


@router.get("/v1/signin/callback", include_in_schema=False)
async def finish(request: Request) -> Response:
    """Receive a browser back from the provider, and begin a session for the person that it has signed in."""
    provider, sessions = _provider(request), _sessions(request)
    secure = provider.secure
    try:
        pending = request.cookies.get(_pending_name(secure), "")
        grant = await provider.finish(dict(request.query_params), pending)
    except NotSignedIn as refusal:
        answer = _refused(refusal)
        request.app.state.broker.audit.refuse("", f"sign-in: {refusal.reason}", 401)
    else:
        assert sessions is not None
        answer = _signed_out(request, RedirectResponse("/", 303))
        answer = _signed_in(request, answer, sessions.begin(grant), secure=secure)
    answer.delete_cookie(_pending_name(secure), httponly=True, secure=secure, samesite="lax")
    return answer


@router.get("/v1/signin/end", include_in_schema=False)
async def end(request: Request) -> Response:
    """Redirect a browser that has signed out here to the provider, to sign out there too."""
    try:
        address = await _provider(request).end_address()
    except NotSignedIn as refusal:
        return _refused(refusal)
    return RedirectResponse(address or "/", 303)


@router.get("/v1/sessions")
async def open_sessions(request: Request) -> wire.SessionList:
    """List the sessions of the page: whose they are, since when, and when they were used last."""
    sessions = _administered(request)
    rows = [] if sessions is None else sessions.list()
    return wire.SessionList(
        sessions=[
            wire.OpenSession(
                person=caller.name,
                name=caller.label or caller.name,
                scopes=sorted(caller.scopes),
                since=wire.moment(opened),
                used=wire.moment(used),
            )
            for caller, opened, used in rows
        ]
    )


@router.delete("/v1/sessions")
async def end_sessions(query: Annotated[wire.SessionsOf, Query()], request: Request) -> wire.EndedSessions:
    """End all sessions of a person at once; to keep them out, revoke keys and inform the provider."""
    sessions = _administered(request, request.app.state.broker.audit.owner(query.person))
    return wire.EndedSessions(ended=0 if sessions is None else sessions.end(query.person))


@router.get("/v1/keys")
async def api_keys(request: Request) -> wire.KeyList:
    """List all API keys without their secrets. New ones are made on the broker's machine alone, because silos
    rely on the owner that is stated when a key is made."""
    _administered(request)
    keys: ApiKeys | None = request.app.state.gate.keys
    return wire.KeyList(keys=[] if keys is None else [_listed(key) for key in keys.all()])


@router.delete("/v1/keys/{id}", status_code=204, response_model=None)
async def revoke_key(id: wire.KeyId, request: Request) -> Response:
    """Revoke an API key at once, with its sessions; not the caller's own, and not that of an auditor."""
    _administered(request, id)
    keys: ApiKeys | None = request.app.state.gate.keys
    key = None if keys is None else next((each for each in keys.all() if each.id == id), None)
    if keys is None or key is None:
        raise HttpProblem(404, "no such key")
    if key.name == request.scope[CALLER].name or "audit" in key.scopes:
        raise HttpProblem(403, "one's own key, and an auditor's, are revoked by: isthmus keys api revoke")
    with suppress(ConfigError):  # the key was revoked meanwhile
        await asyncio.to_thread(keys.revoke, id)
    return Response(status_code=204)


def _listed(key: ApiKey) -> wire.ListedKey:
    return wire.ListedKey(
        id=key.id,
        name=key.name,
        scopes=list(key.scopes),
        groups=list(key.groups),
        created=wire.moment(key.created),
        expires=None if key.expires is None else wire.moment(key.expires),
    )


async def check_provider(sessions: Sessions | None) -> None:
    """Warn the operator if nobody could sign in at the provider."""
    try:
        if sessions is not None and sessions.provider is not None:
            await sessions.provider.begin()
    except NotSignedIn as refusal:
        _log.warning("nobody can sign in at the provider for now: %s", refusal)


def _administered(request: Request, whose: str = "") -> Sessions | None:
    """Return the sessions, if the caller is an administrator. The action, and whose key or sessions it is
    about, is first recorded in the audit log."""
    if not request.scope[CALLER].may("admin"):
        raise HttpProblem(403, "this needs a key with the scope admin")
    audit(request, "administration", what=f"{request.method} {request.scope['route'].path} {whose}".rstrip())
    return _sessions(request)


def _sessions(request: Request) -> Sessions | None:
    sessions: Sessions | None = request.app.state.gate.sessions
    return sessions


def _provider(request: Request) -> SignInProvider:
    sessions = _sessions(request)
    if sessions is None or sessions.provider is None:
        raise HttpProblem(404, "this broker knows no provider of identities: sign in with an API key")
    return sessions.provider


def _refused(refusal: NotSignedIn) -> Response:
    """Redirect to the page, which shows the reason; further details are only logged, for the operator."""
    _log.warning("nobody was signed in: %s", refusal)
    return RedirectResponse(f"/#/search?signin={refusal.reason}", 303)


def _pending_name(secure: bool) -> str:
    return f"__Host-{PENDING_COOKIE}" if secure else PENDING_COOKIE


def _signed_in(request: Request, answer: Response, number: str, *, secure: bool) -> Response:
    caller = None if (sessions := _sessions(request)) is None else sessions.caller(number)
    audit(request, "signed-in", name="" if caller is None else caller.name)
    name = SECURE_COOKIE if secure else COOKIE
    answer.set_cookie(
        name, number, max_age=int(LONGEST), httponly=True, secure=secure, samesite="strict", path="/"
    )
    return answer


def _signed_out(request: Request, answer: Response) -> Response:
    """End the session that the request carries, if any, and have the browser forget its cookies."""
    sessions, number = _sessions(request), session_in(request.scope)
    if sessions is not None and number is not None:
        if (caller := sessions.caller(number)) is not None:
            audit(request, "signed-out", name=caller.name)
        sessions.close(number)
    for name in {SECURE_COOKIE, COOKIE, FORMER_COOKIE} & request.cookies.keys():
        secure = name == SECURE_COOKIE
        answer.delete_cookie(name, path="/", httponly=True, secure=secure, samesite="strict")
    return answer
