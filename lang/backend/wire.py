"""What a Phloem server has beyond OpenAI's API: every constraint, and choices scored in one
operation (`/v1/score`), or by token ids (`/tokenize` and `/generate`) on a server that is older.
No I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, assert_never

import msgspec

from phloem.constrained import spec
from phloem.lang.backend.base import ChatPrompt, Delta, Prompt, TextPrompt
from phloem.lang.backend.http_transport import Body, error_parts
from phloem.lang.backend.openai_wire import (
    Counts,
    Logprobs,
    Metrics,
    chat_messages,
    decode,
    finish_of,
    json_schema_format,
    usage_of,
)
from phloem.lang.backend.selecting import Selected
from phloem.lang.choices import ChoiceScore, ChoicesMethod
from phloem.lang.errors import BackendError, BackendUnavailable, RequestRefused
from phloem.lang.hints import Hint

T = TypeVar("T")

NORMALIZATION = {
    ChoicesMethod.TOKEN_LENGTH_NORMALIZED: "token",
    ChoicesMethod.GREEDY_TOKEN_SELECTION: "greedy",
    ChoicesMethod.UNCONDITIONAL_LIKELIHOOD_NORMALIZED: "unconditional",
}


def constraint_fields(constraint: spec.Constraint) -> Body | None:
    """The fields that ask for a constraint; None where no field can."""
    match constraint:
        case spec.JsonSchema(schema=schema, whitespace=whitespace):
            return json_schema_format(schema) | _whitespace(whitespace)
        case spec.JsonObject(whitespace=whitespace):
            return {"response_format": {"type": "json_object"}, **_whitespace(whitespace)}
        case spec.JsonLines(schema=schema, min_lines=low, max_lines=high):
            lines: Body = {"type": "json_lines", "schema": msgspec.Raw(schema.encode())}
            lines |= {"min_lines": low} if high is None else {"min_lines": low, "max_lines": high}
            return {"response_format": lines}
        case spec.Regex(pattern=pattern):
            return {"regex": pattern}
        case spec.Choice(choices=choices):
            return {"guided_choice": list(choices)}
        case spec.Ebnf(grammar=grammar, root=root):
            return {"ebnf": grammar} if root == "root" else None
        case spec.StructuralTag(format=form):
            tag = {"type": "structural_tag", "format": msgspec.Raw(form.encode())}
            return {"response_format": tag}
        case spec.Continued(constraint=inner, prefix=prefix):
            return _placed(inner, {"constraint_prefix": prefix})
        case spec.Deferred(constraint=inner, end=end, begin="", budget=None, seen=""):
            return None if inner is None else _placed(inner, {"constraint_after": end})
        case spec.Deferred() | spec.JsonDocuments():
            return None
        case never:
            assert_never(never)


def hint_fields(hint: Hint | None) -> Body:
    """The fields that say what a program says of its call."""
    if hint is None:
        return {}
    plan: Body = {}
    if hint.remaining is not None:
        plan["remaining"] = hint.remaining
    if hint.group:
        plan |= {"group": hint.group, "width": hint.width}
    ahead = [fields for one in hint.ahead if (fields := constraint_fields(one)) is not None]
    if ahead:
        plan["next_constraint"] = ahead
    return {"program": hint.program, "plan": plan} if plan else {"program": hint.program}


def _placed(inner: spec.Plain, where: Body) -> Body | None:
    fields = constraint_fields(inner)
    return None if fields is None else fields | where


def _whitespace(whitespace: spec.Whitespace) -> Body:
    """Told where it is not what the server does by itself."""
    if whitespace is spec.Whitespace.BOUNDED:
        return {}
    return {"constraint_whitespace": whitespace.value}


# ------------------------------------------------------------------ scoring in one operation


class _Choice(msgspec.Struct):
    tokens: list[str]
    logprobs: list[float]
    value: float


class _ChoiceScores(msgspec.Struct):
    index: int
    choices: list[_Choice]
    usage: Counts | None = None


def score_request(
    prompt: Prompt, choices: Sequence[str], method: ChoicesMethod, model: str
) -> Body:
    """Body of `/v1/score`."""
    body: Body = {"model": model, "choices": choices, "normalization": NORMALIZATION[method]}
    if isinstance(prompt, TextPrompt):
        return {**body, "prompt": prompt.text}
    chat = chat_messages(prompt)
    chat.pop("add_generation_prompt", None)
    return {**body, **chat}


def selected(data: bytes, count: int) -> Selected:
    """Reply of `/v1/score` to a request of `count` choices."""
    reply = decode(_choice_scores, data)
    if len(reply.choices) != count or not 0 <= reply.index < count:
        raise BackendError(f"{len(reply.choices)} scores for {count} choices")
    return _judged(reply.index, reply.choices, reply.usage)


def _judged(index: int, choices: Sequence[_Choice], usage: Counts | None) -> Selected:
    return Selected(
        index,
        tuple(ChoiceScore(tuple(one.tokens), tuple(one.logprobs)) for one in choices),
        tuple(one.value for one in choices),
        usage_of(usage),
    )


# ------------------------------------------------------------------ a whole program


_Matched = str | int | None


class Told(msgspec.Struct):
    """An event of `/programs/run`: a variable has its value, or an error. Of several answers, what
    there is one of each is a list."""

    type: str = ""
    path: str = ""
    value: str | list[str] = ""
    finish_reason: str | list[str | None] | None = None
    matched_stop: _Matched | list[_Matched] = None
    reasoning_content: str | list[str] = ""
    logprobs: Logprobs | list[Logprobs | None] | None = None
    metrics: Metrics | list[Metrics | None] | None = None
    scores: list[_Choice] = []
    usage: Counts | None = None
    error: Any = None


_UNAVAILABLE = ("queue_full", "rate_limit_exceeded", "unavailable", "deadline_exceeded")


def program_event(data: bytes) -> Told | None:
    """The data of one event; None at the program's end. Raises the error that it is."""
    event = decode(_program_events, data)
    if event.type == "done":
        return None
    if event.error is None:
        return event
    message, param, code = error_parts(data)
    cls = BackendError
    if code in _UNAVAILABLE:
        cls = BackendUnavailable
    elif param is not None:
        cls = RequestRefused
    raise cls(message, param=param, code=code)


