"""A radix node: an edge of token ids with their KV slots, and the walk along edges."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


def as_tokens(tokens: Sequence[int]) -> array[int]:
    """Token ids (or slots) as `array('i')`, which edges are stored in and compared by at C speed.

    An `array('i')` is returned as it is; anything else is copied. Raises `TypeError` for packed
    bytes, whose items are not ids, and `ValueError` for numbers outside int32.
    """
    if isinstance(tokens, array) and tokens.typecode == "i":
        return tokens
    if isinstance(tokens, bytes | bytearray | memoryview):
        raise TypeError("ids must be integers, not packed bytes; use array('i').frombytes")
    try:
        return array("i", tokens)
    except OverflowError as error:
        raise ValueError(f"ids must fit in int32: {error}") from error


class Node:
    """Tokens `tokens` and their KV `slots` (same length), below `parent`.

    `lock_ref` counts the leases that end here or below. Usage, for eviction: `hits` counts the
    leases acquired through this node, `last_access` is the time of the last acquire, extend or
    release, `inserted` that of its newest token. All tokens of a node share their usage: a use of
    only some of them splits the node. `queued` belongs to the eviction queue.
    """

    __slots__ = (
        "children",
        "hits",
        "inserted",
        "last_access",
        "lock_ref",
        "parent",
        "queued",
        "slots",
        "tokens",
    )

    def __init__(
        self, parent: Node | None, tokens: array[int], slots: array[int], now: float
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.children: dict[int, Node] = {}  # by the first token of the child's edge
        self.lock_ref = 0
        self.hits = 0
        self.inserted = now
        self.last_access = now
        self.queued = False

    def split(self, at: int) -> Node:
        """Cut the edge after `at` tokens (0 < at < length); returns the new upper node.

        The lower part stays this object, so leases that end here still end at the same token. The
        upper part inherits lock count and usage.
        """
        parent = self.parent
        assert parent is not None, "a root has no edge to split"
        upper = Node(parent, self.tokens[:at], self.slots[:at], self.inserted)
        upper.lock_ref = self.lock_ref
        upper.hits = self.hits
        upper.last_access = self.last_access
        del self.tokens[:at]
        del self.slots[:at]
        parent.children[upper.tokens[0]] = upper
        upper.children[self.tokens[0]] = self
        self.parent = upper
        return upper


class Root(Node):
    """The empty node at the top of a namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str, now: float) -> None:
        super().__init__(None, array("i"), array("i"), now)
        self.namespace = namespace


def descend(node: Node, tokens: array[int], start: int, stop: int) -> tuple[Node, int, int]:
    """Follow `tokens[start:stop]` down from the end of `node`.

    Returns the last node reached, how many tokens of its edge matched (all of them unless the
    match ends inside the edge), and the position in `tokens` where the match ends.
    """
    while start < stop:
        child = node.children.get(tokens[start])
        if child is None:
            break
        edge = child.tokens
        length = len(edge)
        if length <= stop - start and edge == tokens[start : start + length]:
            node = child
            start += length
            continue
        matched = _common(edge, tokens, start, min(length, stop - start))
        return child, matched, start + matched
    return node, len(node.tokens), start


def common_prefix(left: Sequence[int], right: Sequence[int], limit: int) -> int:
    """Length of the longest common prefix of two token sequences, at most `limit`."""
    left, right = as_tokens(left), as_tokens(right)
    stop = min(len(left), len(right), limit)
    if stop <= 0 or left[0] != right[0]:
        return 0
    return _common(left, right, 0, stop)


def _common(edge: array[int], tokens: array[int], start: int, stop: int) -> int:
    """Length of the common prefix of `edge[:stop]` and `tokens[start:]`, given that it is >= 1.

    Halving compares slices, so a long partial match costs a few memory compares and not a loop.
    """
    if edge[:stop] == tokens[start : start + stop]:
        return stop
    same, differ = 1, stop
    while differ - same > 1:
        middle = (same + differ) // 2
        if edge[same:middle] == tokens[start + same : start + middle]:
            same = middle
        else:
            differ = middle
    return same
