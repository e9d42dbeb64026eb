"""What a run leaves behind: its trace, the file of it, and what is drawn and said of it."""

from __future__ import annotations

import contextvars
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

import phloem
from phloem.lang.backend.mock import MockReply
from phloem.lang.backend.retry import backoff
from phloem.lang.recording import recorder
from phloem.lang.recording.explain import chain_times, explain, longest_chain, recomputed
from phloem.lang.recording.files import TraceError, load, save
from phloem.lang.recording.layout import Phase, duration, phases, rows
from phloem.lang.recording.page import notebook_html, page
from phloem.lang.recording.spans import Branch, Span, Trace, note_times
from phloem.lang.recording.terminal import draw, show
from phloem.lang.state import State

pytestmark = pytest.mark.timeout(60)


@phloem.function
def judge(s: State, topic: str) -> None:
    s += f"On {topic}: " + phloem.gen("thesis", regex="[a-z ]+")
    sides = s.fork(2)
    sides += phloem.gen("side")
    sides[1] += phloem.gen("more")
    sides.join()
    s += "; ".join(s["side"]) + phloem.select("verdict", ["yes", "no"])
    s += phloem.gen("many", n=2)


ANSWERS = {"thesis": "it is so", "side": ["for it", "against it"], "more": "far more"}


def run_judge(**answers: Any) -> State:
    script = {**ANSWERS, "many": ["a b", "c"], **answers}
    return judge.run(topic="tea", backend=phloem.MockBackend(script))


def test_spans_of_a_run() -> None:
    trace = run_judge().trace
    by_name = {span.name: span for span in trace.spans}
    assert [span.name for span in trace.spans] == [
        "thesis",
        "side",
        "side",
        "more",
        "verdict",
        "many",
    ]
    assert [span.branch for span in trace.spans] == [0, 1, 2, 2, 0, 0]
    assert [(b.parent, b.index, b.size) for b in trace.branches[1:]] == [(0, 0, 2), (0, 1, 2)]
    assert (by_name["thesis"].constraint, by_name["verdict"].kind) == ("regex", "select")
    assert (by_name["verdict"].answers, by_name["verdict"].scored_tokens) == (2, 2)
    assert (by_name["many"].answers, by_name["many"].preview) == (2, "a b | c")
    # each needs the newest calls in its prompt, not what those needed themselves
    assert [span.needs for span in trace.spans] == [(), (0,), (0,), (2,), (0,), (4,)]
    assert by_name["thesis"].prompt_tokens == 2
    assert by_name["thesis"].completion_tokens == 3
    assert trace.program == "judge"
    assert trace.backend == "MockBackend"
    for span in trace.spans:
        assert span.error is None
        assert trace.zero <= span.called <= span.sent <= span.ended <= trace.ended  # type: ignore[operator]


def test_who_reads_a_value() -> None:
    state = run_judge()
    unread = [span.name for span in state.trace.spans if not span.read]
    assert unread == ["more", "many"]  # the others are in a prompt, or the program read them
    assert "Read by nobody so far: `more`, `many` (5 tokens)." in state.explain()
    assert state["many"] == ["a b", "c"]
    assert "so far: `more` (2 tokens)." in state.explain()


def failed_judge(**answers: Any) -> State:
    backend = phloem.MockBackend({**ANSWERS, "many": ["a b", "c"], **answers})
    (state,) = judge.run_batch([{"topic": "tea"}], backend=backend)
    return state


def test_errors_are_told_where_they_happen() -> None:
    trace = failed_judge(thesis=ValueError("no tea")).trace
    by_name = {span.name: span for span in trace.spans}
    assert by_name["thesis"].error == "ValueError: no tea"
    assert by_name["side"].error == "variable 'thesis' failed: ValueError: no tea"
    assert by_name["side"].sent is None
    assert trace.totals().failed == len(trace.spans) == 4
    assert trace.error == "GenerationError: variable 'thesis' failed: ValueError: no tea"


def test_tokens_of_a_failed_call_are_counted() -> None:
    state = failed_judge(thesis=MockReply("A B", "length"))
    assert state.trace.spans[0].completion_tokens == 2
    said = state.explain()
    assert "with 2 tokens that were generated for nothing. The first: Truncated: " in said
    assert "- a larger max_tokens for `thesis`" in said


def test_a_backend_notes_what_it_knows() -> None:
    span = Span(name="x")

    def work() -> None:
        span.sending()
        list(backoff(3))
        note_times(0.25, 9999.0)
        note_times(0.125, None)

    contextvars.copy_context().run(work)  # as in a task
    list(backoff(2))  # of no call
    assert (span.retries, span.queue_s) == (3, 0.125)
    assert span.first is not None and span.sent is not None
    assert span.sent <= span.first < span.sent + 60  # a time to come is none


