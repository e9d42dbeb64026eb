"""Pages of other origins may read what the operator said, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

APP = "https://app.example.org"
ALLOW = "Access-Control-Allow-"
QUESTION = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


def told(reply: Any) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name.startswith(ALLOW)}


async def test_nobody_is_told_anything_by_default(api: Any) -> None:
    for method, headers in (("GET", {}), ("OPTIONS", QUESTION)):
        reply = await api.call(method, "/v1/models", headers={"Origin": APP, **headers})
        assert told(reply) == {}
        assert "Vary" not in reply.headers
        assert reply.status == (200 if method == "GET" else 405)


async def test_a_preflight_needs_no_key_and_what_follows_does(serve: Any, engine: Any) -> None:
    api = await serve(api_key="k", cors_origin=("http://localhost:5173", APP))
    question = await api.call(
        "OPTIONS", "/v1/chat/completions", headers={"Origin": APP, **QUESTION}
    )
    assert (question.status, question.raw) == (204, "")
    assert question.headers[f"{ALLOW}Origin"] == APP
    assert question.headers[f"{ALLOW}Headers"] == QUESTION["Access-Control-Request-Headers"]
    assert "POST" in question.headers[f"{ALLOW}Methods"]
    assert f"{ALLOW}Credentials" not in question.headers
    assert "Origin" in question.headers.getall("Vary")
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    for key, status in (("k", 200), ("wrong", 401)):
        headers = {"Origin": APP, "Authorization": f"Bearer {key}"}
        reply = await api.call("POST", "/v1/chat/completions", body, headers=headers)
        assert reply.status == status
        assert told(reply) == {f"{ALLOW}Origin": APP}
        assert "X-Request-Id" in reply.headers["Access-Control-Expose-Headers"]
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", f"{APP}.evil.example", f"{APP}:444", "null", "http://app.example.org"],
)
async def test_other_origins_are_told_nothing(serve: Any, origin: str) -> None:
    api = await serve(cors_origin=(APP,))
    for method, headers in (("GET", {}), ("OPTIONS", QUESTION)):
        reply = await api.call(method, "/v1/models", headers={"Origin": origin, **headers})
        assert told(reply) == {}
        assert reply.headers["Vary"] == "Origin"  # so that no cache gives it to another
    assert told(await api.call("GET", "/v1/models")) == {}


async def test_every_origin_only_if_asked(serve: Any) -> None:
    api = await serve(cors_origin=("*",), api_key="k")
    reply = await api.call("OPTIONS", "/generate", headers={"Origin": APP, **QUESTION})
    assert (reply.status, reply.headers[f"{ALLOW}Origin"]) == (204, "*")
    assert f"{ALLOW}Credentials" not in reply.headers
    assert (await api.call("OPTIONS", "/generate", headers={"Origin": APP})).status == 405
