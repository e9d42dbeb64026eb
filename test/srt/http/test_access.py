"""Keys, tenants and scopes: who may call what, and whose a request is."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phloem.srt.config import ServerOptions
from phloem.srt.errors import InvalidRequest
from phloem.srt.http.access import Keyring
from phloem.srt.http.app import create_app
from phloem.srt.tenants import OPERATOR, Tenant

OPERATOR_KEY = "k-operator"

# What each route asks for, apart from a key that is known.
OPEN = {"/health", "/ready", "/docs"}
ANY_KEY = {
    "/",
    "/metrics",
    "/version",
    "/model_info",
    "/get_model_info",
    "/server_info",
    "/get_server_info",
    "/v1/models",
    "/v1/models/{model}",
    "/health_generate",
    "/v1/loads",
    "/openapi.json",
    "/api/ps",
    "/api/show",
    "/api/tags",
    "/api/version",
}
INFERENCE = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/files",
    "/v1/files/{id}",
    "/v1/files/{id}/content",
    "/v1/batches",
    "/v1/batches/{id}",
    "/v1/batches/{id}/cancel",
    "/generate",
    "/tokenize",
    "/detokenize",
    "/v1/tokenize",
    "/v1/detokenize",
    "/concate_and_append_request",
    "/parse_function_call",
    "/separate_reasoning",
    "/abort",
    "/abort_request",
    "/programs/run",
    "/programs/{program}/end",
    "/cache/explain",
    "/cache/explain/{rid}",
    "/api/chat",
    "/api/embed",
    "/api/embeddings",
    "/api/generate",
    "/encode",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/responses/{id}",
    "/v1/responses/{id}/cancel",
    "/v1/responses/{id}/input_items",
    "/v1/score",
}
ADMIN = {
    "/flush_cache",
    "/cache/stats",
    "/cache/tree",
    "/cache/pin",
    "/cache/pin/{name}",
    "/cache/warm",
    "/cache/flush",
    "/cache/events",
    "/scheduler/policy",
    "/api/delete",
    "/api/pull",
}


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture
def tenants(tmp_path: Path) -> str:
    """Keys are k-NAME: two of inference, one that shares, one of either scope alone."""
    path = tmp_path / "tenants.toml"
    path.write_text(
        f"""
        [tenants.acme]
        key_sha256 = ["{sha("k-acme")}", "{sha("k-acme-old")}"]
        priority = 5

        [tenants.beta]
        key_sha256 = "{sha("k-beta")}"

        [tenants.open]
        key_sha256 = "{sha("k-open")}"
        share = true

        [tenants.ops]
        key_sha256 = "{sha("k-ops")}"
        scopes = ["admin"]
        """
    )
    return str(path)


def auth(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def routes(engine: Any) -> list[tuple[str, str, str]]:
    """Every (method, pattern, path) of the application, something in the patterns' places."""
    return [
        (route.method, route.resource.canonical, re.sub(r"\{.*?\}", "x", route.resource.canonical))
        for route in create_app(engine, ServerOptions()).router.routes()
        if route.resource is not None
    ]


async def test_every_route_asks_for_its_scope(serve: Any, engine: Any, tenants: str) -> None:
    api = await serve(tenants=tenants, api_key=OPERATOR_KEY)
    found = routes(engine)
    assert {pattern for _, pattern, _ in found} == OPEN | ANY_KEY | INFERENCE | ADMIN
    for method, pattern, path in found:
        for key, scopes in (
            ("k-acme", {"inference"}),
            ("k-acme-old", {"inference"}),
            ("k-open", {"inference"}),
            ("k-ops", {"admin"}),
            ("k-nobody", None),
        ):
            wanted = {"inference"} if pattern in INFERENCE else set()
            wanted = {"admin"} if pattern in ADMIN else wanted
            if scopes is None and pattern not in OPEN:
                expected = 401
            elif scopes is not None and not wanted <= scopes:
                expected = 403
            else:
                continue  # it may: other tests see what it gets
            reply = await api.call(method, path, headers=auth(key))
            assert reply.status == expected, (method, path, key)
            if method != "HEAD" and expected == 403:
                error = reply.json["error"]
                if isinstance(error, dict):  # a string in Ollama's shape
                    assert (error["type"], error["code"]) == ("permission_error", "missing_scope")
                    error = error["message"]
                assert f"`{wanted.pop()}`" in error
    assert not engine.requests
    assert not engine.questions


