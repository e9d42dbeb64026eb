"""The replies of Ollama's native API as structs. Absent is absent; durations are nanoseconds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from phloem.srt.generation import ConstraintOutcome
from phloem.srt.http.warning import ReplyWarning


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token's text, its bytes, and its logprob."""

    token: str
    logprob: float
    bytes: list[int]


class Logprob(TokenLogprob, frozen=True, kw_only=True):
    top_logprobs: list[TokenLogprob] | UnsetType = UNSET


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A whole reply, or a line of a streamed one; what follows `done` comes with the end only.

    `load_duration` is the time before the prompt was looked at (reading the request, waiting),
    `prompt_eval_duration` that until the first token, `eval_duration` the rest.
    """

    model: str
    created_at: str
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[Logprob] | UnsetType = UNSET
    constraint: ConstraintOutcome | UnsetType = UNSET
    warnings: list[ReplyWarning] | UnsetType = UNSET


class GenerateReply(Reply, frozen=True, kw_only=True):
    """Of `POST /api/generate`. `context` are the ids of the conversation so far."""

    response: str
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    name: str
    arguments: dict[str, object]


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    function: CalledFunction


class AnswerTurn(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatReply(Reply, frozen=True, kw_only=True):
    """Of `POST /api/chat`."""

    message: AnswerTurn


class EmbedReply(msgspec.Struct, frozen=True, kw_only=True):
    """Of `POST /api/embed`: a vector of length 1 for each text."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingsReply(msgspec.Struct, frozen=True):
    """Of `POST /api/embeddings`: the vector as the model gives it."""

    embedding: list[float]


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """What kind of model it is; the empty strings are what nothing is known of."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is on this machine. `digest` is SHA-256, of a file that is in the store."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str | UnsetType = UNSET
    details: Details


class Tags(msgspec.Struct, frozen=True):
    """Of `GET /api/tags`."""

    models: list[Listed]


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """The served model. It stays loaded, so `expires_at` is the last second that can be written;
    `size` are the bytes of its files."""

    name: str
    model: str
    size: int
    digest: str | UnsetType = UNSET
    details: Details
    expires_at: str = "9999-12-31T23:59:59Z"
    size_vram: int = 0
    context_length: int


class Processes(msgspec.Struct, frozen=True):
    """Of `GET /api/ps`."""

    models: list[Running]


class Show(msgspec.Struct, frozen=True, kw_only=True):
    """Of `POST /api/show`. `template` is Jinja, not Go's language."""

    license: str
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, object]
    capabilities: list[str]
    modified_at: str


class Version(msgspec.Struct, frozen=True):
    """`version` is that of the API, which clients compare; `phloem` is the server's own."""

    version: str
    phloem: str


class PullLine(msgspec.Struct, frozen=True, kw_only=True):
    """Of `POST /api/pull`: what happens, and of a file that comes in how many bytes are here."""

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


def timestamp(seconds: float | None = None) -> str:
    """RFC 3339, in UTC; now, unless `seconds` since 1970 are given."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")
