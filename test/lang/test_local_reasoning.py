"""Thoughts in an engine of this process: told apart as a server does it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest

import phloem
from phloem.constrained.spec import Deferred
from phloem.lang.backend.local import LocalBackend
from phloem.lang.state import State
from phloem.srt.generation import (
    ChatMessage,
    Chunk,
    EngineClient,
    Finish,
    GenerateRequest,
    ReasoningMarks,
    Thoughts,
)
from phloem.srt.messages import FinishReason

pytestmark = pytest.mark.timeout(30)

MARKS = ReasoningMarks(begin="<think>", end="</think>")


class Thinker:
    """An engine whose tokens are characters. Its chats end in `opening`; it says `answer`."""

    def __init__(self, opening: str, answer: str, marks: ReasoningMarks | None = MARKS) -> None:
        self.card = SimpleNamespace(name="thinker", context_length=999, reasoning=marks)
        self.opening = opening
        self.answer = answer
        self.requests: list[GenerateRequest] = []

    async def render_chat(
        self,
        messages: list[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        text = "".join(f"<{message.role}>{message.content}" for message in messages)
        return [ord(char) for char in text + (self.opening if add_generation_prompt else "")]

    async def detokenize(self, ids: list[int], *, skip_special: bool = False) -> str:
        return "".join(map(chr, ids))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
        yield Chunk(rid="r", prompt_tokens=1)
        for char in self.answer:
            yield Chunk(rid="r", text=char)
        yield Chunk(rid="r", completion_tokens=9, finish=Finish(FinishReason.STOP))

    def end_program(self, program: str) -> None:
        """There is nothing to end."""


@phloem.function
def asks(s: State, /, **options: Any) -> None:
    s += phloem.user("Is it?") + phloem.assistant(phloem.gen("x", **options))


def run(engine: Thinker, **options: Any) -> State:
    backend = LocalBackend(cast("EngineClient", engine))
    return asks.run(backend=backend, **options)


@pytest.mark.parametrize(
    ("opening", "answer"),
    [
        ("<assistant><think>\n", "Hm.\n</think>\n\nYes."),
        ("<assistant>", "<think>\nHm.\n</think>\n\nYes."),
    ],
)
def test_thoughts_are_apart_wherever_their_mark_is(opening: str, answer: str) -> None:
    state = run(Thinker(opening, answer))
    assert (state["x"], state.meta("x").reasoning) == ("Yes.", ("Hm.",))
    assert state.messages()[-1] == {"role": "assistant", "content": "Yes."}


def test_what_is_cut_off_while_it_is_thought_is_a_thought() -> None:
    state = run(Thinker("<assistant><think>\n", "Hm"))
    assert (state["x"], state.meta("x").reasoning) == ("", ("Hm",))


def test_a_constraint_holds_behind_thoughts() -> None:
    engine = Thinker("<assistant><think>\n", "Hm.</think>yes")
    assert run(engine, n=2, regex="yes|no")["x"] == ["yes", "yes"]
    for request in engine.requests:
        assert isinstance(request.constraint, Deferred)
        assert (request.constraint.begin, request.constraint.end) == ("", "</think>")
        assert request.thoughts == Thoughts("<think>", "</think>", opened=True)


def test_marks_are_text_where_nothing_is_thought() -> None:
    answer = "a</think>b"
    closed = Thinker("<assistant><think>\n\n</think>\n\n", answer)
    for engine in (closed, Thinker("<assistant><think>", answer, marks=None)):
        state = run(engine, regex=".*")
        assert (state["x"], state.meta("x").reasoning) == (answer, ("",))
        assert engine.requests[0].thoughts is None
        assert not isinstance(engine.requests[0].constraint, Deferred)


def test_a_text_has_no_thoughts_of_a_chat() -> None:
    @phloem.function
    def plain(s: State) -> None:
        s += "So <think>" + phloem.gen("x")

    state = plain.run(backend=LocalBackend(cast("EngineClient", Thinker("", "a</think>b"))))
    assert state["x"] == "a</think>b"


def test_an_answer_that_has_begun_goes_on() -> None:
    @phloem.function
    def goes_on(s: State) -> None:
        s += phloem.user("?") + phloem.assistant("It is " + phloem.gen("x"))

    engine = Thinker("<assistant><think>", "so")
    assert goes_on.run(backend=LocalBackend(cast("EngineClient", engine)))["x"] == "so"
    assert engine.requests[0].thoughts is None
