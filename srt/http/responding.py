"""From a request that was read to its reply, the same for every protocol: run, then encode.

A protocol reads its body into a `Call` and an `Answer`; what happens in between (constraints,
sequences, aborting when the client leaves, an error after the 200) is here and below.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec
from aiohttp import web

from phloem.srt.errors import InvalidConstraint, InvalidRequest, PhloemError
from phloem.srt.generation import Chunk, GenerateRequest
from phloem.srt.http.context import Serving, serving
from phloem.srt.http.enforcement import generate_constrained
from phloem.srt.http.errors import REQUEST_ID
from phloem.srt.http.fanout import Event
from phloem.srt.http.found_constraint import FoundConstraint
from phloem.srt.http.framing import SSE, Framing
from phloem.srt.http.middleware import REQUEST_ID_HEADER
from phloem.srt.http.pacing import paced
from phloem.srt.http.stream import EventStream

MAX_SEQUENCES: Final = 2048

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, kw_only=True)
class Call:
    """What one HTTP request asks of the engine: its sequences under the id that its client knows,
    all with the same constraint, if any. `with_fields`: tell the values as they are finished.
    `names` are the request's own for fields that the engine may find fault with (`prompt`,
    `max_tokens`, `rid`). A stream's frames have `stream_interval` tokens."""

    rid: str
    requests: Sequence[GenerateRequest]
    constraint: FoundConstraint | None = None
    with_fields: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    stream_interval: int = 1


class Answer(Protocol):
    """What makes a reply of engine chunks, whole or in frames. One object makes one of the two."""

    def add(self, index: int, chunk: Chunk) -> None:
        """Take in a chunk of sequence `index`, for `whole`."""
        ...

    def whole(self) -> msgspec.Struct: ...

    def frames(self, index: int, chunk: Chunk) -> Iterable[msgspec.Struct]:
        """Take in a chunk of sequence `index`, and give the frames that it makes."""
        ...

    def closing(self) -> Iterable[msgspec.Struct]:
        """The frames after the last chunk of all sequences."""
        ...


async def respond(
    request: web.Request, call: Call, answer: Answer, *, stream: bool, framing: Framing = SSE
) -> web.StreamResponse:
    """Run `call` and send the reply. The status goes out once all its sequences are accepted."""
    ctx = serving(request)
    REQUEST_ID.set(call.rid)
    if not stream:
        return json_response(await whole(ctx, call, answer))
    async with streaming(ctx, call) as events:
        headers = {REQUEST_ID_HEADER: call.rid}
        async with EventStream(
            request, headers, keepalive_s=ctx.keepalive_s, framing=framing
        ) as out:
            async for index, chunk in events:
                await out.write(b"".join(map(framing.frame, answer.frames(index, chunk))))
            await out.write(b"".join(map(framing.frame, answer.closing())))
        return out.response


async def whole(ctx: Serving, call: Call, answer: Answer) -> msgspec.Struct:
    """The whole reply to `call`. Raises what `running` raises."""
    async with running(ctx, call) as events:
        async for index, chunk in events:
            answer.add(index, chunk)
    return answer.whole()


@asynccontextmanager
async def running(ctx: Serving, call: Call) -> AsyncIterator[AsyncIterator[Event]]:
    """The events of `call`, entered when the engine accepted it; leaving ends what still runs.
    Raises `PhloemError`, under the names of the request's own fields."""
    constraints = [call.constraint] * len(call.requests)
    with located(call.constraint, call.names):
        async with generate_constrained(
            ctx, call.rid, call.requests, constraints, fields=call.with_fields
        ) as events:
            yield events


@asynccontextmanager
async def streaming(ctx: Serving, call: Call) -> AsyncIterator[AsyncIterator[Event]]:
    """`running`, with chunks as large as the call's frames are to be."""
    intervals = [call.stream_interval] * len(call.requests)
    async with running(ctx, call) as events, aclosing(paced(events, intervals)) as timely:
        yield timely


def json_response(body: msgspec.Struct | Sequence[msgspec.Struct]) -> web.Response:
    return web.Response(body=_encoder.encode(body), content_type="application/json")


@contextmanager
def located(
    constraint: FoundConstraint | None, names: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Report what is wrong in a constraint under the request field that it came from, and in other
    fields under the request's own `names` for them."""
    try:
        yield
    except InvalidConstraint as error:
        if constraint is None:
            raise
        field, path = constraint.field_of(error.param or "")
        param = join_path(field, path)
        raise InvalidConstraint(error.message, param=param, code=error.code) from error
    except InvalidRequest as error:
        own = (names or {}).get(error.param or "")
        if own is None:
            raise
        raise type(error)(error.message, param=own, code=error.code) from error


@contextmanager
def renamed(
    name: Callable[[str], str], text: Callable[[str, str | None], str] | None = None
) -> Iterator[None]:
    """Report errors as the client of another protocol knows their fields: `name` has the names,
    and `text` what a message about a field, or none, is to say."""
    try:
        yield
    except PhloemError as error:
        param = None if error.param is None else name(error.param)
        message = error.message if text is None else text(error.message, error.param)
        if (message, param) == (error.message, error.param):
            raise
        raise type(error)(
            message, param=param, code=error.code, retry_after=error.retry_after
        ) from error


def join_path(prefix: str, path: str | None) -> str:
    """`path` (dotted, or a JSON pointer) below `prefix`; one that is there already stays."""
    if not path or path.startswith(prefix):
        return path or prefix
    pointer = path.removeprefix("#")
    if pointer.startswith("/"):
        steps = pointer[1:].split("/")
        return ".".join([prefix, *(s.replace("~1", "/").replace("~0", "~") for s in steps)])
    inner = path.removeprefix("$").removeprefix(".")
    return prefix + inner if inner.startswith("[") else f"{prefix}.{inner}"
