"""What all servers with OpenAI's API have in common: messages in, chat and completion replies out.
No I/O; where servers differ is in `dialects`.

API: https://platform.openai.com/docs/api-reference/chat and /completions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import msgspec

from phloem.lang.backend.base import ChatPrompt, Delta, Message, TokenLogprob, Usage
from phloem.lang.backend.http_transport import Body, error_parts
from phloem.lang.errors import BackendError
from phloem.lang.recording.spans import note_times

T = TypeVar("T")

COMPLETIONS = "/completions"  # under the API's root, which is most often /v1
CHAT = "/chat/completions"


def chat_messages(prompt: ChatPrompt) -> Body:
    """The messages; where the assistant's has begun, it stands last and is to be gone on with."""
    messages = [_message(message) for message in prompt.messages]
    if not prompt.partial:
        return {"messages": messages}
    messages.append(_message(Message("assistant", prompt.partial)))
    return {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}


def json_schema_format(schema: str) -> Body:
    """The field that asks for JSON of a schema."""
    named = {"name": "answer", "schema": msgspec.Raw(schema.encode()), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _message(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}


# ----------------------------------------------------------------------------- replies


class _Token(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: list[_Token] = []


class Logprobs(msgspec.Struct):
    """Of chat (`content`), or of completions (parallel lists; a prompt's first has no logprob)."""

    content: list[_Token] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None

    def entries(self, most: int | None) -> tuple[TokenLogprob, ...]:
        """Each token, with at most `most` alternatives."""
        if self.content is not None:
            return tuple(
                TokenLogprob(
                    t.token, t.logprob, tuple((a.token, a.logprob) for a in t.top_logprobs[:most])
                )
                for t in self.content
            )
        tokens, values = self.tokens or [], self.token_logprobs or []
        tops = self.top_logprobs or [None] * len(tokens)
        if not len(tokens) == len(values) == len(tops) or None in values:
            raise BackendError("the server's logprobs are not one a token")
        return tuple(
            TokenLogprob(token, value or 0.0, tuple((top or {}).items()))
            for token, value, top in zip(tokens, values, tops, strict=True)
        )


class PromptToken(msgspec.Struct):
    logprob: float
    decoded_token: str | None = None


# of each token of a prompt, the token itself by its id; the first has no logprob
PromptLogprobs = list[dict[int, PromptToken] | None]


class _Content(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None  # Phloem, SGLang, llama-server
    reasoning: str | None = None  # vLLM

    @property
    def thoughts(self) -> str:
        return self.reasoning_content or self.reasoning or ""


class Metrics(msgspec.Struct):
    """How long an answer took."""

    queue_time_ms: float = 0.0
    time_to_first_token_ms: float | None = None

    def note(self) -> None:
        """In the trace of the call that runs here."""
        first = self.time_to_first_token_ms
        note_times(self.queue_time_ms / 1e3, None if first is None else first / 1e3)


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None  # completions
    message: _Content | None = None  # chat, whole
    delta: _Content | None = None  # chat, streamed
    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None  # completions
    finish_reason: str | None = None
    matched_stop: str | int | None = None  # Phloem, SGLang
    stop_reason: str | int | None = None  # vLLM
    metrics: Metrics | None = None  # Phloem

    def as_delta(self, most: int | None) -> Delta:
        if self.metrics is not None:
            self.metrics.note()
        content = self.message or self.delta
        if content is not None and content.refusal:
            raise BackendError(f"the model refused: {content.refusal}", code="refusal")
        return Delta(
            index=self.index,
            text=self.text or (content.content if content else None) or "",
            logprobs=self.logprobs.entries(most) if self.logprobs else (),
            finish=finish_of(self.finish_reason),
            matched=self.stop_reason if self.matched_stop is None else self.matched_stop,
            reasoning=content.thoughts if content else "",
        )


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _CompletionDetails(msgspec.Struct):
    forced_tokens: int | None = None  # Phloem


class Counts(msgspec.Struct):
    """Token counts, as a reply tells them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _CompletionDetails | None = None


class Reply(msgspec.Struct):
    """A whole reply, or an event of a streamed one."""

    choices: list[_Choice] = []
    usage: Counts | None = None
    prompt_logprobs: PromptLogprobs | None = None  # chat
    error: Any = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_reply = msgspec.json.Decoder(Reply)
_models = msgspec.json.Decoder(_Models)


def read_reply(data: bytes) -> Reply:
    """Raises `BackendError` for an error event and for anything that is not such a reply."""
    reply = decode(_reply, data)
    if reply.error is not None:
        message, param, code = error_parts(data)
        raise BackendError(message, param=param, code=code)
    return reply


def reply_deltas(data: bytes, most: int | None = None) -> Iterator[Delta]:
    """Deltas of one whole reply, or of one streamed event; tokens have at most `most` alternatives
    where that is given. Raises `BackendError` as `read_reply` does."""
    reply = read_reply(data)
    for choice in reply.choices:
        yield choice.as_delta(most)
    if reply.usage is not None:
        yield Delta(usage=usage_of(reply.usage))


def usage_of(told: Counts | None) -> Usage:
    counts = told or Counts()
    of_prompt = counts.prompt_tokens_details or _Details()
    of_answer = counts.completion_tokens_details or _CompletionDetails()
    return Usage(
        counts.prompt_tokens,
        counts.completion_tokens,
        of_prompt.cached_tokens or 0,
        of_answer.forced_tokens or 0,
    )


def models(data: bytes) -> list[tuple[str, int | None]]:
    """Reply of `/v1/models` → each model's name, and its context length where it is told."""
    found = [(model.id, model.max_model_len) for model in decode(_models, data).data]
    if not found:
        raise BackendError("the server serves no model")
    return found


def decode(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    """Raises `BackendError` for what the decoder does not take."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BackendError(f"the server's reply is not what it should be: {exc}") from exc


def finish_of(reason: str | None) -> Literal["stop", "length"] | None:
    """How an answer has ended. Raises `BackendError` for an end that is none."""
    match reason:
        case None | "stop" | "length":
            return reason
        case other:
            raise BackendError(f"the server ended an answer with finish_reason {other!r}")
