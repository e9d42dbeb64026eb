"""Health, models, tokens, cache, version, metrics, and the API key on every route."""

from __future__ import annotations

import re
from typing import Any

import pytest

from phloem.srt.config import ServerOptions
from phloem.srt.generation import Health
from phloem.srt.http.app import create_app
from phloem.srt.messages import StatsSnapshot


@pytest.mark.parametrize(
    ("health", "status", "live", "ready"),
    [
        (Health(live=True, ready=True), "ok", 200, 200),
        (Health(live=True, ready=False, reason="draining"), "not_ready", 200, 503),
        (Health(live=False, ready=False, reason="silent", restarts=2), "unhealthy", 503, 503),
    ],
)
async def test_liveness_and_readiness(
    api: Any, engine: Any, health: Health, status: str, live: int, ready: int
) -> None:
    engine.health_now = health
    for path, code in (("/health", live), ("/ready", ready)):
        reply = await api.call("GET", path)
        assert (reply.status, reply.json["status"]) == (code, status)
        assert reply.json["reason"] == health.reason


async def test_models(api: Any) -> None:
    listed = (await api.call("GET", "/v1/models")).json
    assert listed["object"] == "list"
    assert [m["id"] for m in listed["data"]] == ["tiny"]
    one = (await api.call("GET", "/v1/models/tiny")).json
    assert one == listed["data"][0]
    assert (one["object"], one["max_model_len"]) == ("model", 512)


async def test_tokens_there_and_back(api: Any, engine: Any) -> None:
    for name in ("text", "prompt", "content"):
        reply = await api.call("POST", "/tokenize", {name: "Hé", "model": "tiny"})
        assert reply.json == {"tokens": [72, 195, 169], "count": 3, "max_model_len": 512}
    for body in ({}, {"text": "a", "prompt": "b"}, {"text": 5}, {"text": ["a"]}):
        assert (await api.call("POST", "/tokenize", body)).status == 400
    back = await api.call("POST", "/detokenize", {"tokens": [72, 195, 169]})
    assert back.json == {"text": "Hé", "prompt": "Hé"}
    for bad in ([1000], [-1], ["a"], None):
        assert (await api.call("POST", "/detokenize", {"tokens": bad})).status == 400


async def test_a_chat_tokenizes_as_it_generates(api: Any, engine: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    ids = (await api.call("POST", "/tokenize", {"messages": messages})).json["tokens"]
    await api.chat(messages=messages)
    assert engine.requests[0].prompt == ids
    bad = await api.call("POST", "/tokenize", {"messages": [{"role": "bot", "content": "x"}]})
    assert bad.json["error"]["param"] == "messages[0].role"


async def test_cache_and_information(api: Any) -> None:
    for method in ("GET", "POST"):
        assert (await api.call(method, "/flush_cache")).json == {
            "success": True,
            "flushed_tokens": 17,
        }
    assert "version" in (await api.call("GET", "/version")).json
    for path in ("/model_info", "/get_model_info"):
        info = (await api.call("GET", path)).json
        assert (info["model_path"], info["is_generation"]) == ("/models/tiny.gguf", True)
    for path in ("/server_info", "/get_server_info"):
        assert (await api.call("GET", path)).json["page_size"] == 1
    assert "tiny" in (await api.call("GET", "/")).raw


async def test_a_clients_request_id_comes_back(api: Any) -> None:
    reply = await api.call("GET", "/version", headers={"X-Request-Id": "abc"})
    assert reply.headers["X-Request-Id"] == "abc"
    odd = await api.call("GET", "/version", headers={"X-Request-Id": "a b" + "c" * 200})
    assert odd.headers["X-Request-Id"].startswith("req-")


async def test_metrics_are_prometheus_text(api: Any, engine: Any) -> None:
    engine.stats_now = StatsSnapshot(
        running=3, waiting=2, kv_slots=100, kv_locked=30, kv_private=20, prompt_tokens_total=7
    )
    await api.chat(n=2)
    await api.call("GET", "/nope/1")
    await api.call("GET", "/nope/2")
    reply = await api.call("GET", "/metrics")
    assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    samples = dict(
        line.rsplit(" ", 1) for line in reply.raw.splitlines() if not line.startswith("#")
    )
    assert samples["phloem_num_requests_running"] == "3.0"
    assert samples["phloem_kv_usage_ratio"] == "0.5"
    assert samples["phloem_prompt_tokens_total"] == "7.0"
    assert samples["phloem_time_to_first_token_seconds_count"] == "2.0"
    assert samples["phloem_inter_token_latency_seconds_count"] == "6.0"
    assert samples["phloem_request_generation_tokens_sum"] == "8.0"
    assert samples['phloem_request_finished_total{finish_reason="stop"}'] == "2.0"
    assert samples['phloem_step_phase_seconds_total{phase="forward"}'] == "0.0"
    key = 'phloem_http_requests_total{method="GET",route="unmatched",status="404"}'
    assert samples[key] == "2.0"
    assert all(re.fullmatch(r"[a-z0-9_:]+(\{.*\})?", name) for name in samples)


def walk(engine: Any) -> list[tuple[str, str]]:
    """Every (method, path) of the application, with something in the patterns' places."""
    app = create_app(engine, ServerOptions())
    return [
        (route.method, re.sub(r"\{.*?\}", "tiny", route.resource.canonical))
        for route in app.router.routes()
        if route.resource is not None
    ]


async def test_the_key_guards_every_route(serve: Any, engine: Any) -> None:
    api = await serve(api_key="k-secret-é")
    routes = walk(engine)
    assert ("POST", "/generate") in routes
    assert len(routes) > 20
    for method, path in [*routes, ("GET", "/nope"), ("POST", "/v1/embeddings")]:
        if path in ("/health", "/ready", "/docs"):
            assert (await api.call(method, path)).status == 200
            continue
        for sent in (None, "wrong", "k-secret-", "k-secret-éx", "", "Bearer"):
            headers = {} if sent is None else {"Authorization": f"Bearer {sent}"}
            reply = await api.call(method, path, {} if method == "POST" else None, headers=headers)
            assert reply.status == 401, (method, path, sent)
            if method != "HEAD" and not path.startswith("/api/"):  # there it is a text
                assert reply.json["error"]["code"] == "invalid_api_key"
            assert reply.headers["WWW-Authenticate"] == "Bearer"
    key = {"Authorization": "Bearer k-secret-é"}
    assert (await api.call("GET", "/v1/models", headers=key)).status == 200
    assert (await api.call("GET", "/v1/models", headers={"Authorization": "Basic x"})).status == 401
    assert (await api.call("OPTIONS", "/v1/chat/completions")).status == 405
    assert not engine.requests
