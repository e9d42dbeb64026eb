"""The simulator that compares policies: its optimum, its clock, its traces, its cost model."""

from __future__ import annotations

import json
import random
from array import array
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import policy
import pytest
import simulator
from simulator import Simulation, Trace
from step_cost import Cost, features, grid, least_squares, stored_cost
from traces import KINDS, make, spread

from phloem.srt.scheduler.trace import (
    TraceError,
    TraceRequest,
    expand,
    read_trace,
    trace_lines,
)

COST = Cost(step=0.004, row=0.0005, token=0.0004, pair=2e-7, kv=1e-6)


def drawn(seed: int, *, turns: bool = True) -> list[TraceRequest]:
    """A small random trace: shared prefixes, equal prompts, namespaces, next turns."""
    rng = random.Random(seed)
    requests: list[TraceRequest] = []
    for number in range(rng.randrange(5, 40)):
        name, after = str(number), []
        prompt: list[int | tuple[str, int]] = [(f"head {rng.randrange(3)}", rng.randrange(1, 12))]
        if turns and requests and rng.random() < 0.4:
            before = rng.choice(requests)
            after = [before.id]
            prompt = [*before.prompt, (f"output of {before.id}", len(before.output_tokens()))]
        if rng.random() < 0.7:
            prompt = [*prompt, (f"tail {rng.randrange(6)}", rng.randrange(1, 9))]
        requests.append(
            TraceRequest(
                id=name,
                after=after,
                arrival=rng.random(),
                prompt=prompt,
                output=rng.randrange(6),
                namespace=rng.choice(["", "", "other"]),
            )
        )
    return requests


def prefixes(namespace: str, tokens: array[int]) -> set[tuple[str, bytes]]:
    return {(namespace, tokens[:end].tobytes()) for end in range(1, len(tokens) + 1)}


@pytest.mark.parametrize("seed", range(20))
def test_the_optimum_computes_each_prefix_once(seed: int) -> None:
    """Against sets of prefixes: a prompt's prefix need not be computed if it is another's too, or
    left by an answer; one prompt has to, of those that have it and of which no answer left it."""
    trace = Trace(drawn(seed))
    needed: Counter[tuple[str, bytes]] = Counter()
    ends: Counter[tuple[str, bytes]] = Counter()
    answers: set[tuple[str, bytes]] = set()
    for call in trace.calls:
        own = prefixes(call.request.namespace, call.prompt)
        needed.update(own)
        ends[max(own, key=lambda prefix: len(prefix[1]))] += 1
        answers |= prefixes(call.request.namespace, call.path) - own
    hits = 0
    for prefix, count in needed.items():
        # prompts that end with it compute it in any case, so one of them does it for the others
        first = 0 if prefix in answers else 1
        hits += count - max(first, ends[prefix])
    assert trace.optimal_hits == hits


@pytest.mark.parametrize("seed", range(20))
def test_depth_first_with_room_for_the_longest_path_is_optimal(seed: int) -> None:
    """The theorem behind the optimum, by the real scheduler: one row, in lexicographic order."""
    calls = sorted(
        Trace(drawn(seed, turns=False)).calls, key=lambda c: (c.request.namespace, c.prompt)
    )
    requests = [
        TraceRequest(
            id=str(place),
            prompt=call.request.prompt,
            output=list(call.output),
            namespace=call.request.namespace,
        )
        for place, call in enumerate(calls)
    ]
    trace = Trace(requests)
    longest = max(len(call.prompt) + len(call.output) for call in trace.calls)
    limits = {"schedule_policy": "fcfs", "max_running": 1}
    outcome = Simulation(trace, COST, longest, limits).run()
    assert outcome.hit_rate == outcome.optimal_hit_rate
    assert outcome.preemptions == 0 and outcome.failed == 0


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("order", policy.POLICIES)
def test_a_run_serves_everybody_and_never_beats_the_optimum(seed: int, order: str) -> None:
    trace = Trace(drawn(seed))
    longest = max(len(call.prompt) + len(call.output) for call in trace.calls)
    slots = longest + 10 * (seed % 4)
    simulation = Simulation(trace, COST, slots, {"schedule_policy": order, "max_running": 3})
    outcome = simulation.run()
    assert outcome.requests == len(trace.calls) and not outcome.failed
    assert outcome.of_optimal <= 1.0
    assert simulation.scheduler.counters.generated_tokens_total == sum(
        len(call.output) for call in trace.calls
    )
    ended = {rid: simulation.arrived[rid] + ttft for rid, ttft in simulation.ttft.items()}
    for call in trace.calls:
        for before in call.request.after:
            assert simulation.arrived[call.request.id] >= ended[before] + call.request.arrival
    again = Simulation(trace, COST, slots, {"schedule_policy": order, "max_running": 3}).run()
    assert asdict(again) | {"scheduler_us": 0} == asdict(outcome) | {"scheduler_us": 0}


