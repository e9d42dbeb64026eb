"""What `POST /programs/run` reads and writes: a straight-line program, and what became of it."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from phloem.srt.http.protocol import Int32, ProgramId, RequestId, Seconds
from phloem.srt.http.replies import ChatLogprobs, CompletionLogprobs, TokenLogprobEntry, Usage
from phloem.srt.http.scoring import Normalization
from phloem.srt.http.scoring_protocol import MAX_CHOICES, ChoiceScore
from phloem.srt.http.stopwatch import AnswerMetrics
from phloem.srt.http.warning import ReplyWarning

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Value = str | list[Any]
"""A text, or a list of values: of `n` answers, of the branches of a fork."""


class SelectFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: Name
    choices: Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)]
    normalization: Normalization | None = None


class Step(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One of: `text`; `insert` a variable; a message of a `role`; `gen`; `select`; `fork`."""

    text: str | None = None
    insert: Name | None = None
    separator: str | None = None
    role: Name | None = None
    content: str | list[Step] | None = None
    gen: dict[str, object] | None = None
    select: SelectFields | None = None
    fork: Annotated[list[list[Step]], Meta(min_length=1)] | None = None
    join: Literal["gather", "append"] | None = None


class ProgramRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`steps` run in order. `variables` are there from the start; `defaults` are fields of each
    `gen`; the others hold for all calls."""

    steps: Annotated[list[Step], Meta(min_length=1)]
    variables: dict[str, Value] | None = None
    defaults: dict[str, object] | None = None
    stream: bool | None = None
    model: str | None = None
    program: ProgramId | None = None
    rid: RequestId | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    timeout: Seconds | None = None


SHARED_FIELDS: Final = ("model", "priority", "cache_salt", "extra_key", "timeout")
"""Fields of all calls."""


class AnswerLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """As the route has them whose fields a `gen` has: `content` of a chat, else the lists."""

    content: list[TokenLogprobEntry] | UnsetType = UNSET
    tokens: list[str] | UnsetType = UNSET
    token_logprobs: list[float | None] | UnsetType = UNSET
    top_logprobs: list[dict[str, float] | None] | UnsetType = UNSET
    text_offset: list[int] | UnsetType = UNSET

    @classmethod
    def of(cls, logprobs: ChatLogprobs | CompletionLogprobs) -> AnswerLogprobs:
        """Those of a reply."""
        if isinstance(logprobs, ChatLogprobs):
            return cls(content=logprobs.content)
        return cls(
            tokens=logprobs.tokens,
            token_logprobs=logprobs.token_logprobs,
            top_logprobs=UNSET if logprobs.top_logprobs is None else logprobs.top_logprobs,
            text_offset=logprobs.text_offset,
        )


Matched = str | int | None


class VariableEvent(msgspec.Struct, frozen=True, kw_only=True, tag="variable", tag_field="type"):
    """A variable has its value. `path` is its step; `scores` are those of a `select`.

    What there is one of an answer, from `value` to `metrics`, is a list for `n` above 1.
    """

    path: str
    name: str
    value: Value
    finish_reason: str | list[str] | UnsetType = UNSET
    matched_stop: Matched | list[Matched] | UnsetType = UNSET
    reasoning_content: str | list[str] | UnsetType = UNSET
    logprobs: AnswerLogprobs | list[AnswerLogprobs] | UnsetType = UNSET
    metrics: AnswerMetrics | list[AnswerMetrics] | UnsetType = UNSET
    scores: list[ChoiceScore] | UnsetType = UNSET
    usage: Usage
    warnings: list[ReplyWarning] | UnsetType = UNSET


class StoredMessage(msgspec.Struct, frozen=True):
    role: str
    content: str


class DoneEvent(msgspec.Struct, frozen=True, kw_only=True, tag="done", tag_field="type"):
    """All steps are done: what the program's variables are, and its text or its messages."""

    id: str
    variables: dict[str, Value]
    text: str | UnsetType = UNSET
    messages: list[StoredMessage] | UnsetType = UNSET
    usage: Usage


class ProgramReply(msgspec.Struct, frozen=True, kw_only=True):
    """The whole reply: what `DoneEvent` has, and the events before it."""

    id: str
    object: Literal["program.run"] = "program.run"
    created: int
    model: str
    variables: dict[str, Value]
    text: str | UnsetType = UNSET
    messages: list[StoredMessage] | UnsetType = UNSET
    calls: list[VariableEvent]
    usage: Usage