def told_deltas(told: Told) -> Iterator[Delta]:
    """The answers of a call."""
    texts = [told.value] if isinstance(told.value, str) else told.value
    count = len(texts)
    ends = _each(told.finish_reason, count, "ends")
    matched = _each(told.matched_stop, count, "matched stops")
    thoughts = _each(told.reasoning_content, count, "thoughts")
    logprobs = _each(told.logprobs, count, "logprobs")
    for metrics in _each(told.metrics, count, "metrics"):
        if metrics is not None:
            metrics.note()
    for i in range(count):
        found = logprobs[i]
        yield Delta(
            index=i,
            text=texts[i],
            logprobs=() if found is None else found.entries(None),
            finish=finish_of(ends[i]),
            matched=matched[i],
            reasoning=thoughts[i],
        )
    yield Delta(usage=usage_of(told.usage))


def _each(told: T | list[T], count: int, what: str) -> list[T]:
    """What is told of each of `count` answers. Nothing may be told of any of them."""
    if not isinstance(told, list):
        told = [told] if told else [told] * count
    if len(told) != count:
        raise BackendError(f"{len(told)} {what} of {count} answers")
    return told


def told_choice(told: Told, choices: Sequence[str]) -> Selected:
    """What a `select` has decided."""
    if told.value not in choices or len(told.scores) != len(choices):
        raise BackendError(f"{told.value!r} is none of {len(choices)} choices, or lacks its scores")
    return _judged(choices.index(str(told.value)), told.scores, told.usage)


# -------------------------------------------------------------------- scoring by token ids


class _Scored(msgspec.Struct):
    class _Meta(msgspec.Struct):
        input_token_logprobs: list[tuple[float | None, int, str | None]]

    meta_info: _Meta


class _Tokens(msgspec.Struct):
    tokens: list[int]


_program_events = msgspec.json.Decoder(Told)
_choice_scores = msgspec.json.Decoder(_ChoiceScores)
_scored = msgspec.json.Decoder(list[_Scored])
_tokens = msgspec.json.Decoder(_Tokens)


def tokenize_request(prompt: Prompt, model: str, choice: str = "") -> Body:
    """Body of `/tokenize` for a prompt, followed by `choice` if there is one."""
    if isinstance(prompt, TextPrompt):
        return {"model": model, "prompt": prompt.text + choice}
    chat = chat_messages(ChatPrompt(prompt.messages, prompt.partial + choice))
    return {"model": model, "add_generation_prompt": True, **chat}


def token_ids(data: bytes) -> list[int]:
    """Reply of `/tokenize` → ids."""
    return decode(_tokens, data).tokens


def logprobs_request(sequences: Sequence[Sequence[int]], start: int) -> Body:
    """Body of `/generate` that asks for the logprobs of each sequence from token `start` on."""
    return {
        "input_ids": [list(ids) for ids in sequences],
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "return_text_in_logprobs": True,
        "logprob_start_len": start,
    }


def choice_scores(data: bytes, lengths: Sequence[int]) -> list[ChoiceScore]:
    """Reply of `/generate` to `logprobs_request` → scores; `lengths` are the expected counts."""
    replies = decode(_scored, data)
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
