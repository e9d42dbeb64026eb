"""Where servers with OpenAI's API differ: which sampling options they take and by what name, how a
constraint is spelt, whether an answer can be gone on with, how a text can be scored.

A dialect says only what is exact: what it has no field for is refused by `unsupported`, because
such servers ignore fields that they do not know, and an answer would come without what was asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, assert_never

import msgspec

from phloem.constrained import spec
from phloem.lang.backend import wire
from phloem.lang.backend.base import Call, ChatPrompt, TextPrompt
from phloem.lang.backend.http_transport import Body
from phloem.lang.backend.openai_wire import (
    CHAT,
    COMPLETIONS,
    chat_messages,
    json_schema_format,
)
from phloem.lang.errors import RequestRefused
from phloem.lang.sampling import SAMPLING_FIELDS, Sampling

_GBNF_SPECIAL = re.compile(r'[\x00-\x1f\x7f"\\]')

DialectName = Literal["openai", "vllm", "vllm-guided", "llama-server", "phloem"]
"""Which server it is, and so which fields it takes beside OpenAI's."""

# a constraint, and whether it is for chat → the fields that ask for it; None: it cannot be said
Spelling = Callable[[spec.Constraint, bool], Body | None]

# values of options that ask for nothing: where there is no such field, they are left out
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "min_tokens": (0,),
    "n": (1,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
    "stop": ((),),
    "stop_token_ids": ((),),
    "stop_regex": ((),),
    "ignore_eos": (False,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """`options` maps an option of `Sampling` to the field of that name there. `max_tokens` and
    `logprobs`, which chat and completions spell differently, are not among them.

    `continues`: whether a chat can go on from a beginning of the assistant's message. `scoring`:
    by an echo of the prompt with its logprobs (completions only), or by `prompt_logprobs` (chat,
    too). `least_top` is the smallest `top_logprobs` that gives logprobs at all. `extra` goes with
    every generation. `streams_continued`: a whole answer has its beginning in it, a streamed one
    has not.
    """

    title: str
    options: Mapping[str, str]
    constraint: Spelling
    chat_max_tokens: str = "max_tokens"
    continues: bool = False
    scoring: Literal["echo", "prompt_logprobs"] | None = None
    least_top: int = 0
    extra: Body = field(default_factory=dict)
    streams_continued: bool = False

    def generation(self, call: Call, model: str) -> tuple[str, Body]:
        """Path and body of a generation. Raises `RequestRefused` for what cannot be asked for."""
        chat = isinstance(call.prompt, ChatPrompt)
        body: Body = {"model": model, **self.extra}
        body |= sampling_fields(call.sampling, self.options, self.title)
        body |= self.constrained(call.constraint, chat=chat)
        if call.stream or self.must_stream(call):
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        most = call.sampling.max_tokens
        if most is not None:
            body[self.chat_max_tokens if chat else "max_tokens"] = most
        body |= self.logprobs(call.sampling, chat=chat)
        match call.prompt:
            case TextPrompt(text):
                return COMPLETIONS, body | {"prompt": text}
            case ChatPrompt():
                return CHAT, body | self.messages(call.prompt)
            case never:
                assert_never(never)

    def logprobs(self, sampling: Sampling, *, chat: bool) -> Body:
        """The fields that ask for the logprobs of an answer's tokens."""
        if sampling.logprobs is None:
            return {}
        top = max(sampling.logprobs, self.least_top)
        return {"logprobs": True, "top_logprobs": top} if chat else {"logprobs": top}

    def must_stream(self, call: Call) -> bool:
        """Whether only a streamed answer is what the model said."""
        begun = isinstance(call.prompt, ChatPrompt) and call.prompt.partial != ""
        return begun and self.streams_continued

    def alternatives(self, call: Call) -> int | None:
        """How many alternatives of a token to keep; None: as many as come."""
        return call.sampling.logprobs if self.least_top else None

    def messages(self, prompt: ChatPrompt) -> Body:
        """The fields of a chat's prompt. Raises `RequestRefused` when the answer has begun and the
        server cannot go on with it."""
        if prompt.partial and not self.continues:
            raise unsupported(
                f"{self.title} cannot go on from a beginning of the assistant's message "
                f"({prompt.partial[-40:]!r})",
                "messages",
            )
        return chat_messages(prompt)

    def constrained(self, constraint: spec.Constraint | None, *, chat: bool) -> Body:
        """The constraint's fields. Raises `RequestRefused` when there are none for it."""
        if constraint is None:
            return {}
        fields = self.constraint(constraint, chat)
        if fields is None:
            kind = type(constraint).__struct_config__.tag
            route = "chat" if chat else "plain text"
            raise unsupported(f"{self.title} has no constraint {kind!r} for {route}", str(kind))
        return fields

    def chooses(self, *, chat: bool) -> bool:
        """Whether an answer can be constrained to be one of some texts."""
        return self.constraint(spec.Choice(choices=("a", "b")), chat) is not None


def sampling_fields(sampling: Sampling, options: Mapping[str, str], title: str) -> Body:
    """Options as fields named by `options`; `max_tokens` and `logprobs` are left to the caller."""
    body: Body = {}
    for option, value in msgspec.structs.asdict(sampling).items():
        if value is None or option in ("max_tokens", "logprobs"):
            continue
        name = options.get(option)
        if name is not None:
            body[name] = value
        elif value not in _NEUTRAL.get(option, ()):
            raise unsupported(f"{title} has no option {option}", option)
    return body


def unsupported(message: str, param: str) -> RequestRefused:
    """Something that a backend cannot ask its server for; nothing was sent."""
    return RequestRefused(message, param=param, code="unsupported")


# ------------------------------------------------------------------------- constraints


def _any_layout(constraint: spec.JsonSchema | spec.JsonObject) -> bool:
    """Whether a server may choose how it lays out JSON: a choice between none and bounded is one of
    cost, the two others say how the text is to look."""
    return constraint.whitespace not in (spec.Whitespace.SPACED, spec.Whitespace.INDENTED)


def _openai(constraint: spec.Constraint, chat: bool) -> Body | None:
    match constraint:
        case spec.JsonSchema(schema=schema) if chat and _any_layout(constraint):
            return json_schema_format(schema)
        case spec.JsonObject() if chat and _any_layout(constraint):
            return {"response_format": {"type": "json_object"}}
        case _:
            return None


def _vllm_kind(constraint: spec.Constraint) -> tuple[str, Any] | None:
    """vLLM's name of the constraint's kind, and the value that goes with it."""
    match constraint:
        case spec.JsonSchema(schema=schema) if _any_layout(constraint):
            return "json", msgspec.Raw(schema.encode())
        case spec.JsonObject() if _any_layout(constraint):
            return "json_object", True
        case spec.Regex(pattern=pattern):
            return "regex", pattern
        case spec.Choice(choices=choices):
            return "choice", choices
        case spec.Ebnf(grammar=grammar, root="root"):
            return "grammar", grammar
        case _:
            return None


def _vllm(constraint: spec.Constraint, chat: bool) -> Body | None:
    found = _vllm_kind(constraint)
    if found is None:
        return None
    fields: Body = dict([found])
    if getattr(constraint, "whitespace", None) is spec.Whitespace.COMPACT:
        fields["disable_any_whitespace"] = True
    return {"structured_outputs": fields}


def _vllm_guided(constraint: spec.Constraint, chat: bool) -> Body | None:
    found = _vllm_kind(constraint)
    if found is None:
        return None
    kind, value = found
    if kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    return {f"guided_{kind}": value}


def _llama_server(constraint: spec.Constraint, chat: bool) -> Body | None:
    match constraint:
        case spec.JsonSchema(schema=schema) if _any_layout(constraint):
            return (
                json_schema_format(schema)
                if chat
                else {"json_schema": msgspec.Raw(schema.encode())}
            )
        case spec.JsonObject() if _any_layout(constraint):
            return {"response_format": {"type": "json_object"}} if chat else {"json_schema": {}}
        case spec.Choice(choices=choices):
            return {"grammar": f"root ::= {' | '.join(map(_gbnf_literal, choices))}"}
        case spec.Ebnf(grammar=grammar, root="root"):
            return {"grammar": grammar}
        case _:
            return None


def _gbnf_literal(text: str) -> str:
    """A text in GBNF's quotes, which know fewer escapes than JSON's."""
    escaped = _GBNF_SPECIAL.sub(lambda found: f"\\x{ord(found[0]):02X}", text)
    return f'"{escaped}"'


# ---------------------------------------------------------------------------- dialects


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_STANDARD = _same("n", "temperature", "top_p", "seed", "stop") | _same(
    "presence_penalty", "frequency_penalty", "logit_bias"
)
_EXTRA = _same("min_tokens", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos")

DIALECTS: Mapping[DialectName, Dialect] = {
    "openai": Dialect(
        title="OpenAI's API",
        options=_STANDARD,
        constraint=_openai,
        chat_max_tokens="max_completion_tokens",
        scoring="echo",
    ),
    "vllm": Dialect(
        title="vLLM",
        options=_STANDARD | _EXTRA,
        constraint=_vllm,
        continues=True,
        scoring="prompt_logprobs",
    ),
    "vllm-guided": Dialect(
        title="vLLM before 0.11",
        options=_STANDARD | _EXTRA,
        constraint=_vllm_guided,
        continues=True,
        scoring="prompt_logprobs",
    ),
    # Its repeat_penalty looks at the last 64 tokens only, so it is not that of the others.
    "llama-server": Dialect(
        title="llama-server",
        options=_STANDARD | _same("top_k", "min_p", "ignore_eos"),
        constraint=_llama_server,
        continues=True,
        least_top=1,
        streams_continued=True,
    ),
    "phloem": Dialect(
        title="Phloem",
        options=_same(*SAMPLING_FIELDS),
        constraint=lambda constraint, chat: wire.constraint_fields(constraint),
        continues=True,
        scoring="prompt_logprobs",
        extra={"return_metrics": True},
    ),
}
