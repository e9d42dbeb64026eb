"""The grammar process: compiles, advances matchers, fills masks into shared memory.

It is asleep until a message, a finished compile or a deadline wakes it. A compile that is past its
deadline cannot be stopped, so the process says so and ends (exit code `OVERDUE`); its successor is
told everything that is still needed.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import time
from pathlib import Path

import psutil
import zmq

from phloem.constrained.backends import create_backend
from phloem.constrained.bitmask import MaskBuffer
from phloem.constrained.compiler import Compiler, Outcome
from phloem.constrained.service import GrammarService, MaskRequest
from phloem.srt.checkpoint import open_checkpoint
from phloem.srt.errors import ErrorInfo
from phloem.srt.grammar.options import GrammarOptions
from phloem.srt.ipc import Channel
from phloem.srt.messages import (
    FromGrammar,
    GrammarClose,
    GrammarCompile,
    GrammarCompiled,
    GrammarReady,
    GrammarReplay,
    GrammarStep,
    StepMasks,
    StopGrammar,
    ToGrammar,
)

log = logging.getLogger(__name__)

OVERDUE = 3
"""Exit code after a compile that could not be stopped."""


class GrammarProcess:
    """Sockets, wake-ups and deadlines around a `GrammarService`."""

    def __init__(self, options: GrammarOptions) -> None:
        began = time.monotonic()
        self.options = options
        vocabulary = open_checkpoint(options.checkpoint).vocabulary()
        opened = time.monotonic()
        backend = create_backend("xgrammar", vocabulary)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.compiler = Compiler(
            backend,
            cache_bytes=options.cache_bytes,
            threads=options.compile_threads,
            timeout_s=options.compile_timeout_s,
            wake=lambda: os.eventfd_write(self._bell, 1),
        )
        self.service = GrammarService(self.compiler)
        _limit_memory(options.memory_bytes)
        context = zmq.Context()
        base = f"ipc://{options.run_dir}"
        self.scheduler: Channel[FromGrammar, ToGrammar] = Channel(
            context, f"{base}/grammar.sock", ToGrammar
        )
        self.worker: Channel[StepMasks, StepMasks] = Channel(
            context, f"{base}/masks.sock", StepMasks, kind=zmq.PUSH
        )
        self._masks: MaskBuffer | None = None
        self.startup = {"vocabulary": opened - began, "engine": time.monotonic() - opened}

    def run(self) -> int:
        """Serve until told to stop; the exit code."""
        poller = zmq.Poller()
        poller.register(self.scheduler.socket, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        self.scheduler.send(GrammarReady(self.startup))
        while True:
            poller.poll(self._timeout_ms())
            self._silence_bell()
            self._report(self.compiler.results())
            overdue = self.compiler.overdue()
            if overdue:
                self._report(overdue)
                log.warning("a compile is past its deadline and cannot be stopped")
                return OVERDUE
            while (message := self.scheduler.recv(0)) is not None:
                if isinstance(message, StopGrammar):
                    return 0
                self._handle(message)

    def _timeout_ms(self) -> int | None:
        deadline = self.compiler.next_deadline()
        if deadline is None:
            return None
        return max(0, int((deadline - time.monotonic()) * 1000)) + 1

    def _silence_bell(self) -> None:
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return  # it did not ring

    def _handle(self, message: GrammarCompile | GrammarStep | GrammarClose) -> None:
        match message:
            case GrammarCompile(key, constraint):
                self.service.compile(key, constraint)
            case GrammarClose(uids):
                self.service.close(uids)
            case GrammarStep():
                self._step(message)

    def _step(self, message: GrammarStep) -> None:
        masks = self._buffer()
        answer = self.service.step(
            [MaskRequest(r.uid, r.key, r.at, r.tokens, r.mask_row) for r in message.rows],
            lambda row: masks.row(message.step_id, row),
        )
        if answer.rows or answer.failed:
            self.worker.send(StepMasks(message.step_id, answer.rows, answer.failed))
        if answer.replay:
            self.scheduler.send(GrammarReplay(message.step_id, answer.replay))

    def _buffer(self) -> MaskBuffer:
        """The worker made the file before it was ready, and no step comes before that."""
        if self._masks is None:
            options = self.options
            self._masks = MaskBuffer.open(
                Path(options.run_dir) / "masks", options.max_rows, options.vocab_size
            )
        return self._masks

    def _report(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            error = outcome.error
            info = None
            if error is not None:
                info = ErrorInfo(
                    kind="InvalidConstraint",
                    message=error.message,
                    param=error.path or None,
                    code=error.reason,
                )
            self.scheduler.send(
                GrammarCompiled(outcome.key, info, outcome.seconds, outcome.cached)
            )

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


def _limit_memory(extra_bytes: int) -> None:
    """Bound the address space at what the process has now and `extra_bytes` more."""
    limit = psutil.Process().memory_info().vms + extra_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def main(options: GrammarOptions) -> None:
    process = GrammarProcess(options)
    code = process.run()
    process.close()
    if code:
        # A compiling thread cannot be joined: leave without waiting for it.
        sys.stderr.flush()
        time.sleep(0.05)  # for the last messages to leave
        os._exit(code)
