"""Recordings: the same decisions again, whatever happened; nothing of what users said; damage is
found."""

from __future__ import annotations

import copy
import importlib.util
import random
import sys
from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from phloem.constrained.spec import Regex
from phloem.srt.messages import Abort, Drain, RowPlan, SamplingParams, StepPlan, Submit
from phloem.srt.questions import AskExplain, AskTree, Pin
from phloem.srt.scheduler.kv_check import KvCheck, KvViolation
from phloem.srt.scheduler.labels import Labels
from phloem.srt.scheduler.record import RecordingScheduler
from phloem.srt.scheduler.record_file import (
    MAGIC,
    Applied,
    Planned,
    Received,
    Record,
    RecordingError,
    RecordReader,
)
from phloem.srt.scheduler.replay import Replay, Report
from phloem.srt.wire import pack, unpack

Build = Callable[..., Any]


@pytest.fixture(scope="module")
def histories() -> Iterator[ModuleType]:
    """The random histories of the scheduler's own test, to record them."""
    path = Path(__file__).with_name("test_histories.py")
    spec = importlib.util.spec_from_file_location("recorded_histories", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def recorded(
    harness: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[list[RecordingScheduler]]:
    """Schedulers that the harness makes record; these are they."""
    schedulers: list[RecordingScheduler] = []

    def make(limits: Any, worker: Any, clock: Any) -> RecordingScheduler:
        path = tmp_path / f"{len(schedulers)}.rec"
        schedulers.append(RecordingScheduler(limits, worker, clock, path))
        return schedulers[-1]

    monkeypatch.setitem(harness.__globals__, "Scheduler", make)
    yield schedulers
    for scheduler in schedulers:
        scheduler.close()


def replayed(path: Path) -> Report:
    """A replay that must not find anything."""
    report = Replay(path).run()
    assert report.problem is None, report.problem
    return report


def rewritten(path: Path, records: list[Record]) -> Path:
    """A recording of these records."""
    data = bytearray(MAGIC)
    for record in records:
        encoded = msgspec.msgpack.encode(record)
        data += len(encoded).to_bytes(4, "little") + encoded
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("seed", [*range(16), 123])
def test_a_history_replays_to_the_same_decisions(
    harness: Build, recorded: list[RecordingScheduler], histories: ModuleType, seed: int
) -> None:
    history = histories.History(harness, seed, histories.WIDE if seed % 2 else histories.SMALL)
    history.live(150, full=1000)
    history.finish()
    steps = 0
    for scheduler in recorded:
        scheduler.close()
        report = replayed(scheduler.path)
        assert not report.cut and not report.slips
        assert report.steps == scheduler.counters.steps_total
        assert len(report.requests) >= scheduler.counters.requests_total
        assert report.preemptions == scheduler.counters.preemptions_total
        assert report.cached_tokens == scheduler.counters.cached_tokens_total
        steps += report.steps
    assert steps > 100


@pytest.mark.parametrize("policy", ["fair", "lpm", "dfs-weight"])
def test_orders_that_compare_prompts_replay(
    harness: Build, recorded: list[RecordingScheduler], policy: str
) -> None:
    """Which of many neighbours comes first depends on how their tokens compare; a replay has only
    labels, which compare otherwise."""
    rng = random.Random(policy)
    h = harness(kv_slots=400, max_running=3, max_step_tokens=48, schedule_policy=policy)
    heads = [[rng.randrange(64) for _ in range(20)] for _ in range(3)]
    for index in range(150):
        h.submit(f"r{index}", rng.choice(heads) + [rng.randrange(64) for _ in range(6)], 2)
    h.run()
    recorded[0].close()
    assert len(replayed(recorded[0].path).requests) == 150


# --------------------------------------------------------------------------- what is not told

NAMES = (
    "rid-alice",
    "tenant-acme",
    "namespace-x",
    "program-payroll",
    "pin-of-bob",
    "s3cr3t",
)


@pytest.fixture
def private(harness: Build, recorded: list[RecordingScheduler]) -> tuple[Path, list[list[int]]]:
    """A recording in which everything has a name, and the token sequences that went by."""
    rid, tenant, namespace, program, pin, pattern = NAMES
    rng = random.Random(5)
    h = harness(vocab_size=60_000, pin_share=0.5, kv_slots=600, block_tokens=4)
    prompts: list[list[int]] = []
    for index in range(12):
        base = prompts[-1] if prompts and index % 2 else []
        prompts.append([*base, *(rng.randrange(60_000) for _ in range(20))])
        h.submit(
            f"{rid}{index}",
            prompts[-1],
            sampling=SamplingParams(max_tokens=9, logit_bias={31_234: 1.0, 41_235: 2.0}),
            tenant=tenant,
            namespace=namespace,
            program=program,
            constraint=Regex(pattern=pattern) if index % 3 == 0 else None,
        )
        h.run()
    h.ask(Pin, name=pin, prompt=pack(prompts[0]), namespace=namespace)
    h.ask(AskExplain, prompt=pack(prompts[1]), namespace=namespace)
    h.ask(AskTree, prefix=pack(prompts[1][:5]), namespace=namespace)
    h.ask(AskTree, prefix=pack(prompts[1][:5]))
    h.scheduler.receive(Abort(f"{rid}0"))
    recorded[0].close()
    said = [prompt + h.replies[f"{rid}{i}"].tokens for i, prompt in enumerate(prompts)]
    return recorded[0].path, [*said, [31_234, 41_235]]


def test_nothing_that_users_said_is_in_the_file(private: tuple[Path, list[list[int]]]) -> None:
    path, said = private
    data = path.read_bytes()
    for name in NAMES:
        assert name.encode() not in data
    for tokens in said:
        for pair in pairwise(tokens):
            assert pack(pair) not in data
            assert b"".join(map(msgspec.msgpack.encode, pair)) not in data
    recorded = [r.message for r in RecordReader(path) if isinstance(r, Received)]
    prompts = [unpack(m.prompt) for m in recorded if isinstance(m, Submit | Pin | AskExplain)]
    sampled = [
        row.token for r in RecordReader(path) if isinstance(r, Applied) for row in r.message.rows
    ]
    ends = {0, -1}  # the end token, and nothing
    assert all(label >= 1 << 20 for prompt in prompts for label in prompt)
    assert all(label >= 1 << 20 or label in ends for label in sampled)
    assert replayed(path).steps


def test_labels_agree_exactly_as_far_as_prompts_do() -> None:
    labels = Labels(100)
    one = labels.chain(pack([7, 7, 7, 8, 9]), "a").labels
    two = labels.chain(pack([7, 7, 7, 9, 9]), "a").labels
    assert one[:3] == two[:3]
    assert not set(one[3:]) & set(two[3:])
    assert len(set(one)) == len(one), "the same token elsewhere has another label"
    assert not set(one) & set(labels.chain(pack([7, 7, 7]), "b").labels)
    assert not set(one) & set(Labels(100).chain(pack([7, 7, 7]), "a").labels), "a key of its own"
    grown = labels.chain(pack([7, 7]), "a")
    for token in (7, 8, 9):
        grown.label(99)  # asked about, and not what came
        grown.append(grown.label(token))
    assert grown.labels == one


def test_a_stop_token_that_does_not_end_the_answer_is_hidden(
    harness: Build, recorded: list[RecordingScheduler]
) -> None:
    """The worker bans stop tokens before `min_tokens`; should one come all the same, the request
    goes on, and so must its replay, in which the next turn shares the whole answer."""
    h = harness()
    h.worker.sample = lambda state: 5
    sampling = SamplingParams(max_tokens=6, min_tokens=4, stop_token_ids=(5,))
    h.submit("one", [1, 2, 3], sampling=sampling)
    h.run()
    h.submit("two", [1, 2, 3, 5, 5, 5, 5], 2)
    h.run()
    assert h.replies["one"].tokens == [5, 5, 5, 5] and h.replies["two"].cached == 6
    recorded[0].close()
    report = replayed(recorded[0].path)
    assert report.cached_tokens == 6
    first = report.requests[0]
    assert first.tokens[3] == 5 and min(first.tokens[:3]) >= 1 << 20


# --------------------------------------------------------------------------- what is found


@pytest.fixture
def records(harness: Build, recorded: list[RecordingScheduler]) -> list[Record]:
    """A recording of a scheduler that has too little room."""
    rng = random.Random(3)
    h = harness(kv_slots=90, max_running=4, max_step_tokens=16)
    for index in range(20):
        h.submit(f"r{index}", [index % 3] * 9 + [rng.randrange(64) for _ in range(8)], 40)
        h.step()
    h.run()
    assert h.scheduler.counters.preemptions_total
    recorded[0].close()
    replayed(recorded[0].path)
    return list(RecordReader(recorded[0].path))


def is_submit(record: Record) -> bool:
    return isinstance(record, Received) and isinstance(record.message, Submit)


def is_plan(record: Record) -> bool:
    return isinstance(record, Planned) and record.step is not None


def other_prompt(record: Any) -> Any:
    prompt = array("i", unpack(record.message.prompt))
    prompt[4] += 1
    return replace(record, message=replace(record.message, prompt=prompt.tobytes()))


def other_results(record: Any) -> Any:
    rows = [replace(row, token=-1, error="no") for row in record.message.rows]
    return replace(record, message=replace(record.message, rows=rows))


@pytest.mark.parametrize(
    ("chosen", "change"),
    [
        (is_submit, lambda record: None),
        (is_submit, other_prompt),
        (is_plan, lambda record: replace(record, digest=bytes(8))),
        (is_plan, lambda record: replace(record, rows=record.rows + 1)),
        (is_plan, lambda record: None),
        (lambda record: isinstance(record, Applied), lambda record: None),
        (lambda record: isinstance(record, Applied), other_results),
    ],
)
def test_what_was_tampered_with_is_found(
    records: list[Record], tmp_path: Path, chosen: Callable[[Record], bool], change: Any
) -> None:
    places = [i for i, record in enumerate(records) if chosen(record)]
    place = places[len(places) // 3]
    changed = change(records[place])
    changed = [] if changed is None else [changed]
    path = rewritten(tmp_path / "changed", records[:place] + changed + records[place + 1 :])
    problem = Replay(path).run().problem
    assert problem is not None
    before = sum(1 for record in records[:place] if isinstance(record, Applied))
    assert problem.step >= before, "not before the place"


def test_an_error_of_the_scheduler_is_recorded(
    harness: Build, recorded: list[RecordingScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    h = harness()
    h.submit("a", [1, 2, 3])
    h.step()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(h.scheduler.ledger, "commit", fail)
        with pytest.raises(ZeroDivisionError):
            h.plan()
    problem = Replay(recorded[0].path).run().problem  # it is there at once, as after a crash
    assert problem is not None and "ZeroDivisionError" in problem.what and problem.step == 1
    with monkeypatch.context() as patch:
        patch.setattr("phloem.srt.scheduler.ledger.Ledger.commit", fail)
        problem = Replay(recorded[0].path).run().problem
    assert problem is not None and problem.step == 0


def test_rows_that_read_what_is_not_theirs_are_found(harness: Build) -> None:
    h = harness(kv_slots=64)
    kv = KvCheck(64, 1)
    h.submit("a", [1, 2, 3, 4], 3)
    h.submit("b", [1, 2, 3, 5], 3)
    plan = h.plan()
    work = h.scheduler.in_flight.work
    kv.step(plan, work)
    h.scheduler.apply(h.worker.run(plan))
    plan = h.plan()
    work = h.scheduler.in_flight.work
    first, second = plan.rows
    for wrong in (
        replace(first, slots=second.slots),  # written twice
        replace(first, slots=pack([64])),  # no such slot
        replace(first, slots=first.slots + pack([50])),  # more slots than tokens
        replace(first, epoch=77),
        replace(first, tokens=pack([9])),
    ):
        with pytest.raises(KvViolation):
            fork(kv).step(StepPlan(1, [wrong, second]), work)
    stolen: list[RowPlan] = [replace(first, slots=pack([slot_of(kv, second.row)])), second]
    with pytest.raises(KvViolation, match="does not hold"):
        fork(kv).step(StepPlan(1, stolen), work)
    failed = fork(kv)
    failed.failed()
    with pytest.raises(KvViolation, match="does not hold"):
        failed.step(plan, work)
    kv.step(plan, work)


def fork(kv: KvCheck) -> KvCheck:
    """A copy to make mistakes with."""
    return copy.deepcopy(kv)


def slot_of(kv: KvCheck, row: int) -> int:
    """A slot that `row` reads."""
    return int(kv._rows[row].slots[-1])


# --------------------------------------------------------------------------- files


def record_ends(data: bytes) -> set[int]:
    """Where the records of a file end."""
    ends, at = {len(MAGIC)}, len(MAGIC)
    while at < len(data):
        at += 4 + int.from_bytes(data[at : at + 4], "little")
        ends.add(at)
    return ends


def test_a_file_that_was_cut_off_replays_as_far_as_it_goes(
    records: list[Record], recorded: list[RecordingScheduler], tmp_path: Path
) -> None:
    data = recorded[0].path.read_bytes()
    rng = random.Random(1)
    head = data.index(b"receive")
    steps, whole = set(), record_ends(data)
    for end in [len(data) - 1, *(rng.randrange(head, len(data)) for _ in range(20))]:
        path = tmp_path / "cut"
        path.write_bytes(data[:end])
        report = replayed(path)
        assert report.cut or end in whole
        steps.add(report.steps)
    assert len(steps) > 5
    assert max(steps) == sum(isinstance(record, Applied) for record in records)


@pytest.mark.parametrize("data", [b"", b"PHLO", b"PK\3\4 and so on", MAGIC, MAGIC + b"\1\0\0\0\0"])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(data)
    with pytest.raises(RecordingError, match="other"):
        Replay(path)


def test_damage_is_told_with_its_place(records: list[Record], tmp_path: Path) -> None:
    path = rewritten(tmp_path / "bad", records)
    data = bytearray(path.read_bytes())
    place = data.index(b"apply")
    data[place : place + 5] = b"nappy"
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=r"at byte \d+.*nappy"):
        Replay(path).run()


def test_a_recording_is_never_written_over(harness: Build, tmp_path: Path) -> None:
    """A server that died and came up again keeps what led to that."""
    h = harness()
    paths = []
    for _ in range(3):
        scheduler = RecordingScheduler(h.limits, h.worker.ready(), h.clock, tmp_path / "rec")
        scheduler.close()
        paths.append(scheduler.path)
    assert [path.name for path in paths] == ["rec", "rec.1", "rec.2"]
    assert all(len(list(RecordReader(path))) == 1 for path in paths)


def test_a_server_that_stops_in_good_order_says_so(
    harness: Build, recorded: list[RecordingScheduler]
) -> None:
    """The process ends as soon as it has said that it is drained: all must be in the file."""
    h = harness()
    h.submit("a", [1, 2, 3], 4)
    h.scheduler.receive(Drain())
    h.submit("late", [1, 2, 3], 4)
    h.step()
    assert not Replay(recorded[0].path).run().drained
    h.run()
    report = replayed(recorded[0].path)
    assert report.drained and report.failed == 1
    assert report.steps == h.scheduler.counters.steps_total


def test_a_disk_that_fails_ends_the_recording_only(
    harness: Build, recorded: list[RecordingScheduler], caplog: pytest.LogCaptureFixture
) -> None:
    h = harness()
    file = recorded[0]._writer._file
    assert file is not None
    file.close()
    recorded[0]._writer._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    h.submit("a", [1, 2, 3], 4)
    h.run()
    recorded[0].close()
    assert h.replies["a"].end is not None
    assert "the recording" in caplog.text


def test_the_trace_of_a_recording_is_what_came_in(
    harness: Build, recorded: list[RecordingScheduler]
) -> None:
    h = harness(max_waiting=3)
    rng = random.Random(9)
    for index in range(12):
        h.submit(f"r{index}", [index % 2] * 6 + [rng.randrange(64)], 3, tenant="t", priority=2)
        h.clock.advance(0.5)
        if index % 4 == 3:
            h.run()
    h.run()
    recorded[0].close()
    report = replayed(recorded[0].path)
    trace = list(report.trace())
    accepted = {rid: reply for rid, reply in h.replies.items() if reply.accepted}
    assert 3 < len(trace) == len(accepted) < 12
    assert len({request.tenant for request in trace}) == 1 and trace[0].tenant != "t"
    assert report.seconds == pytest.approx(h.clock.now)
    assert trace[0].arrival == 0.0 and trace[0].priority == 2
    assert [r.arrival for r in trace] == sorted(r.arrival for r in trace)
    for request, reply in zip(trace, accepted.values(), strict=True):
        assert len(request.prompt_tokens()) == len(reply.prompt)
        assert len(request.output_tokens()) == len(reply.tokens)
