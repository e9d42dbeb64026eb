"""The conversation as the Messages API has it → the inner chat's messages.

A turn of the user's may answer calls and say something besides, which are several inner messages;
turns of one role in a row are one turn. Each inner message remembers where it came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, NoReturn

from phloem.srt.errors import InvalidRequest
from phloem.srt.http.anthropic.protocol import (
    Block,
    Document,
    Image,
    InputMessage,
    RedactedThinking,
    SearchResult,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
)
from phloem.srt.http.body import invalid
from phloem.srt.http.protocol import CalledFunction, ContentPart, Message, MessageToolCall


class Placed(NamedTuple):
    """An inner message, and the path of what it was made of."""

    message: Message
    at: str


@dataclass(frozen=True)
class _Turn:
    """Messages in a row of one role: their blocks, each with its path."""

    role: str
    at: str
    blocks: Sequence[tuple[str, Block]]


def system_message(system: str | list[Text] | None) -> list[Placed]:
    """The system prompt, if there is one."""
    if not system:
        return []
    content = system if isinstance(system, str) else _parts(system)
    return [Placed(Message(role="system", content=content), "system")]


def inner_messages(messages: Sequence[InputMessage]) -> list[Placed]:
    """Raises `InvalidRequest` with the block's path for one that this model cannot read or that may
    not stand where it stands: each call is answered in the very next turn, before anything else."""
    placed: list[Placed] = []
    calls: dict[str, str] = {}  # of the turn before: id → path
    for turn in _turns(messages):
        if turn.role == "assistant":
            placed.append(_assistant(turn, calls))
            continue
        results, said = _split(turn)
        if calls or results:
            placed += _results(results, calls)
        if said or not results:
            parts = _parts([_readable(at, block, turn.role) for at, block in said])
            placed.append(Placed(Message(role=turn.role, content=parts), turn.at))
    if calls:
        _unanswered(calls)
    if turn.role == "assistant" and isinstance(turn.blocks[-1][1], Thinking | RedactedThinking):
        raise invalid("An answer cannot begin in the middle of thinking.", turn.blocks[-1][0])
    return placed


def _turns(messages: Sequence[InputMessage]) -> Iterator[_Turn]:
    for role, group in groupby(enumerate(messages), lambda one: one[1].role):
        members = list(group)
        blocks = [one for i, message in members for one in _blocks(message, f"messages[{i}]")]
        at = f"messages[{members[0][0]}]"
        if not blocks and role == "assistant":
            blocks = [(f"{at}.content", Text(text=""))]  # as a client got it
        if not blocks:
            raise invalid(f"A turn of role {role} needs content.", f"{at}.content")
        yield _Turn(role, at, blocks)


def _blocks(message: InputMessage, at: str) -> list[tuple[str, Block]]:
    if isinstance(message.content, str):
        return [(f"{at}.content", Text(text=message.content))]
    return [(f"{at}.content[{j}]", block) for j, block in enumerate(message.content)]


def _assistant(turn: _Turn, calls: dict[str, str]) -> Placed:
    """The assistant's message; `calls` gets those that it makes."""
    if calls:
        _unanswered(calls)
    texts: list[Text] = []
    thoughts: list[str] = []
    made: list[MessageToolCall] = []
    for at, block in turn.blocks:
        match block:
            case Text():
                texts.append(block)
            case ToolUse():
                if block.id in calls:
                    raise invalid(f"Two calls have the id {block.id!r}.", f"{at}.id")
                calls[block.id] = at
                made.append(_call(block, at))
            case Thinking():
                thoughts.append(block.thinking)
            case RedactedThinking():
                continue
            case _:
                raise _out_of_place(block, at, turn.role)
    message = Message(
        role="assistant",
        content=_parts(texts) if texts or not made else None,
        reasoning_content="".join(thoughts) or None,
        tool_calls=made or None,
    )
    return Placed(message, turn.at)


def _call(block: ToolUse, at: str) -> MessageToolCall:
    text = bytes(block.input).decode()
    if not text.startswith("{"):
        raise invalid("The input of a tool is an object.", f"{at}.input")
    return MessageToolCall(id=block.id, function=CalledFunction(name=block.name, arguments=text))


def _split(
    turn: _Turn,
) -> tuple[list[tuple[str, ToolResult]], list[tuple[str, Block]]]:
    """The results at the beginning of a turn, and what follows them."""
    results: list[tuple[str, ToolResult]] = []
    said: list[tuple[str, Block]] = []
    for at, block in turn.blocks:
        if not isinstance(block, ToolResult):
            said.append((at, block))
        elif turn.role != "user":
            raise _out_of_place(block, at, turn.role)
        elif said:
            raise invalid("Results of tools come first in their turn.", f"{at}.type")
        else:
            results.append((at, block))
    return results, said


def _results(results: Sequence[tuple[str, ToolResult]], calls: dict[str, str]) -> Iterator[Placed]:
    """Messages of role tool; takes what they answer out of `calls`, of which none may be left."""
    for at, block in results:
        if calls.pop(block.tool_use_id, None) is None:
            raise invalid(
                f"{block.tool_use_id!r} is no call of the turn before, or was answered already.",
                f"{at}.tool_use_id",
            )
        message = Message(
            role="tool", content=_result_text(block, at), tool_call_id=block.tool_use_id
        )
        yield Placed(message, at)
    if calls:
        _unanswered(calls)


def _result_text(block: ToolResult, at: str) -> str:
    """The result as text, marked when it is an error."""
    if isinstance(block.content, str):
        text = block.content
    else:
        parts = enumerate(block.content or [])
        text = "\n".join(_readable(f"{at}.content[{k}]", part, "tool").text for k, part in parts)
    return f"Error: {text}" if block.is_error else text


def _readable(at: str, block: Block, role: str) -> Text:
    if not isinstance(block, Text):
        raise _out_of_place(block, at, role)
    return block


def _out_of_place(block: Block, at: str, role: str) -> InvalidRequest:
    kind = block.__struct_config__.tag
    if isinstance(block, Image | Document | SearchResult):
        return InvalidRequest(
            f"Content of type {kind!r} is not supported; this model reads text.",
            param=f"{at}.type",
            code="unsupported_content",
        )
    return invalid(f"A turn of role {role} has no content of type {kind!r}.", f"{at}.type")


def _unanswered(calls: dict[str, str]) -> NoReturn:
    id_, at = next(iter(calls.items()))
    raise invalid(f"The call {id_!r} has no result in the turn that follows.", at)


def _parts(texts: Sequence[Text]) -> str | list[ContentPart]:
    if len(texts) == 1:
        return texts[0].text
    return [ContentPart(type="text", text=text.text) for text in texts] if texts else ""
