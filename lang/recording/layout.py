"""A trace in rows, as every drawing has them: the tree of forks, and what each call did when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from phloem.lang.recording.spans import Branch, Span, Trace

_MAX_GUIDE: Final = 36  # characters; what is nested deeper shows its nearest forks


class Phase(StrEnum):
    """What a call is at."""

    WAIT = "wait"
    QUEUE = "queue"
    PROMPT = "prompt"
    ANSWER = "answer"


PHASES: Final = {
    Phase.WAIT: "waits for variables",
    Phase.QUEUE: "in the server's queue",
    Phase.PROMPT: "until the first token",
    Phase.ANSWER: "answering",
}
"""What each is called. Where the first token's time is not known, answering begins before it."""


@dataclass(frozen=True, slots=True)
class Row:
    """A call, or with `span` None the head of a fork. `guide` draws its place in the tree."""

    guide: str
    label: str
    span: Span | None


def rows(trace: Trace) -> list[Row]:
    """All rows, depth first, in the order in which the program began them."""
    found = []
    entries = _Entries(trace)
    stack = [_Node("", "", entry) for entry in reversed(entries.top())]
    while stack:
        node = stack.pop()
        below = entries.below(node.entry)
        found.append(Row((node.guide + node.joint)[-_MAX_GUIDE:], *entries.shown(node.entry)))
        guide = node.guide + {"": "", "├─ ": "│  ", "└─ ": "   "}[node.joint]
        if below:
            stack.append(_Node(guide, "└─ ", below[-1]))
            stack.extend(_Node(guide, "├─ ", one) for one in reversed(below[:-1]))
    return found


def phases(trace: Trace, span: Span) -> Iterator[tuple[Phase, float, float]]:
    """What a call did, from when to when, in seconds from the run's start."""
    start = span.called - trace.zero
    end = trace.seconds if span.ended is None else span.ended - trace.zero
    sent = end if span.sent is None else span.sent - trace.zero
    queued = min(sent + (span.queue_s or 0.0), end)
    first = queued if span.first is None else max(queued, span.first - trace.zero)
    times = [start, sent, queued, min(first, end), end]
    for phase, begun, done in zip(Phase, times[:-1], times[1:], strict=True):
        if done > begun:
            yield phase, begun, done


def facts(span: Span) -> str:
    """Its counts, in a few words."""
    said = []
    if span.kind == "select":
        said.append(f"select of {span.answers}")
    if span.prompt_tokens:
        said.append(f"{span.prompt_tokens:,} in")
    if span.cached_tokens:
        said.append(f"{span.cached_tokens:,} cached")
    if span.completion_tokens:
        said.append(f"{span.completion_tokens:,} out")
    if span.forced_tokens:
        said.append(f"{span.forced_tokens:,} forced")
    if span.scored_tokens:
        said.append(f"{span.scored_tokens:,} scored")
    if span.kind == "gen" and span.answers > 1:
        said.append(f"n={span.answers}")
    if span.constraint is not None:
        said.append(span.constraint)
    if span.retries:
        said.append(f"{span.retries:,} retries")
    if span.finish == "length":
        said.append("cut")
    return ", ".join(said)


def title(trace: Trace) -> str:
    """One line on the run as a whole."""
    sums = trace.totals()
    said = [f"{trace.program or 'a program'}: {duration(trace.seconds)}", f"{sums.calls:,} calls"]
    if sums.failed:
        said.append(f"{sums.failed:,} failed")
    said.append(f"{sums.prompt_tokens:,} in ({sums.cached_tokens:,} cached)")
    said.append(f"{sums.completion_tokens:,} out ({sums.forced_tokens:,} forced)")
    if trace.dropped:
        said.append(f"{trace.dropped:,} more calls were not kept")
    return ", ".join(said)


def duration(seconds: float) -> str:
    """Seconds for people: three digits that count."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    return f"{seconds:,.0f} s"


def name_of(span: Span) -> str:
    return span.name or "(unnamed)"


_Entry = Span | Branch | tuple[Branch, ...]  # a call; one branch; the branches of one fork


@dataclass(frozen=True, slots=True)
class _Node:
    guide: str
    joint: str
    entry: _Entry


class _Entries:
    """What stands below what. A fork in which nothing was called is left out."""

    def __init__(self, trace: Trace) -> None:
        self._of_branch: dict[int, list[Span | tuple[Branch, ...]]] = defaultdict(list)
        for span in list(trace.spans):
            self._of_branch[span.branch].append(span)
        groups: dict[int, list[Branch]] = defaultdict(list)
        for branch in list(trace.branches)[1:]:
            groups[branch.group].append(branch)
        # A branch is newer than the one that it comes from: in this order, all that is below a
        # group is known when the group is looked at.
        for group in sorted(groups, reverse=True):
            branches = tuple(groups[group])
            if any(self._of_branch.get(branch.id) for branch in branches):
                self._of_branch[branches[0].parent].append(branches)
        for entries in self._of_branch.values():
            entries.sort(key=_begun)

    def top(self) -> Sequence[_Entry]:
        return self._of_branch.get(0, [])

    def below(self, entry: _Entry) -> Sequence[_Entry]:
        match entry:
            case Span():
                return ()
            case Branch():
                return () if self._only_call(entry) else self._of_branch.get(entry.id, ())
            case _:
                return entry if len(entry) > 1 else self._of_branch.get(entry[0].id, ())

    def shown(self, entry: _Entry) -> tuple[str, Span | None]:
        match entry:
            case Span():
                return name_of(entry), entry
            case Branch():
                only = self._only_call(entry)
                label = f"[{entry.index}]"
                return (f"{label} {name_of(only)}", only) if only else (label, None)
            case _:
                return (f"fork of {len(entry)}" if len(entry) > 1 else "copy"), None

    def _only_call(self, branch: Branch) -> Span | None:
        entries = self._of_branch.get(branch.id, ())
        if len(entries) == 1 and isinstance(entries[0], Span):
            return entries[0]
        return None


def _begun(entry: Span | tuple[Branch, ...]) -> float:
    return entry.called if isinstance(entry, Span) else entry[0].started
