"""Drawing along a draft: several tokens of one row out of one step.

Each token is drawn exactly as it would be without the draft: from the logits behind the tokens
before it, with the mask and the noise of its own position. While it is the one that the draft has
there, the next draw's logits are known as well. So drafts change no token, only how many steps it
takes to draw them (speculative decoding, arXiv:2211.17192, for a draft without a distribution and
a draw without free randomness).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phloem.srt.messages import Draft
from phloem.srt.worker.sampler import Draw, SamplerRow, sample


class DrawMasks(NamedTuple):
    """Masks by place of the draw in the step; those of `closing` were narrowed for want of
    budget."""

    ready: Mapping[int, NDArray[np.int32]]
    closing: Set[int]


def follow(
    draft: Draft,
    state: SamplerRow,
    draw: Draw,
    logits: NDArray[np.float32],
    masks: DrawMasks,
    place: int,
) -> Draw:
    """Go on from `draw`, the first one, at `place`, as far along `draft` as what is drawn agrees:
    the last draw, and how much of the draft comes before it. `logits` [draws, vocab]."""
    closing = draw.closing
    bounds = [*draft.draws[1:], len(draft.tokens)]
    accepted = 0
    for at, end in zip(draft.draws, bounds, strict=True):
        if draw.error is not None or at == end or draw.token != draft.tokens[at]:
            break
        if at == draft.draws[-1]:  # what follows is forced up to the end
            draw, accepted = Draw(), end
            break
        place += 1
        mask = masks.ready.get(place)
        if mask is None:
            break  # the next step tells why there is none
        state.follow(draft.tokens[at:end])
        draw, accepted = sample(logits[place : place + 1], [state], [mask])[0], end
        closing = closing or place in masks.closing
    return draw._replace(closing=closing, accepted=accepted)
