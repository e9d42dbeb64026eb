"""What `POST /programs/run` reads and writes: a straight-line program, and what became of it."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from phloem.srt.http.protocol import Int32, ProgramId, RequestId, Seconds
from phloem.srt.http.replies import Usage
from phloem.srt.http.scoring import Normalization
from phloem.srt.http.scoring_protocol import MAX_CHOICES, ChoiceScore
from phloem.srt.http.warning import ReplyWarning

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Value = str | list[Any]
"""A text, or a list of values: of `n` answers, of the branches of a fork."""


class SelectFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: Name
    choices: Annotated[list[str], Meta(min_length=2, max_length=MAX_CHOICES)]
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


class VariableEvent(msgspec.Struct, frozen=True, kw_only=True, tag="variable", tag_field="type"):
    """A variable has its value. `path` is its step; `scores` are those of a `select`."""

    path: str
    name: str
    value: Value
    finish_reason: str | list[str] | UnsetType = UNSET
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
