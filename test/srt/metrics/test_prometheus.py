"""The registry: names, values from snapshots, and what one request contributes."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from phloem.srt.generation import Chunk, Finish, Health
from phloem.srt.messages import FinishReason, StatsSnapshot
from phloem.srt.metrics import names
from phloem.srt.metrics.prometheus import RequestObserver, ServerMetrics


def make(stats: StatsSnapshot | None = None) -> ServerMetrics:
    return ServerMetrics(lambda: stats or StatsSnapshot(), lambda: Health(live=True, ready=False))


def samples(metrics: ServerMetrics) -> dict[str, float]:
    """`name{labels}` → value, as a scraper reads them."""
    return {
        sample.name + "".join(f"|{v}" for _, v in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_every_name_is_exposed_once_and_prefixed() -> None:
    families = [f.name for f in text_string_to_metric_families(make().render().decode())]
    assert len(families) == len(set(families))
    assert all(name.startswith(names.PREFIX) for name in families)
    for metric in (*names.GAUGES, *names.COUNTERS):
        assert names.PREFIX + metric.name in families
    for gauge in names.HEALTH_GAUGES:
        assert names.PREFIX + gauge.name in families


def test_the_snapshot_is_read_at_scrape_time() -> None:
    current = [StatsSnapshot(running=1)]
    metrics = ServerMetrics(lambda: current[0], lambda: Health(live=True, ready=False))
    assert samples(metrics)["phloem_num_requests_running"] == 1
    current[0] = StatsSnapshot(
        running=4,
        kv_slots=10,
        kv_locked=2,
        kv_private=3,
        kv_evictable=5,
        steps_total=9,
        forward_seconds_total=1.5,
    )
    read = samples(metrics)
    assert read["phloem_num_requests_running"] == 4
    assert read["phloem_kv_usage_ratio"] == 0.5  # what is only cached does not count
    assert read["phloem_steps_total"] == 9
    assert read["phloem_step_phase_seconds_total|forward"] == 1.5
    assert (read["phloem_live"], read["phloem_ready"]) == (1, 0)


def test_no_pool_is_no_usage() -> None:
    assert samples(make())["phloem_kv_usage_ratio"] == 0


def test_one_request_observed() -> None:
    metrics, clock = make(), Clock()
    observer = RequestObserver(metrics, clock)
    clock.now = 1.0
    observer.chunk(Chunk(rid="r"))
    clock.now = 2.0
    observer.chunk(Chunk(rid="r", token_ids=[1]))
    clock.now = 3.0
    observer.chunk(Chunk(rid="r", token_ids=[2, 3]))
    clock.now = 4.0
    end = Finish(FinishReason.LENGTH)
    observer.chunk(
        Chunk(rid="r", finish=end, prompt_tokens=7, completion_tokens=3, queue_seconds=0.25)
    )
    observer.end("abort")  # too late: it ended already
    read = samples(metrics)
    assert read["phloem_time_to_first_token_seconds_sum"] == 2.0
    assert read["phloem_inter_token_latency_seconds_count"] == 2
    assert read["phloem_inter_token_latency_seconds_sum"] == 1.0
    assert read["phloem_e2e_request_latency_seconds_sum"] == 4.0
    assert read["phloem_request_queue_time_seconds_sum"] == 0.25
    assert read["phloem_request_prompt_tokens_sum"] == 7
    assert read["phloem_request_generation_tokens_sum"] == 3
    assert read["phloem_request_finished_total|length"] == 1
    assert "phloem_request_finished_total|abort" not in read


def test_labels_stay_few() -> None:
    metrics = make()
    for method in ("GET", "BREW", "FETCH", "x" * 100):
        metrics.http_request(method, "unmatched", 404)
    read = samples(metrics)
    assert read["phloem_http_requests_total|GET|unmatched|404"] == 1
    assert read["phloem_http_requests_total|other|unmatched|404"] == 3
