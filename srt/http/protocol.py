"""The OpenAI request bodies as structs: decoding one is validating it.

`X | None` with a default of None means that null and absent are the same. Ranges stand in the
types. Values that have several spellings, or any JSON, are kept raw and read where they belong
(`constraint_fields`, `tools`).
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Raw

from phloem.constrained.spec import Whitespace
from phloem.srt.messages import JumpForward, LogprobsMode

MAX_CHOICES: Final = 128
MAX_TOP_LOGPROBS: Final = 20
MAX_STOP_STRINGS: Final = 16
DEFAULT_COMPLETION_TOKENS: Final = 16

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Seconds = Annotated[float, Meta(gt=0)]
RequestId = Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,128}\Z")]
ProgramId = RequestId


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_fields: bool | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's spelling; exactly one kind may be given."""

    json: Raw = Raw()
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Raw = Raw()
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class ConstraintFields(msgspec.Struct, kw_only=True):
    """Every top-level spelling of a constraint."""

    response_format: Raw = Raw()
    structured_outputs: StructuredOutputs | None = None
    json_schema: Raw = Raw()
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Raw = Raw()
    grammar: Raw = Raw()
    format: Raw = Raw()
    guided_json: Raw = Raw()
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    constraint_prefix: Raw = Raw()
    constraint_after: str | None = None
    constraint_whitespace: Whitespace | None = None


class GenerationFields(ConstraintFields, kw_only=True):
    """What chat and completions have in common: OpenAI's fields, then ours and the peers'."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    best_of: Choices | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: PositiveShare | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None

    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    min_tokens: Count | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    logprobs_mode: LogprobsMode | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    rid: RequestId | None = None
    request_id: RequestId | None = None
    program: ProgramId | None = None
    timeout: Seconds | None = None
    jump_forward: JumpForward | None = None


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


class FunctionSpec(msgspec.Struct, kw_only=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]
    description: str | None = None
    parameters: Raw = Raw()
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
    tool_choice: Raw = Raw()
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    max_tokens: Count | None = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None


# Fields of OpenAI or of a peer that would change the answer, with the values that ask for nothing.
_NEUTRAL_FLAG = (None, False)
_NEUTRAL_LIST: tuple[object, ...] = (None, [])
UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "use_beam_search": _NEUTRAL_FLAG,
    "beam_width": (None, 1),
    "length_penalty": (None, 1, 1.0),
    "spaces_between_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "prompt_logprobs": (None,),
    "logprob_token_ids": _NEUTRAL_LIST,
    "allowed_token_ids": _NEUTRAL_LIST,
    "bad_words": _NEUTRAL_LIST,
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "stop_regex": (None, "", []),
    "logits_processors": _NEUTRAL_LIST,
    "custom_logit_processor": (None, ""),
    "lora_path": (None, ""),
    "session_params": (None,),
    "return_token_ids": _NEUTRAL_FLAG,
    "return_tokens_as_token_ids": _NEUTRAL_FLAG,
    "return_hidden_states": _NEUTRAL_FLAG,
    "add_special_tokens": (None,),
}
UNSUPPORTED_IN_CHAT: Final = UNSUPPORTED | {
    "chat_template": (None,),
    "documents": _NEUTRAL_LIST,
    "echo": _NEUTRAL_FLAG,
    "functions": _NEUTRAL_LIST,
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
}
UNSUPPORTED_IN_COMPLETIONS: Final = UNSUPPORTED | {"suffix": (None, "")}
