"""The OpenAI request bodies as structs: decoding one is validating it.

`X | None` with a default of None means that null and absent are the same. Ranges stand in the
types. Values that have several spellings, or any JSON, are kept raw and read where they belong
(`constraint_fields`, `tools`).
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Raw

from phloem.constrained.spec import Whitespace
from phloem.srt.http.body import ABSENT
from phloem.srt.messages import JumpForward, LogprobsMode

MAX_CHOICES: Final = 128
MAX_TOP_LOGPROBS: Final = 20
MAX_STOP_STRINGS: Final = 32
MAX_PLANNED: Final = 100_000
DEFAULT_COMPLETION_TOKENS: Final = 16

Penalty = Annotated[float, Meta(ge=-2, le=2)]
# Less would make numbers of logits that no float holds.
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Seconds = Annotated[float, Meta(gt=0)]
RawSchema = Annotated[
    Raw, Meta(extra_json_schema={"description": "A JSON schema, or the text of one."})
]
RawFormat = Annotated[
    Raw,
    Meta(
        extra_json_schema={
            "type": ["object", "null"],
            "properties": {"type": {"type": "string"}},
            "description": "`text`, `json_schema`, `json_object`, `json_lines`, `regex`, `choice`, "
            "`ebnf`, `grammar` or `structural_tag`, with its fields.",
        }
    ),
]
RawTag = Annotated[
    Raw, Meta(extra_json_schema={"description": "A structural tag, or the text of one."})
]
RawToolChoice = Annotated[
    Raw,
    Meta(
        extra_json_schema={
            "type": ["string", "object", "null"],
            "description": "`auto`, `none`, `required`, a named function, or `allowed_tools`.",
        }
    ),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
RequestId = Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,128}\Z")]
ProgramId = RequestId


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_fields: bool | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's spelling; exactly one kind may be given."""

    json: RawSchema = ABSENT
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: RawTag = ABSENT
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class ConstraintFields(msgspec.Struct, kw_only=True):
    """Every top-level spelling of a constraint."""

    response_format: RawFormat = ABSENT
    structured_outputs: StructuredOutputs | None = None
    json_schema: RawSchema = ABSENT
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: RawTag = ABSENT
    grammar: Raw = ABSENT
    format: Raw = ABSENT
    guided_json: RawSchema = ABSENT
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    constraint_prefix: Raw = ABSENT
    constraint_after: str | None = None
    constraint_whitespace: Whitespace | None = None


class NextConstraint(ConstraintFields, kw_only=True, forbid_unknown_fields=True):
    """A constraint of a call to come, in any spelling."""


class PlanFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a program says of its calls to come; see docs/programs.md."""

    remaining: Annotated[int, Meta(ge=0, le=MAX_PLANNED)] | None = None
    fork: Annotated[int, Meta(ge=0, le=MAX_PLANNED)] | None = None
    group: RequestId | None = None
    width: Annotated[int, Meta(ge=2, le=MAX_PLANNED)] | None = None
    next_constraint: (
        NextConstraint | Annotated[list[NextConstraint], Meta(max_length=16)] | None
    ) = None


class CommonFields(ConstraintFields, kw_only=True):
    """What a generation has under the same name in OpenAI's protocols and in Anthropic's."""

    seed: Int64 | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: Count | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream_interval: Positive | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    rid: RequestId | None = None
    request_id: RequestId | None = None
    program: ProgramId | None = None
    plan: PlanFields | None = None
    timeout: Seconds | None = None
    jump_forward: JumpForward | None = None


class GenerationFields(CommonFields, kw_only=True):
    """What chat and completions have in common: OpenAI's fields, then ours and the peers'."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    best_of: Choices | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: PositiveShare | None = None
    stop: str | list[str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    prediction: Raw = ABSENT

    top_k: Annotated[int, Meta(ge=-1)] | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    logprobs_mode: LogprobsMode | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: TopLogprobs | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_metrics: bool | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str = ""


class MessageToolCall(msgspec.Struct, kw_only=True):
    function: CalledFunction
    id: str | None = None
    type: str = "function"


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: Raw = ABSENT


class FunctionSpec(msgspec.Struct, kw_only=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]
    description: str | None = None
    parameters: RawSchema = ABSENT
    strict: bool | None = None


class ToolSpec(msgspec.Struct, kw_only=True):
    type: str
    function: FunctionSpec


class ChatRequest(GenerationFields, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[ToolSpec], Meta(min_length=1)] | None = None
    tool_choice: RawToolChoice = ABSENT
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Count | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    include_reasoning: bool | None = None
    documents: list[dict[str, object]] | None = None
    echo: bool | None = None
    metadata: dict[str, object] | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    max_tokens: Count | None = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    suffix: str | None = None
    metadata: dict[str, object] | None = None


# Fields of OpenAI or of a peer that would change the answer, with the values that ask for nothing.
_NEUTRAL_FLAG = (None, False)
_NEUTRAL_LIST: tuple[object, ...] = (None, [])
UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "use_beam_search": _NEUTRAL_FLAG,
    "beam_width": (None, 1),
    "length_penalty": (None, 1, 1.0),
    "repetition_detection": (None,),
    "logits_processors": _NEUTRAL_LIST,
    "custom_logit_processor": (None, ""),
    "lora_path": (None, ""),
    "session_params": (None,),
    "return_hidden_states": _NEUTRAL_FLAG,
    "return_prompt_text": _NEUTRAL_FLAG,
    "return_meta_info": _NEUTRAL_FLAG,
    "kv_transfer_params": (None,),
}
UNSUPPORTED_IN_CHAT: Final = UNSUPPORTED | {
    "chat_template": (None,),
    "functions": _NEUTRAL_LIST,
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
}
UNSUPPORTED_IN_COMPLETIONS: Final = UNSUPPORTED | {
    "prompt_embeds": (None, []),
    "thinking_token_budget": (None,),
    "reasoning_effort": (None, "none"),
}
