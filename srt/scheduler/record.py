"""A scheduler that writes down what comes into it, for `phloem replay`.

It takes the place of a `Scheduler` and has the same interface. Each call is recorded with what the
clock said in it, and each plan with a digest, so that a replay is the same to the nanosecond and
can tell where it is not. Users' words are replaced by labels (`phloem.srt.scheduler.labels`).
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from struct import Struct

import msgspec
from msgspec.structs import replace

from phloem.srt.messages import (
    Drained,
    Forced,
    FromGrammar,
    GrammarJumped,
    RowResult,
    StepPlan,
    StepResult,
    Submit,
    ToScheduler,
    WorkerReady,
)
from phloem.srt.scheduler.core import Scheduler, SchedulerLimits
from phloem.srt.scheduler.labels import LABELS, LabelChain, Labels
from phloem.srt.scheduler.output import Ending
from phloem.srt.scheduler.record_file import (
    Aliases,
    Applied,
    Call,
    Expired,
    FromGrammarCame,
    FromTierCame,
    Header,
    Planned,
    Raised,
    Received,
    RecordWriter,
)
from phloem.srt.scheduler.request import Request
from phloem.srt.tier.chain import block_keys
from phloem.srt.tier_messages import FromTier, TierReady

ALIASES = 1 << 16
"""Block keys that are remembered as written, so that they are not written again."""

_ROW = Struct("<iiiiBBB")


def plan_digest(plan: StepPlan) -> bytes:
    """What a plan decides: rows, admissions, slots, how far, what is sampled; not the tokens."""
    digest = blake2b(digest_size=8)
    for row in plan.rows:
        start = b"" if row.start is None else row.start.prefix_slots
        sizes = len(row.slots), len(start)
        flags = not row.tokens, row.sample, row.masked
        digest.update(_ROW.pack(row.row, row.epoch, *sizes, *flags))
        digest.update(row.slots)
        digest.update(start)
    return digest.digest()


class _Ticks:
    """A clock of whole nanoseconds that notes what it said while a call is recorded."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = 0
        self._noted: list[int] | None = None

    def __call__(self) -> float:
        now = round(self._clock() * 1e9)
        if self._noted is not None:
            self._noted.append(now - self._last)
            self._last = now
        return now / 1e9

    def note(self) -> None:
        """A call begins."""
        self._noted = []

    def take(self) -> list[int]:
        """It is over: what was said."""
        noted, self._noted = self._noted or [], None
        return noted


@dataclass(slots=True, eq=False, kw_only=True)
class _Labelled(Request):
    """A request with its labels."""

    chain: LabelChain


def _chain(request: Request) -> LabelChain:
    assert isinstance(request, _Labelled)
    return request.chain


def _labels_of(request: Request) -> array[int]:
    """What waiting requests are sorted by: what a replay has for tokens."""
    return _chain(request).labels


