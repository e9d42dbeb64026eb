"""Calls → bodies of Anthropic's Messages API, and its replies → deltas. No I/O.

API: https://docs.anthropic.com/en/api/messages, version 2023-06-01 with structured outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from phloem.constrained import spec
from phloem.lang.backend.base import Call, ChatPrompt, Delta, TextPrompt, Usage
from phloem.lang.backend.dialects import sampling_fields, unsupported
from phloem.lang.backend.http_transport import Body
from phloem.lang.backend.openai_wire import decode
from phloem.lang.errors import BackendError, BackendUnavailable

TITLE = "Anthropic's Messages API"
_OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop": "stop_sequences",
}


def message_request(call: Call, model: str) -> Body:
    """Body of `/v1/messages` for one answer; `n` is the caller's. Raises `RequestRefused` for what
    the API has no field for."""
    if isinstance(call.prompt, TextPrompt):
        raise unsupported(f"{TITLE} has no plain text: put all text into roles", "prompt")
    sampling = msgspec.structs.replace(call.sampling, n=None)
    if sampling.logprobs is not None:
        raise unsupported(f"{TITLE} has no logprobs", "logprobs")
    if sampling.max_tokens is None:
        raise unsupported(f"{TITLE} wants max_tokens", "max_tokens")
    body: Body = {"model": model, "max_tokens": sampling.max_tokens, **_messages(call.prompt)}
    body |= sampling_fields(sampling, _OPTIONS, TITLE)
    if body.get("top_k", 1) <= 0:  # off, which is not sent
        del body["top_k"]
    if call.constraint is not None:
        body["output_config"] = {"format": _format(call.constraint)}
    if call.stream:
        body["stream"] = True
    return body


def _messages(prompt: ChatPrompt) -> Body:
    """What the system says goes before all messages; the assistant's message that has begun is the
    last of them, which the model goes on with."""
    system = []
    messages = []
    for message in prompt.messages:
        if message.role != "system":
            messages.append({"role": message.role, "content": message.content})
        elif messages:
            raise unsupported(f"{TITLE} has system messages only at the beginning", "system")
        else:
            system.append(message.content)
    if prompt.partial:
        messages.append({"role": "assistant", "content": prompt.partial})
    body: Body = {"messages": messages}
    return body if not system else {"system": "\n\n".join(system), **body}


def _format(constraint: spec.Constraint) -> Body:
    if not isinstance(constraint, spec.JsonSchema):
        kind = type(constraint).__struct_config__.tag
        raise unsupported(f"{TITLE} has no constraint {kind!r}, only json_schema", str(kind))
    return {"type": "json_schema", "schema": msgspec.Raw(constraint.schema.encode())}


# ----------------------------------------------------------------------------- replies


class _Block(msgspec.Struct):
    type: str
    text: str = ""


class _Usage(msgspec.Struct):
    """What was computed of the prompt, what was not, and what was put into the cache count apart;
    a stream tells its counts in two parts."""

    input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    output_tokens: int | None = None


class _Ended(msgspec.Struct):
    type: str = ""
    text: str = ""
    stop_reason: str | None = None
    stop_sequence: str | None = None


class _Message(msgspec.Struct):
    content: list[_Block] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: _Usage | None = None


class _Error(msgspec.Struct):
    type: str = ""
    message: str = ""


class _Event(msgspec.Struct):
    type: str
    message: _Message | None = None
    delta: _Ended | None = None
    usage: _Usage | None = None
    error: _Error | None = None


_message = msgspec.json.Decoder(_Message)
_event = msgspec.json.Decoder(_Event)


def message_deltas(data: bytes) -> Iterator[Delta]:
    """Deltas of a whole reply. Raises `BackendError` for anything that is none."""
    message = decode(_message, data)
    text = "".join(block.text for block in message.content if block.type == "text")
    yield Delta(text=text, finish=_finish(message.stop_reason), matched=message.stop_sequence)
    yield Delta(usage=_usage(message.usage or _Usage()))


class StreamReader:
    """Events of a streamed reply → deltas; `done` after the last one."""

    def __init__(self) -> None:
        self.done = False
        self._usage = _Usage()

    def deltas(self, data: bytes) -> Iterator[Delta]:
        """Raises `BackendError` for an error event and for anything that is no event."""
        event = decode(_event, data)
        match event.type:
            case "message_start" if event.message is not None:
                self._count(event.message.usage)
            case "content_block_delta" if event.delta is not None:
                if event.delta.type == "text_delta":
                    yield Delta(text=event.delta.text)
            case "message_delta":
                self._count(event.usage)
                end = event.delta or _Ended()
                yield Delta(finish=_finish(end.stop_reason), matched=end.stop_sequence)
            case "message_stop":
                self.done = True
                yield Delta(usage=_usage(self._usage))
            case "error":
                error = event.error or _Error()
                cls = BackendUnavailable if error.type == "overloaded_error" else BackendError
                raise cls(error.message or "no reason given", code=error.type or None)
            case _:
                return  # pings, the bounds of blocks, and events that are newer than this client

    def _count(self, told: _Usage | None) -> None:
        """A later count replaces an earlier one."""
        for name in told.__struct_fields__ if told is not None else ():
            value = getattr(told, name)
            if value is not None:
                setattr(self._usage, name, value)


def _usage(told: _Usage) -> Usage:
    cached = told.cache_read_input_tokens or 0
    computed = (told.input_tokens or 0) + (told.cache_creation_input_tokens or 0)
    return Usage(computed + cached, told.output_tokens or 0, cached)


def _finish(reason: str | None) -> Literal["stop", "length"]:
    match reason:
        case "end_turn" | "stop_sequence":
            return "stop"
        case "max_tokens" | "model_context_window_exceeded":
            return "length"
        case other:
            raise BackendError(f"the server ended an answer with stop_reason {other!r}", code=other)
