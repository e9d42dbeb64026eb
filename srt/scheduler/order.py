"""In which order waiting requests are served: policies over one lane of the queue.

A lane holds the waiting requests of one tenant and priority. Whatever its length, adding, removing
and finding the next request cost a few binary searches, and a request's cached share is looked up
only when its turn may have come: shares that were true when it arrived go stale as the tree grows
and shrinks, so they are corrected where they are read, and, for the neighbours of a request that
has just been admitted, at once.

    fair        Largest cached share first, in sixteenths. A request rises by a sixteenth each time
                it has waited for PATIENCE / 16 times the work that is not cached, so none starves,
                and what is small does not wait for what is large (response ratio: Hansen's HRRN,
                1971). Among equals the first to arrive goes first, where the calls of a program
                have arrived with its first call. What has begun is to end: calls of a program that
                was served before stand higher, and higher still when their siblings were, or when
                few calls remain after them.
    fcfs        first come, first served
    lpm         longest cached prefix first (RadixAttention, Zheng et al. 2024); may starve
    dfs-weight  depth first over the waiting prompts, the fullest subtree first; may starve
    random      in an order drawn at arrival, for comparison
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeAlias

from phloem.radix import common_prefix
from phloem.srt.scheduler.programs import Standing
from phloem.srt.scheduler.request import Request

NEIGHBOURS = 16
"""Waiting requests, nearest in token order, that are told of an admission."""

CORRECTIONS = 64
"""Stale shares put right in one pass; what is stale beyond that waits for the next."""

OVERHEAD_TOKENS = 32
"""What admitting a request costs beside its uncached tokens, in tokens."""

SHARES = 16
"""Steps between a prompt of which nothing is cached and one that is there as a whole."""

PATIENCE = 200.0
"""A request that waited so many times as long as its uncached work takes stands where one stands
that is cached as a whole and has just arrived. Chosen with benchmark/policy.py: with 50, chats lose
their cached turns to new ones; with 300, nothing is won."""

BEGUN, JOINING, ENDING = SHARES, SHARES // 4, 3 * SHARES // 4
"""By how many of these steps calls of a program rise that has been served before, calls whose
siblings have been, and calls that no other call remains after. Chosen with benchmark/policy.py."""

HEAD_START_TOKENS = 256
"""The calls of a program came with its first one, but at most so much earlier than they did as
PATIENCE grants a request of this work."""

GROUP_TOKENS = 16
"""Prompts that agree so far are one subtree to `dfs-weight` when it looks for the fullest."""


@dataclass(frozen=True)
class Lookups:
    """What orders may ask about a request.

    `cached` tells how many of its tokens are in the tree now. `sort_key` gives what neighbours are
    sorted by: its tokens, or anything that is equal as far as these are. `token_seconds` is what
    computing one token of a prompt takes. `standing` is that of its program.
    """

    cached: Callable[[Request], int]
    sort_key: Callable[[Request], array[int]]
    token_seconds: Callable[[], float]
    standing: Callable[[Request], Standing] = lambda request: Standing(request.arrival, request.uid)


class Order(ABC):
    """Requests of one lane in the order of a policy."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def add(self, request: Request) -> None: ...

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Take out a request that is in this lane."""

    @abstractmethod
    def ranked(self, now: float) -> Iterator[Request]:
        """Requests, best first. The lane must not change while this runs."""

    def admitted(self, request: Request) -> None:  # noqa: B027 (most orders do not care)
        """`request`, just removed, begins to run: more of its neighbours will be cached."""


class KeyOrder(Order):
    """By a key that is fixed when a request is added, then by arrival."""

    def __init__(self, key: Callable[[Request], float]) -> None:
        self._key = key
        self._sorted: list[tuple[float, int]] = []
        self._entries: dict[int, tuple[float, int]] = {}
        self._requests: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, request: Request) -> None:
        entry = (self._key(request), request.uid)
        self._entries[request.uid] = entry
        self._requests[request.uid] = request
        insort(self._sorted, entry)

    def remove(self, request: Request) -> None:
        del self._requests[request.uid]
        del self._sorted[bisect_left(self._sorted, self._entries.pop(request.uid))]

    def ranked(self, now: float) -> Iterator[Request]:
        for _, uid in self._sorted:
            yield self._requests[uid]


_Place: TypeAlias = "tuple[str, array[int], int]"
"""Namespace, sort key and uid."""


class Neighbours:
    """Waiting requests in the order of namespace and tokens: those that share most with a prompt
    stand beside it."""

    def __init__(self, lookups: Lookups) -> None:
        self._key = lookups.sort_key
        self._sorted: list[_Place] = []
        self._requests: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        self._requests[request.uid] = request
        insort(self._sorted, self._place(request))

    def remove(self, request: Request) -> None:
        del self._requests[request.uid]
        del self._sorted[bisect_left(self._sorted, self._place(request))]

    def _place(self, request: Request) -> _Place:
        return request.namespace, self._key(request), request.uid

    def around(self, request: Request) -> Iterator[tuple[Request, int]]:
        """Requests of the same namespace, those sharing most with `request` first, and how many
        tokens they share with it; ends where nothing is shared."""
        above = bisect_left(self._sorted, self._place(request))
        below = above - 1
        left = self._shared(request, below, len(request.tokens))
        right = self._shared(request, above, len(request.tokens))
        while left or right:
            if right >= left:
                places = range(above, above + self._run(request, above, 1, right))
            else:
                places = range(below, below - self._run(request, below, -1, left), -1)
            shared = max(left, right)
            for place in places:
                yield self._requests[self._sorted[place][2]], shared
            if right >= left:
                above = places.stop
                right = self._shared(request, above, shared)
            else:
                below = places.stop
                left = self._shared(request, below, shared)

    def _run(self, request: Request, place: int, step: int, shared: int) -> int:
        """Places from `place` on, in steps of `step`, that share `shared` tokens: those between two
        that do need no look. Finds a power of two of them, so that all are found in a few calls."""
        run = 1
        while run < NEIGHBOURS:
            farther = place + step * (2 * run - 1)
            if self._shared(request, farther, shared) < shared:
                break
            run *= 2
        return run

    def _shared(self, request: Request, place: int, most: int) -> int:
        """Tokens shared with the one at `place`: not more than `most`, which one that is nearer to
        `request` shares."""
        if not 0 <= place < len(self._sorted):
            return 0
        namespace, _, uid = self._sorted[place]
        if namespace != request.namespace:
            return 0
        tokens = self._requests[uid].tokens
        if request.tokens[:most] == tokens[:most]:
            return most
        return common_prefix(request.tokens, tokens, most)


class _Class(NamedTuple):
    """Requests of like cached share (in sixteenths), uncached work (less than `2**bits`), and rise
    by their program."""

    share: int
    bits: int
    rise: int

    @staticmethod
    def of(request: Request, cached: int, standing: Standing) -> _Class:
        work = len(request.tokens) - cached + OVERHEAD_TOKENS
        return _Class(_share(request, cached), work.bit_length(), _rise(standing))

    @property
    def rank(self) -> _Rank:
        return self.share + self.rise, self.bits


_Rank = tuple[int, int]
"""Where a class begins, share and rise together, and its work: classes of one rank rise alike."""


def _share(request: Request, cached: int) -> int:
    return SHARES * cached // len(request.tokens)


def _rise(standing: Standing) -> int:
    """Steps that its program lifts a request by."""
    rise = BEGUN * standing.begun + JOINING * standing.joining
    if standing.remaining is not None:
        rise += ENDING * max(0, 4 - standing.remaining.bit_length()) // 4
    return rise


Entry = tuple[float, int, int]
"""When a request's program came, as far as that counts, the program's first call, the request."""


class FairOrder(Order):
    """By cached share, program, and the time waited for the work, see above. The requests of a
    rank rise alike, so each rank is first come, first served, and only their heads have to be
    compared."""

    def __init__(self, lookups: Lookups) -> None:
        self._lookups = lookups
        self._ranks: dict[_Rank, list[Entry]] = {}
        self._class_of: dict[int, _Class] = {}
        self._entries: dict[int, Entry] = {}
        self._requests: dict[int, Request] = {}
        self._programs: dict[str, dict[int, Request]] = {}
        self._neighbours = Neighbours(lookups)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request.uid] = request
        self._entries[request.uid] = self._entry(request)
        if request.program:
            self._programs.setdefault(request.program, {})[request.uid] = request
        self._neighbours.add(request)
        self._file(request, self._class(request))

    def remove(self, request: Request) -> None:
        del self._requests[request.uid]
        self._neighbours.remove(request)
        self._unfile(request)
        del self._entries[request.uid]
        if request.program:
            calls = self._programs[request.program]
            del calls[request.uid]
            if not calls:
                del self._programs[request.program]

    def _entry(self, request: Request) -> Entry:
        standing = self._lookups.standing(request)
        head_start = PATIENCE * HEAD_START_TOKENS * self._lookups.token_seconds()
        return max(standing.since, request.arrival - head_start), standing.first, request.uid

    def _class(self, request: Request, cached: int | None = None) -> _Class:
        """The class that it belongs to, by what is cached of it, now or soon."""
        cached = self._lookups.cached(request) if cached is None else cached
        return _Class.of(request, cached, self._lookups.standing(request))

    def _file(self, request: Request, class_: _Class) -> None:
        self._class_of[request.uid] = class_
        insort(self._ranks.setdefault(class_.rank, []), self._entries[request.uid])

    def _unfile(self, request: Request) -> None:
        rank = self._class_of.pop(request.uid).rank
        members = self._ranks[rank]
        del members[bisect_left(members, self._entries[request.uid])]
        if not members:
            del self._ranks[rank]

    def _refile(self, request: Request, class_: _Class) -> None:
        if class_ != self._class_of[request.uid]:
            self._unfile(request)
            self._file(request, class_)

    def ranked(self, now: float) -> Iterator[Request]:
        pace = PATIENCE / SHARES * self._lookups.token_seconds()
        walks = {rank: iter(members) for rank, members in self._ranks.items()}
        heap: list[tuple[int, Entry, _Rank | None]] = []  # the last: the rank to go on with
        moved: dict[int, _Class] = {}

        def offer(rank: _Rank) -> None:
            entry = next(walks[rank], None)
            if entry is not None:
                heapq.heappush(heap, (-_level(rank, now - entry[0], pace), entry, rank))

        for rank in self._ranks:
            offer(rank)
        try:
            while heap:
                _, entry, came_from = heapq.heappop(heap)
                came, _, uid = entry
                request = self._requests[uid]
                if came_from is not None:
                    offer(came_from)
                    actual = self._class(request)
                    if actual != self._class_of[uid] and len(moved) < CORRECTIONS:
                        moved[uid] = actual
                        heapq.heappush(heap, (-_level(actual.rank, now - came, pace), entry, None))
                        continue
                yield request
        finally:
            for moved_uid, class_ in moved.items():
                if moved_uid in self._requests:
                    self._refile(self._requests[moved_uid], class_)

    def admitted(self, request: Request) -> None:
        for other, shared in islice(self._neighbours.around(request), NEIGHBOURS):
            if _share(other, shared) > self._class_of[other.uid].share:
                self._refile(other, self._class(other, min(shared, other.match_limit)))
        for other in islice(self._programs.get(request.program, {}).values(), NEIGHBOURS):
            if _rise(self._lookups.standing(other)) > self._class_of[other.uid].rise:
                self._refile(other, self._class(other))


def _level(rank: _Rank, waited: float, pace: float) -> int:
    begins, bits = rank
    return begins + int(waited / (pace * (1 << bits)))


class LongestPrefixOrder(Order):
    """By cached prefix, longest first, then by arrival."""

    def __init__(self, lookups: Lookups) -> None:
        self._lookups = lookups
        self._sorted: list[tuple[int, int]] = []
        self._known: dict[int, int] = {}
        self._requests: dict[int, Request] = {}
        self._neighbours = Neighbours(lookups)

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, request: Request) -> None:
        self._requests[request.uid] = request
        self._neighbours.add(request)
        self._file(request.uid, self._lookups.cached(request))

    def remove(self, request: Request) -> None:
        del self._requests[request.uid]
        self._neighbours.remove(request)
        self._unfile(request.uid)

    def _file(self, uid: int, cached: int) -> None:
        self._known[uid] = cached
        insort(self._sorted, (-cached, uid))

    def _unfile(self, uid: int) -> None:
        del self._sorted[bisect_left(self._sorted, (-self._known.pop(uid), uid))]

    def ranked(self, now: float) -> Iterator[Request]:
        late: list[tuple[int, int]] = []  # turned out to have less than was known
        moved: dict[int, int] = {}
        place = 0
        try:
            while late or place < len(self._sorted):
                if late and (place == len(self._sorted) or late[0] < self._sorted[place]):
                    yield self._requests[heapq.heappop(late)[1]]
                    continue
                known, uid = self._sorted[place]
                place += 1
                cached = self._lookups.cached(self._requests[uid])
                if cached < -known and len(moved) < CORRECTIONS:
                    moved[uid] = cached
                    heapq.heappush(late, (-cached, uid))
                    continue
                yield self._requests[uid]
        finally:
            for uid, cached in moved.items():
                if uid in self._known:
                    self._unfile(uid)
                    self._file(uid, cached)

    def admitted(self, request: Request) -> None:
        for other, shared in islice(self._neighbours.around(request), NEIGHBOURS):
            shared = min(shared, other.match_limit)
            if shared > self._known[other.uid]:
                self._unfile(other.uid)
                self._file(other.uid, shared)


class DepthFirstOrder(Order):
    """Depth first over the waiting prompts: what shares most with the last admission is next; when
    its subtree is served, the subtree with most waiting requests is begun."""

    def __init__(self, lookups: Lookups) -> None:
        self._neighbours = Neighbours(lookups)
        self._requests: dict[int, Request] = {}
        self._groups: dict[tuple[str, bytes], list[int]] = {}
        self._fullest: list[tuple[int, int, tuple[str, bytes]]] = []  # -members, first uid, group
        self._last: Request | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request.uid] = request
        self._neighbours.add(request)
        group = _group(request)
        insort(self._groups.setdefault(group, []), request.uid)
        self._note(group)

    def remove(self, request: Request) -> None:
        del self._requests[request.uid]
        self._neighbours.remove(request)
        group = _group(request)
        members = self._groups[group]
        del members[bisect_left(members, request.uid)]
        if members:
            self._note(group)
        else:
            del self._groups[group]

    def _note(self, group: tuple[str, bytes]) -> None:
        """Enter the group's new size; old entries are dropped when they surface."""
        members = self._groups[group]
        heapq.heappush(self._fullest, (-len(members), members[0], group))
        if len(self._fullest) > 2 * len(self._groups) + 64:
            self._fullest = [(-len(m), m[0], g) for g, m in self._groups.items()]
            heapq.heapify(self._fullest)

    def _fullest_first(self) -> Iterator[Request]:
        """The first request of each group, fullest group first."""
        seen: list[tuple[int, int, tuple[str, bytes]]] = []
        try:
            while self._fullest:
                entry = heapq.heappop(self._fullest)
                size, first, group = entry
                members = self._groups.get(group, [])
                if len(members) != -size or members[0] != first:
                    continue
                seen.append(entry)
                yield self._requests[first]
        finally:
            for entry in seen:
                heapq.heappush(self._fullest, entry)

    def ranked(self, now: float) -> Iterator[Request]:
        given: set[int] = set()
        if self._last is not None:
            for request, shared in self._neighbours.around(self._last):
                if shared < min(GROUP_TOKENS, len(self._last.tokens)):
                    break
                given.add(request.uid)
                yield request
        for first in self._fullest_first():
            if first.uid in given:
                continue
            given.add(first.uid)
            yield first
            for request, shared in self._neighbours.around(first):
                if shared < min(GROUP_TOKENS, len(first.tokens)):
                    break
                if request.uid not in given:
                    given.add(request.uid)
                    yield request

    def admitted(self, request: Request) -> None:
        self._last = request


def _group(request: Request) -> tuple[str, bytes]:
    return request.namespace, request.tokens[:GROUP_TOKENS].tobytes()


def _random_key(request: Request) -> float:
    return random.Random(request.uid).random()


POLICIES: dict[str, Callable[[Lookups], Order]] = {
    "fair": FairOrder,
    "fcfs": lambda lookups: KeyOrder(lambda request: 0.0),
    "lpm": LongestPrefixOrder,
    "dfs-weight": DepthFirstOrder,
    "random": lambda lookups: KeyOrder(_random_key),
}
"""Name → a new lane's order."""