class RecordingScheduler(Scheduler):
    """Records to `path`, or beside it if that exists: see `RecordWriter`."""

    def __init__(
        self,
        limits: SchedulerLimits,
        worker: WorkerReady,
        clock: Callable[[], float],
        path: Path,
    ) -> None:
        self._labels = Labels(worker.vocab_size)
        self._submitted: LabelChain | None = None
        self._block_tokens: int | None = None
        self._aliased: OrderedDict[bytes, None] = OrderedDict()
        self._ticks = _Ticks(clock)
        self._writer = RecordWriter(path)
        self.path = self._writer.path
        self._ticks.note()
        super().__init__(limits, worker, self._ticks, sort_key=_labels_of)
        self._writer.write(
            Header(
                phloem=version("phloem"),
                started=time.time(),
                limits=self._hidden_limits(limits),
                worker=replace(worker, vocab_size=LABELS, startup={}),
                ticks=self._ticks.take(),
            )
        )
        self._writer.flush()

    def _hidden_limits(self, limits: SchedulerLimits) -> dict[str, object]:
        fields: dict[str, object] = msgspec.to_builtins(limits)
        tenants = {self._labels.name(name): value for name, value in limits.tenants.items()}
        return fields | {"tenants": msgspec.to_builtins(tenants)}

    def close(self) -> None:
        """Write what is left; the scheduler must not be used any more."""
        self._writer.close()

    @contextmanager
    def _recorded(self, record: Callable[[list[int], int], Call]) -> Iterator[None]:
        """A call of the scheduler, written down when it is over, however it ends."""
        before = len(self.to_frontend)
        self._ticks.note()
        try:
            yield
        except BaseException as error:
            self._write(record, before)
            self._writer.write(Raised(type(error).__name__))
            self._writer.flush()
            raise
        self._write(record, before)
        if self.draining and Drained() in self.to_frontend[before:]:
            self._writer.flush()  # the process may be ended from now on

    def _write(self, record: Callable[[list[int], int], Call], before: int) -> None:
        self._writer.write(record(self._ticks.take(), len(self.to_frontend) - before))

    # ------------------------------------------------------------------ calls

    def receive(self, message: ToScheduler) -> None:
        if isinstance(message, Submit):
            self._submitted = self._labels.chain(message.prompt, message.namespace)
            hidden: ToScheduler = self._labels.submit(message, self._submitted)
        else:
            hidden = self._labels.received(message)
        with self._recorded(lambda ticks, sent: Received(ticks, sent, hidden)):
            super().receive(message)

    def _admit(self, message: Submit) -> Request:
        request = super()._admit(message)
        assert self._submitted is not None
        values = {field.name: getattr(request, field.name) for field in fields(request)}
        labelled = _Labelled(**values, chain=self._submitted)
        self._alias(labelled)
        return labelled

    def grammar(self, message: FromGrammar) -> None:
        if isinstance(message, GrammarJumped):
            self._grammar_jumped(message)
            return
        hidden = self._labels.grammar(message)
        with self._recorded(lambda ticks, sent: FromGrammarCame(ticks, sent, hidden)):
            super().grammar(message)

    def _grammar_jumped(self, message: GrammarJumped) -> None:
        """Forced tokens get the labels of the requests whose output they become."""
        rows: list[Forced] = []
        for row in message.rows:
            request = self.grammars.asked(row.uid)
            rows.append(Forced(row.uid, []) if request is None else self._hidden(request, row))
        with self._recorded(lambda ticks, sent: FromGrammarCame(ticks, sent, GrammarJumped(rows))):
            super().grammar(message)

    def _hidden(self, request: Request, row: Forced) -> Forced:
        """Forced tokens and a draft of what follows, in labels."""
        drafted = [] if row.draft is None else row.draft.tokens
        labels = self._forced_labels(request, [*row.tokens, *drafted])
        count = len(row.tokens)
        draft = None if row.draft is None else replace(row.draft, tokens=labels[count:])
        return replace(row, tokens=labels[:count], draft=draft)

    def _force(self, request: Request, tokens: list[int]) -> Ending | None:
        length, labels = len(request.tokens), self._forced_labels(request, tokens)
        ending = super()._force(request, tokens)
        self._grown(request, length, labels)
        return ending

    def _drawn(self, request: Request, row: RowResult) -> list[int]:
        """Labels of what a row drew: of its draft, and behind it."""
        draft = request.draft
        tokens = [] if draft is None else draft.tokens[: row.accepted]
        if row.token < 0:
            return _chain(request).ahead(tokens)
        *labels, last = _chain(request).ahead([*tokens, row.token])
        return [*labels, row.token if self._stops(request, row.token, len(tokens)) else last]

    def _grown(self, request: Request, length: int, labels: list[int]) -> None:
        """The tokens from `length` on are new, and these stand for them."""
        chain = _chain(request)
        for token, label in zip(request.tokens[length:], labels, strict=False):
            chain.label(token)
            chain.append(label)
        size = self._block_tokens
        if size and length // size < len(request.tokens) // size:
            self._alias(request)

    def _forced_labels(self, request: Request, tokens: list[int]) -> list[int]:
        """Labels of forced tokens; one that ends the request stays itself, as in `apply`."""
        labels = _chain(request).ahead(tokens)
        for i, token in enumerate(tokens):
            if token in request.stop_ids:
                labels[i] = token
                break
        return labels

    def tier(self, message: FromTier) -> None:
        if isinstance(message, TierReady):
            self._block_tokens = message.block_tokens
            for request in self._by_rid.values():
                self._alias(request)
        hidden = self._labels.tier(message)
        with self._recorded(lambda ticks, sent: FromTierCame(ticks, sent, hidden)):
            super().tier(message)

    def next_step(self) -> StepPlan | None:
        plan: StepPlan | None = None

        def record(ticks: list[int], sent: int) -> Planned:
            if plan is None:
                return Planned(ticks, sent)
            return Planned(ticks, sent, plan.step_id, len(plan.rows), plan_digest(plan))

        with self._recorded(record):
            plan = super().next_step()
        return plan

    def expire(self) -> None:
        with self._recorded(Expired):
            super().expire()

    def apply(self, result: StepResult) -> None:
        flight = self.in_flight
        known = flight is not None and flight.plan.step_id == result.step_id
        work = flight.work if flight is not None and known else []
        requests = [w.request for w in work] if len(work) == len(result.rows) else []
        lengths = [len(request.tokens) for request in requests]
        drawn = [self._drawn(*pair) for pair in zip(requests, result.rows, strict=False)]
        written = [-1] * len(result.rows)
        for index, labels in enumerate(drawn):
            if result.rows[index].token >= 0:
                written[index] = labels[-1]
        hidden = self._labels.result(result, written)
        with self._recorded(lambda ticks, sent: Applied(ticks, sent, hidden)):
            super().apply(result)
            for request, length, labels in zip(requests, lengths, drawn, strict=True):
                self._grown(request, length, labels)

    def _stops(self, request: Request, token: int, before: int) -> bool:
        """Whether `token`, sampled behind `before` others, ends the request. It then stays itself:
        it never comes into the tree, and the replay has to know it. Elsewhere a stop token is a
        token as any."""
        if token not in request.stop_ids:
            return False
        longer = request.output_len + before + 1 >= request.sampling.min_tokens
        return longer or request.constraint is not None

    # ------------------------------------------------------------------ the lower tier

    def _alias(self, request: Request) -> None:
        """Say which block keys of the labels stand for those that the tier knows."""
        if self._block_tokens is None:
            return
        labels = _chain(request).labels
        # A stop token that ended the request stands for itself, and not for what it is in a prompt.
        end = len(labels) - (labels[-1] < self._labels.first_label)
        theirs = block_keys(request.tokens[:end], request.namespace, self._block_tokens)
        namespace = self._labels.name(request.namespace)
        ours = block_keys(labels[:end], namespace, self._block_tokens)
        new: dict[bytes, bytes] = {}
        for key, ours_key in zip(theirs, ours, strict=True):
            if key not in self._aliased:
                new[self._labels.key(key)] = ours_key
            self._aliased[key] = None
            self._aliased.move_to_end(key)
        while len(self._aliased) > ALIASES:
            self._aliased.popitem(last=False)
        if new:
            self._writer.write(Aliases(new))
