"""Fewer frames with more in each: `stream_interval`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import msgspec

from phloem.srt.generation import Chunk
from phloem.srt.http.fanout import Event


async def paced(
    events: AsyncIterator[Event], intervals: Sequence[int]
) -> AsyncGenerator[Event, None]:
    """`events` with at least `intervals[i]` tokens in a chunk of sequence `i`. The first token of
    each is not held back, nor is its end, nor what came before an error."""
    held: dict[int, Chunk] = {}
    begun: set[int] = set()
    try:
        async for index, chunk in events:
            waiting = held.pop(index, None)
            if waiting is not None:
                chunk = joined(waiting, chunk)
            count = len(chunk.token_ids)
            if chunk.finish is None and index in begun and count < intervals[index]:
                held[index] = chunk
                continue
            if count:
                begun.add(index)
            yield index, chunk
    except Exception:
        for event in held.items():
            yield event
        raise


def joined(first: Chunk, second: Chunk) -> Chunk:
    """Two neighbouring chunks of a sequence as one."""
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = (first.logprobs or []) + (second.logprobs or [])
    return msgspec.structs.replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        fields=first.fields + second.fields,
    )
