"""The worker's loop over real sockets, with a scripted model: plans in, masks in, results out."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Never

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray

from phloem.constrained.bitmask import MaskBuffer, pack_mask, unpack_mask
from phloem.srt import timing
from phloem.srt.ipc import Channel, make_run_dir
from phloem.srt.messages import (
    Draft,
    FromWorker,
    LogprobsMode,
    RowPlan,
    RowStart,
    SamplingParams,
    StepMasks,
    StepPlan,
    StepResult,
    StopWorker,
    TokenLogprob,
    ToWorker,
    WorkerReady,
)
from phloem.srt.wire import pack
from phloem.srt.worker.masks import MaskInbox, Masks
from phloem.srt.worker.process import Worker
from phloem.srt.worker.runner import StepHidden

VOCAB = 100
ROWS = 4
FURTHER = 4
"""Rows of the mask buffer for further draws."""
GREEDY = SamplingParams(temperature=0)


@dataclass
class ScriptedRunner:
    """The hidden state of row r is r; its logits peak at token 10 r + 5, then fall with the id.
    `narrowed` has the draws, step by step, for which masks came with the logits: what these forbid
    is -inf."""

    narrowed: list[set[int]] = field(default_factory=list)
    committed: list[tuple[int, int]] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    before_forward: Callable[[StepPlan], None] = lambda plan: None
    before_logits: Callable[[StepHidden], None] = lambda step: None
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    embeddings: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    nan_rows: set[int] = field(default_factory=set)

    def forward(self, plan: StepPlan) -> StepHidden:
        self.before_forward(plan)
        rows = [
            i
            for i, row in enumerate(plan.rows)
            for _ in ([] if not row.sample else [0] if row.draft is None else row.draft.draws)
        ]
        hidden = np.array([[plan.rows[i].row] for i in rows], np.float32)
        return StepHidden(rows, hidden, self.prompt_logprobs, self.embeddings)

    def logits(
        self, step: StepHidden, masks: Mapping[int, NDArray[np.int32]]
    ) -> NDArray[np.float32]:
        self.before_logits(step)
        self.narrowed.append(set(masks))
        logits = np.tile(np.linspace(1, 0, VOCAB, dtype=np.float32), (len(step.rows), 1))
        for i, (values, row) in enumerate(zip(logits, step.hidden[:, 0].astype(int), strict=True)):
            values[10 * row + 5] = 9
            if row in self.nan_rows:
                values[0] = np.nan
            if i in masks:
                values[~unpack_mask(masks[i], VOCAB)] = -np.inf
        return logits

    def commit(self, row: int, token: int, rejected: int = 0) -> None:
        self.committed.append((row, token))
        self.rejected.append(rejected)


class Harness:
    """A worker in a thread; the test plays scheduler and grammar process."""

    def __init__(self, mask_timeout_s: float = 20.0) -> None:
        self.run_dir = make_run_dir()
        base = f"ipc://{self.run_dir}"
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.runner = ScriptedRunner()
        self.scheduler: Channel[ToWorker, FromWorker] = Channel(
            self.context, f"{base}/worker.sock", FromWorker, bind=True
        )
        self._worker_end: Channel[FromWorker, ToWorker] = Channel(
            self.context, f"{base}/worker.sock", ToWorker
        )
        self._pull: Channel[Never, StepMasks] = Channel(
            self.context, f"{base}/masks.sock", StepMasks, kind=zmq.PULL, bind=True
        )
        self.grammar: Channel[StepMasks, Any] = Channel(
            self.context, f"{base}/masks.sock", StepMasks, kind=zmq.PUSH
        )
        # As in `main`: the side that binds can send only once it has heard from the other.
        self._worker_end.send(WorkerReady(100, 100, VOCAB, [99], {}))
        assert isinstance(self.scheduler.recv(20_000), WorkerReady)
        buffer = MaskBuffer.create(self.run_dir / "masks", ROWS + FURTHER, VOCAB)
        self.masks = MaskBuffer.open(self.run_dir / "masks", ROWS + FURTHER, VOCAB)
        worker = Worker(
            self.runner, VOCAB, buffer, MaskInbox(self._pull), mask_timeout_s=mask_timeout_s
        )
        self.thread = threading.Thread(target=worker.serve, args=(self._worker_end,), daemon=True)
        self.thread.start()

    def step(self, step_id: int, *rows: RowPlan) -> StepResult:
        self.scheduler.send(StepPlan(step_id, list(rows)))
        return self.result()

    def result(self) -> StepResult:
        result = self.scheduler.recv(20_000)
        assert isinstance(result, StepResult)
        return result

    def fill(self, step_id: int, row: int, *tokens: int) -> None:
        self.masks.row(step_id, row)[:] = pack_mask(tokens, VOCAB)

    def close(self) -> None:
        self.scheduler.send(StopWorker())
        self.thread.join(20)
        assert not self.thread.is_alive()
        for channel in (self.scheduler, self._worker_end, self._pull, self.grammar):
            channel.close()
        self.context.term()
        shutil.rmtree(self.run_dir)


@pytest.fixture
def harness() -> Iterator[Harness]:
    running = Harness()
    yield running
    running.close()


def first(
    row: int,
    *,
    epoch: int = 1,
    masked: bool = False,
    sample: bool = True,
    params: SamplingParams = GREEDY,
) -> RowPlan:
    """A row's first step: a prompt of two tokens."""
    start = RowStart(2, b"", params, 0, [99])
    return RowPlan(row, epoch, pack([1, 2]), pack([3, 4]), sample, masked, start)


