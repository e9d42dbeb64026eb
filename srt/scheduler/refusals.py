"""Why a request is refused or given up, as the error that its client reads."""

from __future__ import annotations

from array import array
from collections.abc import Collection

from phloem.srt.errors import InternalError, InvalidConstraint, InvalidRequest, PhloemError
from phloem.srt.messages import Submit
from phloem.srt.scheduler.request import Request


def check_tokens(tokens: array[int], message: Submit, vocab_size: int) -> None:
    """Whether all ids are known.

    Raises:
        InvalidRequest: one is not, or there is no prompt.
    """
    if not tokens:
        raise InvalidRequest("the prompt is empty", param="prompt")
    sampling = message.sampling
    for name, ids in (
        ("prompt", tokens),
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", sampling.logit_bias),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("logprob_token_ids", sampling.logprob_token_ids),
    ):
        bad = next((t for t in _extremes(ids) if not 0 <= t < vocab_size), None)
        if bad is not None:
            raise InvalidRequest(
                f"token id {bad} is outside the vocabulary of {vocab_size}", param=name
            )


def check_embed(message: Submit) -> None:
    """Raises `InvalidRequest` for a request that wants an embedding, and something beside it."""
    if message.embed is None:
        return
    if message.constraint is not None or message.prompt_logprobs_from is not None:
        raise InvalidRequest("an embedding has neither constraint nor logprobs", param="embed")
    if message.sampling.max_tokens != 0:
        raise InvalidRequest("an embedding has no output", param="max_tokens")


def _extremes(ids: Collection[int]) -> tuple[int, ...]:
    return (min(ids), max(ids)) if ids else ()


def too_short(request: Request, minimum: int | None) -> InvalidRequest | None:
    """The error of a request whose output may not be long enough for its constraint, of which
    `minimum` tokens complete a text."""
    if minimum is None or request.max_output >= minimum or request.max_output == 0:
        return None
    return InvalidRequest(
        f"the output may have {request.max_output} tokens; the constraint wants {minimum}",
        param="max_tokens",
        code="max_tokens_too_small",
    )


def row_error(reason: str, fault: str) -> PhloemError:
    """What a request ends in whose row gave no token: the server's fault, or its constraint's."""
    if fault:
        return InvalidConstraint(reason, code=fault)
    return InternalError(reason)
