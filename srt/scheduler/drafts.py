"""Drafts in the scheduler: how much of one a step may have, and what becomes of it.

The grammar process guesses (`phloem.constrained.drafts`), the worker draws along the guess
(`phloem.srt.worker.drafts`). Here a draft is cut to what its request may still produce and to the
slots and tokens that nobody else wants; what was drawn is booked, and the slots of the rest go
back.
"""

from __future__ import annotations

from dataclasses import dataclass

from phloem.srt.messages import Draft
from phloem.srt.scheduler.request import Request
from phloem.srt.scheduler.stats import Counters


@dataclass(frozen=True)
class DraftLimits:
    """Tokens of one draft (0: no drafts), and rows of a batch up to which there are any."""

    tokens: int = 0
    batch: int = 0

    def wanted(self, running: int) -> int | None:
        """How long a draft to ask for while so many rows run; None when there are none at all."""
        if self.tokens == 0:
            return None
        return self.tokens if running <= self.batch else 0


def cut(draft: Draft | None, most: int) -> Draft | None:
    """`draft` with at most `most` tokens to compute; None when nothing is left to follow."""
    if draft is None or draft.computed <= most:
        return draft
    return _up_to(draft, most)


def within(draft: Draft | None, request: Request) -> Draft | None:
    """`draft` as far as it goes on with the request's output, and leaves room for one more token:
    what ends an output is drawn outside of drafts."""
    if draft is None:
        return None
    most = request.max_output - request.output_len - 1
    for place, token in enumerate(draft.tokens):
        if token in request.stop_ids:
            most = min(most, place)
            break
    return draft if len(draft.tokens) <= most else _up_to(draft, most)


def _up_to(draft: Draft, most: int) -> Draft | None:
    draws = [at for at in draft.draws if at <= most]
    return Draft(draft.tokens[: draws[-1]], draws) if len(draws) > 1 else None


def append_drafted(request: Request, draft: Draft, accepted: int, counters: Counters) -> None:
    """The first `accepted` tokens of `draft` came out: add them, and count."""
    guesses = [at for at in draft.draws if at < len(draft.tokens)]
    right = sum(at < accepted for at in guesses)
    tokens = draft.tokens[:accepted]
    request.tokens.extend(tokens)
    request.unsent += tokens
    request.forced_tokens += accepted - right
    request.accepted_guesses += right
    request.rejected_guesses += len(guesses) - right
    counters.generated_tokens_total += accepted
    counters.forced_tokens_total += accepted - right
    counters.accepted_guesses_total += right
    counters.rejected_guesses_total += len(guesses) - right
