"""`/scheduler/policy`, the order of waiting requests, and `/programs/{program}/end`."""

from __future__ import annotations

import msgspec
from aiohttp import web

from phloem.srt.http.access import CALLER
from phloem.srt.http.body import BodyReader
from phloem.srt.http.caller import program_id
from phloem.srt.http.context import serving
from phloem.srt.http.responding import json_response
from phloem.srt.questions import AskPolicy, Policy
from phloem.srt.tenants import scoped


class PolicyRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    policy: str


class PolicyReply(msgspec.Struct, frozen=True, kw_only=True):
    """The policy in force, and all there are."""

    policy: str
    policies: list[str]


class ProgramReply(msgspec.Struct, frozen=True, kw_only=True):
    ended: str


_policy_reader = BodyReader(PolicyRequest)


async def policy(request: web.Request) -> web.Response:
    return await _ask_policy(request, None)


async def set_policy(request: web.Request) -> web.Response:
    """Order the requests that wait by another policy from now on."""
    return await _ask_policy(request, (await _policy_reader.read(request)).policy)


async def _ask_policy(request: web.Request, wanted: str | None) -> web.Response:
    answer = await serving(request).ask(AskPolicy(0, policy=wanted), Policy)
    return json_response(PolicyReply(policy=answer.policy, policies=answer.policies))


async def end_program(request: web.Request) -> web.Response:
    """No call of this program follows: what it alone used is the first to be evicted."""
    program = program_id(request.match_info["program"])
    serving(request).engine.end_program(scoped(request[CALLER].name, program))
    return json_response(ProgramReply(ended=program))