async def test_who_may_is_let_in(serve: Any, tenants: str) -> None:
    api = await serve(tenants=tenants, api_key=OPERATOR_KEY)
    for key, method, path in (
        ("k-acme", "GET", "/v1/models"),
        ("k-ops", "GET", "/metrics"),
        ("k-ops", "POST", "/cache/flush"),
        (OPERATOR_KEY, "POST", "/cache/flush"),
        (OPERATOR_KEY, "POST", "/programs/x/end"),
        ("k-beta", "POST", "/programs/x/end"),
    ):
        assert (await api.call(method, path, headers=auth(key))).status == 200, (key, path)
    for path in OPEN:
        assert (await api.call("GET", path)).status == 200


async def test_a_key_may_stand_in_either_header(serve: Any, tenants: str) -> None:
    """The one that Anthropic's clients send counts where the other is absent."""
    api = await serve(tenants=tenants)
    for headers, status in (
        ({"X-Api-Key": "k-acme"}, 200),
        ({"X-Api-Key": "k-nobody"}, 401),
        ({"X-Api-Key": ""}, 401),
        ({"X-Api-Key": "k-nobody", **auth("k-acme")}, 200),
        ({"X-Api-Key": "k-acme", **auth("k-nobody")}, 401),
    ):
        assert (await api.call("GET", "/v1/models", headers=headers)).status == status, headers


async def test_tenants_without_an_operator_leave_nothing_open(serve: Any, tenants: str) -> None:
    api = await serve(tenants=tenants)
    for sent in ({}, auth(""), auth("k-nobody"), {"Authorization": "Basic k-acme"}):
        assert (await api.call("GET", "/v1/models", headers=sent)).status == 401
    assert (await api.call("GET", "/v1/models", headers=auth("k-acme"))).status == 200


def test_all_hashes_are_compared_whatever_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = {f"t{i}": Tenant(name=f"t{i}", key_sha256=(sha(f"k{i}"),)) for i in range(5)}
    keyring = Keyring("k-operator", ring)
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("phloem.srt.http.access.hmac.compare_digest", compare)
    assert keyring.caller("Bearer k0").name == "t0"
    assert keyring.caller("bearer  k4 ").name == "t4"
    assert keyring.caller("Bearer k-operator") is OPERATOR
    assert len(compared) == 3 * 6
    assert {len(digest) for pair in compared for digest in pair} == {32}


def test_a_key_is_one_persons(tenants: str, engine: Any) -> None:
    with pytest.raises(InvalidRequest, match="also a tenant's"):
        create_app(engine, ServerOptions(tenants=tenants, api_key="k-beta"))
    with pytest.raises(InvalidRequest, match="cannot read"):
        create_app(engine, ServerOptions(tenants=f"{tenants}.not"))


# ----------------------------------------------------------------------- whose a request is


async def each_way(api: Any, key: str, **fields: object) -> None:
    """One request on each route that generates."""
    bodies: dict[str, dict[str, object]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/completions": {"prompt": "Hi"},
        "/generate": {"text": "Hi"},
    }
    for path, body in bodies.items():
        reply = await api.call("POST", path, {**body, **fields}, headers=auth(key))
        assert reply.status == 200, reply.raw


async def test_requests_carry_their_tenant(serve: Any, engine: Any, tenants: str) -> None:
    api = await serve(tenants=tenants, api_key=OPERATOR_KEY)
    spaces: dict[str, set[str]] = {}
    for key, name, priority in (
        ("k-acme", "acme", 5),
        ("k-acme-old", "acme", 5),
        ("k-beta", "beta", 0),
        ("k-open", "open", 0),
        (OPERATOR_KEY, "", 0),
    ):
        engine.requests.clear()
        await each_way(api, key, priority=2, program="p", cache_salt="s")
        await each_way(api, key)
        for request in engine.requests:
            assert request.tenant == name
            assert request.priority in (priority, priority + 2)
            assert (request.program == "") == (request.priority == priority)
        assert {r.priority for r in engine.requests} == {priority, priority + 2}
        assert len({r.program for r in engine.requests}) == 2
        spaces[key] = {request.namespace for request in engine.requests}
        assert len(spaces[key]) == 2
    assert spaces["k-acme"] == spaces["k-acme-old"]
    assert spaces["k-open"] == spaces[OPERATOR_KEY]
    assert "" in spaces["k-open"]
    for a, b in (("k-acme", "k-beta"), ("k-acme", "k-open"), ("k-beta", "k-open")):
        assert spaces[a].isdisjoint(spaces[b])