def test_recording_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_SPANS", 5)

    @phloem.function
    def long(s: State) -> None:
        for i in range(8):
            s += phloem.gen(f"x{i}")
            s.fork(2)

    state = long.run(backend=phloem.MockBackend(lambda call: "y"))
    trace = state.trace
    assert (len(trace.spans), trace.dropped, len(trace.branches)) == (5, 3, 5)
    assert state["x7"] == "y"
    assert "3 further calls were not kept" in state.explain()


# ------------------------------------------------------------------ files


def test_a_saved_trace_is_the_same(tmp_path: Path) -> None:
    state = run_judge()
    state.save_trace(tmp_path / "t.json")
    (again,) = load(tmp_path / "t.json")
    assert again.zero == 0
    assert [span.name for span in again.spans] == [span.name for span in state.trace.spans]
    assert again.branches[1].size == 2
    assert explain(again).splitlines()[1:-1] == state.explain().splitlines()[1:-1]
    save(again, tmp_path / "u.json")
    assert (tmp_path / "u.json").read_bytes() == (tmp_path / "t.json").read_bytes()
    assert "On tea" not in (tmp_path / "t.json").read_text()  # no prompts


def test_every_run_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    phloem.save_traces(path)
    try:
        backend = phloem.MockBackend({**ANSWERS, "side": "s", "many": "m"})
        judge.run_batch([{"topic": str(i)} for i in range(40)], backend=backend)
    finally:
        phloem.save_traces(None)
    run_judge()
    traces = list(load(path))
    assert [trace.program for trace in traces] == ["judge"] * 40
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])  # as a kill leaves it
    assert len(list(load(path))) == 39


def test_a_full_disk_stops_no_program(caplog: pytest.LogCaptureFixture) -> None:
    phloem.save_traces("/dev/full")
    try:
        assert run_judge()["thesis"] == run_judge()["thesis"] == "it is so"
    finally:
        phloem.save_traces(None)
    assert len([record for record in caplog.records if "/dev/full" in record.message]) == 1


def test_what_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "x"
    good = {"format": "phloem-trace-1", "started_at": 1, "spans": [], "branches": [{}]}
    cases: list[object] = [
        {"a": 1},
        {**good, "format": "other"},
        {**good, "spans": [{"id": 0, "needs": [7]}]},
        {**good, "spans": [{"id": 0, "branch": 3}]},
        {**good, "spans": [{"id": 0}, {"id": 0}]},
        {**good, "branches": [{}, {"id": 1, "parent": 1}]},
    ]
    for case in cases:
        path.write_text(json.dumps(case))
        with pytest.raises(TraceError):
            list(load(path))
    path.write_text(f"{json.dumps(good)}\nnonsense\n")
    with pytest.raises(TraceError, match="line 2"):
        list(load(path))
    path.write_bytes(b"")
    with pytest.raises(TraceError):
        list(load(path))


# ------------------------------------------------------------------ drawings


def span_of(number: int, *times: float | None, **given: Any) -> Span:
    """Of `called`, `sent`, `first`, `ended`."""
    called, sent, first, ended = times
    given.setdefault("read", True)
    return Span(id=number, called=called or 0.0, sent=sent, first=first, ended=ended, **given)


def known() -> Trace:
    """A run of ten seconds, all of whose times are known."""
    return Trace(
        program="tree",
        programs=4,
        started_at=0.0,
        ended=10.0,
        branches=[
            Branch(),
            *(Branch(id=1 + i, group=1, index=i, size=2, started=2.5) for i in range(2)),
        ],
        spans=[
            span_of(
                0, 0, 0, 1, 2, name="plan", prompt_tokens=100, completion_tokens=20, queue_s=0.5
            ),
            span_of(
                1,
                2.5,
                2.5,
                3.0,
                6.0,
                name="leaf",
                branch=1,
                needs=(0,),
                prompt_tokens=130,
                cached_tokens=119,
                completion_tokens=30,
                forced_tokens=15,
                constraint="json_schema",
            ),
            span_of(
                2,
                2.5,
                2.5,
                None,
                5.0,
                name="leaf",
                branch=2,
                needs=(0,),
                prompt_tokens=130,
                error="Truncated: more",
                retries=2,
            ),
            span_of(3, 3.0, 6.0, 6.5, 9.0, name="<b>&", branch=1, needs=(1,), read=False),
        ],
    )


def test_rows_are_the_tree() -> None:
    assert [row.guide + row.label for row in rows(known())] == [
        "plan",
        "fork of 2",
        "├─ [0]",
        "│  ├─ leaf",
        "│  └─ <b>&",
        "└─ [1] leaf",
    ]


