"""The eviction history: which tokens were cached once, and why they are not any more."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator

from phloem.radix.errors import IntegrityError
from phloem.radix.ghost import Cause, Fork, Forks, Ghost
from phloem.radix.node import FirstPage, Node, Root, common_pages, first_page

SMALLEST = 16
"""Tokens that a ghost counts for at least, so that their number is bounded too."""
MERGED = 256
"""Tokens up to which a ghost takes in the piece that went before it."""


class History:
    """Ghosts of what was evicted or flushed, the newest of them, `limit` tokens in all.

    A ghost is younger than those below it, so the oldest one has none below and can go alone.
    Remembering costs O(1) besides the tokens, and the forks of an edge that is only shortened. A
    `limit` too small for one ghost is no history.
    """

    def __init__(self, limit: int, page: int) -> None:
        if limit < 0:
            raise ValueError(f"history_tokens must not be negative, not {limit}")
        self._page = page
        self._limit = limit if limit >= max(page, SMALLEST) else 0
        self._ghosts: OrderedDict[Ghost, None] = OrderedDict()  # oldest first
        self._weight = 0
        self._idle: dict[str, Forks] = {}  # of namespaces that have nothing but ghosts

    @property
    def tokens(self) -> int:
        """What the ghosts count for together, at most the limit."""
        return self._weight

    # ------------------------------------------------------------------------------- remembering

    def shortened(self, node: Node, tokens: array[int], cause: Cause) -> None:
        """The edge of `node` lost `tokens` at its end."""
        if self._limit:
            end = node.start + len(node.tokens)
            below = node.forks
            if below is not None:
                if len(below.at) == 1 and self._lengthen(below, end, tokens, cause):
                    return
                node.forks = below.cut(end)
            self._remember(node, end, tokens, below, cause)

    def removed(self, node: Node, parent: Node, cause: Cause) -> None:
        """`node`, a leaf of `parent`, left the tree. Its tokens are the history's now."""
        if self._limit:
            below, node.forks = node.forks, None
            self._remember(parent, node.start, node.tokens, below, cause)

    def _remember(
        self, above: Node, position: int, tokens: array[int], below: Forks | None, cause: Cause
    ) -> None:
        """`tokens` went from below `above`, and `below` hangs from them."""
        if len(tokens) > self._limit:
            # What hangs below the part that is not kept is older, and must go for this one.
            del tokens[self._limit - self._limit % self._page :]
        ghost = None
        if below is not None:
            ghost = self._merge(tokens, position + len(tokens), below, cause)
        if ghost is None:
            ghost = Ghost(tokens, below, cause)
            self._ghosts[ghost] = None
            self._weight += max(len(tokens), SMALLEST)
        forks = above.forks
        if forks is None:
            forks = above.forks = Forks()
        forks.hang(position, first_page(tokens, self._page), ghost)
        while self._weight > self._limit:
            self._forget(next(iter(self._ghosts)))

    def _lengthen(self, forks: Forks, end: int, tokens: array[int], cause: Cause) -> bool:
        """The short way of `_merge` for a decode step's eviction, again and again from one leaf
        that has lost only its tail: its one ghost begins earlier."""
        (fork,) = forks.at.values()
        if fork.position != end + len(tokens) or len(fork.branches) != 1:
            return False
        (ghost,) = fork.branches.values()
        if ghost.cause.flushed or len(tokens) + len(ghost.tokens) > MERGED:
            return False
        self._put_in_front(ghost, tokens, cause)
        fork.position = end
        fork.branches = {first_page(tokens, self._page): ghost}
        forks.at = {end: fork}
        while self._weight > self._limit:
            self._forget(next(iter(self._ghosts)))
        return True

    def _merge(self, tokens: array[int], end: int, below: Forks, cause: Cause) -> Ghost | None:
        """The ghost that `tokens` continue into at `end`, with them put in front, if it is the same
        story: a leaf that is evicted token by token does not become as many ghosts."""
        fork = below.at.get(end)
        if fork is None or len(fork.branches) != 1:
            return None
        (ghost,) = fork.branches.values()
        if ghost.cause.flushed != cause.flushed or len(tokens) + len(ghost.tokens) > MERGED:
            return None
        del below.at[end]
        if below.at:
            _move(ghost.forks, below)
            ghost.forks = below
        self._put_in_front(ghost, tokens, cause)
        return ghost

    def _put_in_front(self, ghost: Ghost, tokens: array[int], cause: Cause) -> None:
        before, more = len(ghost.tokens), len(tokens)
        self._weight += more if before >= SMALLEST else max(before + more - SMALLEST, 0)
        tokens.extend(ghost.tokens)
        ghost.tokens = tokens
        ghost.cause = cause
        self._ghosts.move_to_end(ghost)

    # -------------------------------------------------------------------------------- forgetting

    def cached(self, above: Node, node: Node, position: int, tokens: array[int]) -> None:
        """`tokens` follow in the tree again after `position`, the end of `above`, as (the end of)
        the edge of `node`. Ghosts along them shrink or go; what hangs off them stays.
        """
        forks = above.forks
        ghost = None
        if forks is not None:
            ghost = forks.find(position, first_page(tokens, self._page))
        done = 0
        while ghost is not None:
            same = common_pages(ghost.tokens, tokens, done, len(tokens), self._page)
            done += same
            position += same
            if same < len(ghost.tokens):
                self._behead(ghost, same, node, position)
            else:
                self._forget(ghost)
                if ghost.forks is not None:
                    if node.forks is None:
                        node.forks = Forks()
                    _move(ghost.forks, node.forks)
            if done == len(tokens) or node.forks is None:
                return
            ghost = node.forks.find(position, first_page(tokens, self._page, done))

    def _behead(self, ghost: Ghost, same: int, node: Node, position: int) -> None:
        """The first `same` tokens of `ghost` are in the tree: the rest hangs from `node`."""
        self._unhook(ghost)
        self._weight -= _weight(ghost)
        del ghost.tokens[:same]
        self._weight += _weight(ghost)
        if node.forks is None:
            node.forks = Forks()
        if ghost.forks is not None:
            _move(ghost.forks.cut(position), node.forks)
        node.forks.hang(position, first_page(ghost.tokens, self._page), ghost)

    def _forget(self, ghost: Ghost) -> None:
        """Drop a ghost, but not what hangs below it."""
        self._unhook(ghost)
        del self._ghosts[ghost]
        self._weight -= _weight(ghost)

    def _unhook(self, ghost: Ghost) -> None:
        fork = ghost.fork
        assert fork is not None, "a remembered ghost hangs somewhere"
        del fork.branches[first_page(ghost.tokens, self._page)]
        if fork.branches:
            return
        owner = fork.owner
        del owner.at[fork.position]
        if owner.namespace is not None and not owner.at:
            del self._idle[owner.namespace]

    # -------------------------------------------------------------------------------- namespaces

    def idle(self, root: Root) -> None:
        """`root` leaves the tree; its ghosts stay."""
        forks = root.forks
        if forks is not None and forks.at:
            forks.namespace = root.namespace
            self._idle[root.namespace] = forks

    def wake(self, root: Root) -> None:
        """`root` is in the tree: it gets the ghosts its namespace has."""
        forks = root.forks = self._idle.pop(root.namespace, None)
        if forks is not None:
            forks.namespace = None

    def of_idle(self, namespace: str) -> Forks | None:
        """The ghosts of a namespace that has nothing else."""
        return self._idle.get(namespace)

    # -------------------------------------------------------------------------------- integrity

    def check(self, nodes: Iterable[Node], namespaces: Iterable[str]) -> None:
        """Raise `IntegrityError` unless the ghosts along `nodes`, all of the tree's, and those of
        idle namespaces are the ones counted, and each is where it belongs."""
        age = {ghost: number for number, ghost in enumerate(self._ghosts)}
        found: dict[Ghost, None] = {}
        for node in nodes:
            if node.forks is not None:
                _require(node.forks.namespace is None, "a live root's ghosts are called idle")
                found.update(self._walk(node.forks, node.start, node.tokens, node.children, age))
        for namespace, forks in self._idle.items():
            _require(namespace not in namespaces, f"namespace {namespace!r} is live and idle")
            _require(forks.namespace == namespace, f"idle namespace {namespace!r} is misfiled")
            _require(bool(forks.at), f"idle namespace {namespace!r} has no ghosts")
            found.update(self._walk(forks, 0, array("i"), (), age))
        _require(
            found.keys() == age.keys(), f"{len(age)} ghosts are counted but {len(found)} found"
        )
        weight = sum(_weight(ghost) for ghost in found)
        _require(weight == self._weight, f"ghosts count for {weight}, not for {self._weight}")
        _require(weight <= self._limit, f"ghosts count for {weight}, more than {self._limit}")

    def _walk(
        self,
        forks: Forks | None,
        start: int,
        edge: array[int],
        children: Collection[FirstPage],
        age: dict[Ghost, int],
    ) -> Iterator[tuple[Ghost, None]]:
        """Every ghost that hangs along an edge, and those below."""
        stack: list[tuple[Forks, int, array[int], Collection[FirstPage], int]] = []
        if forks is not None:
            stack.append((forks, start, edge, children, len(age)))
        while stack:
            forks, start, edge, children, younger = stack.pop()
            end = start + len(edge)
            for position, fork in forks.at.items():
                continues = children
                if position < end:
                    continues = (first_page(edge, self._page, position - start),)
                on_edge = start < position <= end or start == end == position
                wrong = _wrong_fork(fork, forks, position, on_edge)
                for first, ghost in fork.branches.items():
                    wrong = wrong or self._wrong_ghost(ghost, fork, first, continues)
                    if age.get(ghost, younger) >= younger:
                        wrong = wrong or "one is too young"
                    if wrong:
                        break
                    yield ghost, None
                    if ghost.forks is not None:
                        stack.append((ghost.forks, position, ghost.tokens, (), age[ghost]))
                _require(not wrong, f"ghosts at token {position}: {wrong}")

    def _wrong_ghost(
        self, ghost: Ghost, fork: Fork, first: FirstPage, continues: Collection[FirstPage]
    ) -> str:
        """What contradicts itself about `ghost`, a branch of `fork`; empty if nothing does."""
        if ghost.fork is not fork:
            return "one hangs from elsewhere"
        if first_page(ghost.tokens, self._page) != first:
            return "one is misfiled"
        if len(ghost.tokens) % self._page:
            return "one is not whole pages"
        return "one is cached" if first in continues else ""


def _wrong_fork(fork: Fork, owner: Forks, position: int, on_edge: bool) -> str:
    """What contradicts itself about `fork`; empty if nothing does."""
    if fork.owner is not owner:
        return "their owner is another"
    if fork.position != position:
        return "they are misfiled"
    if not on_edge:
        return "they are off the edge"
    return "" if fork.branches else "there are none"


def _weight(ghost: Ghost) -> int:
    return max(len(ghost.tokens), SMALLEST)


def _move(forks: Forks | None, target: Forks) -> None:
    """The forks hang from `target`, which has none at their positions."""
    if forks is not None:
        for fork in forks.at.values():
            target.take(fork)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise IntegrityError(message)
