"""The bodies of Ollama's native API as structs.

The reference: https://docs.ollama.com/api. What other servers would ignore is refused by name;
`UNSUPPORTED_*` are known fields that cannot be honoured, with the values that ask for nothing.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Raw

from phloem.srt.http.body import ABSENT
from phloem.srt.http.gathering import RunFields
from phloem.srt.http.protocol import (
    Count,
    Int64,
    Penalty,
    Positive,
    PositiveShare,
    RepetitionPenalty,
    Share,
    ToolSpec,
    TopLogprobs,
)


class Options(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`options`. How the machine is used (the last group) does not change an answer, so any value
    is accepted; the middle group is for samplers that there are not, and takes what turns them off.
    """

    seed: Int64 | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    top_p: PositiveShare | None = None
    min_p: Share | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: str | list[str] | None = None
    num_predict: Annotated[int, Meta(ge=-2)] | None = None
    num_ctx: Positive | None = None

    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    penalize_newline: bool | None = None
    vocab_only: bool | None = None
    embedding_only: bool | None = None

    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    draft_num_predict: int | None = None


class KeptFields(RunFields, kw_only=True):
    """`keep_alive` is for how long the model is to stay loaded, in seconds or as in "5m"."""

    options: Options | None = None
    keep_alive: int | float | str | None = None


class AnswerFields(KeptFields, kw_only=True):
    """What generating and chatting have in common."""

    stream: bool | None = None
    format: Raw = ABSENT
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    truncate: bool | None = None


class GenerateBody(AnswerFields, kw_only=True):
    """`POST /api/generate`."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    context: list[Count] | None = None
    raw: bool | None = None


class CalledTool(msgspec.Struct, kw_only=True):
    name: str
    arguments: dict[str, object] = {}


class Call(msgspec.Struct, kw_only=True):
    function: CalledTool
    id: str | None = None


class ChatTurn(msgspec.Struct, kw_only=True):
    """One message. The arguments of calls are objects here, not JSON in a string; `name` is the
    older spelling of `tool_name`."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None


class ChatBody(AnswerFields, kw_only=True):
    """`POST /api/chat`."""

    messages: list[ChatTurn] | None = None
    tools: list[ToolSpec] | None = None


class EmbedBody(KeptFields, kw_only=True):
    """`POST /api/embed`."""

    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: Positive | None = None


class EmbeddingsBody(KeptFields, kw_only=True):
    """`POST /api/embeddings`, the older route."""

    prompt: str | None = None


class ModelBody(msgspec.Struct, kw_only=True):
    """What names a model; `name` is the older spelling of `model`."""

    model: str | None = None
    name: str | None = None


class PullBody(ModelBody, kw_only=True):
    """`POST /api/pull`."""

    stream: bool | None = None


_NOTHING: Final[tuple[object, ...]] = (None, "", [])
_NOT: Final = (None, False)

UNSUPPORTED_IN_CHAT: Final[dict[str, tuple[object, ...]]] = {"shift": _NOT}
UNSUPPORTED_IN_GENERATE: Final[dict[str, tuple[object, ...]]] = {
    "shift": _NOT,
    "template": _NOTHING,
    "images": _NOTHING,
    "width": (None, 0),
    "height": (None, 0),
    "steps": (None, 0),
}
UNSUPPORTED_IN_SHOW: Final[dict[str, tuple[object, ...]]] = {"verbose": _NOT}
UNSUPPORTED_IN_PULL: Final[dict[str, tuple[object, ...]]] = {"insecure": _NOT}