def following(row: int, *, epoch: int = 1, masked: bool = False) -> RowPlan:
    return RowPlan(row, epoch, b"", pack([7]), True, masked)


def drafted(row: int, draft: Draft, *, draft_row: int = ROWS) -> RowPlan:
    """A decode step of a masked row, with a draft."""
    slots = pack(range(7, 8 + draft.computed))
    return RowPlan(row, 1, b"", slots, True, True, draft=draft, draft_row=draft_row)


def test_rows_come_back_in_the_plans_order(harness: Harness) -> None:
    result = harness.step(1, first(2, epoch=8), first(0, epoch=9, sample=False), first(1))
    assert [(r.epoch, r.token, r.error) for r in result.rows] == [
        (8, 25, None),
        (9, -1, None),
        (1, 15, None),
    ]
    assert result.step_id == 1
    assert harness.runner.committed == [(2, 25), (1, 15)]
    again = harness.step(2, following(1), following(2, epoch=8))
    assert [r.token for r in again.rows] == [15, 25]


def test_prompt_logprobs_are_handed_on(harness: Harness) -> None:
    expected = [TokenLogprob(2, -0.5)]
    harness.runner.prompt_logprobs = {1: expected}
    result = harness.step(1, first(0), first(1, sample=False))
    assert [r.prompt_logprobs for r in result.rows] == [None, expected]


def test_embeddings_are_handed_on_unless_they_are_not_finite(harness: Harness) -> None:
    harness.runner.embeddings = {
        0: np.array([1, -2], np.float32),
        2: np.array([np.inf, 0], np.float32),
    }
    rows = harness.step(1, *(first(i, sample=False) for i in range(3))).rows
    assert rows[0].embedding == np.array([1, -2], "<f4").tobytes()
    assert rows[1].embedding is None and rows[1].error is None
    assert rows[2].embedding is None and "not finite" in str(rows[2].error)


def test_a_masked_row_waits_for_its_mask(harness: Harness) -> None:
    """The forward pass does not: the mask is only made once it runs."""

    def make_mask(plan: StepPlan) -> None:
        harness.fill(plan.step_id, 1, 50, 60)
        harness.grammar.send(StepMasks(plan.step_id, [1]))

    harness.runner.before_forward = make_mask
    result = harness.step(1, first(0), first(1, masked=True))
    assert [r.token for r in result.rows] == [5, 50]


