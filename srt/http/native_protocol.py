"""The native `/generate` request: SGLang's fields, the part of them that is honoured.

Unknown fields are errors here, at the top and in `sampling_params`: a typo must not be a no-op.
null for any field means its default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from phloem.srt.generation import ConstraintOutcome
from phloem.srt.http.body import ABSENT, unsupported
from phloem.srt.http.protocol import (
    Choices,
    Count,
    Int32,
    Int64,
    Penalty,
    PlanFields,
    Positive,
    PositiveShare,
    ProgramId,
    RepetitionPenalty,
    RequestId,
    Seconds,
    Share,
    TopLogprobs,
)
from phloem.srt.http.warning import ReplyWarning
from phloem.srt.messages import JumpForward

DEFAULT_NEW_TOKENS: Final = 128


class NativeSampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Count] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: PositiveShare | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    n: Choices | None = None
    json_schema: Raw = ABSENT
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Raw = ABSENT
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: Int64 | None = None
    stop_regex: str | list[str] | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: Positive | None = None
    # Known elsewhere; only the value that asks for nothing is taken.
    beam_width: int | None = None
    custom_params: Raw = ABSENT
    watermark: Raw = ABSENT


class NativeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    rid: RequestId | list[RequestId] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_logprobs_num: TopLogprobs | None = None
    token_ids_logprob: list[int | list[int]] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    incremental_streaming_output: bool | None = None
    priority: Int32 | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    program: ProgramId | None = None
    plan: PlanFields | None = None
    timeout: Seconds | None = None
    jump_forward: JumpForward | None = None
    # They change nothing in the answer.
    log_metrics: bool | None = None
    no_logs: bool | None = None
    custom_labels: dict[str, str] | None = None
    routing_key: str | None = None
    # Known elsewhere; only the value that asks for nothing is taken.
    input_embeds: Raw = ABSENT
    image_data: Raw = ABSENT
    video_data: Raw = ABSENT
    audio_data: Raw = ABSENT
    modalities: Raw = ABSENT
    return_hidden_states: bool | None = None
    lora_path: Raw = ABSENT
    session_params: Raw = ABSENT
    session_id: str | None = None
    custom_logit_processor: Raw = ABSENT
    require_reasoning: bool | None = None
    routed_dp_rank: Raw = ABSENT
    bootstrap_host: Raw = ABSENT
    bootstrap_port: Raw = ABSENT
    bootstrap_room: Raw = ABSENT


UNSUPPORTED_RAW: Final = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "modalities",
    "lora_path",
    "session_params",
    "custom_logit_processor",
    "routed_dp_rank",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
)
UNSUPPORTED_FLAGS: Final = ("return_hidden_states", "require_reasoning")
EMPTY_JSON: Final = frozenset({b"", b"null", b"[]", b"{}", b'""'})


def refuse_unsupported(body: msgspec.Struct, raw: Sequence[str], flags: Sequence[str]) -> None:
    """Raises `InvalidRequest` for the first of these fields that asks for anything."""
    for name in raw:
        if bytes(getattr(body, name)) not in EMPTY_JSON:
            raise unsupported(name)
    for name in flags:
        if getattr(body, name):
            raise unsupported(name)


Entry = tuple[float | None, int, str | None]  # logprob, token id, text if asked for


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    finish_reason: dict[str, str | int | None] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    forced_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    num_retractions: int
    e2e_latency: float
    queue_time: float
    input_token_logprobs: list[Entry] | None = None
    output_token_logprobs: list[Entry] | None = None
    output_token_logprobs_length: int | None = None
    input_top_logprobs: list[list[Entry] | None] | None = None
    output_top_logprobs: list[list[Entry]] | None = None
    input_token_ids_logprobs: list[list[Entry] | None] | None = None
    output_token_ids_logprobs: list[list[Entry]] | None = None
    constraint: ConstraintOutcome | None = None
    warnings: list[ReplyWarning] | UnsetType = UNSET


class NativeReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | None = None
    prompt_token_ids: list[int] | None = None
