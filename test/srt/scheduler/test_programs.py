"""Programs: their calls come forward, what they go on from stays, and nobody starves for them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from phloem.constrained.spec import Regex
from phloem.srt.messages import (
    CallPlan,
    EndProgram,
    Flush,
    GrammarCompile,
    GrammarReady,
    SamplingParams,
)
from phloem.srt.questions import AskStats, Pin
from phloem.srt.scheduler.grammars import MAX_AHEAD, Grammars
from phloem.srt.scheduler.holds import HOLD_SECONDS, MAX_PROGRAM_HOLDS
from phloem.srt.scheduler.order import (
    BEGUN,
    ENDING,
    HEAD_START_TOKENS,
    JOINING,
    OVERHEAD_TOKENS,
    PATIENCE,
    SHARES,
    FairOrder,
    Lookups,
)
from phloem.srt.scheduler.programs import LARGE_TOKENS, SILENCE_SECONDS, Standing
from phloem.srt.scheduler.request import Request
from phloem.srt.wire import pack

Build = Callable[..., Any]

TOKEN_SECONDS = 0.0005
ROOT = [7, 8, 9] * 6


def prompt(number: int, length: int = 12) -> list[int]:
    """A prompt that shares nothing with those of other numbers."""
    rng = random.Random(number)
    return [number % 60 + 2, *(rng.randrange(60) for _ in range(length - 1))]


def watch_admissions(h: Any) -> list[str]:
    """A list that grows by each request that begins to run."""
    order: list[str] = []
    started = h.scheduler.programs.started

    def noted(request: Request) -> None:
        order.append(request.rid)
        started(request)

    h.scheduler.programs.started = noted
    return order


def held(h: Any) -> int:
    tokens: int = h.scheduler.ledger.holds.tokens
    return tokens


def fill(h: Any, count: int = 12) -> None:
    """Requests that push everything else out of the cache."""
    for i in range(count):
        h.submit(f"fill{h.worker.steps}-{i}", [20 + i] * 30, 2)
        h.run()


# ----------------------------------------------------------------------------- who is next


def test_what_has_begun_is_served_before_new_programs(harness: Build) -> None:
    h = harness(max_running=1)
    order = watch_admissions(h)
    h.submit("a0", prompt(0), 2, program="a")
    h.step()
    for number, name in enumerate("bcd", 1):
        h.submit(f"{name}0", prompt(number), 2, program=name)
    h.submit("none", prompt(5), 2)
    for i in range(1, 4):
        h.submit(f"a{i}", prompt(10 + i), 2, program="a")
    h.run()
    assert order == ["a0", "a1", "a2", "a3", "b0", "c0", "d0", "none"]


def test_siblings_are_served_back_to_back(harness: Build) -> None:
    """Two programs that have begun, with siblings that share nothing: of the group that has begun
    all are served, and then of the other one."""
    h = harness(max_running=1, kv_slots=2001)
    h.submit("a", prompt(0), 1, program="a")
    h.submit("b", prompt(1), 1, program="b")
    h.run()
    order = watch_admissions(h)
    h.submit("block", prompt(2), 3, priority=1)
    h.step()
    for i in range(4):
        for name in "ba":
            plan = CallPlan(group="g", width=4)
            h.submit(f"{name}{i}", prompt(10 * i + ord(name)), 2, program=name, plan=plan)
    h.run()
    assert [rid[0] for rid in order[1:]] == ["a"] * 4 + ["b"] * 4


def test_a_sibling_beyond_the_width_does_not_come_forward(harness: Build) -> None:
    h = harness(max_running=1)
    standing = h.scheduler.programs.standing
    for i in range(3):
        h.submit(f"s{i}", prompt(i), 3, program="a", plan=CallPlan(group="g", width=2))
    requests = h.scheduler._by_rid
    assert not standing(requests["s0"]).joining, "no sibling was served yet"
    h.step()
    assert standing(requests["s1"]).joining
    while h.replies["s1"].prefix is None:
        h.step()
    assert not standing(requests["s2"]).joining and standing(requests["s2"]).begun


def test_a_program_that_is_nearly_over_goes_first(harness: Build) -> None:
    h = harness(max_running=1)
    h.submit("block", prompt(0), 3, priority=1)
    h.step()
    order = watch_admissions(h)
    for number, remaining in enumerate((None, 9, 3, 1, 0), 1):
        plan = CallPlan(remaining=remaining)
        h.submit(f"r{remaining}", prompt(number), 2, program=f"p{number}", plan=plan)
    h.run()
    assert order == ["r0", "r1", "r3", "rNone", "r9"]


def test_a_large_program_stands_as_others_do(harness: Build) -> None:
    h = harness(max_running=1)
    h.submit("a0", prompt(0), 2, program="a")
    h.step()
    h.submit("a1", prompt(1), 2, program="a")
    request = h.scheduler._by_rid["a1"]
    assert h.scheduler.programs.standing(request).begun
    request.member.served = LARGE_TOKENS + 1
    assert h.scheduler.programs.standing(request) == Standing(request.arrival, request.uid)


def test_work_is_counted_to_its_program(harness: Build) -> None:
    h = harness()
    h.submit(
        "a0", prompt(0, 12), 5, program="a", sampling=SamplingParams(max_tokens=5, ignore_eos=True)
    )
    member = h.scheduler._by_rid["a0"].member
    h.run()
    assert member.served == 12 + 4, "the last token of the output is never computed"


@pytest.mark.parametrize("seed", range(12))
def test_programs_starve_nobody(seed: int) -> None:
    """One cold request of no program, among programs that have begun, are about to end, have all
    their siblings waiting and their prompts cached, and never stop asking.

    A call of theirs rises from `top` at most, and has waited for no longer than its head start and
    a turn of the others; the cold one rises for ever.
    """
    rng = random.Random(seed)
    standings: dict[int, Standing] = {}
    lookups = Lookups(
        cached=lambda request: len(request.tokens) - 1 if request.program else 0,
        sort_key=lambda request: request.tokens,
        token_seconds=lambda: TOKEN_SECONDS,
        standing=lambda request: (
            standings.get(request.uid) or Standing(request.arrival, request.uid)
        ),
    )
    lane = FairOrder(lookups)
    cold = _request(0, [-1] * rng.choice([10, 40, 100]), 0.0)
    lane.add(cold)
    clients = rng.randrange(1, 30)
    serving = [rng.choice([0.2, 1.0, 3.0]) * TOKEN_SECONDS * OVERHEAD_TOKENS for _ in range(99)]
    pace = PATIENCE / SHARES * TOKEN_SECONDS
    top = SHARES + BEGUN + JOINING + ENDING
    waited = PATIENCE * HEAD_START_TOKENS * TOKEN_SECONDS + max(serving) * (clients + 1)
    others = top + 1 + waited / (pace * OVERHEAD_TOKENS)
    latest = pace * 2 * (len(cold.tokens) + OVERHEAD_TOKENS) * (others + 1) + waited
    now, uid = 0.0, 1

    def ask() -> None:
        nonlocal uid
        standings[uid] = Standing(0.0, 1, begun=True, joining=True, remaining=0)
        lane.add(_request(uid, [7] * 50, now, program=f"p{uid % clients}"))
        uid += 1

    for _ in range(clients):
        ask()
    while True:
        chosen = next(iter(lane.ranked(now)))
        lane.remove(chosen)
        lane.admitted(chosen)
        if chosen is cold:
            break
        now += serving[uid % 99]
        assert now <= latest, "the cold request starves"
        ask()


def _request(uid: int, tokens: list[int], arrival: float, program: str = "") -> Request:
    return Request(
        uid=uid,
        rid=f"r{uid}",
        tokens=array("i", tokens),
        prompt_len=len(tokens),
        sampling=SamplingParams(),
        seed=0,
        max_output=16,
        stop_ids=frozenset(),
        arrival=arrival,
        deadline=1e9,
        program=program,
    )


# ----------------------------------------------------------------------------- what is held


def parent(h: Any, fork: int, **more: Any) -> list[int]:
    """A call that `fork` others are to go on from; its prompt and its answer."""
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    h.submit("parent", ROOT, sampling=sampling, program="p", plan=CallPlan(fork=fork), **more)
    h.run()
    return [*ROOT, *h.replies["parent"].tokens]


def go_on(h: Any, rid: str, path: list[int], **more: Any) -> int:
    """One call that goes on from `path`: how much of its prompt was cached."""
    h.submit(rid, [*path, 1], 1, program="p", **more)
    h.run()
    cached: int = h.replies[rid].cached
    return cached


def test_what_calls_go_on_from_stays_until_they_have(harness: Build) -> None:
    h = harness(kv_slots=101, pin_share=0.5)
    path = parent(h, fork=2)
    for rid in ("first", "second"):
        fill(h)
        assert go_on(h, rid, path) == len(path) - 1  # the last token of an answer has no KV
    assert held(h) == 0
    fill(h)
    assert go_on(h, "third", path) == 0


def test_without_a_fork_nothing_is_held(harness: Build) -> None:
    h = harness(kv_slots=101, pin_share=0.5)
    path = parent(h, fork=0)
    assert held(h) == 0
    fill(h)
    assert go_on(h, "next", path) == 0


def test_a_call_that_goes_elsewhere_is_not_waited_for_less(harness: Build) -> None:
    h = harness(kv_slots=101, pin_share=0.5)
    path = parent(h, fork=1)
    h.submit("other", [*ROOT[:9], 1], 1, program="p")
    h.submit("stranger", [*path, 1], 1, program="q")
    h.submit("apart", [*path, 1], 1, program="p", namespace="other")
    h.run()
    assert held(h) == len(path) - 1
    go_on(h, "next", path)
    assert held(h) == 0


@pytest.mark.parametrize("how", ["end", "remaining", "time", "silence", "flush"])
def test_a_hold_ends(harness: Build, how: str) -> None:
    h = harness(kv_slots=101, pin_share=0.5)
    path = parent(h, fork=9)
    assert held(h) == h.ask(AskStats).locked == len(path) - 1
    if how == "end":
        h.scheduler.receive(EndProgram("p"))
    elif how == "remaining":
        go_on(h, "last", path, plan=CallPlan(remaining=0))
        assert not len(h.scheduler.programs) and h.ask(AskStats).programs == 0
    elif how == "flush":
        h.ask(Flush)
    else:
        h.clock.advance((HOLD_SECONDS if how == "time" else SILENCE_SECONDS) - 0.1)
        h.scheduler.expire()
        assert bool(held(h)) == (how == "time")
        h.clock.advance(0.2)
        h.scheduler.expire()
    assert held(h) == h.ask(AskStats).locked == 0
    h.check()


def test_a_program_ends_when_its_last_calls_have(harness: Build) -> None:
    h = harness()
    long = SamplingParams(max_tokens=9, ignore_eos=True)
    h.submit("long", prompt(0), sampling=long, program="p")
    h.submit("last", prompt(1), 1, program="p", plan=CallPlan(remaining=0))
    while h.replies["last"].end is None:
        h.step()
    assert len(h.scheduler.programs) == 1
    h.run()
    assert len(h.scheduler.programs) == 0
    h.submit("again", prompt(2), 1, program="p")
    assert not h.scheduler.programs.standing(h.scheduler._by_rid["again"]).begun


def test_a_silent_program_is_forgotten_and_one_that_runs_is_not(harness: Build) -> None:
    h = harness(max_running=1)
    h.submit("block", prompt(0), 5, priority=1)
    h.step()
    h.submit("waits", prompt(1), 1, program="p")
    h.submit("came", prompt(2), 1, program="q")
    h.abort("came")
    for _ in range(2):
        h.clock.advance(SILENCE_SECONDS + 1)
        h.scheduler.expire()
    assert list(h.scheduler.programs._live) == ["p"]
    h.run()
    h.clock.advance(SILENCE_SECONDS + 1)
    h.scheduler.expire()
    assert len(h.scheduler.programs) == 0 and h.ask(AskStats).programs == 0


def test_a_fork_point_is_found_and_stays_until_the_join(harness: Build) -> None:
    """The server sees where siblings part; nobody tells it."""
    h = harness(kv_slots=101, pin_share=0.5)
    for i in range(3):
        fill(h)
        h.submit(f"s{i}", [*ROOT, i, 5, 5], 2, program="p", plan=CallPlan(group="g", width=3))
        h.run()
        assert h.replies[f"s{i}"].cached >= (0 if i == 0 else len(ROOT))
        assert held(h) == (len(ROOT) + 3 if i == 0 else len(ROOT))
    fill(h)
    assert go_on(h, "join", ROOT) == len(ROOT)
    assert held(h) == 0


def test_holds_yield_to_a_request_that_has_no_room(harness: Build) -> None:
    h = harness(kv_slots=61, pin_share=1.0)
    path = parent(h, fork=9)
    assert held(h) == len(path) - 1 == 21
    h.submit("large", prompt(3, 45), 10)
    h.run()
    assert held(h) == 0
    assert h.replies["large"].tokens == h.expected(h.replies["large"].prompt, 10)
    assert h.scheduler.counters.preemptions_total == 0


def test_holds_stay_when_their_end_would_not_make_room(harness: Build) -> None:
    h = harness(kv_slots=61, pin_share=1.0, max_running=2)
    parent(h, fork=9)
    endless = SamplingParams(max_tokens=16, ignore_eos=True)
    h.submit("runs", prompt(3, 20), sampling=endless)
    h.step()
    h.submit("large", prompt(4, 45), 5)
    h.step()
    assert held(h) == 21, "large does not fit beside what runs, with or without them"
    h.run()
    assert h.replies["large"].end is not None


def test_a_running_row_takes_what_is_held_before_another_is_preempted(harness: Build) -> None:
    h = harness(kv_slots=61, pin_share=1.0, max_running=2)
    parent(h, fork=9)
    for i in range(2):
        h.submit(f"r{i}", prompt(3 + i, 8), sampling=SamplingParams(max_tokens=20, ignore_eos=True))
    h.run()
    assert held(h) == 0 and h.scheduler.counters.preemptions_total == 0


def test_pins_and_holds_of_the_same_tokens_go_together(harness: Build) -> None:
    h = harness(kv_slots=41, pin_share=0.6)
    path = parent(h, fork=9)
    h.ask(Pin, name="same", prompt=pack([*path, 1]))
    h.submit("large", prompt(3, 38), 2)
    h.run()
    assert h.replies["large"].end is not None and h.ask(AskStats).locked == 0


def test_the_budget_keeps_the_newest(harness: Build) -> None:
    h = harness(kv_slots=101, pin_share=0.3)
    for i in range(3):
        h.submit(f"r{i}", prompt(i, 12), 0, program=f"p{i}", plan=CallPlan(fork=1))
        h.run()
    assert held(h) == 24 and list(h.scheduler.ledger.holds._names) == ["p1", "p2"]
    h.submit("larger", prompt(9, 40), 0, program="p9", plan=CallPlan(fork=1))
    h.run()
    assert held(h) == 24, "it would not fit the budget alone"


def test_one_program_holds_a_bounded_number(harness: Build) -> None:
    h = harness(kv_slots=2001, pin_share=1.0)
    for i in range(MAX_PROGRAM_HOLDS + 5):
        h.submit(f"r{i}", [i % 60, i // 60, 5, 6], 0, program="p", plan=CallPlan(fork=1))
        h.run()
    assert len(h.scheduler.ledger.holds) == MAX_PROGRAM_HOLDS
    h.check()


def test_what_failed_or_never_ran_is_not_held(harness: Build) -> None:
    h = harness(kv_slots=101, pin_share=0.5, max_running=1)
    plan = CallPlan(fork=3)
    h.submit("runs", prompt(0), 9, program="p")
    h.step()
    h.submit("gone", prompt(1), 1, program="p", plan=plan)
    h.abort("gone")
    h.submit("late", prompt(2), 1, program="p", plan=plan, deadline_s=0.001)
    h.clock.advance(1.0)
    h.scheduler.expire()
    h.collect()
    h.run()
    assert held(h) == 0 and not h.scheduler._by_rid


# ----------------------------------------------------------------------------- grammars ahead


def constraints(*numbers: int) -> list[Any]:
    return [Regex(pattern=f"a{{{n}}}") for n in numbers]


def compiled(h: Any) -> list[str]:
    return [order.constraint.pattern for order in h.pending]


def test_the_next_grammar_compiles_while_the_call_before_runs(harness: Build) -> None:
    h = harness()
    h.hold_compiles = True
    plan = CallPlan(next_constraints=constraints(1))
    h.submit("now", prompt(0), 3, program="p", plan=plan)
    assert compiled(h) == ["a{1}"]
    h.step()
    assert h.replies["now"].tokens, "nobody waits for it"
    h.compile_pending()
    assert h.scheduler.grammars.waiting == 0
    h.hold_compiles = False
    h.submit("next", prompt(1), 3, program="p", constraint=constraints(1)[0])
    h.run()
    assert h.replies["next"].end is not None


def test_what_a_request_waits_for_is_compiled_first(harness: Build) -> None:
    h = harness()
    h.hold_compiles = True
    h.submit("r", prompt(0), 3, constraint=constraints(0)[0])
    for i in range(2):
        plan = CallPlan(next_constraints=constraints(1, 2, 0))
        h.submit(f"p{i}", prompt(1 + i), 1, program="p", plan=plan)
    assert compiled(h) == ["a{0}"], "others are in a hurry"
    done: list[str] = []
    while h.pending:
        assert len(h.pending) == 1, "one at a time"
        done += compiled(h)
        h.compile_pending()
        h.collect()
    assert done == ["a{0}", "a{1}", "a{2}"]


def test_a_request_that_wants_it_meanwhile_is_answered(harness: Build) -> None:
    h = harness()
    h.hold_compiles = True
    plan = CallPlan(next_constraints=constraints(1, 2))
    h.submit("p", prompt(0), 1, program="p", plan=plan)
    for n in (1, 2):
        h.submit(f"r{n}", prompt(n), 3, constraint=constraints(n)[0])
    assert compiled(h) == ["a{1}", "a{1}", "a{2}"], "the process compiles each once"
    h.hold_compiles = False
    h.run()
    assert all(reply.end is not None for reply in h.replies.values())


def test_a_new_grammar_process_is_not_killed_by_the_same_guess() -> None:
    grammars = Grammars()
    grammars.prepare(constraints(1, 2))
    assert [order.constraint for order in grammars.outbox] == constraints(1)  # type: ignore[union-attr]
    grammars.outbox.clear()
    assert not grammars.restarted([]) and not grammars.outbox
    grammars.prepare(constraints(3))
    assert [order.constraint for order in grammars.outbox] == constraints(2)  # type: ignore[union-attr]


def test_what_waits_to_be_compiled_is_bounded() -> None:
    grammars = Grammars()
    grammars.prepare(constraints(*range(MAX_AHEAD + 10)))
    done: list[str] = []
    while grammars.outbox:
        order = grammars.outbox.pop()
        assert isinstance(order, GrammarCompile)
        done.append(order.key)
        grammars.compiled(order.key)
    assert len(done) == MAX_AHEAD


def test_a_restart_of_the_process_leaves_programs_alone(harness: Build) -> None:
    h = harness(kv_slots=101, pin_share=0.5)
    path = parent(h, fork=1)
    h.scheduler.grammar(GrammarReady({}))
    h.collect()
    assert held(h) == len(path) - 1
