"""The server's Prometheus registry, and the per-request observations that feed it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from phloem.srt.generation import Chunk, Health
from phloem.srt.messages import StatsSnapshot
from phloem.srt.metrics import names

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


class _SnapshotCollector(Collector):
    """Turns the newest snapshot into samples, at scrape time."""

    def __init__(
        self, read_stats: Callable[[], StatsSnapshot], read_health: Callable[[], Health]
    ) -> None:
        self._read_stats = read_stats
        self._read_health = read_health

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        for metric in names.GAUGES:
            yield GaugeMetricFamily(
                names.PREFIX + metric.name, metric.help, value=float(metric.read(stats))
            )
        for metric in names.COUNTERS:
            yield CounterMetricFamily(
                names.PREFIX + metric.name, metric.help, value=float(metric.read(stats))
            )
        phases = CounterMetricFamily(
            names.PREFIX + names.STEP_PHASES,
            names.STEP_PHASES_HELP,
            labels=[names.STEP_PHASE_LABEL],
        )
        for phase, read in names.STEP_PHASE_VALUES.items():
            phases.add_metric([phase], float(read(stats)))
        yield phases
        health = self._read_health()
        for gauge in names.HEALTH_GAUGES:
            yield GaugeMetricFamily(
                names.PREFIX + gauge.name, gauge.help, value=float(gauge.read(health))
            )


class ServerMetrics:
    """All metrics of one server, in a registry of its own.

    Not thread-safe beyond what prometheus-client is; used from the event loop only.
    """

    def __init__(
        self, read_stats: Callable[[], StatsSnapshot], read_health: Callable[[], Health]
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_SnapshotCollector(read_stats, read_health))
        self.time_to_first_token = self._histogram(names.TIME_TO_FIRST_TOKEN)
        self.inter_token_latency = self._histogram(names.INTER_TOKEN_LATENCY)
        self.e2e_latency = self._histogram(names.E2E_LATENCY)
        self.queue_time = self._histogram(names.QUEUE_TIME)
        self.prompt_tokens = self._histogram(names.PROMPT_TOKENS)
        self.generation_tokens = self._histogram(names.GENERATION_TOKENS)
        self.finished = Counter(
            names.PREFIX + names.FINISHED,
            names.FINISHED_HELP,
            ["finish_reason"],
            registry=self._registry,
        )
        self.constraint_violations = Counter(
            names.PREFIX + names.CONSTRAINT_VIOLATIONS,
            names.CONSTRAINT_VIOLATIONS_HELP,
            ["enforcement"],
            registry=self._registry,
        )
        for enforcement in ("full", "partial"):
            self.constraint_violations.labels(enforcement)
        self._http_requests = Counter(
            names.PREFIX + names.HTTP_REQUESTS,
            names.HTTP_REQUESTS_HELP,
            ["method", "route", "status"],
            registry=self._registry,
        )

    def _histogram(self, metric: names.HistogramMetric) -> Histogram:
        return Histogram(
            names.PREFIX + metric.name,
            metric.help,
            buckets=metric.buckets,
            registry=self._registry,
        )

    def http_request(self, method: str, route: str, status: int) -> None:
        """Count one HTTP exchange. `route` is the route's pattern, never a path from a client."""
        known = method if method in _METHODS else "other"
        self._http_requests.labels(known, route, str(status)).inc()

    def render(self) -> bytes:
        """The text exposition, to be sent as `CONTENT_TYPE`."""
        return generate_latest(self._registry)


class RequestObserver:
    """Observes one sequence from its arrival to its end; every chunk passes through `chunk`."""

    def __init__(
        self, metrics: ServerMetrics, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._started = clock()
        self._last_token: float | None = None
        self._ended = False

    def chunk(self, chunk: Chunk) -> None:
        """Tokens that come together share the time since the last ones evenly."""
        now = self._clock()
        count = len(chunk.token_ids)
        if count and self._last_token is None:
            self._metrics.time_to_first_token.observe(now - self._started)
        elif count and self._last_token is not None:
            gap = (now - self._last_token) / count
            for _ in range(count):
                self._metrics.inter_token_latency.observe(gap)
        if count:
            self._last_token = now
        if chunk.finish is not None:
            self._metrics.queue_time.observe(chunk.queue_seconds)
            self._metrics.prompt_tokens.observe(chunk.prompt_tokens)
            self._metrics.generation_tokens.observe(chunk.completion_tokens)
            self.end(chunk.finish.reason)

    def end(self, reason: str) -> None:
        """The sequence is over; only the first call counts."""
        if self._ended:
            return
        self._ended = True
        self._metrics.e2e_latency.observe(self._clock() - self._started)
        self._metrics.finished.labels(reason).inc()
