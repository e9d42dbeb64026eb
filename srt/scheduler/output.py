"""A request's output: tokens that were drawn or forced, where it ends, and what is told of it."""

from __future__ import annotations

from typing import NamedTuple

from phloem.srt.messages import FinishReason, TokenLogprob, Tokens
from phloem.srt.scheduler.request import Request


class Ending(NamedTuple):
    """Why an output ends, and the token that ended it, if one did."""

    finish: FinishReason
    matched: int | None = None


def append_drawn(request: Request, token: int) -> Ending | None:
    """The request's row has drawn `token`: add it. How the output ends with it, if it does."""
    request.tokens.append(token)
    request.unsent.append(token)
    request.row_sampled = request.decoding = True
    return _ending(request, token)


def append_forced(request: Request, tokens: list[int]) -> Ending | None:
    """Add tokens that the constraint forces, as far as the output may go on."""
    for token in tokens:
        request.tokens.append(token)
        request.unsent.append(token)
        request.forced_tokens += 1
        request.row_sampled = False
        ending = _ending(request, token)
        if ending is not None:
            return ending
    return None


def append_stop(request: Request, token: int) -> Ending:
    """Nothing but the end is legal: add the end token without drawing it."""
    request.tokens.append(token)
    request.unsent.append(token)
    return Ending(FinishReason.STOP, token)


def _ending(request: Request, token: int) -> Ending | None:
    # Before `min_tokens` the sampler bans stop ids, unless a grammar leaves nothing else.
    long_enough = request.output_len >= request.sampling.min_tokens
    if token in request.stop_ids and (long_enough or request.constraint is not None):
        return Ending(FinishReason.STOP, token)
    if request.output_len >= request.max_output:
        return Ending(FinishReason.LENGTH)
    return None


def take_message(
    request: Request, ending: Ending | None, logprobs: list[TokenLogprob] | None
) -> Tokens:
    """What was not sent of the output, and its end; nothing is unsent then."""
    first = not request.announced
    request.announced = True
    finish, matched = ending or (None, None)
    message = Tokens(
        request.rid,
        request.unsent,
        finish,
        cached_tokens=request.cached_tokens or 0,
        matched=matched,
        logprobs=logprobs,
        prompt_logprobs=_take_prompt_logprobs(request) if first else None,
        preemptions=request.preemptions,
        queue_seconds=(request.started or request.arrival) - request.arrival,
        forced_tokens=request.forced_tokens,
        closed_by_budget=request.closed_by_budget,
        embedding=request.embedding,
        accepted_guesses=request.accepted_guesses,
        rejected_guesses=request.rejected_guesses,
    )
    request.unsent = []
    return message


def _take_prompt_logprobs(request: Request) -> list[TokenLogprob | None] | None:
    """What was asked of the prompt; token 0 follows nothing, so it has None."""
    if request.prompt_logprobs_from is None:
        return None
    head: list[TokenLogprob | None] = [None] if request.prompt_logprobs_from == 0 else []
    entries = head + request.prompt_logprobs
    request.prompt_logprobs = []
    return entries
