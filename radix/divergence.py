"""Why a prompt hits as far as it does and no further."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from operator import attrgetter

from phloem.radix.ghost import Ghost
from phloem.radix.node import Descend, Node, common_pages, first_page

SHOWN_BRANCHES, SHOWN_TOKENS = 3, 32
COMPARED = 100
"""Branches looked at for the most hit ones: there may be thousands."""


class MissReason(StrEnum):
    """Why the tree has no more of a prompt than it has."""

    WHOLE = "whole"  # it has all that it may give: the last token is always computed
    OTHER_TOKEN = "other_token"  # something else follows there
    EVICTED = "evicted"  # it was there, and went for another request's slots
    FLUSHED = "flushed"  # it was there until somebody flushed the tree
    NEVER_SEEN = "never_seen"  # nothing follows there, nor did this as far as is remembered
    LIMITED = "limited"  # there is more, but the caller's limit forbids it


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """`matched` tokens of a prompt are cached; then `reason`.

    `branches` is how many ways the tree continues there, `cached` how the most hit of the 100
    oldest begin (up to 3, up to 32 tokens each, as far as the edge goes). If the prompt's own
    continuation was there once: how many tokens of it went, when the first did (the tree's clock)
    and for whom.
    """

    matched: int
    reason: MissReason
    branches: int
    cached: tuple[array[int], ...]
    evicted_tokens: int = 0
    evicted_at: float | None = None
    evicted_by: str = ""


def diverge(
    root: Node, query: array[int], limit: int | None, page: int, descend: Descend
) -> Divergence:
    """Explain what an `acquire` of `query` below `root` finds."""
    stop = len(query) - 1
    node, offset, length = descend(root, query, 0, stop)
    ghost: Ghost | None = None
    if limit is not None and limit < length:
        reason = MissReason.LIMITED
        node, offset, length = descend(root, query, 0, limit)
    elif stop - length < page:
        reason = MissReason.WHOLE
    else:
        if node.forks is not None:
            ghost = node.forks.find(length, first_page(query, page, length))
        if ghost is not None:
            reason = MissReason.FLUSHED if ghost.cause.flushed else MissReason.EVICTED
        elif offset < len(node.tokens) or node.children:
            reason = MissReason.OTHER_TOKEN
        else:
            reason = MissReason.NEVER_SEEN
    branches, cached = _continuations(node, offset)
    return Divergence(
        matched=length,
        reason=reason,
        branches=branches,
        cached=cached,
        evicted_tokens=_remembered(ghost, query, length, stop, page),
        evicted_at=None if ghost is None else ghost.cause.at,
        evicted_by="" if ghost is None else ghost.cause.by,
    )


def _continuations(node: Node, offset: int) -> tuple[int, tuple[array[int], ...]]:
    """How many ways the tree goes on after `offset` tokens of `node`'s edge, and the first tokens
    of the most hit ones."""
    if offset < len(node.tokens):
        return 1, (node.tokens[offset : offset + SHOWN_TOKENS],)
    compared = islice(node.children.values(), COMPARED)
    most = sorted(compared, key=attrgetter("hits"), reverse=True)[:SHOWN_BRANCHES]
    return len(node.children), tuple(child.tokens[:SHOWN_TOKENS] for child in most)


def _remembered(ghost: Ghost | None, query: array[int], start: int, stop: int, page: int) -> int:
    """How many tokens of `query[start:stop]` follow along `ghost` and those below it."""
    at = start
    while ghost is not None:
        same = common_pages(ghost.tokens, query, at, stop, page)
        at += same
        if ghost.forks is None or stop - at < page:
            break
        ghost = ghost.forks.find(at, first_page(query, page, at))  # also off the middle of it
    return at - start
