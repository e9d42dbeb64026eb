"""`phloem chat`: turns, commands, interruption, and what the next turn remembers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest

from phloem.srt.errors import PromptTooLong
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


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(say: Any, engine: Any) -> None:
    engine.interrupt_after = 1
    result = say("hi", "go on")
    assert result.code == 0
    assert result.out == "Hel\nHel\n"
    assert "(interrupted)" in result.err
    assert roles(engine.chats[1])[1] == ("assistant", "Hel")


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
