"""What a client of the OpenAI routes wants in its reply beside the answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from phloem.srt.http.protocol import GenerationFields, StreamOptions
from phloem.srt.http.warning import Warnings


@dataclass(frozen=True, kw_only=True)
class ReplyOptions:
    """`include_usage` and `continuous_usage` are of streams; `prompt_logprobs` is the number of
    alternatives, None for no logprobs of the prompt."""

    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    metrics: bool = False
    prompt_logprobs: int | None = None
    warnings: Warnings = field(default_factory=Warnings)

    @staticmethod
    def of(fields: GenerationFields, stream: StreamOptions, warnings: Warnings) -> ReplyOptions:
        return ReplyOptions(
            include_usage=bool(stream.include_usage),
            continuous_usage=bool(stream.continuous_usage_stats),
            token_ids=bool(fields.return_token_ids),
            tokens_as_ids=bool(fields.return_tokens_as_token_ids),
            metrics=bool(fields.return_metrics),
            prompt_logprobs=fields.prompt_logprobs,
            warnings=warnings,
        )
