"""Running one HTTP request's sequences: opened together, merged, closed together.

`n` choices and lists of prompts are several engine requests. They are accepted all or none: an
error of one before its first chunk ends the others, and is the answer. Leaving the context, for
whatever reason, closes every stream, and closing a stream aborts its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import msgspec

from phloem.srt.errors import InternalError
from phloem.srt.generation import Chunk, GenerateRequest
from phloem.srt.http.context import Serving
from phloem.srt.http.rate_limits import Bill
from phloem.srt.messages import FinishReason
from phloem.srt.metrics.prometheus import RequestObserver
from phloem.srt.tenants import scoped

Event = tuple[int, Chunk]


@asynccontextmanager
async def generate(
    serving: Serving, rid: str, requests: Sequence[GenerateRequest]
) -> AsyncIterator[AsyncIterator[Event]]:
    """Submit `requests`, all of one tenant, under the client's `rid`; entered when the engine
    accepted them all.

    Gives `(index, chunk)` events, of each index in order, of different indexes as they come; the
    accepting chunks come first. Raises what the engine raises (`PhloemError`).
    """
    tenant = requests[0].tenant
    parts = [
        scoped(tenant, request.rid or part_rid(rid, i, len(requests)))
        for i, request in enumerate(requests)
    ]
    prompts = [request.prompt for request in requests]
    with (
        serving.quotas.admitted(tenant, prompts) as bill,
        serving.in_flight.hold(tenant, rid, parts),
    ):
        streams = [
            _observed(serving, msgspec.structs.replace(request, rid=part), bill)
            for request, part in zip(requests, parts, strict=True)
        ]
        try:
            accepted = await _first_chunks(streams)
            bill.accepted(_prompt_tokens(prompts, accepted))
            async with aclosing(_events(accepted, streams)) as events:
                yield events
        finally:
            await _close(streams)


def part_rid(rid: str, index: int, count: int) -> str:
    """The id of one of `count` sequences."""
    return rid if count == 1 else f"{rid}-{index}"


def _prompt_tokens(prompts: Sequence[str | list[int]], accepted: Sequence[Chunk]) -> int:
    """The length of all prompts together; one that several choices share counts once."""
    lengths = {
        id(prompt): chunk.prompt_tokens for prompt, chunk in zip(prompts, accepted, strict=True)
    }
    return sum(lengths.values())


async def _observed(serving: Serving, request: GenerateRequest, bill: Bill) -> AsyncIterator[Chunk]:
    """One engine stream, measured, counted, and checked to end with a finish reason."""
    observer = RequestObserver(serving.metrics)
    counted = 0
    stream = serving.engine.generate(request)
    try:
        async for chunk in stream:
            observer.chunk(chunk)
            bill.output(chunk.completion_tokens - counted)
            counted = chunk.completion_tokens
            yield chunk
            if chunk.finish is not None:
                return
        raise InternalError("The engine ended an answer without saying how.")
    except (asyncio.CancelledError, GeneratorExit):
        observer.end(FinishReason.ABORT)
        raise
    except Exception:
        observer.end("error")
        raise
    finally:
        await _close([stream])


async def _first_chunks(streams: Sequence[AsyncIterator[Chunk]]) -> list[Chunk]:
    """The accepting chunk of each stream, or the first error of any."""
    if len(streams) == 1:
        return [await anext(streams[0])]
    tasks = [asyncio.ensure_future(anext(stream)) for stream in streams]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def _events(
    accepted: Sequence[Chunk], streams: Sequence[AsyncIterator[Chunk]]
) -> AsyncGenerator[Event, None]:
    for event in enumerate(accepted):
        yield event
    open_streams = [(i, s) for i, s in enumerate(streams) if accepted[i].finish is None]
    if len(open_streams) == 1:
        index, only = open_streams[0]
        async for chunk in only:
            yield index, chunk
        return
    async with aclosing(_merge(open_streams)) as merged:
        async for event in merged:
            yield event


async def _merge(
    streams: Sequence[tuple[int, AsyncIterator[Chunk]]],
) -> AsyncGenerator[Event, None]:
    """Events of all streams as they come. The queue is short, so a slow reader holds all back."""
    queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(index: int, stream: AsyncIterator[Chunk]) -> None:
        try:
            async for chunk in stream:
                await queue.put((index, chunk))
        except Exception as error:  # handed to the reader, who raises it
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in streams]
    left = len(tasks)
    try:
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Future[Chunk]] | Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _close(streams: Sequence[AsyncIterator[Chunk]]) -> None:
    """Close what can be closed; a failing close must not keep the others open."""
    closers = [getattr(stream, "aclose", None) for stream in streams]
    await asyncio.gather(
        *(close() for close in closers if close is not None), return_exceptions=True
    )
