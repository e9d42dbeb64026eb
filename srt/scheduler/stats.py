"""Counters of the scheduler, and the frozen snapshot that leaves it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from phloem.srt.messages import StatsSnapshot


@dataclass(slots=True)
class Counters:
    """Totals since start. Names match `StatsSnapshot`."""

    steps_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    computed_prefill_tokens_total: int = 0
    generated_tokens_total: int = 0
    forced_tokens_total: int = 0
    accepted_guesses_total: int = 0
    rejected_guesses_total: int = 0
    preemptions_total: int = 0
    requests_total: int = 0
    aborted_total: int = 0
    failed_total: int = 0
    grammar_compiles_total: int = 0
    grammar_compile_seconds_total: float = 0.0
    grammar_cache_hits_total: int = 0
    bad_messages_total: int = 0
    step_seconds_total: float = 0.0
    schedule_seconds_total: float = 0.0
    forward_seconds_total: float = 0.0
    mask_wait_seconds_total: float = 0.0
    sample_seconds_total: float = 0.0

    def snapshot(self, **gauges: int) -> StatsSnapshot:
        return StatsSnapshot(**asdict(self), **gauges)
