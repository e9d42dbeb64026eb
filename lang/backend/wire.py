"""Calls → bodies of a Phloem server's HTTP routes, and its replies → deltas. No I/O.

Text goes to `/v1/completions`, chats to `/v1/chat/completions`: with the assistant's text so far as
last message and `continue_final_message`, so that the server's template leaves that message open.
Choices are scored by token ids over `/tokenize` and `/generate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar, assert_never, cast

import msgspec

from phloem.constrained import spec
from phloem.lang.backend.base import (
    Call,
    ChatPrompt,
    Delta,
    Message,
    Prompt,
    TextPrompt,
    TokenLogprob,
    Usage,
)
from phloem.lang.choices import ChoiceScore
from phloem.lang.errors import BackendError
from phloem.lang.sampling import Sampling

T = TypeVar("T")
Body = dict[str, Any]


def call_request(call: Call, model: str) -> tuple[str, Body]:
    """Path and body of a generation."""
    body: Body = {"model": model, **_sampling(call.sampling), **_constraint(call.constraint)}
    if call.stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    logprobs = call.sampling.logprobs
    match call.prompt:
        case TextPrompt(text):
            if logprobs is not None:
                body["logprobs"] = logprobs
            return "/v1/completions", {**body, "prompt": text}
        case ChatPrompt():
            if logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": logprobs}
            return "/v1/chat/completions", {**body, **_chat(call.prompt)}
        case never:
            assert_never(never)


def tokenize_request(prompt: Prompt, model: str, choice: str = "") -> Body:
    """Body of `/tokenize` for a prompt, followed by `choice` if there is one."""
    match prompt:
        case TextPrompt(text):
            return {"model": model, "prompt": text + choice}
        case ChatPrompt(messages, partial):
            return {"model": model, **_chat(ChatPrompt(messages, partial + choice))}
        case never:
            assert_never(never)


def score_request(sequences: Sequence[Sequence[int]], start: int) -> Body:
    """Body of `/generate` that asks for the logprobs of each sequence from token `start` on."""
    return {
        "input_ids": [list(ids) for ids in sequences],
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "return_text_in_logprobs": True,
        "logprob_start_len": start,
    }


def _chat(prompt: ChatPrompt) -> Body:
    messages = [_message(message) for message in prompt.messages]
    if not prompt.partial:
        return {"messages": messages, "add_generation_prompt": True}
    messages.append(_message(Message("assistant", prompt.partial)))
    return {
        "messages": messages,
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


def _message(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}


def _sampling(sampling: Sampling) -> Body:
    body = cast("Body", msgspec.to_builtins(sampling, str_keys=True))
    body.pop("logprobs", None)  # spelt differently by the two routes
    return body


def _constraint(constraint: spec.Constraint | None) -> Body:
    match constraint:
        case None:
            return {}
        case spec.JsonSchema(schema=schema, whitespace=whitespace):
            named = {"name": "answer", "schema": msgspec.Raw(schema.encode()), "strict": True}
            form = {"type": "json_schema", "json_schema": named}
            return {"response_format": form, **_whitespace(whitespace)}
        case spec.JsonObject(whitespace=whitespace):
            return {"response_format": {"type": "json_object"}, **_whitespace(whitespace)}
        case spec.JsonLines(schema=schema, min_lines=low, max_lines=high):
            lines: Body = {"type": "json_lines", "schema": msgspec.Raw(schema.encode())}
            lines |= {"min_lines": low} if high is None else {"min_lines": low, "max_lines": high}
            return {"response_format": lines}
        case spec.Continued(constraint=inner, prefix=prefix):
            return {**_constraint(inner), "constraint_prefix": prefix}
        case spec.Regex(pattern=pattern):
            return {"regex": pattern}
        case spec.Choice(choices=choices):
            return {"guided_choice": list(choices)}
        case spec.Ebnf(grammar=grammar):
            return {"ebnf": grammar}
        case spec.StructuralTag(format=form):
            tag = {"type": "structural_tag", "format": msgspec.Raw(form.encode())}
            return {"response_format": tag}
        case never:
            assert_never(never)


def _whitespace(whitespace: spec.Whitespace) -> Body:
    """Told where it is not what servers do by themselves."""
    if whitespace is spec.Whitespace.BOUNDED:
        return {}
    return {"constraint_whitespace": whitespace.value}


# ----------------------------------------------------------------------------- replies


class _Token(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: list[_Token] = []


class _Logprobs(msgspec.Struct):
    """Of chat (`content`), or of completions (parallel lists)."""

    content: list[_Token] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None

    def entries(self) -> tuple[TokenLogprob, ...]:
        if self.content is not None:
            return tuple(
                TokenLogprob(
                    t.token, t.logprob, tuple((a.token, a.logprob) for a in t.top_logprobs)
                )
                for t in self.content
            )
        tokens, values = self.tokens or [], self.token_logprobs or []
        tops = self.top_logprobs or [None] * len(tokens)
        return tuple(
            TokenLogprob(token, value, tuple((top or {}).items()))
            for token, value, top in zip(tokens, values, tops, strict=True)
        )


class _Content(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None  # completions
    message: _Content | None = None  # chat, whole
    delta: _Content | None = None  # chat, streamed
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | None = None

    def as_delta(self) -> Delta:
        content = self.message or self.delta
        return Delta(
            index=self.index,
            text=self.text or (content.content if content else None) or "",
            logprobs=self.logprobs.entries() if self.logprobs else (),
            finish=_finish(self.finish_reason),
            matched=self.matched_stop,
        )


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _ErrorBody(msgspec.Struct):
    message: str = ""
    param: str | None = None
    code: str | int | None = None


class _Envelope(msgspec.Struct):
    error: _ErrorBody | str


class _Scored(msgspec.Struct):
    class _Meta(msgspec.Struct):
        input_token_logprobs: list[tuple[float | None, int, str | None]]

    meta_info: _Meta


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_reply = msgspec.json.Decoder(_Reply)
_envelope = msgspec.json.Decoder(_Envelope)
_scored = msgspec.json.Decoder(list[_Scored])
_tokens = msgspec.json.Decoder(_Tokens)
_models = msgspec.json.Decoder(_Models)


def reply_deltas(data: bytes) -> Iterator[Delta]:
    """Deltas of one whole reply, or of one streamed event. Raises `BackendError` for an error
    event and for anything that is not such a reply."""
    reply = _decode(_reply, data)
    if reply.error is not None:
        message, param, code = error_parts(data)
        raise BackendError(message, param=param, code=code)
    for choice in reply.choices:
        yield choice.as_delta()
    if reply.usage is not None:
        details = reply.usage.prompt_tokens_details or _Details()
        yield Delta(
            usage=Usage(
                reply.usage.prompt_tokens,
                reply.usage.completion_tokens,
                details.cached_tokens or 0,
            )
        )


def error_parts(data: bytes) -> tuple[str, str | None, str | None]:
    """Message, field and code of an error body, of whatever shape it is."""
    try:
        error = _envelope.decode(data).error
    except msgspec.DecodeError:
        return data.decode(errors="replace").strip()[:500] or "no reason given", None, None
    if isinstance(error, str):
        return error, None, None
    return error.message, error.param, None if error.code is None else str(error.code)


def token_ids(data: bytes) -> list[int]:
    """Reply of `/tokenize` → ids."""
    return _decode(_tokens, data).tokens


def choice_scores(data: bytes, lengths: Sequence[int]) -> list[ChoiceScore]:
    """Reply of `/generate` to `score_request` → scores; `lengths` are the expected token counts."""
    replies = _decode(_scored, data)
    if len(replies) != len(lengths):
        raise BackendError(f"{len(replies)} replies to {len(lengths)} scored sequences")
    scores = []
    for reply, length in zip(replies, lengths, strict=True):
        entries = reply.meta_info.input_token_logprobs
        if len(entries) != length:
            raise BackendError(f"{len(entries)} logprobs for {length} scored tokens")
        values = [value for value, _, _ in entries if value is not None]
        if len(values) != length:
            raise BackendError("a scored token has no logprob")
        scores.append(ChoiceScore(tuple(text or "" for _, _, text in entries), tuple(values)))
    return scores


def first_model(data: bytes) -> tuple[str, int | None]:
    """Reply of `/v1/models` → the first model's name and context length."""
    models = _decode(_models, data).data
    if not models:
        raise BackendError("the server serves no model")
    return models[0].id, models[0].max_model_len


def _finish(reason: str | None) -> Literal["stop", "length"] | None:
    match reason:
        case None | "stop" | "length":
            return reason
        case other:
            raise BackendError(f"the server ended an answer with finish_reason {other!r}")


def _decode(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BackendError(f"the server's reply is not what it should be: {exc}") from exc
