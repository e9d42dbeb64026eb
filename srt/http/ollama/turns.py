"""Ollama's chat messages → those of the inner request.

Calls and answers of tools belong together by name here, or by nothing but their order; templates
want ids. So a call without one gets one, and a tool's message that of the call it answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from phloem.srt.errors import InvalidRequest
from phloem.srt.http.ollama.protocol import Call, ChatTurn
from phloem.srt.http.protocol import CalledFunction, Message, MessageToolCall


def inner_messages(turns: Sequence[ChatTurn]) -> list[Message]:
    """Raises `InvalidRequest` with the message's path for what no model here can read."""
    messages: list[Message] = []
    unanswered: list[MessageToolCall] = []
    for i, turn in enumerate(turns):
        at = f"messages[{i}]"
        if turn.images:
            raise InvalidRequest(
                "Images are not supported; this model reads text.",
                param=f"{at}.images",
                code="unsupported_content",
            )
        calls = [_call(call, f"call_{i}_{k}") for k, call in enumerate(turn.tool_calls or [])]
        answered = _answered(turn, unanswered) if turn.role == "tool" else None
        unanswered += calls
        message = Message(
            role=turn.role,
            content=turn.content,
            name=turn.tool_name or turn.name,
            tool_calls=calls or None,
            tool_call_id=turn.tool_call_id,
            reasoning_content=turn.thinking or None,
        )
        if answered is not None:
            message.name = answered.function.name
            message.tool_call_id = answered.id
        messages.append(message)
    return messages


def _call(call: Call, call_id: str) -> MessageToolCall:
    arguments = msgspec.json.encode(call.function.arguments).decode()
    function = CalledFunction(name=call.function.name, arguments=arguments)
    return MessageToolCall(id=call.id or call_id, function=function)


def _answered(turn: ChatTurn, unanswered: list[MessageToolCall]) -> MessageToolCall | None:
    """The first open call that `turn` can be the answer to; it is open no more."""
    name = turn.tool_name or turn.name
    for call in unanswered:
        same_id = turn.tool_call_id in (None, "", call.id)
        if same_id and name in (None, "", call.function.name):
            unanswered.remove(call)
            return call
    return None