def test_a_request_alone_takes_what_the_cost_model_says() -> None:
    trace = Trace([TraceRequest(id="a", arrival=2.0, prompt=[("p", 700)], output=3)])
    outcome = Simulation(trace, COST, 1000, {"max_step_tokens": 512}).run()
    first = COST.seconds([(0, 512)]) + COST.seconds([(512, 188)])
    rest = COST.seconds([(700, 1)]) + COST.seconds([(701, 1)])
    assert outcome.mean_ttft == pytest.approx(first)
    assert outcome.max_slowdown == pytest.approx(1.0)
    assert outcome.seconds == pytest.approx(2.0 + first + rest)


def test_requests_arrive_while_a_step_is_under_way() -> None:
    """The second is not served before the first one's step, and its wait counts from arrival."""
    first = COST.seconds([(0, 400)])
    requests = [
        TraceRequest(id="a", prompt=[("a", 400)], output=1),
        TraceRequest(id="b", arrival=first / 4, prompt=[("b", 50)], output=1),
    ]
    simulation = Simulation(Trace(requests), COST, 1000)
    simulation.run()
    assert simulation.arrived["b"] == first / 4
    assert simulation.ttft["b"] == pytest.approx(first * 3 / 4 + COST.seconds([(0, 50)]))


def test_step_features_count_rows_tokens_pairs_and_context() -> None:
    rows = [(3, 2), (0, 4)]
    seen = [start + i + 1 for start, count in rows for i in range(count)]
    assert features(rows) == (1, 2, 6, sum(seen), 9)


def test_the_fit_finds_the_weights_it_was_made_with() -> None:
    weights = np.array([0.003, 0.0004, 0.0003, 2e-7, 1e-6])
    sizes = np.array([features(step) for step in grid()], float)
    seconds = sizes @ weights
    found = least_squares(sizes / seconds[:, None], np.ones(len(seconds)))
    assert np.allclose(found, weights)
    without = np.array([0.003, -0.0004, 0.0003, 2e-7, 1e-6])
    seconds = np.abs(sizes @ without)
    found = least_squares(sizes / seconds[:, None], np.ones(len(seconds)))
    assert (found >= 0).all() and found[1] == 0


def test_the_stored_cost_is_one_of_a_machine() -> None:
    cost = stored_cost()
    assert 1e-5 < cost.seconds([(100, 1)]) < cost.seconds([(0, 512)]) < 60
    assert cost.fitted


# --------------------------------------------------------------------------- traces


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_follow_from_their_seed(kind: str) -> None:
    requests = make(kind, 1)
    assert requests == make(kind, 1) != make(kind, 2)
    known: set[str] = set()
    for request in requests:
        assert request.id not in known and known.issuperset(request.after)
        known.add(request.id)
    trace = Trace(requests)
    longest = max(len(call.prompt) + len(call.output) for call in trace.calls)
    assert longest < KINDS[kind].kv_slots < trace.prompt_tokens, "neither too small nor idle"
    assert 0.3 < trace.optimal_hits / trace.prompt_tokens < 1


