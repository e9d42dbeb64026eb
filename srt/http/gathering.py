"""Running many short requests for one reply that is never streamed: embeddings, scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from phloem.srt.errors import Conflict, InternalError
from phloem.srt.generation import Chunk, GenerateRequest
from phloem.srt.http.body import unsupported
from phloem.srt.http.caller import Caller
from phloem.srt.http.context import Serving
from phloem.srt.http.errors import REQUEST_ID
from phloem.srt.http.fanout import generate
from phloem.srt.http.protocol import Int32, PlanFields, ProgramId, RequestId, Seconds
from phloem.srt.messages import FinishReason

GROUP: Final = 256
"""Requests that are with the engine at once: one client's list leaves room in its queue."""


class RunFields(msgspec.Struct, kw_only=True):
    """What a request says of how it is run: the fields of a generation that fit any request."""

    model: str | None = None
    rid: RequestId | None = None
    request_id: RequestId | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    timeout: Seconds | None = None
    program: ProgramId | None = None
    plan: PlanFields | None = None


def refuse_fork(caller: Caller, what: str) -> None:
    """Raises `InvalidRequest` if the caller plans to fork after `what`."""
    if caller.plan is not None and caller.plan.fork:
        raise unsupported("plan.fork", f"{what} has no answer to go on from")


async def last_chunks(ctx: Serving, rid: str, requests: Sequence[GenerateRequest]) -> list[Chunk]:
    """Run `requests`, of at most one token of output each and without constraint; the last chunk
    of each, which has all there is. Raises `PhloemError`, of any of them, and `Conflict` if they
    were aborted."""
    REQUEST_ID.set(rid)
    found: list[Chunk] = []
    for begin in range(0, len(requests), GROUP):
        group = requests[begin : begin + GROUP]
        async with generate(ctx, rid, group) as events:
            last = {index: chunk async for index, chunk in events}
        found += [_whole(last.get(index)) for index in range(len(group))]
    return found


def _whole(chunk: Chunk | None) -> Chunk:
    if chunk is None or chunk.finish is None:
        raise InternalError("The engine ended an answer without saying how.")
    if chunk.finish.reason is FinishReason.ABORT:
        raise Conflict("The request was aborted.", code="aborted")
    return chunk
