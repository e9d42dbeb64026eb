"""The grammar process: compiles constraints, advances matchers, fills masks.

It talks to the scheduler over `grammar.sock` and tells the worker over `masks.sock` which rows of
the shared mask buffer are ready. Compiles run in threads beside the loop; the loop sleeps in one
poll over the scheduler's socket and a wake-up pipe that finished compiles write to.

What may take long is tried in a sandbox first (`compiling.py`). If a compile takes too long all the
same, which cannot be interrupted here, its request is answered with an error and the process exits
with `EXIT_OVERDUE`: the supervisor starts it anew, and the scheduler compiles the live grammars
again and replays the histories.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import resource
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import zmq

from phloem.constrained.backends import load_backend
from phloem.constrained.bitmask import MaskBuffer
from phloem.constrained.closing import ClosingVocabulary
from phloem.constrained.compiler import Compiled, GrammarCompiler
from phloem.constrained.jump import Encode, Jumper
from phloem.constrained.service import GrammarService
from phloem.constrained.spec import Constraint
from phloem.constrained.vocab import Vocabulary
from phloem.srt.errors import InvalidConstraint
from phloem.srt.grammar.compiling import Compiling, trial
from phloem.srt.grammar.garbage import Garbage
from phloem.srt.grammar.options import GrammarOptions
from phloem.srt.grammar.remembered import Remembered
from phloem.srt.grammar.sandbox import WALL_FACTOR, Sandbox, limit_resource
from phloem.srt.grammar.watchdog import Watchdog
from phloem.srt.ipc import Channel
from phloem.srt.messages import (
    Draft,
    Forced,
    FromGrammar,
    GrammarClose,
    GrammarCompile,
    GrammarCompiled,
    GrammarJump,
    GrammarJumped,
    GrammarJumpRow,
    GrammarReady,
    GrammarReplay,
    GrammarStep,
    JumpForward,
    StepMasks,
    StopGrammar,
    ToGrammar,
)
from phloem.srt.timing import timed

if TYPE_CHECKING:
    from phloem.srt.checkpoint.base import Checkpoint
    from phloem.srt.tokenizer.tokenizer import Tokenizer

EXIT_OVERDUE = 3
BACKEND = "routed"
HURRIED_SECONDS = 1.0
"""A compile that takes longer goes on in a line of its own: others do not wait behind it."""
MATCHER_SECONDS = 5.0
"""What a matcher may take at one time before the process is ended for it."""

logger = logging.getLogger(__name__)


class GrammarProcess:
    """The loop. `vocabulary` is given by `main`; tests give their own. `encode` as in `Jumper`."""

    def __init__(
        self,
        options: GrammarOptions,
        vocabulary: Vocabulary,
        compiling: Compiling,
        *,
        encode: Encode | None = None,
        watchdog: Watchdog | None = None,
        remembered: Remembered | None = None,
    ) -> None:
        run_dir = Path(options.run_dir)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._done: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
        self._compiler = GrammarCompiler(
            compiling.build,
            self._finished,
            patiently=compiling.build_patiently,
            again=compiling.rebuild,
            threads=options.compile_threads,
            # The sandbox ends what is tried in it, and so long is waited for that; a compile that
            # goes on behind it is stuck here.
            timeout_s=options.compile_timeout_s * (WALL_FACTOR + 1),
            cache_bytes=options.cache_bytes,
        )
        self._service = GrammarService(
            self._compiler.obtain,
            Jumper(vocabulary, encode),
            guard=watchdog,
            stuck=None if watchdog is None else watchdog.left_by(options.predecessor),
        )
        self._masks = MaskBuffer.open(run_dir / "masks", options.mask_rows, options.vocab_size)
        self._context = zmq.Context()
        self._scheduler: Channel[FromGrammar, ToGrammar] = Channel(
            self._context, f"ipc://{run_dir}/grammar.sock", ToGrammar
        )
        self._worker: Channel[StepMasks, StepMasks] = Channel(
            self._context, f"ipc://{run_dir}/masks.sock", StepMasks, kind=zmq.PUSH
        )
        self._garbage = Garbage()
        # One of these constraints may be what the predecessor died of.
        first = options.predecessor == 0
        self._earlier = remembered.load() if remembered is not None and first else []
        self._remembered = remembered
        self._asked: dict[str, Constraint] = {}
        self.startup: dict[str, float] = {}

    def run(self) -> int:
        """Serve until told to stop (0) or until a compile is overdue (`EXIT_OVERDUE`)."""
        poller = zmq.Poller()
        poller.register(self._scheduler.socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        self._scheduler.send(GrammarReady(self.startup, self._earlier))
        while True:
            waits = [self._compiler.next_deadline(), self._garbage.waits]
            left = min((one for one in waits if one is not None), default=None)
            if not poller.poll(None if left is None else int(left * 1000) + 1):
                self._garbage.collect()
            while (message := self._scheduler.recv(0)) is not None:
                if isinstance(message, StopGrammar):
                    return 0
                self._handle(message)
            self._report_finished()
            overdue = self._compiler.overdue()
            for late in overdue:
                self._report(late)
            if overdue:
                logger.warning("a grammar compile is overdue; leaving to be started anew")
                return EXIT_OVERDUE

    def close(self) -> None:
        """Send what is queued and close the sockets; compiles are not waited for."""
        self._compiler.close()
        if self._remembered is not None:
            self._remembered.close()
        self._scheduler.close()
        self._worker.close()
        self._context.term()

    def _handle(self, message: GrammarCompile | GrammarStep | GrammarJump | GrammarClose) -> None:
        match message:
            case GrammarCompile(key, constraint):
                self._asked[key] = constraint
                self._compiler.request(key, constraint)
            case GrammarStep():
                self._step(message)
            case GrammarJump(rows):
                self._scheduler.send(GrammarJumped([self._jump(row) for row in rows]))
            case GrammarClose(uids):
                self._service.close(uids)

    def _step(self, message: GrammarStep) -> None:
        step_id = message.step_id
        outcome = self._service.step(message.rows, lambda row: self._masks.row(step_id, row))
        if outcome.replay:
            self._scheduler.send(GrammarReplay(step_id, outcome.replay))
        if outcome.filled or outcome.failed:
            self._worker.send(
                StepMasks(step_id, outcome.filled, outcome.failed, outcome.faults, outcome.closing)
            )

    def _jump(self, row: GrammarJumpRow) -> Forced:
        exact = row.jump is JumpForward.EXACT
        jump = self._service.jump(row, exact=exact)
        if jump.ends:
            return Forced(row.uid, jump.tokens, ends=True)
        guess = self._service.draft(row, len(jump.tokens), exact=exact)
        draft = None if guess is None else Draft(guess.tokens, guess.draws)
        return Forced(row.uid, jump.tokens, draft=draft)

    def _finished(self, done: Compiled) -> None:
        """From a compile thread: queue the outcome and wake the loop."""
        self._done.put(done)
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            return  # the pipe is full: the loop is going to wake anyway

    def _report_finished(self) -> None:
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            return
        while True:
            try:
                self._report(self._done.get_nowait())
            except queue.Empty:
                return

    def _remember(self, done: Compiled) -> None:
        constraint = self._asked.pop(done.key, None)
        if self._remembered is None or done.grammar is None:
            return
        if done.cached:
            self._remembered.used(done.key)
        elif constraint is not None:
            self._remembered.compiled(done.key, constraint)

    def _report(self, done: Compiled) -> None:
        self._remember(done)
        self._garbage.made()
        error = None
        if done.error is not None:
            refusal = InvalidConstraint(
                str(done.error), param=done.error.path or None, code=done.error.reason
            )
            error = refusal.to_info()
        minimum = None if done.grammar is None else done.grammar.minimum
        self._scheduler.send(GrammarCompiled(done.key, error, done.seconds, done.cached, minimum))


def limit_memory(extra_bytes: int) -> None:
    """Let this process grow by `extra_bytes` of address space from here; beyond it allocations
    fail, which a compile reports as its own error."""
    limit_resource(resource.RLIMIT_AS, psutil.Process().memory_info().vms + extra_bytes)


def _load_tokenizer(checkpoint: Checkpoint, tokenizer: Future[Tokenizer]) -> None:
    from phloem.srt.tokenizer.tokenizer import load_tokenizer

    try:
        tokenizer.set_result(load_tokenizer(checkpoint))
    except Exception as error:
        tokenizer.set_exception(error)


def main(options: GrammarOptions, startup: dict[str, float]) -> None:
    """Load the vocabulary of `options.checkpoint`, serve, and leave with the loop's exit code.

    `startup` is phase → seconds so far.
    """
    from phloem.srt.checkpoint import open_checkpoint

    # A pause of the interpreter's is a pause of every stream: while something compiles in a thread,
    # the loop gets its turn a hundred times sooner than by default.
    sys.setswitchinterval(5e-5)
    with timed(startup, "vocabulary"):
        checkpoint = open_checkpoint(options.checkpoint)
        vocabulary = checkpoint.vocabulary()
        if vocabulary.size != options.vocab_size:
            vocabulary = replace(vocabulary, size=options.vocab_size)
    with timed(startup, "engine"):
        backend = load_backend(BACKEND, vocabulary)
    with timed(startup, "closing"):
        closings = ClosingVocabulary(vocabulary)
    # Before there are threads and sockets.
    tried = trial(backend, closings)
    cpu_seconds, memory_bytes = math.ceil(options.compile_timeout_s), options.memory_bytes
    hurried = Sandbox(
        tried, cpu_seconds=cpu_seconds, memory_bytes=memory_bytes, wait_seconds=HURRIED_SECONDS
    )
    patient = Sandbox(tried, cpu_seconds=cpu_seconds, memory_bytes=memory_bytes)
    tokenizer: Future[Tokenizer] = Future()
    process = GrammarProcess(
        options,
        vocabulary,
        Compiling(backend, closings, hurried.call, patient.call),
        encode=lambda text: tokenizer.result().encode_answer(text),
        watchdog=Watchdog(Path(options.run_dir) / "matcher", MATCHER_SECONDS),
        remembered=None if options.remembered is None else Remembered(Path(options.remembered)),
    )
    process.startup = startup
    limit_memory(options.memory_bytes)
    # Not needed before the first jump, so nobody waits for it.
    threading.Thread(target=_load_tokenizer, args=(checkpoint, tokenizer), daemon=True).start()
    Garbage.begin()
    code = process.run()
    process.close()
    hurried.close()
    patient.close()
    if code == EXIT_OVERDUE:
        # A thread is still compiling: the interpreter would wait for it.
        sys.stderr.flush()
        os._exit(code)
