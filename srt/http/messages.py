"""Chat messages as sent → `ChatMessage`s, as templates take them."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from phloem.srt.errors import InvalidRequest
from phloem.srt.generation import ChatMessage, EngineClient
from phloem.srt.http.body import given, invalid, strict_loads, unsupported
from phloem.srt.http.protocol import ChatRequest, Message, MessageToolCall
from phloem.srt.http.reasoning import reasoning_kwargs
from phloem.srt.http.tool_formats import FORMATS

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
RESERVED_KWARGS: Final = frozenset(
    {"chat_template", "messages", "conversation", "tools", "tokenize", "add_generation_prompt"}
    | {"continue_final_message", "return_dict", "return_tensors"}
)


async def render_chat(
    request: ChatRequest, tools: list[dict[str, object]] | None, engine: EngineClient
) -> list[int]:
    """The prompt of a chat request as ids, the same for every route that reads one. `tools` are as
    `plan_tools` has them. Raises `InvalidRequest`."""
    opening, going_on = generation_prompt(request)
    card = engine.card
    kwargs = template_kwargs(request.chat_template_kwargs) or {}
    messages = chat_messages(request.messages)
    if id_length := FORMATS[card.tool_format].syntax.id_length:
        messages = [with_short_ids(message, id_length) for message in messages]
    return await engine.render_chat(
        messages,
        add_generation_prompt=opening,
        continue_final_message=going_on,
        tools=tools,
        template_kwargs={**kwargs, **reasoning_kwargs(request, card.reasoning)} or None,
        documents=request.documents or None,
    )


def chat_messages(messages: list[Message]) -> list[ChatMessage]:
    """Raises `InvalidRequest` with the message's path for what no template could render, and for
    the answer of a tool that was not called."""
    called: set[str | None] = set()
    read: list[ChatMessage] = []
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        read.append(_message(message, at))
        for call in message.tool_calls or ():
            called |= {call.id, call.function.name}
        if message.role == "tool":
            _check_answers(message, called, at)
    return read


def _check_answers(message: Message, called: set[str | None], at: str) -> None:
    """A tool's message says which call it answers: by its id, or (Ollama's way) by the name."""
    if message.tool_call_id is None and message.name is None:
        raise invalid(
            "A tool's message needs the tool_call_id that it answers.", f"{at}.tool_call_id"
        )
    if message.tool_call_id is None:
        if message.name not in called:
            raise invalid(f"No message before calls {message.name!r}.", f"{at}.name")
    elif message.tool_call_id not in called:
        raise invalid(
            f"No message before has a tool call with the id {message.tool_call_id!r}.",
            f"{at}.tool_call_id",
        )


def with_short_ids(message: ChatMessage, length: int) -> ChatMessage:
    """The message with ids of calls as a template wants them, which knows no others: `length`
    letters and digits. Equal ids stay equal."""

    def short(call_id: object) -> str:
        text = str(call_id)
        if len(text) == length and text.isascii() and text.isalnum():
            return text
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:length]

    calls = message.tool_calls
    return msgspec.structs.replace(
        message,
        tool_calls=None if calls is None else [{**c, "id": short(c["id"])} for c in calls],
        tool_call_id=None if message.tool_call_id is None else short(message.tool_call_id),
    )


def _message(message: Message, at: str) -> ChatMessage:
    if message.role not in ROLES:
        raise invalid(f"{message.role!r} is not a role: {', '.join(ROLES)}.", f"{at}.role")
    calls = message.tool_calls or None
    if calls and message.role != "assistant":
        raise invalid("Only the assistant calls tools.", f"{at}.tool_calls")
    if given(message.function_call):
        raise unsupported(f"{at}.function_call", "tool_calls say that")
    thoughts = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if thoughts is not None and message.role != "assistant":
        raise invalid("Only the assistant reasons.", f"{at}.reasoning_content")
    if message.content is None and message.refusal is None and not calls:
        raise invalid(f"A message of role {message.role} needs content.", f"{at}.content")
    return ChatMessage(
        # The newer name of the same role; templates know the older one.
        role="system" if message.role == "developer" else message.role,
        content=_content(message, at),
        name=message.name,
        tool_calls=None if calls is None else [_call(c, at, i) for i, c in enumerate(calls)],
        tool_call_id=message.tool_call_id,
        reasoning_content=thoughts,
    )


def _content(message: Message, at: str) -> str | None:
    if message.content is None:
        return message.refusal
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for i, part in enumerate(message.content):
        if part.type != "text":
            raise InvalidRequest(
                f"Content of type {part.type!r} is not supported; this model reads text.",
                param=f"{at}.content[{i}].type",
                code="unsupported_content",
            )
        if part.text is None:
            raise invalid("A text part needs its text.", f"{at}.content[{i}].text")
        texts.append(part.text)
    return "\n".join(texts)


def _call(call: MessageToolCall, at: str, index: int) -> dict[str, object]:
    """Templates want the arguments as an object; the API carries them as a string of JSON."""
    param = f"{at}.tool_calls[{index}]"
    if call.type != "function":
        raise invalid(f"A tool call of type {call.type!r} is unknown.", f"{param}.type")
    arguments: object = {}
    if call.function.arguments.strip():
        try:
            arguments = strict_loads(call.function.arguments.encode())
        except (ValueError, RecursionError) as error:
            raise invalid(
                f"The arguments are not JSON: {error}", f"{param}.function.arguments"
            ) from None
    if not isinstance(arguments, dict):
        raise invalid("The arguments are not a JSON object.", f"{param}.function.arguments")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def generation_prompt(request: ChatRequest) -> tuple[bool, bool]:
    """`(add_generation_prompt, continue_final_message)`, which exclude each other."""
    going_on = bool(request.continue_final_message)
    opening = (
        not going_on if request.add_generation_prompt is None else (request.add_generation_prompt)
    )
    if going_on and opening:
        raise invalid(
            "add_generation_prompt and continue_final_message exclude each other.",
            "continue_final_message",
        )
    if going_on and (request.messages[-1].role != "assistant" or not request.messages[-1].content):
        raise invalid(
            "There is no text of the assistant at the end to go on with.",
            "continue_final_message",
        )
    return opening, going_on


def going_on_text(request: ChatRequest) -> str | None:
    """The assistant's text that the answer goes on with; None where it begins anew."""
    if not request.continue_final_message:
        return None
    return _content(request.messages[-1], f"messages[{len(request.messages) - 1}]")


def template_kwargs(kwargs: dict[str, object] | None) -> dict[str, object] | None:
    """Variables for the model's own template; never a template, nor what the server decides."""
    for name in kwargs or {}:
        if name in RESERVED_KWARGS:
            raise InvalidRequest(
                f"`{name}` cannot be set from a request.",
                param=f"chat_template_kwargs.{name}",
                code="unsupported_parameter",
            )
    return kwargs or None
