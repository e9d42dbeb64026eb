"""`POST /generate`: the native route, in SGLang's shapes."""

from __future__ import annotations

from contextlib import aclosing
from typing import Final

import msgspec
from aiohttp import web

from phloem.srt.generation import GenerateRequest
from phloem.srt.http.body import BodyReader
from phloem.srt.http.caller import caller_of
from phloem.srt.http.context import serving
from phloem.srt.http.enforcement import generate_constrained
from phloem.srt.http.errors import REQUEST_ID
from phloem.srt.http.middleware import REQUEST_ID_HEADER
from phloem.srt.http.native_answer import NativeAnswer
from phloem.srt.http.native_protocol import NativeReply, NativeRequest
from phloem.srt.http.native_sequences import NativeSequence, read_sequences, sequence_rids
from phloem.srt.http.pacing import paced
from phloem.srt.http.responding import json_response, located
from phloem.srt.http.routes import Access, Route
from phloem.srt.http.sampling import choice_seeds
from phloem.srt.http.stream import EventStream

_reader = BodyReader(NativeRequest)


async def generate_route(request: web.Request) -> web.StreamResponse:
    body = await _reader.read(request)
    caller = caller_of(request, body.program, body.plan)
    read, batched = await read_sequences(body, serving(request).engine, caller)
    rid, rids = sequence_rids(body, read)
    # each sequence as often as it has choices
    sequences = [sequence for sequence in read for _ in range(sequence.n)]
    requests = [
        msgspec.structs.replace(
            sequence.request,
            rid=part,
            sampling=msgspec.structs.replace(sequence.request.sampling, seed=seed),
        )
        for sequence, parts in zip(read, rids, strict=True)
        for part, seed in zip(
            parts, choice_seeds(sequence.request.sampling.seed, sequence.n), strict=True
        )
    ]
    REQUEST_ID.set(rid)
    several = batched or len(sequences) > 1
    names = {
        "prompt": "text" if body.text is not None else "input_ids",
        "max_tokens": "sampling_params.max_new_tokens",
    }
    with located(next((s.constraint for s in sequences if s.constraint), None), names):
        return await _respond(request, rid, requests, sequences, body, several)


async def _respond(
    request: web.Request,
    rid: str,
    requests: list[GenerateRequest],
    sequences: list[NativeSequence],
    body: NativeRequest,
    several: bool,
) -> web.StreamResponse:
    ctx = serving(request)
    incremental = bool(body.stream and body.incremental_streaming_output)
    answers = [
        NativeAnswer(one.rid or rid, sequence.wanted, sequence.warnings, incremental=incremental)
        for one, sequence in zip(requests, sequences, strict=True)
    ]
    constraints = [sequence.constraint for sequence in sequences]
    async with generate_constrained(ctx, rid, requests, constraints) as events:
        if not body.stream:
            async for index, chunk in events:
                answers[index].add(chunk)
            replies = [answer.reply() for answer in answers]
            return json_response(replies if several else replies[0])
        headers = {REQUEST_ID_HEADER: rid}
        intervals = [sequence.stream_interval for sequence in sequences]
        async with (
            EventStream(request, headers, keepalive_s=ctx.keepalive_s) as stream,
            aclosing(paced(events, intervals)) as timely,
        ):
            async for index, chunk in timely:
                answers[index].add(chunk)
                if chunk.token_ids or chunk.text or chunk.finish is not None:
                    await stream.send(answers[index].reply(index if several else None))
        return stream.response


ROUTES: Final = tuple(
    Route(
        method,
        "/generate",
        generate_route,
        Access.INFERENCE,
        "Continue one prompt or several; events are cumulative",
        body=_reader,
        reply=NativeReply | list[NativeReply],
        events=NativeReply,
        example={"text": "Once upon a time", "sampling_params": {"max_new_tokens": 8}},
    )
    for method in ("POST", "PUT")
)
