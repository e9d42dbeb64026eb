"""What a model thinks before it answers: asked for, bounded, kept apart from the answer.

Whether the answer begins inside the reasoning is read off the prompt's own end, as the template
rendered it. A constraint holds behind the reasoning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

import msgspec

from phloem.srt.errors import InvalidRequest
from phloem.srt.generation import EngineClient, GenerateRequest, ReasoningMarks, Thoughts
from phloem.srt.http.body import unsupported
from phloem.srt.http.found_constraint import FoundConstraint, Prelude
from phloem.srt.http.protocol import ChatRequest
from phloem.srt.http.tool_parser import AnswerParser, Piece, Reasoning, held_back

TAIL: Final = 32
"""Tokens at the end of a prompt that show whether reasoning is open there."""

_EFFORT: Final = "reasoning_effort"


@dataclass(frozen=True)
class ReasoningPlan:
    """How reasoning shapes one chat request. `marks` is None where nothing is thought."""

    marks: ReasoningMarks | None = None
    opened: bool = False
    budget: int | None = None
    separate: bool = True
    stream: bool = True
    include: bool = True

    @property
    def _prelude(self) -> Prelude | None:
        if self.marks is None:
            return None
        begin = "" if self.opened else self.marks.begin
        return Prelude(self.marks.end, begin=begin, budget=self.budget)

    def place(self, found: FoundConstraint | None) -> FoundConstraint | None:
        """The constraint behind the reasoning, unless the client placed it or it is of any text."""
        if found is None or found.after is not None or found.prefix or found.param == "bad_words":
            return found
        return replace(found, after=self._prelude)

    def bound(self, request: GenerateRequest) -> GenerateRequest:
        """The request with its reasoning counted, and held to the budget where no constraint does
        that."""
        if self.marks is None:
            return request
        thoughts = Thoughts(self.marks.begin, self.marks.end, self.opened)
        request = msgspec.structs.replace(request, thoughts=thoughts)
        prelude = self._prelude
        if request.constraint is None and prelude is not None and self.budget is not None:
            return msgspec.structs.replace(request, constraint=prelude.deferred(None))
        return request

    def parser(self, inner: Callable[[], AnswerParser]) -> Callable[[], AnswerParser]:
        """Parsers that keep the reasoning apart from what `inner` reads."""
        return inner if self.marks is None else lambda: ReasoningParser(inner(), self)


async def plan_reasoning(
    body: ChatRequest, engine: EngineClient, prompt: list[int], going_on: str | None
) -> ReasoningPlan:
    """`going_on` is the assistant's text that the prompt ends in, if there is one.

    Raises:
        InvalidRequest: a budget for a model that does not reason.
    """
    marks, budget = engine.card.reasoning, body.thinking_token_budget
    if marks is None:
        if budget is not None:
            raise unsupported("thinking_token_budget", "this model does not reason")
        return ReasoningPlan()
    if going_on is not None:
        _, begun, rest = going_on.rpartition(marks.begin)
        opened = bool(begun) and marks.end not in rest
        closed = not opened
    else:
        text = (await engine.detokenize(prompt[-TAIL:])).rstrip()
        opened = text.endswith(marks.begin)
        closed = text.endswith(marks.end) or body.add_generation_prompt is False
    if closed:
        return ReasoningPlan()
    if body.reasoning_effort == "none" and marks.switch is None and budget is None:
        budget = 0  # its template cannot say so
    return ReasoningPlan(
        marks,
        opened,
        budget,
        separate=body.separate_reasoning is not False,
        stream=body.stream_reasoning is not False,
        include=body.include_reasoning is not False,
    )


def reasoning_kwargs(body: ChatRequest, marks: ReasoningMarks | None) -> dict[str, object]:
    """Variables of the chat template that `reasoning_effort` sets.

    Raises:
        InvalidRequest: the model does not reason, or `chat_template_kwargs` says otherwise.
    """
    effort = body.reasoning_effort
    if effort is None:
        return {}
    if marks is None:
        if effort == "none":
            return {}
        raise unsupported(_EFFORT, "this model does not reason")
    wanted: dict[str, object] = {}
    if marks.efforts:
        wanted[_EFFORT] = effort
    if marks.switch is not None:
        wanted[marks.switch] = effort != "none"
    given = body.chat_template_kwargs or {}
    for name, value in wanted.items():
        if name in given and given[name] != value:
            raise InvalidRequest(
                f"{_EFFORT} is {effort!r}, but chat_template_kwargs.{name} says otherwise.",
                param=f"chat_template_kwargs.{name}",
                code="invalid_value",
            )
    return wanted


class _State(Enum):
    START = auto()  # whether it begins with reasoning is not known yet
    THINKING = auto()
    GAP = auto()  # line feeds between reasoning and answer
    ANSWER = auto()


class ReasoningParser:
    """Reasoning, without its marks and the white space inside them, then what `inner` makes of the
    rest. Not separated, all of it is content as it is written."""

    def __init__(self, inner: AnswerParser, plan: ReasoningPlan) -> None:
        assert plan.marks is not None
        self._inner = inner
        self._plan = plan
        self._marks = plan.marks
        self._state = _State.THINKING if plan.opened else _State.START
        self._held = ""
        self._thoughts: list[str] = []  # kept until all are there, if they are not streamed
        self._began = False  # something was thought

    @property
    def named(self) -> bool:
        return self._inner.named

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        text, self._held = self._held + text, ""
        if self._state is _State.START and text:
            text = self._start(text, pieces)
        if self._state is _State.THINKING and text:
            text = self._think(text, pieces)
        if self._state is _State.GAP and text:
            text = text.lstrip("\n") if self._plan.separate else text
            self._state = _State.ANSWER if text else _State.GAP
        return pieces + (self._inner.feed(text) if text else [])

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        held, self._held = self._held, ""
        if self._state is _State.START:
            pieces += self._inner.feed(held)
        elif self._state is _State.THINKING:
            self._say(held.rstrip() if self._plan.separate else held, pieces)
            self._end(pieces)
        return pieces + self._inner.finish()

    def _start(self, text: str, pieces: list[Piece]) -> str:
        begin, found = self._marks.begin, text.lstrip()
        if begin.startswith(found) and found != begin:
            self._held = text
            return ""
        if not found.startswith(begin):
            self._state = _State.ANSWER
            return text
        self._state = _State.THINKING
        behind = found.removeprefix(begin)
        if not self._plan.separate:
            pieces.append(text.removesuffix(behind))
        return behind

    def _think(self, text: str, pieces: list[Piece]) -> str:
        """Say what is certain to be thought; gives what stands behind."""
        before, end, behind = text.partition(self._marks.end)
        separate = self._plan.separate
        if end:
            self._say(before.rstrip() if separate else before + end, pieces)
            self._end(pieces)
            self._state = _State.GAP
            return behind
        said = before.removesuffix(held_back(before, self._marks.end))
        if separate:
            said = said.rstrip()
        self._held = before[len(said) :]
        self._say(said, pieces)
        return ""

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if not self._plan.separate:
            pieces += [text] if text else []
            return
        if not self._began:
            text = text.lstrip()
        if not text or not self._plan.include:
            return
        self._began = True
        if self._plan.stream:
            pieces.append(Reasoning(text))
        else:
            self._thoughts.append(text)

    def _end(self, pieces: list[Piece]) -> None:
        if self._thoughts:
            pieces.append(Reasoning("".join(self._thoughts)))
            self._thoughts = []