def test_masks_of_a_step_may_come_in_pieces(harness: Harness) -> None:
    harness.scheduler.send(StepPlan(4, [first(0, masked=True), first(1, masked=True)]))
    harness.fill(4, 1, 61)
    harness.grammar.send(StepMasks(4, [1]))
    assert harness.scheduler.recv(50) is None
    harness.fill(4, 0, 62)
    harness.grammar.send(StepMasks(4, [0]))
    assert [r.token for r in harness.result().rows] == [62, 61]


def test_old_masks_are_dropped_and_early_ones_kept(harness: Harness) -> None:
    harness.fill(5, 0, 40)
    harness.fill(6, 0, 41)
    for step in (3, 6, 5):
        harness.grammar.send(StepMasks(step, [0]))
    assert harness.step(5, first(0, masked=True)).rows[0].token == 40
    assert harness.step(6, following(0, masked=True)).rows[0].token == 41


def test_a_failed_matcher_ends_one_row(harness: Harness) -> None:
    harness.fill(1, 2, 70)
    harness.grammar.send(StepMasks(1, [2], {1: "token 5 is not legal"}))
    result = harness.step(1, first(0), first(1, masked=True), first(2, masked=True))
    assert [(r.token, r.error) for r in result.rows] == [
        (5, None),
        (-1, "token 5 is not legal"),
        (70, None),
    ]
    assert harness.runner.committed == [(0, 5), (2, 70)]


def test_a_mask_that_never_comes_ends_its_row() -> None:
    harness = Harness(mask_timeout_s=0.05)
    result = harness.step(1, first(0), first(1, masked=True))
    assert result.rows[0].token == 5
    assert result.rows[1].error == "no mask came from the grammar process within 0.05 s"
    assert result.error is None
    assert harness.step(2, following(0)).rows[0].token == 5
    harness.close()


def test_an_empty_mask_ends_its_row(harness: Harness) -> None:
    harness.grammar.send(StepMasks(1, [1]))
    result = harness.step(1, first(0), first(1, masked=True))
    assert [r.error for r in result.rows] == [None, "the vocabulary mask has no legal token"]


def test_nan_logits_end_their_row(harness: Harness) -> None:
    harness.runner.nan_rows = {1}
    result = harness.step(1, first(0), first(1), first(2))
    assert [r.token for r in result.rows] == [5, -1, 25]
    assert result.rows[1].error == "the model gave nan as the logit of token 0"


def test_a_failed_forward_is_the_steps_error_and_the_worker_lives_on(harness: Harness) -> None:
    def fail(plan: StepPlan) -> None:
        raise MemoryError("no room")

    harness.runner.before_forward = fail
    result = harness.step(1, first(0, epoch=4), first(1))
    assert result.error == "MemoryError: no room"
    assert [(r.epoch, r.token) for r in result.rows] == [(4, -1), (1, -1)]
    harness.runner.before_forward = lambda plan: None
    assert harness.step(2, first(0, epoch=5)).rows[0].token == 5


def test_failed_logits_end_the_rows_that_sample_and_the_kv_stands(harness: Harness) -> None:
    def fail(step: StepHidden) -> None:
        raise MemoryError("no room")

    harness.runner.before_logits = fail
    harness.grammar.send(StepMasks(1, [], {2: "token 5 is not legal"}))
    result = harness.step(1, first(0), first(1, sample=False), first(2, masked=True))
    assert result.error is None
    assert [r.error for r in result.rows] == [
        "sampling failed: MemoryError: no room",
        None,
        "token 5 is not legal",
    ]
    harness.runner.before_logits = lambda step: None
    assert harness.step(2, following(1)).rows[0].token == 15


