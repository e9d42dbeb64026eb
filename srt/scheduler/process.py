"""The scheduler's process: one loop over three sockets, asleep when nothing happens.

It binds the sockets of its run directory, waits for the worker and the grammar process, tells the
frontend that it is ready, and then lets messages drive `Scheduler`.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import zmq

from phloem.srt.ipc import Channel
from phloem.srt.messages import (
    BackendReady,
    FromGrammar,
    FromWorker,
    GrammarReady,
    StepPlan,
    StepResult,
    StopGrammar,
    StopWorker,
    ToFrontend,
    ToGrammar,
    ToScheduler,
    ToWorker,
    WorkerReady,
)
from phloem.srt.scheduler.core import Scheduler, SchedulerLimits
from phloem.srt.scheduler.drafts import DraftLimits
from phloem.srt.scheduler.events import EventStream
from phloem.srt.scheduler.options import SchedulerProcessOptions
from phloem.srt.scheduler.record import RecordingScheduler
from phloem.srt.tier_messages import FromTier, StopTier, ToTier

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
BURST = 256
"""Messages taken from one socket before the others get their turn."""


class SchedulerProcess:
    """Sockets around a `Scheduler`. `run` returns when the frontend is gone or has said so."""

    def __init__(self, options: SchedulerProcessOptions) -> None:
        self.options = options
        context = zmq.Context()
        base = f"ipc://{Path(options.run_dir)}"
        self.frontend: Channel[ToFrontend, ToScheduler] = Channel(
            context, f"{base}/scheduler.sock", ToScheduler, bind=True
        )
        self.worker: Channel[ToWorker, FromWorker] = Channel(
            context, f"{base}/worker.sock", FromWorker, bind=True
        )
        self.grammar: Channel[ToGrammar, FromGrammar] = Channel(
            context, f"{base}/grammar.sock", FromGrammar, bind=True
        )
        self.lower: Channel[ToTier, FromTier] | None = None
        if options.tier:
            self.lower = Channel(context, f"{base}/tier.sock", FromTier, bind=True)
        self.events = EventStream(context, options.kv_events)
        self.poller = zmq.Poller()
        for channel in (self.frontend, self.worker, self.grammar):
            self.poller.register(channel.socket, zmq.POLLIN)
        if self.events.socket is not None:
            self.poller.register(self.events.socket, zmq.POLLIN)
        self.recorder: RecordingScheduler | None = None
        self.last_heartbeat = 0.0

    def run(self) -> None:
        scheduler = self._handshake()
        while True:
            self.poller.poll(self._timeout_ms(scheduler))
            self._take(scheduler)
            scheduler.expire()
            plan = scheduler.next_step()
            self._send(scheduler, plan)
            self._heartbeat(scheduler)

    def _handshake(self) -> Scheduler:
        """Wait for the worker and the grammar process, in whatever order they come up."""
        worker: WorkerReady | None = None
        grammar: GrammarReady | None = None
        while worker is None or grammar is None:
            self.poller.poll()
            message = self.worker.recv(0)
            if isinstance(message, WorkerReady):
                worker = message
            reply = self.grammar.recv(0)
            if isinstance(reply, GrammarReady):
                grammar = reply
        options = self.options
        limits = SchedulerLimits(
            max_running=options.max_running,
            max_waiting=options.max_waiting,
            max_step_tokens=options.max_step_tokens,
            request_timeout_s=options.request_timeout_s,
            eviction_policy=options.eviction_policy,
            schedule_policy=options.schedule_policy,
            sharing=options.sharing,
            page_size=options.page_size,
            pin_share=options.pin_share,
            itl_target_s=options.itl_target_s,
            tenants=options.tenants,
            drafts=DraftLimits(options.draft_tokens, options.draft_batch),
        )
        scheduler = self._scheduler(limits, worker)
        scheduler.grammar(grammar)
        if (
            self.lower is not None
        ):  # read from now on, so that polling does not return for it before
            self.poller.register(self.lower.socket, zmq.POLLIN)
        startup = {f"worker {k}": v for k, v in worker.startup.items()}
        startup |= {f"grammar {k}": v for k, v in grammar.startup.items()}
        self.frontend.send(
            BackendReady(
                kv_slots=scheduler.ledger.pool.capacity,
                context_length=scheduler.model.context_length,
                vocab_size=worker.vocab_size,
                max_running=options.max_running,
                startup=startup,
            )
        )
        return scheduler

    def _scheduler(self, limits: SchedulerLimits, worker: WorkerReady) -> Scheduler:
        record = self.options.record
        if record is None:
            return Scheduler(limits, worker, time.monotonic)
        self.recorder = RecordingScheduler(limits, worker, time.monotonic, Path(record))
        log.info("recording to %s", self.recorder.path)
        return self.recorder

    def _timeout_ms(self, scheduler: Scheduler) -> int:
        """Until the next heartbeat or deadline, whichever is first."""
        now = time.monotonic()
        wake = self.last_heartbeat + HEARTBEAT_SECONDS
        deadline = scheduler.deadlines.next_deadline()
        if deadline is not None:
            wake = min(wake, deadline)
        return max(0, min(int((wake - now) * 1000) + 1, int(HEARTBEAT_SECONDS * 1000)))

    def _take(self, scheduler: Scheduler) -> None:
        for _ in range(BURST):
            if (message := self.frontend.recv(0)) is None:
                break
            scheduler.receive(message)
        for _ in range(BURST):
            if (reply := self.grammar.recv(0)) is None:
                break
            scheduler.grammar(reply)
        while (result := self.worker.recv(0)) is not None:
            if isinstance(result, StepResult):
                scheduler.apply(result)
        while self.lower is not None and (word := self.lower.recv(0)) is not None:
            scheduler.tier(word)

    def _send(self, scheduler: Scheduler, plan: StepPlan | None) -> None:
        """The plan first: the worker computes while everybody else is told."""
        if plan is not None:
            self.worker.send(plan)
        for order in scheduler.grammars.outbox:
            self.grammar.send(order)
        scheduler.grammars.outbox.clear()
        if self.lower is not None:
            for transfer in scheduler.to_tier:
                self.lower.send(transfer)
            scheduler.to_tier.clear()
        self.events.publish(scheduler)
        for message in scheduler.to_frontend:
            self.frontend.send(message)
        scheduler.to_frontend.clear()

    def _heartbeat(self, scheduler: Scheduler) -> None:
        """A snapshot each second, and one when the server falls idle."""
        now = time.monotonic()
        idle = scheduler.in_flight is None and not scheduler.grammars.holding
        if now - self.last_heartbeat >= HEARTBEAT_SECONDS or (idle and not self._was_idle):
            self.last_heartbeat = now
            bad = sum(c.bad_messages for c in (self.frontend, self.worker, self.grammar))
            self.frontend.send(scheduler.snapshot(bad_messages=bad))
        self._was_idle = idle

    _was_idle = True

    def close(self) -> None:
        """Tell the others to leave, so that none of them waits for a message for ever."""
        if self.lower is not None:
            self.lower.send(StopTier())
            self.lower.close()
        self.events.close()
        if self.recorder is not None:
            self.recorder.close()
        self.worker.send(StopWorker())
        self.grammar.send(StopGrammar())
        for channel in (self.frontend, self.worker, self.grammar):
            channel.close()


def main(options: SchedulerProcessOptions) -> None:
    process = SchedulerProcess(options)
    try:
        process.run()
    finally:
        process.close()
