"""A reply of OpenAI's API, whole or streamed, to its end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from phloem.lang.backend.base import Delta
from phloem.lang.backend.http_transport import Body, Transport
from phloem.lang.backend.openai_wire import reply_deltas
from phloem.lang.errors import BackendUnavailable


async def answer_deltas(
    transport: Transport, path: str, body: Body, most: int | None = None
) -> AsyncGenerator[Delta, None]:
    """The reply's deltas. Those of a streamed one come up to `[DONE]`; raises `BackendUnavailable`
    when it breaks off before. It is read to its end, so that the connection can be kept."""
    if not body.get("stream"):
        for delta in reply_deltas(await transport.post(path, body), most):
            yield delta
        return
    done = False
    async with aclosing(transport.events(path, body)) as events:
        async for data in events:
            if data == b"[DONE]":
                done = True
            elif not done:
                for delta in reply_deltas(data, most):
                    yield delta
    if not done:
        raise BackendUnavailable("the stream broke off before its end")