def test_the_model_gets_the_masks_but_of_rows_that_want_raw_logprobs(harness: Harness) -> None:
    def logprobs(mode: LogprobsMode) -> SamplingParams:
        return SamplingParams(temperature=0, logprobs=0, logprobs_mode=mode)

    for row in range(3):
        harness.fill(1, row, 50, 60)
    harness.grammar.send(StepMasks(1, [0, 1, 2]))
    result = harness.step(
        1,
        first(3),
        first(0, masked=True),
        first(1, masked=True, params=logprobs(LogprobsMode.RAW)),
        first(2, masked=True, params=logprobs(LogprobsMode.PROCESSED)),
    )
    assert harness.runner.narrowed == [{1, 3}]
    assert [r.token for r in result.rows] == [35, 50, 50, 50]
    raw, processed = (result.rows[i].logprob for i in (2, 3))
    assert raw is not None
    assert processed is not None
    assert raw.logprob < -8  # token 15 has a logit of 9, all others of at most 1
    assert processed.logprob > -1


class Clock:
    """Stands in for the module `time`: `perf_counter` moves only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def take(self, seconds: float) -> None:
        self.now += seconds


class SlowInbox(MaskInbox):
    """Every mask is there, after 4 seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def wait(self, step_id: int, rows: Set[int], timeout_s: float) -> Masks:
        self._clock.take(4)
        return Masks(frozenset(rows), {}, frozenset())


def test_the_time_of_a_step_is_told_by_what_took_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    runner = ScriptedRunner(
        before_forward=lambda plan: clock.take(1), before_logits=lambda step: clock.take(2)
    )
    masks = MaskBuffer.create(tmp_path / "masks", ROWS, VOCAB)
    worker = Worker(runner, VOCAB, masks, SlowInbox(clock))
    result = worker.step(StepPlan(1, [first(0, masked=True)]))
    assert (result.forward_seconds, result.mask_wait_seconds) == (3, 4)
    assert result.sample_seconds == 0


def test_a_malformed_message_is_skipped(harness: Harness) -> None:
    for data in (b"", b"\xc1", b"\x80", b"cos\nsystem\n", b"\x93\xa4step"):
        harness.scheduler.socket.send(data)
    assert harness.step(1, first(0)).rows[0].token == 5


def test_nonsense_in_a_row_is_that_rows_error(harness: Harness) -> None:
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    odd = RowStart(2, b"", params, 0, [], history=b"abc")
    foreign = RowStart(2, b"", SamplingParams(temperature=0, logit_bias={VOCAB: 1.0}), 0, [])
    result = harness.step(
        1,
        RowPlan(0, 1, pack([1]), pack([3]), True, start=odd),
        RowPlan(1, 1, pack([1]), pack([3]), True, start=foreign),
        following(2),
        first(3),
    )
    assert result.error is None
    errors = [row.error or "" for row in result.rows]
    assert "multiple of item size" in errors[0]
    assert errors[1] == "logit_bias: token 100 is not in a vocabulary of 100"
    assert errors[2] == "row 2 was never started in epoch 1"
    assert result.rows[3].token == 35


def test_an_epoch_that_is_over_is_an_error(harness: Harness) -> None:
    harness.step(1, first(0, epoch=1))
    harness.step(2, first(0, epoch=2))
    assert harness.step(3, following(0, epoch=1)).rows[0].error is not None
    assert harness.step(4, following(0, epoch=2)).rows[0].token == 5


def test_a_row_beyond_the_mask_buffer_does_not_kill(harness: Harness) -> None:
    beyond = ROWS + FURTHER
    harness.grammar.send(StepMasks(1, [beyond]))
    result = harness.step(1, first(beyond, masked=True))
    assert result.rows[0].error == f"sampling failed: IndexError: mask row {beyond} of {beyond}"
    assert harness.step(2, first(0)).rows[0].token == 5


def test_it_sleeps_when_idle(harness: Harness) -> None:
    harness.step(1, first(0))
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


