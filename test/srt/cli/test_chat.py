"""`phloem chat`: turns, commands, interruption, and what the next turn remembers."""

from __future__ import annotations

import asyncio
import io
import signal
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from phloem.srt import blocking
from phloem.srt.errors import PromptTooLong
from phloem.srt.generation import ChatMessage, Chunk, Finish, GenerateRequest
from phloem.srt.messages import FinishReason


@pytest.fixture
def say(phloem: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a chat in which the user types these lines."""

    def chat(*lines: str, arguments: tuple[str, ...] = ()) -> Any:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        return phloem("chat", *arguments)

    return chat


def roles(messages: list[Any]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]


def test_answers_stream_to_stdout_and_are_remembered(say: Any, engine: Any) -> None:
    result = say("hi", "again", arguments=("--system", "Be kind."))
    assert (result.code, result.out) == (0, "Hello\nHello\n")
    assert roles(engine.chats[1]) == [
        ("system", "Be kind."),
        ("user", "hi"),
        ("assistant", "Hello"),
        ("user", "again"),
    ]
    assert engine.closed


def test_model_is_an_argument(say: Any, engine: Any) -> None:
    say(arguments=("some/model",))
    assert engine.config.model.model == "some/model"


def test_exit_leaves_and_later_lines_are_not_read(say: Any, engine: Any) -> None:
    assert say("/exit", "hi").code == 0
    assert engine.chats == []


def test_clear_forgets_all_but_the_system_message(say: Any, engine: Any) -> None:
    say("hi", "/clear", "new", arguments=("--system", "S"))
    assert roles(engine.chats[1]) == [("system", "S"), ("user", "new")]


def test_unknown_command_is_not_sent_to_the_model(say: Any, engine: Any) -> None:
    result = say("/helo", "", "   ")
    assert "no command /helo" in result.err
    assert "/exit" in result.err
    assert engine.chats == []


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(say: Any, engine: Any, times: int) -> None:
    engine.interrupt_after, engine.interrupts = 1, times
    before = signal.getsignal(signal.SIGINT)  # ignored in a shell's background jobs
    result = say("hi", "go on")
    assert result.code == 0
    assert result.out == "Hel\nHel\n"
    assert result.err.count("(interrupted)") == 2
    assert roles(engine.chats[1])[1] == ("assistant", "Hel")
    assert signal.getsignal(signal.SIGINT) is before


class HalfwayEngine:
    """Stands in for `Engine`: its first answer stays where it is until it is aborted."""

    def __init__(self, config: object, *, progress: object) -> None:
        self.card = SimpleNamespace(name="halfway")
        self.aborted: dict[str | None, asyncio.Event] = {}

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def render_chat(self, messages: list[ChatMessage]) -> list[int]:
        return [1, 2, 3]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        aborted = self.aborted[request.rid] = asyncio.Event()
        yield Chunk(rid="r")
        yield Chunk(rid="r", text="Hel")
        if len(self.aborted) == 1:
            await aborted.wait()
            yield Chunk(rid="r", finish=Finish(FinishReason.ABORT))
        else:
            yield Chunk(rid="r", text="lo")
            yield Chunk(rid="r", finish=Finish(FinishReason.STOP))

    def abort(self, rid: str) -> bool:
        if rid in self.aborted:
            self.aborted[rid].set()
        return rid in self.aborted


@pytest.mark.parametrize("handed_over", [False, True])
@pytest.mark.parametrize(
    ("work", "written"), [("render_chat", ""), ("accepted", ""), ("piece", ""), ("wait", "Hel")]
)
def test_ctrl_c_at_a_hand_over_to_the_loop(
    say: Any, monkeypatch: pytest.MonkeyPatch, work: str, written: str, handed_over: bool
) -> None:
    """Just before, or just after, the main thread gives the engine's loop something to do."""
    hand_over = asyncio.run_coroutine_threadsafe
    works = iter(["start", "render_chat", "accepted", "piece", "wait"])

    def interrupted(coroutine: Any, loop: asyncio.AbstractEventLoop) -> Any:
        now = next(works, None) == work
        if now and not handed_over:
            signal.raise_signal(signal.SIGINT)
        future = hand_over(coroutine, loop)
        if now and handed_over:
            signal.raise_signal(signal.SIGINT)
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    monkeypatch.setattr(blocking, "Engine", HalfwayEngine)
    result = say("hi", "go on")
    assert result.code == 0
    assert result.out == f"{written}\nHello\n"
    assert result.err.count("(interrupted)") == 1


def test_ctrl_c_at_the_prompt_does_not_leave(
    say: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script: Iterator[str | BaseException] = iter([KeyboardInterrupt(), "hi", EOFError()])

    def scripted_input(prompt: str = "") -> str:
        step = next(script)
        if isinstance(step, BaseException):
            raise step
        return step

    monkeypatch.setattr("builtins.input", scripted_input)
    result = say()
    assert result.out == "Hello\n"
    assert "/exit leaves" in result.err


def test_error_is_told_and_the_turn_is_taken_back(say: Any, engine: Any) -> None:
    engine.pieces, engine.error = [], PromptTooLong("9,000 tokens do not fit 8,192")
    result = say("too much", "less")
    assert result.code == 0
    assert result.err.count("error: 9,000 tokens do not fit 8,192") == 2
    assert roles(engine.chats[1]) == [("user", "less")]


def test_cut_answer_is_marked(say: Any, engine: Any) -> None:
    engine.finish = FinishReason.LENGTH
    assert "cut" in say("hi").err
