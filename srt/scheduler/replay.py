"""Drives a fresh scheduler with a recording, and tells where the two part.

The recorded results take the worker's place, the recorded clock the clock's. Each plan has to be
the recorded one, and each request gets one terminal reply; with `check`, after each step, every
slot has one owner, the tree is sound, and rows read nothing but their own KV.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec.structs import replace

from phloem.radix import IntegrityError
from phloem.srt.messages import Accepted, Drained, Failed, Submit, ToFrontend, Tokens
from phloem.srt.scheduler.core import Scheduler, SchedulerLimits
from phloem.srt.scheduler.kv_check import KvCheck, KvViolation
from phloem.srt.scheduler.record import plan_digest
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
    RecordingError,
    RecordReader,
)
from phloem.srt.scheduler.trace import TraceRequest
from phloem.srt.tier_messages import FromTier, KvDropped, KvLoaded, TierReady
from phloem.srt.wire import unpack


@dataclass(frozen=True)
class Problem:
    """Where a replay stopped: after `step` whole steps, at call `call` of the recording."""

    step: int
    call: int
    what: str


@dataclass
class Replayed:
    """One request as the replay saw it. Times are seconds of the recorded clock."""

    submit: Submit
    arrival: float
    first: float | None = None
    accepted: bool = False
    ended: bool = False
    tokens: list[int] = field(default_factory=list)

    def sequence(self) -> tuple[array[int], str]:
        """Prompt and output so far, and the namespace they are in."""
        return array("i", [*unpack(self.submit.prompt), *self.tokens]), self.submit.namespace


@dataclass
class Report:
    """What a replay found."""

    header: Header
    requests: list[Replayed] = field(default_factory=list)
    calls: int = 0
    steps: int = 0
    seconds: float = 0.0
    preemptions: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    drained: bool = False
    """The server was stopped in good order; otherwise it was killed, or runs."""
    cut: bool = False
    """The file ends in the middle of a record, which was left out."""
    slips: int = 0
    """Calls that read the clock another number of times than recorded: another Phloem wrote it."""
    problem: Problem | None = None

    @property
    def ttft(self) -> list[float]:
        """Seconds from arrival to the first token, sorted."""
        return sorted(r.first - r.arrival for r in self.requests if r.first is not None)

    def trace(self) -> Iterator[TraceRequest]:
        """The accepted requests as a trace, with labels as tokens."""
        accepted = [request for request in self.requests if request.accepted]
        begin = min((request.arrival for request in accepted), default=0.0)
        for request in accepted:
            submit = request.submit
            yield TraceRequest(
                id=submit.rid,
                arrival=request.arrival - begin,
                prompt=list(unpack(submit.prompt)),
                output=list(request.tokens),
                program=submit.program,
                tenant=submit.tenant,
                namespace=submit.namespace,
                priority=submit.priority,
            )


class _Diverged(Exception):
    """The replay is not what was recorded."""


class _Tape:
    """The recorded clock."""

    def __init__(self) -> None:
        self.now = 0
        self._ticks: Iterator[int] = iter(())
        self.missing = 0

    def __call__(self) -> float:
        try:
            self.now += next(self._ticks)
        except StopIteration:
            self.missing += 1
        return self.now / 1e9

    def load(self, ticks: list[int]) -> None:
        self._ticks = iter(ticks)

    def unload(self) -> bool:
        """Go to where the recorded call ended; whether the call read what was recorded."""
        rest = list(self._ticks)
        self.now += sum(rest)
        exact = not rest and not self.missing
        self.missing = 0
        return exact


class Replay:
    """A replay of the recording at `path`. Raises `RecordingError` if it is none, `OSError` if it
    cannot be read."""

    def __init__(self, path: Path, *, check: bool = True) -> None:
        self._path = path
        self._check = check
        header = next(iter(RecordReader(path)), None)
        if not isinstance(header, Header):
            raise RecordingError(f"{path} has no header")
        try:
            limits = msgspec.convert(header.limits, SchedulerLimits)
        except msgspec.ValidationError as error:
            raise RecordingError(
                f"{path} was written by Phloem {header.phloem}: {error}"
            ) from error
        self._tape = _Tape()
        self._tape.load(header.ticks)
        self.scheduler = Scheduler(limits, header.worker, self._tape)
        self._tape.unload()
        self._kv = KvCheck(header.worker.kv_slots, limits.page_size)
        self._keys: dict[bytes, bytes] = {}
        self._begin: int | None = None
        self._requests: dict[str, Replayed] = {}
        self._refused: str | None = None
        self.report = Report(header)

    def run(self) -> Report:
        """Drive the scheduler to the end of the recording, or to the first problem."""
        reader = RecordReader(self._path)
        for record in reader:
            if isinstance(record, Aliases):
                self._keys.update(record.keys)
        report, counters = self.report, self.scheduler.counters
        for call, raised in self._calls():
            try:
                self._drive(call, raised)
            except _Diverged as error:
                report.problem = Problem(counters.steps_total, report.calls, str(error))
                break
            report.calls += 1
        report.cut = reader.cut
        report.steps = counters.steps_total
        report.preemptions = counters.preemptions_total
        report.failed = counters.failed_total
        report.prompt_tokens = counters.prompt_tokens_total
        report.cached_tokens = counters.cached_tokens_total
        if self._begin is not None:
            report.seconds = (self._tape.now - self._begin) / 1e9
        return report

    def _calls(self) -> Iterator[tuple[Call, Raised | None]]:
        """Calls, each with the error it ended in."""
        call: Call | None = None
        for record in RecordReader(self._path):
            match record:
                case Header() | Aliases():
                    continue
                case Raised():
                    if call is not None:
                        yield call, record
                    call = None
                case _:
                    if call is not None:
                        yield call, None
                    call = record
        if call is not None:
            yield call, None

    # ------------------------------------------------------------------ calls

    def _drive(self, call: Call, raised: Raised | None) -> None:
        self._tape.load(call.ticks)
        try:
            self._call(call)
        except _Diverged:
            if raised is None:
                raise
        except KvViolation as error:
            raise _Diverged(str(error)) from error
        except Exception as error:
            # whatever goes wrong inside the scheduler is what a replay is there to find
            told = "as in the recording" if raised is not None else "unlike in the recording"
            raise _Diverged(f"{type(error).__name__}: {error} ({told})") from error
        if raised is not None:
            raise _Diverged(f"the recording has {raised.error} here, the replay does not")
        self.report.slips += not self._tape.unload()
        if self._begin is None and call.ticks:
            self._begin = self._tape.now
        self._listen(call.sent)
        if self._check and isinstance(call, Applied | FromTierCame):
            self._verify()

    def _call(self, call: Call) -> None:
        scheduler = self.scheduler
        match call:
            case Received():
                scheduler.receive(call.message)
                if isinstance(call.message, Submit):
                    self._submitted(call.message)
            case FromGrammarCame():
                scheduler.grammar(call.message)
            case FromTierCame():
                message = self._translated(call.message)
                self._kv.tier(message)
                scheduler.tier(message)
            case Applied():
                if call.message.error is not None:
                    self._kv.failed()
                flight = scheduler.in_flight
                scheduler.apply(call.message)
                if flight is not None and scheduler.in_flight is None and self._check:
                    self._kv.drew(flight.plan, flight.work, call.message)
            case Expired():
                scheduler.expire()
            case Planned():
                self._plan(call)
        for order in scheduler.to_tier:
            self._kv.ordered(order, map(Replayed.sequence, self._requests.values()))
        scheduler.to_tier.clear()
        scheduler.ledger.tree.events.clear()
        scheduler.grammars.outbox.clear()

    def _plan(self, recorded: Planned) -> None:
        plan = self.scheduler.next_step()
        if plan is None:
            if recorded.step is not None:
                raise _Diverged(f"nothing is planned; recorded are {recorded.rows} rows")
            return
        if recorded.step is None:
            raise _Diverged(f"{len(plan.rows)} rows are planned; none was recorded")
        if len(plan.rows) != recorded.rows:
            raise _Diverged(f"{len(plan.rows)} rows are planned; recorded are {recorded.rows}")
        if plan_digest(plan) != recorded.digest:
            raise _Diverged("a plan with other rows or slots than recorded")
        flight = self.scheduler.in_flight
        if self._check and flight is not None:
            self._kv.step(plan, flight.work)

    def _translated(self, message: FromTier) -> FromTier:
        """The message with the keys that the labels have, as far as they were needed."""
        match message:
            case TierReady():
                size = message.key_bytes
                keys = [message.keys[i : i + size] for i in range(0, len(message.keys), size)]
                return replace(message, keys=b"".join(map(self._key, keys)))
            case KvLoaded():
                return replace(message, corrupt=[self._key(key) for key in message.corrupt])
            case KvDropped(keys):
                return KvDropped([self._key(key) for key in keys])
            case _:
                return message

    def _key(self, key: bytes) -> bytes:
        return self._keys.get(key, key)

    # ------------------------------------------------------------------ what came of it

    def _submitted(self, message: Submit) -> None:
        request = Replayed(message, self._tape.now / 1e9)
        self.report.requests.append(request)
        if message.rid in self._requests:
            self._refused = message.rid  # the id is in use; its owner goes on
        else:
            self._requests[message.rid] = request

    def _listen(self, sent: int) -> None:
        messages = self.scheduler.to_frontend
        if len(messages) != sent:
            raise _Diverged(f"{len(messages)} messages to the frontend; recorded are {sent}")
        for message in messages:
            self._hear(message)
        messages.clear()

    def _hear(self, message: ToFrontend) -> None:
        now = self._tape.now / 1e9
        self.report.drained = self.report.drained or isinstance(message, Drained)
        if not isinstance(message, Accepted | Tokens | Failed):
            return
        if isinstance(message, Failed) and message.rid == self._refused:
            self._refused = None
            return
        request = self._requests.get(message.rid)
        if request is None:
            raise _Diverged(f"a reply to {message.rid}, which has ended or was never asked")
        match message:
            case Accepted():
                request.accepted = True
            case Tokens():
                request.tokens += message.tokens
                if request.first is None:
                    request.first = now
                request.ended = message.finish is not None
            case Failed():
                request.ended = True
        if request.ended:
            del self._requests[message.rid]

    def _verify(self) -> None:
        ledger = self.scheduler.ledger
        try:
            ledger.tree.check()
        except IntegrityError as error:
            raise _Diverged(f"the tree is broken: {error}") from error
        free, evictable, locked = ledger.pool.free, ledger.tree.evictable, ledger.tree.locked
        if free + evictable + locked + ledger.private != ledger.pool.capacity:
            raise _Diverged(
                f"{free} free, {evictable} evictable, {locked} locked and {ledger.private} private "
                f"slots are not the {ledger.pool.capacity} there are"
            )
        rows = [request.row for request in ledger.running.values()]
        if len(set(rows)) != len(rows):
            raise _Diverged("two requests have one row")