@pytest.mark.parametrize(
    ("legal", "accepted", "token"),
    [
        ([15, 15, 15], 4, 15),  # all that was guessed, and one more
        ([15, 15, 60], 4, 60),
        ([15, 60, 15], 3, 60),  # the second guess was wrong
        ([60, 15, 15], 0, 60),
        ([15, 15, None], 3, 15),  # the third draw has no mask: it is left to the next step
        ([15, None, 15], 0, 15),
    ],
)
def test_a_draft_is_followed_while_it_is_what_is_drawn(
    harness: Harness, legal: list[int | None], accepted: int, token: int
) -> None:
    """Tokens 15 (drawn), 2, 3 (forced), 15 (drawn): draws behind 0, 3 and 4 of them."""
    harness.step(1, first(0), first(1))
    rows = [1, ROWS, ROWS + 1]
    for row, only in zip(rows, legal, strict=True):
        harness.fill(2, row, *([] if only is None else [only]))
    failed = {row: "no" for row, only in zip(rows, legal, strict=True) if only is None}
    ready = [row for row in rows if row not in failed]
    harness.grammar.send(StepMasks(2, ready, failed))
    plan = drafted(1, Draft([15, 2, 3, 15], [0, 3, 4]))
    result = harness.step(2, following(0), plan, first(2))
    assert [(r.accepted, r.token, r.error) for r in result.rows] == [
        (0, 5, None),
        (accepted, token, None),
        (0, 25, None),
    ]
    assert harness.runner.committed[2:] == [(0, 5), (1, token), (2, 25)]
    assert harness.runner.rejected[2:] == [0, 4 - accepted, 0]


@pytest.mark.parametrize(("legal", "accepted", "token"), [(15, 5, -1), (60, 2, 60)])
def test_behind_a_draft_that_ends_nothing_is_drawn(
    harness: Harness, legal: int, accepted: int, token: int
) -> None:
    harness.step(1, first(1))
    harness.fill(2, 1, 15)
    harness.fill(2, ROWS + 2, legal)
    harness.grammar.send(StepMasks(2, [1, ROWS + 2]))
    draft = Draft([15, 8, 15, 8, 8], [0, 2])  # the last three are not computed
    row = harness.step(2, drafted(1, draft, draft_row=ROWS + 2)).rows[0]
    assert (row.accepted, row.token, row.error) == (accepted, token, None)
    assert harness.runner.rejected[1:] == [0]


def test_a_draft_tells_of_the_closings_that_its_draws_met(harness: Harness) -> None:
    harness.step(1, first(1))
    for step, second in ((2, 15), (3, 60)):
        for row, only in ((1, 15), (ROWS, second), (ROWS + 1, 15)):
            harness.fill(step, row, only)
        harness.grammar.send(StepMasks(step, [1, ROWS, ROWS + 1], closing=[ROWS + 1]))
        result = harness.step(step, drafted(1, Draft([15, 15], [0, 1, 2])))
        assert result.rows[0].closing == (second == 15)


def test_a_drafts_row_without_its_first_mask_ends(harness: Harness) -> None:
    harness.step(1, first(1))
    harness.grammar.send(StepMasks(2, [], {1: "the matcher failed", ROWS: "the matcher failed"}))
    row = harness.step(2, drafted(1, Draft([15], [0, 1]))).rows[0]
    assert (row.accepted, row.token, row.error) == (0, -1, "the matcher failed")


def test_draws_of_a_draft_have_the_noise_and_penalties_of_their_own_places(
    harness: Harness,
) -> None:
    """The same tokens, one by one and along a draft that is sometimes right."""
    params = SamplingParams(temperature=3.0, frequency_penalty=0.7, min_tokens=9)
    harness.step(1, first(1, params=params), first(2, params=params))
    alone = [harness.step(step, following(1)).rows[0].token for step in range(2, 10)]
    along: list[int] = []
    step = 10
    while len(along) < len(alone):
        right = alone[len(along) : len(along) + 2]
        guess = [*right[:1], 3, 4] if len(along) % 2 else [*right, 4]
        for row in (2, ROWS, ROWS + 1, ROWS + 2):
            harness.fill(step, row, *range(VOCAB))
        harness.grammar.send(StepMasks(step, [2, ROWS, ROWS + 1, ROWS + 2]))
        drew = harness.step(step, drafted(2, Draft(guess, [0, 1, 2, 3]))).rows[0]
        assert drew.accepted >= 1
        along += [*guess[: drew.accepted], drew.token]
        step += 1
    assert along[: len(alone)] == alone
