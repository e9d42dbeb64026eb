"""A slow, plain oracle for tests: which tokens may come next, by bytes and by brute force.

The language is given as a pattern tree; its nondeterministic automaton is stepped over UTF-8 bytes
decoded on the fly. Nothing is shared with the engines or with `phloem.constrained.automaton`.
"""

from __future__ import annotations

from phloem.constrained import charset
from phloem.constrained.pattern import Alt, Chars, Node, Repeat, Seq
from phloem.constrained.vocab import Vocabulary

# A position is what is still to be matched, as a stack of nodes, the next one last.
Stack = tuple[Node, ...]


class ReferenceMatcher:
    """The legal next tokens of a closed pattern over a small vocabulary."""

    def __init__(self, pattern: Node, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._history: list[tuple[frozenset[Stack], bytes]] = [
            (_settle(frozenset({(pattern,)})), b"")
        ]

    def allowed(self) -> set[int]:
        """Ids that may come next; end tokens only when the text is complete."""
        vocabulary = self._vocabulary
        found = {
            i
            for i, data in enumerate(vocabulary.tokens)
            if data and i not in vocabulary.special_ids and self._after(data) is not None
        }
        if self.is_complete:
            found.update(vocabulary.stop_ids)
        return found

    def accept(self, token: int) -> None:
        """Advance by a token that is not an end token.

        Raises:
            ValueError: the token is not legal.
        """
        after = self._after(self._vocabulary.tokens[token])
        if after is None:
            raise ValueError(f"token {token} is not legal here")
        self._history.append(after)

    def rollback(self, count: int) -> None:
        """Undo `count` tokens."""
        del self._history[len(self._history) - count :]

    @property
    def is_complete(self) -> bool:
        """The text so far is in the language and ends with a whole character."""
        states, pending = self._history[-1]
        return not pending and () in states

    def _after(self, data: bytes) -> tuple[frozenset[Stack], bytes] | None:
        states, pending = self._history[-1]
        for byte in data:
            pending += bytes([byte])
            character = _character(pending)
            if character is not None:
                states = _step(states, character)
                pending = b""
            if not states or (pending and not _can_continue(states, pending)):
                return None
        return states, pending


def _character(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _can_continue(states: frozenset[Stack], pending: bytes) -> bool:
    """Some character that begins with these bytes may come next."""
    firsts = charset.union(*(s[-1].chars for s in states if s and isinstance(s[-1], Chars)))
    low, high = _range_of(pending)
    return bool(low <= high and charset.intersect(firsts, ((low, high),)))


def _range_of(pending: bytes) -> tuple[int, int]:
    """The code points whose UTF-8 form begins with `pending`, an incomplete sequence; (1, 0) when
    there are none."""
    first = pending[0]
    if 0xC2 <= first <= 0xDF:
        length, value, least = 2, first & 0x1F, 0x80
    elif 0xE0 <= first <= 0xEF:
        length, value, least = 3, first & 0x0F, 0x800
    elif 0xF0 <= first <= 0xF4:
        length, value, least = 4, first & 0x07, 0x10000
    else:
        return 1, 0
    if len(pending) >= length or any(not 0x80 <= b <= 0xBF for b in pending[1:]):
        return 1, 0
    for byte in pending[1:]:
        value = value << 6 | byte & 0x3F
    missing = 6 * (length - len(pending))
    return max(value << missing, least), min(((value + 1) << missing) - 1, 0x10FFFF)


def _step(states: frozenset[Stack], character: str) -> frozenset[Stack]:
    return _settle(
        frozenset(
            s[:-1]
            for s in states
            if s and isinstance(s[-1], Chars) and charset.contains(s[-1].chars, character)
        )
    )


def _settle(states: frozenset[Stack]) -> frozenset[Stack]:
    """Unfold until each stack is empty or wants a character."""
    found: set[Stack] = set()
    seen: set[Stack] = set(states)
    pending = list(states)
    while pending:
        stack = pending.pop()
        if not stack or isinstance(stack[-1], Chars):
            found.add(stack)
            continue
        for unfolded in _unfold(stack[-1]):
            following = stack[:-1] + unfolded
            if following not in seen:
                seen.add(following)
                pending.append(following)
    return frozenset(found)


def _unfold(node: Node) -> list[Stack]:
    match node:
        case Seq(items):
            return [tuple(reversed(items))]
        case Alt(items):
            return [(item,) for item in items]
        case Repeat(item, low, high):
            if low > 0:
                rest = Repeat(item, low - 1, None if high is None else high - 1)
                return [(rest, item)]
            if high == 0:
                return [()]
            more = Repeat(item, 0, None if high is None else high - 1)
            return [(), (more, item)]
        case _:
            raise AssertionError("anchors are gone once a pattern is closed")
