"""A trace in sentences. Each says what was measured; advice comes where a number calls for it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from phloem.lang.recording.layout import Phase, duration, name_of, phases
from phloem.lang.recording.spans import Branch, Span, Totals, Trace

_MUCH: Final = 0.2  # of a run's time, from which on something is worth a word
_MANY_TOKENS: Final = 64
_FEW_TOKENS: Final = 16
_MAX_LINEAGE: Final = 64

_AT: Final = {
    Phase.WAIT: "waiting for variables",
    Phase.QUEUE: "in the server's queue",
    Phase.PROMPT: "until first tokens came",
    Phase.ANSWER: "answering",
}


def explain(trace: Trace) -> str:
    """What was computed, cached, forced, of no use, and waited for, and what would help."""
    spans = list(trace.spans)
    if not spans:
        return f"{trace.program or 'The program'} made no call in {duration(trace.seconds)}."
    sums = trace.totals()
    chain = longest_chain(trace)
    parts = [
        _overview(trace, sums, spans),
        *_prompts(trace, sums),
        *_answers(sums, spans),
        *_waste(spans),
        *_waits(trace, chain),
    ]
    advice = list(_advice(trace, sums, spans, chain))
    if advice:
        parts += ["What would help:", *(f"- {one}" for one in advice)]
    return "\n".join(parts)


def _overview(trace: Trace, sums: Totals, spans: Sequence[Span]) -> str:
    at_once = most_at_once(trace)
    calls = "1 call" if sums.calls == 1 else f"{sums.calls:,} calls, at most {at_once:,} at once"
    kept = f" {trace.dropped:,} further calls were not kept." if trace.dropped else ""
    running = sum(span.ended is None for span in spans)
    still = f" {running:,} of them have not ended." if running else ""
    state = "has run" if trace.ended is None else "took"
    name = trace.program or "The program"
    return f"{name} {state} {duration(trace.seconds)}: {calls}.{still}{kept}"


def _prompts(trace: Trace, sums: Totals) -> Iterator[str]:
    if not sums.prompt_tokens:
        return
    yield (
        f"Prompts: {sums.prompt_tokens:,} tokens, of which {sums.cached_tokens:,} "
        f"({_share(sums.cached_tokens, sums.prompt_tokens)}) were in the cache and "
        f"{sums.computed_tokens:,} were computed."
    )
    again = recomputed(trace)
    if again:
        yield (
            f"Of these, {again:,} were computed again: an earlier call of the same text had "
            "them already."
        )


def _answers(sums: Totals, spans: Sequence[Span]) -> Iterator[str]:
    if sums.completion_tokens:
        forced = _share(sums.forced_tokens, sums.completion_tokens)
        how = (
            f"of which {sums.forced_tokens:,} ({forced}) were forced by constraints and not sampled"
            if sums.forced_tokens
            else "all of them sampled"
        )
        yield f"Answers: {sums.completion_tokens:,} tokens, {how}."
    if sums.scored_tokens:
        yield f"Choices: {sums.scored_tokens:,} tokens were scored."
    cut = [span for span in spans if span.finish == "length"]
    if cut:
        yield f"Ended by max_tokens: {_names(cut)}."


def _waste(spans: Sequence[Span]) -> Iterator[str]:
    failed = [span for span in spans if span.error is not None]
    if failed:
        lost = sum(span.completion_tokens for span in failed)
        tokens = f", with {lost:,} tokens that were generated for nothing" if lost else ""
        yield f"Failed: {_names(failed)}{tokens}. The first: {failed[0].error}"
    unread = [s for s in spans if s.ended is not None and s.error is None and not s.read]
    if unread:
        unused = sum(span.completion_tokens for span in unread)
        yield f"Read by nobody so far: {_names(unread)} ({unused:,} tokens)."


def _waits(trace: Trace, chain: Sequence[Span]) -> Iterator[str]:
    """Where the time went, along the calls that made the run as long as it was."""
    along, own = chain_times(trace, chain)
    spent = [f"{duration(own)} in the program's own code"] if own >= 0.0005 else []
    spent += [f"{duration(s)} {_AT[p]}" for p, s in along.items() if s >= 0.0005]
    path = " → ".join(_shortened([name_of(span) for span in chain]))
    yield f"The time went to {path}: {', '.join(spent) or 'next to nothing'}."


def _advice(
    trace: Trace, sums: Totals, spans: Sequence[Span], chain: Sequence[Span]
) -> Iterator[str]:
    along, own = chain_times(trace, chain)
    long = max(trace.seconds, 1e-9)
    cut = [span for span in spans if span.error is not None and "Truncated" in span.error]
    if cut:
        yield f"a larger max_tokens for {_names(cut)}, or a constraint with an earlier end"
    if along[Phase.QUEUE] > _MUCH * long:
        yield f"{_fewer(trace)}a server with a larger --max-running"
    if sums.retries:
        yield (
            f"the server was full or away {sums.retries:,} times: {_fewer(trace)}a larger "
            "--max-waiting"
        )
    if recomputed(trace) > max(_MANY_TOKENS, sums.computed_tokens // 10):
        yield "a larger --kv-tokens: the cache lost what this program still wanted"
    elif not sums.cached_tokens and len(spans) > 2 and sums.prompt_tokens > 64 * len(spans):
        yield "text that all calls have in common at the beginning of the prompt: none was cached"
    steps = [span for span in chain if span.branch == chain[-1].branch]
    if len(steps) > 2 and most_at_once(trace) == 1 and len(trace.branches) == 1:
        yield (
            "forks, if some of these calls do not need the answers before them: in one line of "
            "text each call waits for the one before it"
        )
    if own > _MUCH * long and own > 0.05:
        yield f"less work between calls: for {duration(own)} the program itself kept it waiting"


def _fewer(trace: Trace) -> str:
    """What of the run itself filled the server, as one of two things to change."""
    if trace.programs > 1:
        return "fewer programs at once (concurrency=), or "
    return "fewer calls at once, or " if most_at_once(trace) > 1 else ""


def longest_chain(trace: Trace) -> list[Span]:
    """The calls that made the run as long as it was, first to last: each began when the one before
    it had ended, because its prompt had that value in it, or because the program went on then."""
    ended = sorted(
        (span for span in list(trace.spans) if span.ended is not None),
        key=lambda span: span.ended or 0.0,
    )
    if not ended:
        return list(trace.spans)[-1:]
    by_id = {span.id: span for span in ended}
    ends = [span.ended or 0.0 for span in ended]
    chain = [ended[-1]]
    seen = {chain[0].id}
    while True:
        span = chain[-1]
        needed = [by_id[i] for i in span.needs if i in by_id]
        last = max(needed, key=lambda one: one.ended or 0.0, default=None)
        if last is None or (last.ended or 0.0) < span.called:
            place = bisect_right(ends, span.called)
            last = ended[place - 1] if place else None
        if last is None or last.id in seen:
            return chain[::-1]
        chain.append(last)
        seen.add(last.id)


def chain_times(trace: Trace, chain: Sequence[Span]) -> tuple[dict[Phase, float], float]:
    """Seconds along a chain in each phase (waiting for a call of the chain is that call's time),
    and in the program's own code."""
    along = dict.fromkeys(Phase, 0.0)
    clock = 0.0
    for span in chain:
        for phase, begun, done in phases(trace, span):
            along[phase] += max(0.0, done - max(begun, clock))
            clock = max(clock, done)
    return along, max(0.0, trace.seconds - sum(along.values()))


def most_at_once(trace: Trace) -> int:
    """The most calls that a backend worked on at the same time."""
    edges = []
    for span in list(trace.spans):
        if span.sent is not None:
            edges.append((span.sent, 1))
            edges.append((span.ended if span.ended is not None else float("inf"), -1))
    most = running = 0
    for _, step in sorted(edges):
        running += step
        most = max(most, running)
    return most


def recomputed(trace: Trace) -> int:
    """Prompt tokens that were computed although an earlier call of the same text, done by then, had
    them in its prompt or answer. A few a call are not counted: templates put some between."""
    gens = [span for span in list(trace.spans) if span.kind == "gen" and span.prompt_tokens]
    lineages = _lineages(list(trace.branches))
    by_branch: dict[int, list[Span]] = defaultdict(list)
    total = 0
    for span in sorted(gens, key=lambda one: one.called):
        before = _text_before(span, lineages[span.branch], by_branch)
        by_branch[span.branch].append(span)
        if before is not None:
            # n answers are not part of the text; the KV of an answer's last token is never made
            said = max(0, before.completion_tokens - 1) if before.answers == 1 else 0
            known = min(before.prompt_tokens + said, span.prompt_tokens - 1)
            again = known - span.cached_tokens
            total += again if again >= _FEW_TOKENS else 0
    return total


def _text_before(
    span: Span, lineage: Sequence[tuple[int, float]], by_branch: dict[int, list[Span]]
) -> Span | None:
    """The last call in the text before `span` that had ended when `span` was sent."""
    for branch, until in lineage:
        for other in reversed(by_branch[branch]):
            if other.called <= until and _ended_by(other, span.sent):
                return other
    return None


def _lineages(branches: Sequence[Branch]) -> dict[int, list[tuple[int, float]]]:
    """For each branch, itself and those it came from, each with the time up to which its calls are
    part of the text."""
    found: dict[int, list[tuple[int, float]]] = {}
    for branch in branches:
        line = [(branch.id, float("inf"))]
        if branch.id:
            above = found[branch.parent]
            line += [(above[0][0], branch.started), *above[1:_MAX_LINEAGE]]
        found[branch.id] = line
    return found


def _names(spans: Sequence[Span]) -> str:
    counts = Counter(name_of(span) for span in spans)
    said = [f"`{name}`" if n == 1 else f"`{name}` x {n:,}" for name, n in counts.items()]
    return ", ".join(said[:6] + ([f"and {len(said) - 6:,} others"] if len(said) > 6 else []))


def _shortened(names: Sequence[str]) -> list[str]:
    if len(names) <= 8:
        return list(names)
    return [*names[:4], f"({len(names) - 7:,} more)", *names[-3:]]


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %"


def _ended_by(span: Span, moment: float | None) -> bool:
    return span.ended is not None and moment is not None and span.ended <= moment
