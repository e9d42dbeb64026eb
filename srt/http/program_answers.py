"""What the answers of a program's call are: the reply of its route → the variable's event.

Reasoning is told apart by the route where the model is known to reason. Elsewhere, and in plain
text, that is done here, by marks which the client names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from phloem.srt.errors import InternalError
from phloem.srt.http.program_protocol import AnswerLogprobs, Matched, VariableEvent
from phloem.srt.http.replies import ChatChoice, ChatCompletion, Completion, CompletionChoice, Usage

T = TypeVar("T")

MARKS: Final = "reasoning_marks"
"""The field of a `gen` that names them."""

Mark = Annotated[str, Meta(min_length=1, max_length=64)]
Choice = ChatChoice | CompletionChoice


class AnswerMarks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is thought stands between `begin` and `end`, at the beginning of an answer. `opened`:
    the prompt has the opening mark, so that the answer begins with thoughts."""

    begin: Mark
    end: Mark
    opened: bool = False


def reasoning_name(name: str) -> str:
    """The variable of what is thought before the answer `name`."""
    return f"{name}_reasoning_content"


def apart(text: str, marks: AnswerMarks) -> tuple[str, str]:
    """What is thought and what is said, both without the marks, and without white space at their
    beginning and end. Thoughts that do not end are all there is."""
    begun = text.lstrip()
    if begun.startswith(marks.begin):
        text = begun.removeprefix(marks.begin)
    elif not marks.opened:
        return "", text.strip()
    thoughts, _, said = text.partition(marks.end)
    return thoughts.strip(), said.strip()


def answer_event(
    reply: object, path: str, name: str, marks: AnswerMarks | None, *, many: bool
) -> VariableEvent:
    """The event of a `gen`, from the whole reply to its call; `many` of several answers."""
    if not isinstance(reply, ChatCompletion | Completion):
        raise InternalError("A call gave another reply than its own.")
    assert isinstance(reply.usage, Usage), "a whole reply has it"
    choices: Sequence[Choice] = reply.choices
    said = [_said(choice, marks) for choice in choices]

    def each(values: list[T]) -> Any:
        return values if many else values[0]

    def where_known(find: Callable[[Choice], T | UnsetType | None]) -> Any:
        """Of all answers, or of none."""
        found = [find(choice) for choice in choices]
        return each(found) if all(one not in (None, UNSET) for one in found) else UNSET

    return VariableEvent(
        path=path,
        name=name,
        value=each([text for _, text in said]),
        finish_reason=each([str(choice.finish_reason) for choice in choices]),
        matched_stop=each([_matched(choice) for choice in choices]),
        reasoning_content=each([one for one, _ in said]) if any(one for one, _ in said) else UNSET,
        logprobs=where_known(_logprobs),
        metrics=where_known(lambda choice: choice.metrics),
        usage=reply.usage,
        warnings=reply.warnings,
    )


def _said(choice: Choice, marks: AnswerMarks | None) -> tuple[str, str]:
    """What was thought, and what was said."""
    if isinstance(choice, CompletionChoice):
        thoughts, text = "", choice.text
    else:
        thoughts, text = choice.message.reasoning_content or "", choice.message.content or ""
    if thoughts or marks is None:
        return thoughts, text
    return apart(text, marks)


def _matched(choice: Choice) -> Matched:
    return None if choice.matched_stop is UNSET else choice.matched_stop


def _logprobs(choice: Choice) -> AnswerLogprobs | None:
    return None if choice.logprobs is None else AnswerLogprobs.of(choice.logprobs)
