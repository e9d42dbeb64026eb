"""`/scheduler/policy`: the order of waiting requests."""

from __future__ import annotations

from typing import Final

import msgspec
from aiohttp import web

from phloem.srt.http.body import BodyReader
from phloem.srt.http.context import serving
from phloem.srt.http.responding import json_response
from phloem.srt.http.routes import Access, Route
from phloem.srt.questions import AskPolicy, Policy


class PolicyRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    policy: str


class PolicyReply(msgspec.Struct, frozen=True, kw_only=True):
    """The policy in force, and all there are."""

    policy: str
    policies: list[str]


_policy_reader = BodyReader(PolicyRequest)


async def policy(request: web.Request) -> web.Response:
    return await _ask_policy(request, None)


async def set_policy(request: web.Request) -> web.Response:
    """Order the requests that wait by another policy from now on."""
    return await _ask_policy(request, (await _policy_reader.read(request)).policy)


async def _ask_policy(request: web.Request, wanted: str | None) -> web.Response:
    answer = await serving(request).ask(AskPolicy(0, policy=wanted), Policy)
    return json_response(PolicyReply(policy=answer.policy, policies=answer.policies))


ROUTES: Final = (
    Route(
        "GET",
        "/scheduler/policy",
        policy,
        Access.ADMIN,
        "The order of waiting requests",
        reply=PolicyReply,
    ),
    Route(
        "POST",
        "/scheduler/policy",
        set_policy,
        Access.ADMIN,
        "Change the order of waiting requests",
        body=_policy_reader,
        reply=PolicyReply,
        example={"policy": "lpm"},
    ),
)
