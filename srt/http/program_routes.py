"""`POST /programs/run`, a whole program in one round trip, and `POST /programs/{program}/end`."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from aiohttp import web
from msgspec import UNSET

from phloem.srt.errors import Unavailable
from phloem.srt.http.access import CALLER
from phloem.srt.http.body import BodyReader, unsupported
from phloem.srt.http.caller import PLAN_HEADER, Caller, caller_of, program_id
from phloem.srt.http.context import Serving, serving
from phloem.srt.http.errors import REQUEST_ID, ErrorShape
from phloem.srt.http.framing import NamedFrames
from phloem.srt.http.middleware import REQUEST_ID_HEADER
from phloem.srt.http.program_protocol import (
    SHARED_FIELDS,
    DoneEvent,
    ProgramReply,
    ProgramRequest,
    VariableEvent,
)
from phloem.srt.http.program_run import Line, ProgramRun
from phloem.srt.http.program_steps import read_program
from phloem.srt.http.responding import json_response
from phloem.srt.http.routes import Access, Route
from phloem.srt.http.sampling import check_model
from phloem.srt.http.stream import EventStream
from phloem.srt.tenants import scoped


class ProgramEnded(msgspec.Struct, frozen=True, kw_only=True):
    ended: str


FRAMES: Final = NamedFrames(ErrorShape.OPENAI)
program_reader = BodyReader(ProgramRequest)


async def run_program(request: web.Request) -> web.StreamResponse:
    """Run the steps; with `stream`, tell each variable as soon as it is there."""
    ctx, body = serving(request), await program_reader.read(request)
    check_model(body.model, ctx.engine.card)
    program = read_program(body)
    caller = caller_of(request, body.program, None)
    if caller.plan is not None:
        raise unsupported(PLAN_HEADER, "the server knows what a program in it is about to do")
    rid = body.rid or f"run-{uuid.uuid4().hex}"
    REQUEST_ID.set(rid)
    ends = not caller.program
    if ends:
        caller = Caller(caller.tenant, scoped(caller.tenant.name, rid))
    calls: list[VariableEvent] = []

    async def note(event: VariableEvent) -> None:
        calls.append(event)

    shared = _shared(body)
    variables = dict(body.variables or {})
    with _ended(ctx, caller.program if ends else None):
        if not body.stream:
            run = ProgramRun(program, ctx, caller, rid, shared, note, ends)
            return json_response(_reply(run, await run.run(variables), ctx, calls))
        headers = {REQUEST_ID_HEADER: rid}
        async with EventStream(
            request, headers, keepalive_s=ctx.keepalive_s, framing=FRAMES
        ) as out:
            run = ProgramRun(program, ctx, caller, rid, shared, out.send, ends)
            await out.send(_done(run, await run.run(variables)))
        return out.response


def _shared(body: ProgramRequest) -> dict[str, Any]:
    values = {name: getattr(body, name) for name in SHARED_FIELDS}
    return {name: value for name, value in values.items() if value is not None}


@contextlib.contextmanager
def _ended(ctx: Serving, program: str | None) -> Iterator[None]:
    """End a program of ours, however it ended."""
    try:
        yield
    finally:
        if program is not None:
            with contextlib.suppress(Unavailable):  # then nothing is held for it, either
                ctx.engine.end_program(program)


def _done(run: ProgramRun, line: Line) -> DoneEvent:
    chat = run.program.chat
    return DoneEvent(
        id=run.rid,
        variables=line.variables,
        text=UNSET if chat else line.text,
        messages=list(line.messages) if chat else UNSET,
        usage=run.usage,
    )


def _reply(run: ProgramRun, line: Line, ctx: Serving, calls: list[VariableEvent]) -> ProgramReply:
    done = _done(run, line)
    return ProgramReply(
        id=run.rid,
        created=int(time.time()),
        model=ctx.engine.card.name,
        variables=done.variables,
        text=done.text,
        messages=done.messages,
        calls=calls,
        usage=done.usage,
    )


async def end_program(request: web.Request) -> web.Response:
    """No call of this program follows: what it alone used is the first to be evicted."""
    program = program_id(request.match_info["program"])
    serving(request).engine.end_program(scoped(request[CALLER].name, program))
    return json_response(ProgramEnded(ended=program))


ROUTES: Final = (
    Route(
        "POST",
        "/programs/run",
        run_program,
        Access.INFERENCE,
        "Run a straight-line program",
        body=program_reader,
        reply=ProgramReply,
        events=VariableEvent | DoneEvent,
        framing=FRAMES,
        example={"steps": [{"text": "2 + 2 ="}, {"gen": {"name": "sum", "max_tokens": 4}}]},
    ),
    Route(
        "POST",
        "/programs/{program}/end",
        end_program,
        Access.INFERENCE,
        "Say that no call of a program follows",
        reply=ProgramEnded,
    ),
)
