"""An explanation of a hit or a miss, as a person reads it, with no more than the reader may know.

A tenant's own namespaces are the tenant's to look into. What other tenants have is not told to it
at all; nor, where tenants share, the text of what others cached.
"""

from __future__ import annotations

from typing import Final

import msgspec

from phloem.srt.generation import EngineClient
from phloem.srt.http.cache_protocol import Around, Eviction, ExplainReply
from phloem.srt.questions import CacheExplanation, MissReason
from phloem.srt.tenants import Tenant, unscoped
from phloem.srt.wire import unpack

WINDOW: Final = 16
"""Tokens that are shown on each side of the end of the match."""

_SHOWN: Final = 40  # characters of a text inside a sentence


async def explain_reply(
    answer: CacheExplanation, reader: Tenant, engine: EngineClient
) -> ExplainReply:
    """`answer` for `reader`, who owns its namespace or is an admin."""
    known = answer if reader.admin else _without_others(answer, reader)
    prompt = unpack(known.prompt)
    around = await _around(known, prompt, engine)
    rid = None if known.rid is None else unscoped(known.rid)[1]
    return ExplainReply(
        rid=rid,
        namespace=known.namespace,
        prompt_tokens=len(prompt),
        matched_tokens=known.matched,
        reason=known.reason.value,
        summary=_summary(known, len(prompt), around),
        around=around,
        branches=known.branches,
        evicted=_eviction(known),
        restorable_tokens=known.restorable,
        elsewhere=known.elsewhere,
        at_admission=known.at_admission,
    )


def _without_others(answer: CacheExplanation, reader: Tenant) -> CacheExplanation:
    elsewhere = [e for e in answer.elsewhere if not reader.share and reader.owns(e.namespace)]
    reason = answer.reason
    if reason is MissReason.NAMESPACE and not elsewhere:
        reason = MissReason.NEVER_SEEN
    mine = unscoped(answer.evicted_by)[0] == reader.name
    return msgspec.structs.replace(
        answer,
        reason=reason,
        elsewhere=elsewhere,
        cached=[] if reader.share else answer.cached,
        evicted_by=answer.evicted_by if mine else "",
    )


async def _around(answer: CacheExplanation, prompt: list[int], engine: EngineClient) -> Around:
    end = answer.matched
    before = prompt[max(0, end - WINDOW) : end]
    matched = await engine.detokenize(before)

    async def after(ids: list[int]) -> str:
        """The text of `ids` where it stands, which is not always that of `ids` alone."""
        both = await engine.detokenize(before + ids)
        alone = both.startswith(matched)
        return both[len(matched) :] if alone else await engine.detokenize(ids)

    return Around(
        matched=matched,
        prompt=await after(prompt[end : end + WINDOW]),
        cached=[await after(unpack(ids)[:WINDOW]) for ids in answer.cached],
    )


def _eviction(answer: CacheExplanation) -> Eviction | None:
    if not answer.evicted_tokens and answer.evicted_s is None:
        return None
    tenant, rid = unscoped(answer.evicted_by)
    return Eviction(
        tokens=answer.evicted_tokens,
        seconds_ago=answer.evicted_s,
        rid=rid or None,
        tenant=tenant if rid else None,
    )


# ----------------------------------------------------------------------- in words


def _summary(answer: CacheExplanation, total: int, around: Around) -> str:
    sentences = [f"{_matched(answer, total)}: {_why(answer, around)}."]
    if answer.restorable:
        sentences.append(f"{_tokens(answer.restorable)} more can be read back from a lower tier.")
    return " ".join(sentences)


def _matched(answer: CacheExplanation, total: int) -> str:
    verb = "came" if answer.at_admission else "come"
    if not answer.matched:
        return f"None of the prompt's {_tokens(total)} {verb} from the cache"
    return f"{answer.matched:,} of the prompt's {_tokens(total)} {verb} from the cache"


def _why(answer: CacheExplanation, around: Around) -> str:
    match answer.reason:
        case MissReason.WHOLE:
            return "all that can: the last token is always computed, and pages are shared whole"
        case MissReason.NEVER_SEEN:
            return "nothing that follows was cached, as far as is remembered"
        case MissReason.OTHER_TOKEN:
            return _other_token(answer, around)
        case MissReason.EVICTED:
            return f"{_lost(answer)} evicted{_when(answer)}{_whom(answer)}"
        case MissReason.FLUSHED:
            return f"{_lost(answer)} flushed{_when(answer)}"
        case MissReason.COMPUTING:
            return "a running request is about to compute what follows"
        case MissReason.NAMESPACE:
            found = ", ".join(f"{_tokens(e.matched)} in {e.namespace!r}" for e in answer.elsewhere)
            return f"there is nothing in its namespace; in others there is ({found})"
        case MissReason.LIMITED:
            return "more is cached, but the logprobs that were asked for have to be computed"


def _other_token(answer: CacheExplanation, around: Around) -> str:
    said = f"then the prompt goes on with {_quoted(around.prompt)}"
    if not around.cached:
        return f"{said}, and the cache does otherwise"
    others = answer.branches - 1
    more = f" (and {others:,} other {'ways' if others > 1 else 'way'})" if others > 0 else ""
    return f"{said}, the cache with {_quoted(around.cached[0])}{more}"


def _lost(answer: CacheExplanation) -> str:
    """The subject of what happened to tokens, with its verb."""
    if not answer.evicted_tokens:
        return "what follows was"
    return f"{_tokens(answer.evicted_tokens)} that follow were"


def _when(answer: CacheExplanation) -> str:
    seconds = answer.evicted_s
    if seconds is None:
        return ""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f" {seconds / length:.0f} {unit} ago"
    return f" {seconds:.0f} s ago"


def _whom(answer: CacheExplanation) -> str:
    tenant, rid = unscoped(answer.evicted_by)
    if not rid:
        return ""
    return f" for request {rid}" + (f" of {tenant}" if tenant else "")


def _tokens(count: int) -> str:
    return f"{count:,} token{'' if count == 1 else 's'}"


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
