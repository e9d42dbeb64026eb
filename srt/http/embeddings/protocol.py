"""What the embedding routes read and write."""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec import Raw

from phloem.srt.http.body import ABSENT
from phloem.srt.http.gathering import RunFields
from phloem.srt.http.protocol import Int32, PlanFields, Positive, ProgramId, RequestId, Seconds
from phloem.srt.messages import Pooling

MAX_TEXTS: Final = 2048


class EmbeddingsRequest(RunFields, kw_only=True):
    """`POST /v1/embeddings`: OpenAI's fields, then ours."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    user: str | None = None

    pooling: Pooling | None = None
    normalize: bool | None = None


# Fields of peers that would change the answer, with the values that ask for nothing.
UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "messages": (None, []),
    "truncate_prompt_tokens": (None,),
    "add_special_tokens": (None, True),
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
    "input_type": (None,),
    "lora_path": (None, ""),
}


class EmbeddingData(msgspec.Struct, frozen=True, kw_only=True):
    """`embedding` in base64 is float32, little-endian."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[EmbeddingData]
    model: str
    usage: EmbeddingUsage


class EncodeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /encode`: SGLang's fields, then ours."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    rid: RequestId | None = None
    dimensions: Positive | None = None
    priority: Int32 | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    timeout: Seconds | None = None
    program: ProgramId | None = None
    plan: PlanFields | None = None
    # They change nothing in the answer.
    log_metrics: bool | None = None
    sampling_params: Raw = ABSENT
    # Known elsewhere; only the value that asks for nothing is taken.
    image_data: Raw = ABSENT
    video_data: Raw = ABSENT
    audio_data: Raw = ABSENT
    modalities: Raw = ABSENT
    input_embeds: Raw = ABSENT
    is_cross_encoder_request: bool | None = None
    return_pooled_hidden_states: bool | None = None
    lora_path: Raw = ABSENT


UNSUPPORTED_RAW: Final = (
    "image_data",
    "video_data",
    "audio_data",
    "modalities",
    "input_embeds",
    "lora_path",
)
UNSUPPORTED_FLAGS: Final = ("is_cross_encoder_request", "return_pooled_hidden_states")


class EncodeMeta(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    finish_reason: dict[str, str | int]
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int
    e2e_latency: float
    queue_time: float


class EncodeReply(msgspec.Struct, frozen=True, kw_only=True):
    embedding: list[float]
    meta_info: EncodeMeta
