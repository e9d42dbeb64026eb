"""A radix node: an edge of token ids with their KV slots, and the walk along edges."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from phloem.radix.ghost import Forks
    from phloem.radix.program import Program

FirstPage = int | bytes
"""What an edge is filed under: its first token, or its first page packed when pages are larger."""


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


def first_page(tokens: array[int], page: int, at: int = 0) -> FirstPage:
    """What an edge that begins with `tokens[at:]` is filed under."""
    return tokens[at] if page == 1 else tokens[at : at + page].tobytes()


class Usage:
    """How much one namespace has in the tree: cached `tokens` in `nodes`."""

    __slots__ = ("nodes", "tokens")

    def __init__(self) -> None:
        self.nodes = 0
        self.tokens = 0


class Node:
    """Tokens `tokens` and their KV `slots` (same length, whole pages), below `parent`.

    `id` is the tree's own number for the node (0: a root), `start` the tokens before this edge.
    `lock_ref` counts the leases that end here or below. Usage, for eviction: `hits` counts the
    leases acquired through this node, `last_access` is the time of the last acquire, extend or
    release, `inserted` that of its newest token, `priority` the highest of its users' and
    `program` the live program that used it last. All tokens of a node share their usage: a use of
    only some of them splits the node. `queued` and `floor` belong to the eviction queue, `usage`
    is shared by all nodes of a namespace, `forks` are what left the tree along this edge.
    """

    __slots__ = (
        "children",
        "floor",
        "forks",
        "hits",
        "id",
        "inserted",
        "last_access",
        "lock_ref",
        "parent",
        "priority",
        "program",
        "queued",
        "slots",
        "start",
        "tokens",
        "usage",
    )

    def __init__(
        self, parent: Node | None, tokens: array[int], slots: array[int], now: float, id: int = 0
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.children: dict[FirstPage, Node] = {}
        self.id = id
        if parent is None:
            self.start = 0
            self.usage = Usage()
        else:
            self.start = parent.start + len(parent.tokens)
            self.usage = parent.usage
        self.lock_ref = 0
        self.hits = 0
        self.inserted = now
        self.last_access = now
        self.priority = 0
        self.program: Program | None = None
        self.queued = 0
        self.floor = 0.0
        self.forks: Forks | None = None

    def split(self, at: int, page: int = 1, id: int = 0) -> Node:
        """Cut the edge after `at` tokens (0 < at < length, whole pages); returns the new upper
        node, whose number is `id`.

        The lower part stays this object, so leases that end here still end at the same token. The
        upper part inherits lock count and usage.
        """
        parent = self.parent
        assert parent is not None, "a root has no edge to split"
        upper = Node(parent, self.tokens[:at], self.slots[:at], self.inserted, id)
        upper.lock_ref = self.lock_ref
        upper.hits = self.hits
        upper.last_access = self.last_access
        upper.priority = self.priority
        upper.floor = self.floor
        if self.program is not None:
            self.program.mark(upper)
        del self.tokens[:at]
        del self.slots[:at]
        self.start += at
        if self.forks is not None:
            upper.forks = self.forks.cut(self.start)
        parent.children[first_page(upper.tokens, page)] = upper
        upper.children[first_page(self.tokens, page)] = self
        self.parent = upper
        return upper


class Root(Node):
    """The empty node at the top of a namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str, now: float) -> None:
        super().__init__(None, array("i"), array("i"), now)
        self.namespace = namespace


class Descend(Protocol):
    """`descend`, for a page size."""

    def __call__(
        self, node: Node, tokens: array[int], start: int, stop: int, /
    ) -> tuple[Node, int, int]: ...


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


def descend_by_pages(
    page: int, node: Node, tokens: array[int], start: int, stop: int
) -> tuple[Node, int, int]:
    """As `descend`, in whole pages: what is left of a page at the end does not count."""
    while stop - start >= page:
        child = node.children.get(tokens[start : start + page].tobytes())
        if child is None:
            break
        edge = child.tokens
        length = len(edge)
        if length <= stop - start and edge == tokens[start : start + length]:
            node = child
            start += length
            continue
        matched = _common(edge, tokens, start, min(length, stop - start))
        matched -= matched % page
        return child, matched, start + matched
    return node, len(node.tokens), start


def descend_for(page: int) -> Descend:
    """The walk for a page size."""
    return descend if page == 1 else partial(descend_by_pages, page)


def common_pages(edge: array[int], tokens: array[int], start: int, stop: int, page: int) -> int:
    """Length of the common prefix, in whole pages, of `edge` and `tokens[start:stop]`, given that
    their first page is the same."""
    matched = _common(edge, tokens, start, min(len(edge), stop - start))
    return matched - matched % page


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
