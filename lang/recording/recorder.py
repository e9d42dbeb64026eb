"""Takes down a run while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from phloem.constrained.spec import Constraint
from phloem.lang import ir
from phloem.lang.recording import files
from phloem.lang.recording.spans import UNATTACHED, Branch, Span, Trace

MAX_SPANS: Final = 20_000
"""Calls, and branches, of one run that are kept; those that follow are only counted."""

_MAX_LINEAGE: Final = 64

Lineage = tuple[int, ...]
"""A branch and those that it came from, the newest last; of a deep one the newest only."""

ROOT: Final[Lineage] = (0,)


class Recorder:
    """The trace of one run, `trace`. Its methods may be called from any thread."""

    def __init__(self, backend: str = "") -> None:
        self._lock = threading.Lock()
        self.trace = Trace(
            backend=backend,
            started_at=time.time(),
            zero=time.perf_counter(),
            spans=[],
            branches=[Branch()],
        )

    def begin(
        self,
        span: Span,
        lineage: Lineage,
        before: Sequence[object],
    ) -> None:
        """A call begins on a branch: `span` is what is known of it, `before` the events of its
        prompt, of which those with a span are calls."""
        span.called = time.perf_counter()
        span.branch = lineage[-1]
        span.needs = _needs(lineage, before)
        trace = self.trace
        with self._lock:
            if len(trace.spans) < MAX_SPANS:
                span.id = len(trace.spans)
                trace.spans.append(span)
            else:
                trace.dropped += 1

    def fork(self, lineage: Lineage, size: int) -> list[Lineage]:
        """`size` branches begin where a branch is."""
        trace = self.trace
        started = time.perf_counter()
        with self._lock:
            first = len(trace.branches)
            if first + size > MAX_SPANS:
                return [lineage] * size
            trace.branches.extend(
                Branch(
                    id=first + index,
                    parent=lineage[-1],
                    group=first,
                    index=index,
                    size=size,
                    started=started,
                )
                for index in range(size)
            )
        return [(*lineage[1 - _MAX_LINEAGE :], first + index) for index in range(size)]

    def end(self, program: str, error: BaseException | None) -> None:
        """The run has ended: keep its trace where it is wanted."""
        self.trace.program = program
        self.trace.ended = time.perf_counter()
        if error is not None:
            self.trace.error = f"{type(error).__name__}: {error}"[:500]
        files.keep(self.trace)


def describe(span: Span, node: ir.Gen[Any] | ir.Select) -> Span:
    """`span`, with what the node says of its call."""
    if isinstance(node, ir.Select):
        span.kind = "select"
        span.answers = len(node.choices)
    elif node.constraint is not None:
        span.constraint = _kind_of(node.constraint)
    return span


def _kind_of(constraint: Constraint) -> str:
    return str(type(constraint).__struct_config__.tag)


def _needs(lineage: Lineage, before: Sequence[object]) -> tuple[int, ...]:
    """The calls in a prompt, the last first, up to one whose own prompt had the rest in it."""
    found = []
    for event in reversed(before):
        span = getattr(event, "span", None)
        if isinstance(span, Span) and span.id != UNATTACHED:
            found.append(span.id)
            if span.branch in lineage:
                break
    return tuple(found)