async def test_programs_of_tenants_are_their_own(serve: Any, engine: Any, tenants: str) -> None:
    api = await serve(tenants=tenants, api_key=OPERATOR_KEY)
    for key in ("k-acme", "k-beta", OPERATOR_KEY):
        await each_way(api, key, program="agent/7")
        path = "/programs/agent%2F7/end"
        reply = await api.call("POST", path, headers=auth(key))
        assert (reply.status, reply.json) == (200, {"ended": "agent/7"})
    assert len(set(engine.ended)) == 3
    assert set(engine.ended) == {request.program for request in engine.requests}
    assert (await api.call("POST", "/programs/a%20b/end", headers=auth("k-acme"))).status == 400


async def test_the_program_may_stand_in_a_header(api: Any, engine: Any) -> None:
    bodies: dict[str, dict[str, object]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/completions": {"prompt": "Hi"},
        "/generate": {"text": "Hi"},
    }
    for path, body in bodies.items():
        header = {"X-Program-Id": "p-1"}
        assert (await api.call("POST", path, body, headers=header)).status == 200
        both = await api.call("POST", path, {**body, "program": "p-1"}, headers=header)
        assert both.status == 200
        for fields, headers in (
            ({"program": "p-2"}, header),
            ({"program": ""}, {}),
            ({"program": "a b"}, {}),
            ({"program": "x" * 129}, {}),
            ({}, {"X-Program-Id": "a b"}),
            ({}, {"X-Program-Id": ""}),
        ):
            bad = await api.call("POST", path, {**body, **fields}, headers=headers)
            assert (bad.status, bad.json["error"]["param"]) == (400, "program"), (fields, headers)
    assert [request.program for request in engine.requests] == ["p-1"] * 6


async def test_ids_of_tenants_do_not_meet(
    serve: Any, engine: Any, script: Any, tenants: str, eventually: Callable[..., Any]
) -> None:
    """Two tenants use one id at once; each aborts its own, and only its own."""
    hold = asyncio.Event()
    engine.script = lambda request: script(hold=hold)
    api = await serve(tenants=tenants, api_key=OPERATOR_KEY)
    body = {"text": "Hi", "rid": "job", "sampling_params": {"n": 2}}
    running = [
        asyncio.create_task(api.call("POST", "/generate", body, headers=auth(key)))
        for key in ("k-acme", "k-beta")
    ]
    await eventually(lambda: len(engine.running) == 4)
    again = await api.call("POST", "/generate", body, headers=auth("k-acme"))
    assert again.json["error"]["code"] == "duplicate_request_id"
    assert "acme" not in again.json["error"]["message"]

    async def abort(key: str, **fields: object) -> tuple[int, set[str]]:
        engine.aborted.clear()
        reply = await api.call("POST", "/abort", fields, headers=auth(key))
        assert reply.status == 200, reply.raw
        return reply.json["aborted"], set(engine.aborted)

    acme, mine = await abort("k-acme", rid="job")
    beta, others = await abort("k-beta", abort_all=True)
    assert (acme, beta) == (2, 2)
    assert mine | others == engine.running
    assert mine.isdisjoint(others)
    assert await abort("k-open", abort_all=True) == (0, set())
    assert (await abort("k-open", rid="job"))[0] == 0
    assert await abort(OPERATOR_KEY, rid="job", tenant="beta") == (2, others)
    assert await abort(OPERATOR_KEY, abort_all=True, tenant="acme") == (2, mine)
    assert (await abort(OPERATOR_KEY, abort_all=True))[0] == 4
    for key, name, status in (("k-acme", "beta", 403), (OPERATOR_KEY, "nobody", 400)):
        reply = await api.call("POST", "/abort", {"rid": "job", "tenant": name}, headers=auth(key))
        assert (reply.status, reply.json["error"]["param"]) == (status, "tenant")
    hold.set()
    replies = await asyncio.gather(*running)
    for reply in replies:
        assert [one["meta_info"]["id"] for one in reply.json] == ["job-0", "job-1"]
        assert reply.headers["X-Request-Id"] == "job"
