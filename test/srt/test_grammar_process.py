"""The grammar process over its real sockets: compile, masks, replay, overdue compiles."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from phloem.constrained.backends import load_backend
from phloem.constrained.bitmask import MaskBuffer, allowed_tokens
from phloem.constrained.closing import ClosingVocabulary
from phloem.constrained.spec import JsonSchema, Regex, constraint_key
from phloem.constrained.vocab import Vocabulary
from phloem.srt.grammar.compiling import Compiling, trial
from phloem.srt.grammar.options import GrammarOptions
from phloem.srt.grammar.process import EXIT_OVERDUE, GrammarProcess
from phloem.srt.ipc import Channel, make_run_dir
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
    GrammarRow,
    GrammarStep,
    JumpForward,
    StepMasks,
    StopGrammar,
    ToGrammar,
)

VOCABULARY = Vocabulary([b"a", b"b", b"ab", b""], frozenset({3}), (3,))
PATTERN = Regex(pattern="(ab)+")
KEY = constraint_key(PATTERN)
WAIT_MS = 60_000


class Peer:
    """The scheduler's and the worker's ends, with the process in a thread."""

    def __init__(
        self, run_dir: Path, timeout_s: float, lower: Callable[[bytes], bytes] | None = None
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.scheduler: Channel[ToGrammar, FromGrammar] = Channel(
            self.context, f"ipc://{run_dir}/grammar.sock", FromGrammar, bind=True
        )
        self.worker: Channel[StepMasks, StepMasks] = Channel(
            self.context, f"ipc://{run_dir}/masks.sock", StepMasks, kind=zmq.PULL, bind=True
        )
        self.masks = MaskBuffer.create(run_dir / "masks", 4, VOCABULARY.size)
        self.codes: list[int] = []
        options = GrammarOptions(
            run_dir=str(run_dir),
            checkpoint="",
            mask_rows=4,
            vocab_size=VOCABULARY.size,
            compile_timeout_s=timeout_s,
        )
        self.thread = threading.Thread(target=self._serve, args=(options, lower))
        self.thread.start()

    def _serve(self, options: GrammarOptions, lower: Callable[[bytes], bytes] | None) -> None:
        backend = load_backend("routed", VOCABULARY)
        vocabulary = ClosingVocabulary(VOCABULARY)
        compiling = Compiling(backend, vocabulary, lower or trial(backend, vocabulary))
        process = GrammarProcess(options, VOCABULARY, compiling)
        self.codes.append(process.run())
        process.close()

    def told(self) -> FromGrammar | None:
        return self.scheduler.recv(WAIT_MS)

    def close(self) -> None:
        self.scheduler.send(StopGrammar())
        self.thread.join(60)
        self.scheduler.close()
        self.worker.close()
        self.context.term()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    path = make_run_dir()
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


@pytest.fixture
def peer(run_dir: Path) -> Iterator[Peer]:
    peer = Peer(run_dir, timeout_s=60)
    assert isinstance(peer.told(), GrammarReady)
    yield peer
    peer.close()
    assert peer.codes == [0]


def compile_pattern(peer: Peer) -> GrammarCompiled:
    peer.scheduler.send(GrammarCompile(KEY, PATTERN))
    told = peer.told()
    assert isinstance(told, GrammarCompiled)
    return told


def test_masks_follow_the_history(peer: Peer) -> None:
    first = compile_pattern(peer)
    assert (first.key, first.error, first.cached) == (KEY, None, False)
    assert compile_pattern(peer).cached
    peer.scheduler.send(GrammarStep(8, [GrammarRow(1, KEY, 0, [], 1000, 2)]))
    assert peer.worker.recv(WAIT_MS) == StepMasks(8, [2])
    assert allowed_tokens(peer.masks.row(8, 2), 4) == [0, 2]
    rows = [GrammarRow(1, KEY, 0, [2], 1000, 2), GrammarRow(2, KEY, 0, [1], 1000, 3)]
    peer.scheduler.send(GrammarStep(9, rows))
    masks = peer.worker.recv(WAIT_MS)
    assert masks is not None
    assert masks.rows == [2]
    assert "contradicts" in masks.failed[3]
    assert allowed_tokens(peer.masks.row(9, 2), 4) == [0, 2, 3]


def test_what_is_forced_comes_back(peer: Peer) -> None:
    compile_pattern(peer)
    rows = [GrammarJumpRow(1, KEY, 0, [0], 1000, JumpForward.EXACT)]
    peer.scheduler.send(
        GrammarJump([*rows, GrammarJumpRow(2, KEY, 7, [0], 1000, JumpForward.EXACT)])
    )
    assert peer.told() == GrammarJumped([Forced(1, [1]), Forced(2, [])])
    peer.scheduler.send(GrammarStep(1, [GrammarRow(1, KEY, 2, [], 1000, 0)]))
    assert peer.worker.recv(WAIT_MS) == StepMasks(1, [0])


def test_drafts_come_back_and_have_their_masks(peer: Peer) -> None:
    compile_pattern(peer)
    for uid, at in ((1, 0), (1, 1), (2, 0)):
        row = GrammarJumpRow(uid, KEY, at, [2], 1000, JumpForward.EXACT, draft=4)
        peer.scheduler.send(GrammarJump([row]))
        told = peer.told()
    draft = Draft([2], [0, 1])
    assert told == GrammarJumped([Forced(2, [], draft=draft)])
    masked = GrammarRow(2, KEY, 1, [], 1000, 0, draft=draft, draft_row=3)
    peer.scheduler.send(GrammarStep(1, [masked]))
    assert peer.worker.recv(WAIT_MS) == StepMasks(1, [0, 3])
    assert allowed_tokens(peer.masks.row(1, 3), 4) == [0, 2, 3]


def test_what_is_unknown_is_replayed(peer: Peer) -> None:
    compile_pattern(peer)
    peer.scheduler.send(GrammarStep(1, [GrammarRow(5, KEY, 3, [0], 1000, 0)]))
    assert peer.told() == GrammarReplay(1, [5])
    peer.scheduler.send(GrammarStep(1, [GrammarRow(5, KEY, 0, [2, 2, 2, 0], 1000, 0)]))
    assert peer.worker.recv(WAIT_MS) == StepMasks(1, [0])
    assert allowed_tokens(peer.masks.row(1, 0), 4) == [1]
    peer.scheduler.send(GrammarClose([5]))
    peer.scheduler.send(GrammarStep(2, [GrammarRow(5, KEY, 4, [1], 1000, 0)]))
    assert peer.told() == GrammarReplay(2, [5])


def test_a_refusal_has_kind_path_and_code(peer: Peer) -> None:
    schema = JsonSchema(schema=json.dumps({"items": {"type": "array", "uniqueItems": True}}))
    peer.scheduler.send(GrammarCompile("k", schema))
    told = peer.told()
    assert isinstance(told, GrammarCompiled)
    assert told.error is not None
    assert told.error.kind == "InvalidConstraint"
    assert told.error.param == "/items/uniqueItems"
    assert told.error.code == "unsupported_keyword"
    assert "uniqueItems" in told.error.message


def test_an_overdue_compile_is_answered_and_ends_the_process(run_dir: Path) -> None:
    release = threading.Event()

    def slow(request: bytes) -> bytes:
        assert release.wait(60)
        raise AssertionError("nobody waits for this any more")

    peer = Peer(run_dir, timeout_s=0.2, lower=slow)
    assert isinstance(peer.told(), GrammarReady)
    start = time.monotonic()
    told = compile_pattern(peer)
    assert told.error is not None
    assert told.error.code == "compile_timeout"
    assert time.monotonic() - start >= 0.2
    peer.thread.join(60)
    assert peer.codes == [EXIT_OVERDUE]
    release.set()
    peer.close()