def test_phases_follow_each_other() -> None:
    spans = known().spans
    told = [[(str(p), a, b) for p, a, b in phases(known(), span)] for span in spans]
    assert told[0] == [("queue", 0, 0.5), ("prompt", 0.5, 1), ("answer", 1, 2)]
    assert told[2] == [("answer", 2.5, 5.0)]
    assert told[3] == [("wait", 3.0, 6.0), ("prompt", 6.0, 6.5), ("answer", 6.5, 9.0)]


def test_drawing_in_a_terminal() -> None:
    lines = ["".join(text for text, _ in line).rstrip() for line in draw(known(), 100)]
    assert lines[0] == ("tree: 10 s, 4 calls, 1 failed, 360 in (119 cached), 50 out (15 forced)")
    assert re.fullmatch(r"plan        ░░▒▒█{4,5} +2 s 100 in, 20 out", lines[1])
    bar = lines[5].removeprefix("│  └─ <b>&  ")
    assert re.match(r" +·+▒+█+ +6 s", bar), bar
    assert re.search(r" █+ +2.5 s 130 in, 2 retries +Truncated: more$", lines[6])
    assert "waits for variables" in lines[7]


def test_show_with_and_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(encoding: str) -> str:
        raw = io.BytesIO()
        out = io.TextIOWrapper(raw, encoding=encoding)
        show(known(), out)
        out.flush()
        return raw.getvalue().decode(encoding)

    rich = shown("utf-8")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    plain = shown("utf-8")
    assert [line.rstrip() for line in rich.splitlines()] == plain.splitlines()
    assert "\x1b" not in plain
    assert "=" in shown("ascii")  # bars of what there is


