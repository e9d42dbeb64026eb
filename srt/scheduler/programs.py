"""Programs, clients of many calls: what they announced, how far they are, what is held for them.

A program begins with its first call and ends when it says so, when the calls that it announced are
over, or when it has been silent for long. All that it says is a hint: it moves its calls forward
among those of its tenant, within bounds, and holds KV within a budget; it never makes anybody wait
for a call that has not come.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from phloem.radix import RadixTree, common_prefix
from phloem.srt.messages import CallPlan
from phloem.srt.scheduler.holds import HOLD_SECONDS, Holds
from phloem.srt.scheduler.request import Request

SILENCE_SECONDS = 600.0
"""A program without a call for so long is over; its next call begins a new one."""

LARGE_TOKENS = 1 << 16
"""A program that was served more (computed tokens) is none that is about to end: its calls stand
as calls of no program do."""

MAX_PROGRAMS = 4096
MAX_GROUPS = 1024
"""Programs and groups that are known; beyond that, those go first that were silent longest."""


class Standing(NamedTuple):
    """What orders go by: when the request's program began (one call is a program of its own), and
    the number of its first call, which tells apart programs that began at one time; whether it has
    been served before; whether siblings of the request have, so that a join waits for it; how many
    calls remaining after it, if that was announced."""

    since: float
    first: int
    begun: bool = False
    joining: bool = False
    remaining: int | None = None


class Member:
    """A program as its calls know it."""

    __slots__ = ("alive", "begun", "first", "name", "remaining", "seen", "served", "since")

    def __init__(self, name: str, since: float, first: int) -> None:
        self.name = name
        self.since = self.seen = since
        self.first = first
        self.alive = 0
        self.begun = False
        self.served = 0
        self.remaining: int | None = None


class _Group:
    """Siblings: calls that are joined. `tokens[:shared]` is where those that came have forked."""

    __slots__ = ("expires", "shared", "started", "tokens")

    def __init__(self, tokens: array[int]) -> None:
        self.tokens = tokens
        self.shared = len(tokens)
        self.started = 0
        self.expires = 0.0


_Key = tuple[str, str, str]
"""Program, group and namespace: siblings whose KV is apart share nothing."""


def _key(request: Request) -> _Key:
    return request.program, request.plan.group if request.plan else "", request.namespace


class Programs:
    """The programs that live. `clock` gives seconds."""

    def __init__(self, tree: RadixTree, holds: Holds, clock: Callable[[], float]) -> None:
        self._tree = tree
        self._holds = holds
        self._clock = clock
        self._live: OrderedDict[str, Member] = OrderedDict()
        self._groups: OrderedDict[_Key, _Group] = OrderedDict()
        """Both by when they were last heard of."""

    def __len__(self) -> int:
        return len(self._live)

    # ------------------------------------------------------------------ the calls of a program

    def joined(self, request: Request) -> None:
        """A request was accepted: it is a call of its program from now on."""
        if not request.program:
            return
        now = self._clock()
        member = self._live.get(request.program)
        if member is None:
            if len(self._live) == MAX_PROGRAMS:
                self.end(next(iter(self._live)))
            member = self._live[request.program] = Member(request.program, now, request.uid)
        request.member = member
        member.alive += 1
        self._heard(member, now)
        plan = request.plan or CallPlan()
        if plan.remaining is not None:
            member.remaining = plan.remaining
        if plan.group:
            self._sibling(request, now)

    def _heard(self, member: Member, now: float) -> None:
        member.seen = now
        if self._live.get(member.name) is member:
            self._live.move_to_end(member.name)

    def _sibling(self, request: Request, now: float) -> None:
        key = _key(request)
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) == MAX_GROUPS:
                self._groups.popitem(last=False)
            group = self._groups[key] = _Group(request.tokens[: request.prompt_len])
        group.shared = common_prefix(group.tokens, request.tokens, group.shared)
        self._renew(key, group, now)

    def _renew(self, key: _Key, group: _Group, now: float) -> None:
        group.expires = now + HOLD_SECONDS
        self._groups.move_to_end(key)

    def _group(self, request: Request) -> _Group | None:
        return self._groups.get(_key(request)) if request.plan and request.plan.group else None

    def standing(self, request: Request) -> Standing:
        """Where a waiting request stands."""
        member = request.member
        if member is None or member.served > LARGE_TOKENS:
            return Standing(request.arrival, request.uid)
        joining = False
        group = self._group(request)
        if group is not None and request.plan is not None:
            joining = 0 < group.started < request.plan.width
        return Standing(member.since, member.first, member.begun, joining, member.remaining)

    def started(self, request: Request) -> None:
        """A call runs for the first time."""
        member = request.member
        if member is None:
            return
        member.begun = True
        group = self._group(request)
        if group is not None:
            group.started += 1
        self._holds.went_on(member.name, request.tokens, request.namespace)

    def charge(self, request: Request, tokens: int) -> None:
        """`tokens` were computed for a call."""
        if request.member is not None:
            request.member.served += tokens

    def left(self, request: Request, *, whole: bool) -> None:
        """A call is over; if it is `whole` its KV is in the tree, for those that go on from it."""
        member = request.member
        if member is None:
            return
        now = self._clock()
        member.alive -= 1
        self._heard(member, now)
        if self._live.get(member.name) is not member:
            return  # the program ended before its call
        plan = request.plan
        if plan is not None and whole:
            self._hold(request, plan, now)
        if member.remaining == 0 and not member.alive:
            self.end(member.name)

    def _hold(self, request: Request, plan: CallPlan, now: float) -> None:
        program, namespace = request.program, request.namespace
        if plan.fork:
            name = f"call {request.uid}"
            least = request.prompt_len
            self._holds.keep(program, name, request.tokens, namespace, least, plan.fork)
        group = self._group(request)
        if group is not None:
            self._renew(_key(request), group, now)
            awaited = max(0, plan.width - group.started) + 1  # the join goes on from there, too
            fork = group.tokens[: group.shared]
            name = f"group {plan.group} {namespace}"
            self._holds.keep(program, name, fork, namespace, group.shared, awaited)

    # ------------------------------------------------------------------ the end of a program

    def end(self, name: str) -> None:
        """No call of the program called `name` follows, or of another one of that name."""
        self._live.pop(name, None)
        self._tree.end_program(name)
        self._holds.end(name)
        for key in [key for key in self._groups if key[0] == name]:
            del self._groups[key]

    def expire(self) -> None:
        """End what has been silent for too long."""
        now = self._clock()
        self._holds.expire()
        while self._groups and next(iter(self._groups.values())).expires <= now:
            self._groups.popitem(last=False)
        while self._live:
            member = next(iter(self._live.values()))
            if member.seen > now - SILENCE_SECONDS:
                return
            if member.alive:
                self._heard(member, now)
            else:
                self.end(member.name)
