"""Every metric the server exposes: name, help and where its value comes from.

Gauges and counters are read from the scheduler's latest snapshot when somebody scrapes;
histograms are observed per request by the HTTP layer. Labels have few, fixed values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phloem.srt.generation import Health
from phloem.srt.messages import StatsSnapshot

PREFIX = "phloem_"


@dataclass(frozen=True)
class SnapshotMetric:
    """A value of the snapshot."""

    name: str
    help: str
    read: Callable[[StatsSnapshot], float]


@dataclass(frozen=True)
class HealthMetric:
    """A value of the engine's health, as a gauge."""

    name: str
    help: str
    read: Callable[[Health], float]


@dataclass(frozen=True)
class HistogramMetric:
    """A distribution over requests or tokens."""

    name: str
    help: str
    buckets: tuple[float, ...]


def _kv_usage(stats: StatsSnapshot) -> float:
    """Share of the pool that running requests hold; what is only cached is not in use."""
    used = stats.kv_locked + stats.kv_private
    return used / stats.kv_slots if stats.kv_slots else 0.0


GAUGES: tuple[SnapshotMetric, ...] = (
    SnapshotMetric("num_requests_running", "Requests in the running batch.", lambda s: s.running),
    SnapshotMetric("num_requests_waiting", "Requests waiting for a place.", lambda s: s.waiting),
    SnapshotMetric(
        "num_requests_compiling", "Requests waiting for their grammar.", lambda s: s.compiling
    ),
    SnapshotMetric("kv_slots", "KV slots of the pool.", lambda s: s.kv_slots),
    SnapshotMetric("kv_free_slots", "KV slots that hold nothing.", lambda s: s.kv_free),
    SnapshotMetric("kv_usage_ratio", "Share of the KV slots held by running requests.", _kv_usage),
    SnapshotMetric("kv_private_slots", "KV slots outside the radix tree.", lambda s: s.kv_private),
    SnapshotMetric("radix_nodes", "Nodes of the radix tree.", lambda s: s.tree_nodes),
    SnapshotMetric(
        "radix_evictable_tokens", "Cached tokens that nobody holds.", lambda s: s.kv_evictable
    ),
    SnapshotMetric(
        "radix_locked_tokens", "Cached tokens held by running requests.", lambda s: s.kv_locked
    ),
)

# Exposed with the suffix `_total`.
COUNTERS: tuple[SnapshotMetric, ...] = (
    SnapshotMetric("steps", "Steps of the engine.", lambda s: s.steps_total),
    SnapshotMetric("requests", "Requests received.", lambda s: s.requests_total),
    SnapshotMetric(
        "requests_aborted",
        "Requests whose client left or that were aborted.",
        lambda s: s.aborted_total,
    ),
    SnapshotMetric("requests_failed", "Requests that ended in an error.", lambda s: s.failed_total),
    SnapshotMetric("prompt_tokens", "Prompt tokens.", lambda s: s.prompt_tokens_total),
    SnapshotMetric(
        "cached_tokens", "Prompt tokens found in the radix tree.", lambda s: s.cached_tokens_total
    ),
    SnapshotMetric(
        "computed_prefill_tokens",
        "Tokens computed in prefill.",
        lambda s: s.computed_prefill_tokens_total,
    ),
    SnapshotMetric(
        "generation_tokens", "Output tokens, drawn or forced.", lambda s: s.generated_tokens_total
    ),
    SnapshotMetric(
        "forced_tokens",
        "Output tokens that a constraint forced: never drawn.",
        lambda s: s.forced_tokens_total,
    ),
    SnapshotMetric(
        "accepted_prediction_tokens",
        "Output tokens that had been guessed in drafts.",
        lambda s: s.accepted_guesses_total,
    ),
    SnapshotMetric(
        "rejected_prediction_tokens",
        "Tokens guessed in drafts that were not drawn.",
        lambda s: s.rejected_guesses_total,
    ),
    SnapshotMetric(
        "radix_evicted_tokens", "Cached tokens evicted.", lambda s: s.evicted_tokens_total
    ),
    SnapshotMetric(
        "preemptions", "Running requests that gave their slots back.", lambda s: s.preemptions_total
    ),
    SnapshotMetric("grammar_compiles", "Grammars compiled.", lambda s: s.grammar_compiles_total),
    SnapshotMetric(
        "grammar_compile_seconds",
        "Time spent compiling grammars.",
        lambda s: s.grammar_compile_seconds_total,
    ),
    SnapshotMetric(
        "grammar_cache_hits", "Grammars found compiled.", lambda s: s.grammar_cache_hits_total
    ),
    SnapshotMetric(
        "bad_messages",
        "Messages between processes that could not be read.",
        lambda s: s.bad_messages_total,
    ),
    SnapshotMetric(
        "step_seconds",
        "Time from a step's plan to its result applied.",
        lambda s: s.step_seconds_total,
    ),
)

STEP_PHASES = "step_phase_seconds"
STEP_PHASES_HELP = "Time of the steps by phase."
STEP_PHASE_LABEL = "phase"
STEP_PHASE_VALUES: dict[str, Callable[[StatsSnapshot], float]] = {
    "schedule": lambda s: s.schedule_seconds_total,
    "forward": lambda s: s.forward_seconds_total,
    "mask_wait": lambda s: s.mask_wait_seconds_total,
    "sample": lambda s: s.sample_seconds_total,
}

HEALTH_GAUGES: tuple[HealthMetric, ...] = (
    HealthMetric("live", "1 while the backend makes progress.", lambda h: h.live),
    HealthMetric("ready", "1 while requests are accepted.", lambda h: h.ready),
    HealthMetric("backend_restarts", "Restarts of the backend so far.", lambda h: h.restarts),
    HealthMetric(
        "heartbeat_age_seconds",
        "Time since the scheduler's last sign of life.",
        lambda h: h.heartbeat_age_s,
    ),
)

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)

TIME_TO_FIRST_TOKEN = HistogramMetric(
    "time_to_first_token_seconds", "From a request's arrival to its first token.", _SECONDS
)
INTER_TOKEN_LATENCY = HistogramMetric(
    "inter_token_latency_seconds",
    "Between a token and the one before it.",
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
E2E_LATENCY = HistogramMetric(
    "e2e_request_latency_seconds", "From a request's arrival to its end.", _SECONDS
)
QUEUE_TIME = HistogramMetric(
    "request_queue_time_seconds", "Time a request waited for its place in the batch.", _SECONDS
)
PROMPT_TOKENS = HistogramMetric("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
GENERATION_TOKENS = HistogramMetric(
    "request_generation_tokens", "Tokens generated for a request.", _TOKENS
)

FINISHED = "request_finished"
FINISHED_HELP = "Requests by how they ended: stop, length, abort or error."
CONSTRAINT_VIOLATIONS = "constraint_violations"
CONSTRAINT_VIOLATIONS_HELP = "Finished answers that a validator refused, by enforcement."
HTTP_REQUESTS = "http_requests"
HTTP_REQUESTS_HELP = "HTTP requests by method, route and status."