def test_nothing_is_drawn_before_it_is_asked_for() -> None:
    code = (
        "import sys, phloem\n"
        "p = phloem.function(lambda s: s.__iadd__('q' + phloem.gen('x')))\n"
        "p.run(backend=phloem.MockBackend({'x': 'y'}))\n"
        "print('rich' in sys.modules, 'phloem.lang.recording.page' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


class Elements(HTMLParser):
    """The tags of a page, and what they refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.tips: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.links += [given[name] or "" for name in ("src", "href", "action") if name in given]
        if "data-tip" in given:
            self.tips.append(given["data-tip"] or "")


def test_page_needs_nothing_else_and_escapes(tmp_path: Path) -> None:
    trace = known()
    trace.error = "<script>alert(1)</script>"
    trace.spans[0].preview = '"><img src=x>'
    text = page(trace)
    found = Elements(text)
    assert found.links == []
    assert not re.search(r"https?:|url\(|@import", text)
    assert found.tags.count("script") == 1
    assert "img" not in found.tags and "b" not in found.tags
    assert len(found.tips) == 4
    assert "0 ms – 500 ms  in the server's queue (500 ms)" in found.tips[0]
    assert '“"><img src=x>”' in found.tips[0]
    assert "read by nobody so far" in found.tips[2]
    assert "prefers-color-scheme: dark" in text
    frame = Elements(notebook_html(trace))
    assert frame.tags == ["iframe"]
    state = run_judge()
    state.save_html(tmp_path / "run.html")
    assert "verdict" in (tmp_path / "run.html").read_text(encoding="utf-8")
    assert state._repr_html_().startswith("<iframe sandbox")


def test_the_pages_columns_follow_their_texts_and_its_ticks_the_time() -> None:
    spans = [span_of(i, 0, 0, 1, 4, name=name) for i, name in enumerate(("x", "a_longer_name"))]
    spans[1].read = False
    trace = Trace(started_at=0.0, ended=4.0, spans=spans, branches=[Branch()])
    text = page(trace)
    assert f"--names:{len('a_longer_name')}ch" in text
    ticks = re.findall(r'<span style="left:(\d+)%">([^<]+)</span>', text)
    assert [int(share) for share, _ in ticks] == [0, 20, 40, 60, 80, 100]
    assert [ticks[0][1], ticks[-1][1]] == ["0 ms", duration(4.0)]
    assert "Read by nobody so far: <code>a_longer_name</code>" in text
    assert page(Trace(started_at=0.0, ended=0.0, spans=[], branches=[Branch()]))


def test_a_large_trace_is_drawn_in_part() -> None:
    spans = [span_of(i, i, i, i, i + 1, name="x") for i in range(5000)]
    trace = Trace(started_at=0.0, ended=5001.0, spans=spans, branches=[Branch()])
    assert len(draw(trace, 80)) == 403
    assert page(trace).count('class="row"') == 4000
    assert recomputed(trace) == 0


def test_copies_of_copies_are_rows_too() -> None:
    """Thousands deep: no recursion, and no quadratic memory."""

    @phloem.function
    def deep(s: State) -> None:
        for _ in range(3000):
            s = s.copy()
        s += phloem.gen("x")

    trace = deep.run(backend=phloem.MockBackend({"x": "y"})).trace
    assert len(trace.branches) == 3001
    assert len(trace.spans) == 1
    assert recomputed(trace) == 0


# ------------------------------------------------------------------ in sentences


def test_explained() -> None:
    assert explain(known()).splitlines() == [
        "tree took 10 s: 4 calls, at most 2 at once.",
        "Prompts: 360 tokens, of which 119 (33 %) were in the cache and 241 were computed.",
        "Of these, 119 were computed again: an earlier call of the same text had them already.",
        "Answers: 50 tokens, of which 15 (30 %) were forced by constraints and not sampled.",
        "Failed: `leaf`. The first: Truncated: more",
        "Read by nobody so far: `<b>&` (0 tokens).",
        "The time went to plan → leaf → <b>&: 1.5 s in the program's own code, "
        "500 ms in the server's queue, 1.5 s until first tokens came, 6.5 s answering.",
        "What would help:",
        "- a larger max_tokens for `leaf`, or a constraint with an earlier end",
        "- the server was full or away 2 times: fewer programs at once (concurrency=), or a larger "
        "--max-waiting",
        "- a larger --kv-tokens: the cache lost what this program still wanted",
    ]


@pytest.mark.parametrize(
    ("programs", "calls", "queue", "full"),
    [
        (1, 1, "a server", "a larger"),
        (1, 2, "fewer calls at once, or a server", "fewer calls at once, or a larger"),
        (2, 1, "fewer programs at once (c", "fewer programs at once (c"),
    ],
)
def test_advice_is_of_what_ran_at_once(programs: int, calls: int, queue: str, full: str) -> None:
    """One program can't be fewer, nor can one call."""
    spans = [span_of(i, 0, 0, 3, 4, name="x", queue_s=2.0, retries=1) for i in range(calls)]
    trace = Trace(started_at=0.0, ended=4.0, spans=spans, branches=[Branch()], programs=programs)
    lines = explain(trace).splitlines()
    assert any(line.startswith(f"- {queue}") for line in lines)
    assert any(
        line.startswith(f"- the server was full or away {calls} times: {full}") for line in lines
    )


def test_a_trace_knows_how_many_programs_its_batch_ran_at_once() -> None:
    @phloem.function
    def one(s: State, i: int) -> None:
        s += phloem.gen("x")

    backend = phloem.MockBackend({"x": "y"})
    assert one.run(0, backend=backend).trace.programs == 1
    for items, programs in ([(0,)], 1), ([(0,)] * 2, 2), ([(0,)] * 5, 3):
        states = one.run_batch(items, backend=backend, concurrency=3)
        assert {state.trace.programs for state in states} == {programs}
    states = one.run_batch(iter([(0,)]), backend=backend, concurrency=3)
    assert states[0].trace.programs == 3


def test_the_longest_chain_goes_by_needs_then_by_time() -> None:
    trace = known()
    assert [span.id for span in longest_chain(trace)] == [0, 1, 3]
    along, own = chain_times(trace, longest_chain(trace))
    assert sum(along.values()) + own == pytest.approx(trace.seconds)
    assert along[Phase.WAIT] == 0
    same = [span_of(i, 1.0, 1.0, 1.0, 1.0, name=f"x{i}") for i in range(3)]
    at_once = Trace(started_at=0.0, ended=1.0, spans=same, branches=[Branch()])
    assert longest_chain(at_once)  # though each ended as the others began


def test_a_run_that_goes_on_can_be_explained() -> None:
    trace = Trace(started_at=0.0, spans=[span_of(0, 0, None, None, None)], branches=[Branch()])
    assert "1 of them have not ended" in explain(trace)
    assert draw(trace, 80)
    assert "has not ended" in page(trace)
    empty = Trace(started_at=0.0, ended=1.0, spans=[], branches=[Branch()])
    assert explain(empty) == "The program made no call in 1 s."
    assert draw(empty, 80) and page(empty)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 ms"),
        (0.00123, "1.23 ms"),
        (0.5, "500 ms"),
        (0.9996, "1 s"),
        (12.34, "12.3 s"),
        (100, "100 s"),
        (5000, "5,000 s"),
    ],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_spans_are_small() -> None:
    """What an idle field costs in a file: nothing."""
    assert msgspec.json.encode(Span(id=1)) == b'{"id":1}'