def test_programs_arrive_spread_over_the_time() -> None:
    requests = make("agents", 3)
    placed = spread(requests, 3, 100.0)
    starts = [request.arrival for request in placed if not request.after]
    assert 0 < min(starts) < 20 and 80 < max(starts) < 100
    assert all(r.arrival == 0.0 for r in placed if r.after)
    assert spread(requests, 4, 100.0) != placed == spread(requests, 3, 100.0)


def test_a_trace_file_gives_back_what_went_in(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    requests = [*drawn(1), TraceRequest(id="ids", prompt=[5, 6, ("x", 2)], output=[9], priority=-2)]
    path.write_bytes(b"\n".join(trace_lines(requests)))  # with empty lines between
    assert read_trace(path) == requests


def test_segments_of_a_label_begin_alike() -> None:
    long, short = expand([("a", 50)]), expand([("a", 20), 7, ("b", 3)])
    assert long[:20] == short[:20] and short[20] == 7
    assert not set(expand([("b", 50)])) & set(long)
    answered = TraceRequest(id="r", prompt=[1], output=4)
    assert answered.output_tokens() == expand([("output of r", 4)])


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"id": "b", "output": 1}', "prompt"),
        ('{"id": "a", "prompt": [1], "output": 1}', "there is a request 'a' above"),
        ('{"id": "b", "prompt": [1], "output": 1, "after": ["c"]}', "after 'c'"),
        ('{"id": "b", "prompt": [], "output": 1}', "empty"),
        ('{"id": "b", "prompt": [-1], "output": 1}', "-1 is neither"),
        ('{"id": "b", "prompt": [["x", -1]], "output": 1}', "-1 is neither"),
        ('{"id": "b", "prompt": [4294967296], "output": 1}', "neither a token id"),
        ("what?", "malformed"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"id": "a", "prompt": [["x", 3]], "output": 1}}\n{line}\n')
    with pytest.raises(TraceError, match=rf"line 2: .*{complaint}"):
        read_trace(path)


# --------------------------------------------------------------------------- the command


def test_the_command_compares_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, figures = tmp_path / "mine.jsonl", tmp_path / "figures.json"
    path.write_bytes(b"".join(trace_lines(drawn(2))))
    monkeypatch.setattr(policy, "stored_cost", lambda: COST)
    arguments = ["--trace", str(path), "--policies", "fair", "fcfs", "--eviction", "lru", "lfu"]
    results = policy.main([*arguments, "--kv-slots", "90", "--json", str(figures)])
    assert [(r["policy"], r["eviction"]) for r in results] == [
        ("fair", "lru"),
        ("fair", "lfu"),
        ("fcfs", "lru"),
        ("fcfs", "lfu"),
    ]
    assert json.loads(figures.read_text())["results"] == results
    printed = capsys.readouterr().out
    assert "mine.jsonl" in printed and "fair, lfu" in printed


def test_load_stretches_the_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the load is twice the time."""
    seen: list[list[TraceRequest]] = []

    def note(case: policy.Case, *_: object) -> list[object]:
        seen.append(case.requests)
        return []

    monkeypatch.setattr(policy, "compare", note)
    for load in ("0.5", "1.0"):
        policy.main(["judge", "--online", "--load", load])
    last = [max(request.arrival for request in requests) for requests in seen]
    assert last[0] == pytest.approx(2 * last[1])
    work = Trace(seen[0]).least_seconds(stored_cost())
    assert 0.8 * work < last[1] < work


def test_percentiles_are_of_the_nearest_rank() -> None:
    values = [float(v) for v in range(1, 201)]
    assert simulator._percentile(values, 50) == 100.0
    assert simulator._percentile(values, 99) == 198.0
    assert simulator._percentile([3.0], 99) == 3.0
