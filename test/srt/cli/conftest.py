"""A phloem command line with nothing of the user's in it, and an engine that is a script."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from phloem.srt import blocking
from phloem.srt.cli import main
from phloem.srt.config import ServeConfig
from phloem.srt.errors import PhloemError
from phloem.srt.generation import ChatMessage, Chunk, Finish, GenerateRequest
from phloem.srt.messages import FinishReason


@pytest.fixture(autouse=True)
def clean_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, an empty store, no options in the environment."""
    for name in [name for name in os.environ if name.startswith("PHLOEM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PHLOEM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def phloem(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs `phloem ARGUMENTS…` in this process."""

    def call(*arguments: str) -> Outcome:
        try:
            code = main(list(arguments))
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        said = capsys.readouterr()
        return Outcome(code, said.out, said.err)

    return call


@dataclass
class ScriptedEngine:
    """Stands in for `BlockingEngine`: answers with `pieces`, or fails as told.

    Ctrl-C comes `interrupts` times before piece `interrupt_after`.
    """

    pieces: list[str] = field(default_factory=lambda: ["Hel", "lo"])
    finish: FinishReason = FinishReason.STOP
    error: PhloemError | None = None
    interrupt_after: int | None = None
    interrupts: int = 1
    config: ServeConfig | None = None
    requests: list[GenerateRequest] = field(default_factory=list)
    chats: list[list[ChatMessage]] = field(default_factory=list)
    closed: bool = False
    engine: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            card=SimpleNamespace(name="scripted"), abort=lambda rid: True
        )
    )
    loop: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(call_soon_threadsafe=lambda call, *a: call(*a))
    )

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.closed = True

    def render_chat(self, messages: list[ChatMessage]) -> list[int]:
        self.chats.append(list(messages))
        return [1, 2, 3]

    def stream(self, request: GenerateRequest) -> Iterator[Chunk]:
        self.requests.append(request)
        yield Chunk(rid="r")
        for position, piece in enumerate(self.pieces):
            if position == self.interrupt_after:
                for _ in range(self.interrupts):
                    signal.raise_signal(signal.SIGINT)
            yield Chunk(rid="r", text=piece)
        if self.error is not None:
            raise self.error
        yield Chunk(rid="r", finish=Finish(self.finish))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    """The engine that `run` and `chat` get."""
    scripted = ScriptedEngine()

    def make(config: ServeConfig, *, progress: object) -> ScriptedEngine:
        scripted.config = config
        return scripted

    monkeypatch.setattr(blocking, "BlockingEngine", make)
    return scripted
