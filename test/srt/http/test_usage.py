"""`cached_tokens`: prompt tokens that nobody had to compute for this request."""

from __future__ import annotations

import random
from typing import Any

import pytest

from phloem.srt.generation import Chunk, Finish
from phloem.srt.http.usage import UsageCounter
from phloem.srt.messages import FinishReason


def history(rng: random.Random, prompt: int, cached: int, *, aborted: bool) -> list[Chunk]:
    """The chunks of one sequence: accepted, then tokens, each with the totals so far."""
    chunks = [Chunk(rid="r", prompt_tokens=prompt)]
    if aborted:  # while it waited: nothing was taken from the tree, and nothing computed
        finish = Finish(FinishReason.ABORT)
        return [*chunks, Chunk(rid="r", prompt_tokens=prompt, finish=finish)]
    length = rng.randint(0, 3)
    for i in range(max(1, length)):
        end = Finish(FinishReason.LENGTH) if i + 1 >= length else None
        tokens = min(i + 1, length)
        chunks.append(
            Chunk(
                rid="r",
                prompt_tokens=prompt,
                completion_tokens=tokens,
                cached_tokens=cached,
                finish=end,
            )
        )
    return chunks


@pytest.mark.parametrize("seed", range(20))
def test_what_was_computed_counts_once_for_all_choices(seed: int) -> None:
    """Of n sequences that come together one computes what is missing, and the others share it;
    the counts are never wrong on the way, only not yet known."""
    rng = random.Random(seed)
    n, prompts = rng.randint(1, 4), rng.randint(1, 3)
    counter = UsageCounter(n)
    streams: dict[int, list[Chunk]] = {}
    expected, total = 0, 0
    for p in range(prompts):
        prompt = rng.randint(2, 50)
        before = rng.randrange(prompt)  # in the tree already
        first = rng.randrange(n)
        aborted = {i for i in range(n) if i != first and rng.random() < 0.2}
        for i in range(n):
            cached = before if i == first else rng.randint(before, prompt - 1)
            streams[p * n + i] = history(rng, prompt, cached, aborted=i in aborted)
        expected += before
        total += prompt
    while any(streams.values()):
        index = rng.choice([i for i, chunks in streams.items() if chunks])
        counter.add(index, streams[index].pop(0))
        usage = counter.usage()
        assert usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens
    assert usage.prompt_tokens == total
    assert usage.prompt_tokens_details.cached_tokens == expected


async def test_choices_that_wait_do_not_hide_what_is_cached(
    api: Any, engine: Any, script: Any
) -> None:
    """In a stream with running usage: a choice that has no token yet has no say."""
    engine.script = lambda request: script(cached_tokens=1)
    reply = await api.chat(
        n=3, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    seen = [
        event["usage"]["prompt_tokens_details"]["cached_tokens"]
        for event in reply.events
        if event["usage"]["completion_tokens"]
    ]
    assert seen
    assert set(seen) == {1}


def test_guesses_of_all_choices_are_added() -> None:
    counter = UsageCounter(n=2)
    for index, (accepted, rejected) in enumerate([(3, 1), (4, 0)]):
        chunk = Chunk(
            rid="r",
            prompt_tokens=5,
            completion_tokens=9,
            forced_tokens=2,
            accepted_guesses=accepted,
            rejected_guesses=rejected,
        )
        counter.add(index, chunk)
    details = counter.usage().completion_tokens_details
    assert (details.forced_tokens, details.reasoning_tokens) == (4, 0)
    assert details.accepted_prediction_tokens == 7
    assert details.rejected_prediction_tokens == 1
