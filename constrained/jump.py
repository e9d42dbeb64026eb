"""Jump-forward: the tokens that a constraint forces, appended without asking the model.

Two policies. *Exact*: while exactly one token is legal, it is the next one; the output is what the
masks alone would have given. *Canonical*: while the text is forced, it is split as the tokenizer
itself would split it (SGLang's compressed finite-state machine, arXiv:2312.07104 §4, over a
context-free matcher). The texts that can come out are the same; which tokens spell them is not,
and is closer to what the model was trained on than a split made byte by byte.

A canonical split keeps what was already sent: the forced text is encoded together with the last
tokens before it, and where the tokenizer would not end a token there, on its own. At its other
end, tokens are left out that a longer token of the vocabulary could swallow in some continuation
that the constraint allows: there the model decides.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from phloem.constrained import bitmask
from phloem.constrained.base import Matcher
from phloem.constrained.vocab import Vocabulary

MAX_JUMP = 256
"""Tokens of one jump; what is forced beyond them is forced again after the next step."""
CONTEXT_TOKENS = 3
"""Tokens before a jump that its split is made with."""
UNSETTLED = 4
"""Tokens at the end of a jump that what follows may change: on MaskBench no more than these."""
MAX_FOLLOWS = 64
"""Continuations that the end of a split is tried with."""
MAX_REMEMBERED = 4_096

Encode = Callable[[str], Sequence[int]]
K = TypeVar("K")
V = TypeVar("V")


class Jump(NamedTuple):
    """Tokens that a matcher was moved on by; `ends` when nothing but an end token may follow: of
    an exact jump, one certain end token."""

    tokens: list[int]
    ends: bool


NO_JUMP = Jump([], ends=False)


class Jumper:
    """Finds jumps for one vocabulary. `encode` splits a text as the tokenizer does, control tokens
    read as text and none added; None where no tokenizer is at hand: then canonical jumps are exact
    ones."""

    def __init__(self, vocabulary: Vocabulary, encode: Encode | None) -> None:
        self._tokens = vocabulary.tokens
        self._encode = encode
        self._row = np.zeros(bitmask.words(vocabulary.size), np.int32)
        self._stops = np.zeros(bitmask.words(vocabulary.size) * 4, np.uint8)
        for token in vocabulary.stop_ids:
            self._stops[token >> 3] |= 1 << (token & 7)
        words = [t for i, t in enumerate(self._tokens) if t and i not in vocabulary.special_ids]
        self._sorted = sorted(words)
        self._longest = max(map(len, words), default=1)
        self._byte_ids = _byte_ids(vocabulary)
        self._splits: OrderedDict[tuple[bytes, str], Sequence[int]] = OrderedDict()
        self._kept: OrderedDict[tuple[tuple[int, ...], int], int] = OrderedDict()

    def exact(self, matcher: Matcher) -> Jump:
        """Accept the next token as long as there is but one.

        Raises:
            MatcherRejected: the matcher refuses a token of its own mask.
        """
        tokens: list[int] = []
        while len(tokens) < MAX_JUMP:
            matcher.fill(self._row)
            only = _only(self._row.view(np.uint8))
            if only is None:
                break
            if self._stops[only >> 3] & (1 << (only & 7)):
                return Jump(tokens, ends=True)
            matcher.accept(only)
            tokens.append(only)
        return Jump(tokens, ends=False)

    def canonical(self, matcher: Matcher, before: Sequence[int]) -> Jump:
        """Accept the tokenizer's split of the text that is forced after the tokens `before`.

        Raises:
            MatcherRejected: the matcher refuses tokens of a text that it forces.
        """
        if self._encode is None:
            return self.exact(matcher)
        forced = matcher.forced_string()
        if not forced:
            if matcher.is_complete:
                matcher.fill(self._row)
                return Jump([], ends=not (self._row.view(np.uint8) & ~self._stops).any())
            return NO_JUMP
        tail = b"".join([self._tokens[t] for t in before[-CONTEXT_TOKENS:]])
        split = list(self._split(tail, forced)[:MAX_JUMP])
        if not split:
            return NO_JUMP
        for token in split:
            matcher.accept(token)
        matcher.fill(self._row)
        bits = self._row.view(np.uint8)
        if matcher.is_complete and not (bits & ~self._stops).any():
            return Jump(split, ends=True)
        kept = self._settled(split, bits)
        if kept < len(split):
            matcher.rollback(len(split) - kept)
        return Jump(split[:kept], ends=False)

    # ------------------------------------------------------------------ splitting

    def _split(self, before: bytes, text: str) -> Sequence[int]:
        """The tokenizer's tokens of `text` behind `before`; empty when they do not spell it."""
        known = self._splits.get((before, text))
        if known is None:
            known = self._split_behind(before, text) or self._split_behind(b"", text) or []
            remember(self._splits, (before, text), known)
        return known

    def _split_behind(self, tail: bytes, text: str) -> list[int] | None:
        """None when no token would end where `tail` does."""
        assert self._encode is not None
        try:
            context = tail.decode()
        except UnicodeDecodeError:  # it begins or ends inside a character
            return None
        wanted = tail + text.encode()
        tokens = self._encode(context + text)
        start = length = 0
        for i, token in enumerate(tokens):
            if length == len(tail):
                start = i
                break
            length += len(self._tokens[token])
        else:
            return None
        own = list(tokens[start:])
        if b"".join([self._tokens[t] for t in tokens]) != wanted or length != len(tail):
            return None
        return own

    # ------------------------------------------------------------------ the end of a jump

    def _settled(self, split: Sequence[int], legal: NDArray[np.uint8]) -> int:
        """How many tokens of `split` the tokenizer keeps whatever follows. `legal` is the mask
        behind them."""
        follows = self._first_bytes(legal)
        last = tuple(split[-UNSETTLED:])
        kept = self._kept.get((last, follows))
        if kept is None:
            kept = len(last)
            for follow in self._swallowing(last, follows):
                kept = min(kept, self._common(last, follow))
            remember(self._kept, (last, follows), kept)
        return len(split) - len(last) + kept

    def _common(self, split: Sequence[int], follow: bytes) -> int:
        """How many tokens of `split` are left when `follow` comes behind them."""
        try:
            text = (b"".join([self._tokens[t] for t in split]) + follow).decode()
        except UnicodeDecodeError:  # half a character: its other half is not known yet
            return len(split)
        longer = self._split_behind(b"", text) or split
        pairs = enumerate(zip(split, longer, strict=False))
        return next((i for i, (one, other) in pairs if one != other), min(len(split), len(longer)))

    def _swallowing(self, split: Sequence[int], follows: int) -> Iterator[bytes]:
        """What may follow such that a token of the vocabulary begins in `split` and ends behind
        it, the shortest first; no more than `MAX_FOLLOWS`."""
        data = b"".join([self._tokens[t] for t in split])[-self._longest :]
        found: set[bytes] = set()
        for start in range(len(data)):
            prefix = data[start:]
            for token in self._extensions(prefix):
                if follows >> token[len(prefix)] & 1:
                    found.add(token[len(prefix) :])
        yield from sorted(found, key=lambda follow: (len(follow), follow))[:MAX_FOLLOWS]

    def _extensions(self, prefix: bytes) -> list[bytes]:
        """Tokens that begin with `prefix` and are longer."""
        low = bisect.bisect_right(self._sorted, prefix)
        high = bisect.bisect_left(self._sorted, prefix + b"\xff" * self._longest, low)
        return self._sorted[low:high]

    def _first_bytes(self, legal: NDArray[np.uint8]) -> int:
        """Bytes, as bits of an integer, that may come next."""
        ids = self._byte_ids
        bits = (legal[ids >> 3] >> (ids & 7) & 1) | (ids < 0)
        return int.from_bytes(np.packbits(bits.astype(np.uint8), bitorder="little"), "little")


def remember(cache: OrderedDict[K, V], key: K, value: V) -> None:
    """Add an entry; the oldest goes when there are more than `MAX_REMEMBERED`."""
    cache[key] = value
    if len(cache) > MAX_REMEMBERED:
        cache.popitem(last=False)


def _only(bits: NDArray[np.uint8]) -> int | None:
    """The one id whose bit is set; None when there are none or several."""
    places = np.flatnonzero(bits)
    if len(places) != 1:
        return None
    byte = int(bits[places[0]])
    if byte & (byte - 1):
        return None
    return int(places[0]) * 8 + byte.bit_length() - 1


def _byte_ids(vocabulary: Vocabulary) -> NDArray[np.int64]:
    """[256]: the token of each single byte, -1 where there is none."""
    ids = np.full(256, -1, np.int64)
    for i, token in enumerate(vocabulary.tokens):
        if len(token) == 1 and i not in vocabulary.special_ids:
            ids[token[0]] = i
    return ids
