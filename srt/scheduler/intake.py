"""From a message to a request: what only the scheduler can check of it, and what it becomes."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from phloem.constrained.spec import constraint_key
from phloem.srt.errors import PromptTooLong
from phloem.srt.messages import Submit
from phloem.srt.scheduler.refusals import check_embed, check_tokens
from phloem.srt.scheduler.request import Request, Status
from phloem.srt.wire import unpack_array


@dataclass(frozen=True, kw_only=True)
class ModelBounds:
    """What the model and its pool allow, and which tokens end a text of it."""

    context_length: int
    vocab_size: int
    eos_ids: frozenset[int]


def request_of(
    message: Submit, bounds: ModelBounds, *, uid: int, now: float, timeout_s: float, longest: int
) -> Request:
    """The request that `message` asks for; prompt and output together may have `longest` tokens.

    Raises:
        InvalidRequest: ids outside the vocabulary, no prompt, or an embedding with anything else.
        PromptTooLong: it does not fit.
    """
    tokens = unpack_array(message.prompt)
    sampling = message.sampling
    check_tokens(tokens, message, bounds.vocab_size)
    check_embed(message)
    room = longest - len(tokens)
    max_output = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    if room < 0 or (room == 0 and sampling.max_tokens != 0):
        raise PromptTooLong(
            f"the prompt has {len(tokens)} tokens; prompt and output together may have {longest}",
            param="prompt",
            code="context_length_exceeded",
        )
    stop_ids = frozenset(sampling.stop_token_ids)
    if not sampling.ignore_eos or message.constraint is not None:
        stop_ids |= bounds.eos_ids
    timeout = timeout_s if message.deadline_s is None else message.deadline_s
    return Request(
        uid=uid,
        rid=message.rid,
        tokens=tokens,
        prompt_len=len(tokens),
        sampling=sampling,
        seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
        max_output=max_output,
        stop_ids=stop_ids,
        arrival=now,
        deadline=now + timeout,
        namespace=message.namespace,
        priority=message.priority,
        tenant=message.tenant,
        program=message.program,
        plan=message.plan,
        constraint=message.constraint,
        grammar_key=None if message.constraint is None else constraint_key(message.constraint),
        jump=message.jump,
        prompt_logprobs_from=message.prompt_logprobs_from,
        embed=message.embed,
        status=Status.WAITING if message.constraint is None else Status.COMPILING,
    )
