"""Items → the messages of a chat: an assistant's turn, its text and its calls, is one message."""

from __future__ import annotations

from collections.abc import Sequence

from phloem.srt.errors import InvalidRequest
from phloem.srt.http.protocol import CalledFunction, ContentPart, Message, MessageToolCall
from phloem.srt.http.responses.inputs import Placed
from phloem.srt.http.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputText,
    MessageItem,
    OutputText,
    ReasoningItem,
)


class Conversation:
    """The messages, and in `paths` where each comes from. Raises `InvalidRequest` for a call
    without its output, and for an output without its call.

    What was thought goes with the turn that it led to; the model's template says which of it the
    model reads again.
    """

    def __init__(self, instructions: str | None, items: Sequence[Placed]) -> None:
        self.messages: list[Message] = []
        self.paths: dict[str, str] = {}
        self._unanswered: dict[str, str] = {}
        self._called: set[str] = set()
        self._thoughts: list[str] = []
        if instructions is not None:
            self._add(Message(role="system", content=instructions), "instructions", "instructions")
        for placed in items:
            self._take(placed)
        for call_id, at in self._unanswered.items():
            raise InvalidRequest(
                f"There is no output of the function call {call_id!r}.",
                param=at,
                code="missing_call_output",
            )

    def _take(self, placed: Placed) -> None:
        at = placed.at
        match placed.item:
            case MessageItem(role=role, content=content):
                inner = at if at == "input" else f"{at}.content"
                self._add(Message(role=role, content=_content(content)), at, inner)
            case FunctionCallItem() as call:
                self._call(call, at)
            case FunctionCallOutputItem(call_id=call_id, output=output):
                if call_id not in self._called:
                    raise InvalidRequest(
                        f"There is no function call {call_id!r} before this output.",
                        param=f"{at}.call_id",
                        code="unknown_call",
                    )
                self._unanswered.pop(call_id, None)
                text = output if isinstance(output, str) else _content(output)
                message = Message(role="tool", content=text, tool_call_id=call_id)
                self._add(message, at, f"{at}.output")
            case ReasoningItem(content=content):
                self._thoughts += [part.text for part in content]

    def _add(self, message: Message, at: str, content_at: str) -> None:
        thoughts, self._thoughts = self._thoughts, []
        if thoughts and message.role == "assistant":
            message.reasoning_content = "\n".join(thoughts)
        inner = f"messages[{len(self.messages)}]"
        self.paths[inner] = at
        self.paths[f"{inner}.content"] = content_at
        self.messages.append(message)

    def _call(self, call: FunctionCallItem, at: str) -> None:
        self._called.add(call.call_id)
        self._unanswered[call.call_id] = at
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or self._thoughts:
            last = Message(role="assistant", content=None)
            self._add(last, at, at)
        calls = last.tool_calls = last.tool_calls or []
        inner = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self.paths[inner] = at
        self.paths[f"{inner}.function"] = at
        calls.append(
            MessageToolCall(
                id=call.call_id, function=CalledFunction(name=call.name, arguments=call.arguments)
            )
        )


def _content(parts: Sequence[InputText | OutputText]) -> str | list[ContentPart]:
    if len(parts) == 1:
        return parts[0].text
    return [ContentPart(type="text", text=part.text) for part in parts]


def beginnings(items: Sequence[Placed]) -> list[int]:
    """Where a conversation could begin, were what stands before left out: at what a user says."""
    return [
        i
        for i, placed in enumerate(items)
        if isinstance(placed.item, MessageItem) and placed.item.role == "user"
    ]


def without_oldest(items: Sequence[Placed], count: int) -> list[Placed]:
    """All but the first `count` items, and but the outputs of calls that were among those."""
    gone = {one.item.call_id for one in items[:count] if isinstance(one.item, FunctionCallItem)}
    return [
        one
        for one in items[count:]
        if not isinstance(one.item, FunctionCallOutputItem) or one.item.call_id not in gone
    ]
