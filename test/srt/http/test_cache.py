"""`/cache/…`: questions go out as they should, and answers come back readable."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from phloem.radix import Cleared, NodeRemoved, NodeSplit, NodeStored
from phloem.srt.errors import Conflict, NotFound, PromptTooLong, Unavailable
from phloem.srt.kv_events import KvEvents
from phloem.srt.messages import Answer, Flush, Flushed, Question
from phloem.srt.questions import (
    AskExplain,
    AskStats,
    AskTree,
    CacheExplanation,
    CacheStats,
    CacheTree,
    MissReason,
    NamespaceUse,
    Pin,
    Pinned,
    PinUse,
    Refused,
    TenantUse,
    TierUse,
    TreeNode,
    Unpin,
    Unpinned,
)
from phloem.srt.wire import pack, unpack

STATS = CacheStats(
    7,
    capacity=100,
    free=40,
    evictable=30,
    locked=20,
    private=10,
    loading=1,
    pinned=5,
    pin_budget=25,
    page_size=1,
    nodes=9,
    eviction_policy="lru",
    schedule_policy="fair",
    lookups_total=3,
    lookup_tokens_total=300,
    hit_tokens_total=200,
    inserted_tokens_total=90,
    duplicate_tokens_total=2,
    evicted_tokens_total=38,
    namespaces_total=1,
    namespaces=[NamespaceUse("@acme", 50, 9)],
    tenants=[TenantUse("acme", 2.0, 1, 0, 20, None, 12.5)],
    programs=1,
    pins=[PinUse("p", "", 5, None)],
    tiers=[TierUse("disk", 64, 1, 2, 3, 4, 5, 6, 7)],
)


async def test_stats(api: Any, engine: Any) -> None:
    engine.answers = lambda question: STATS
    reply = await api.call("GET", "/cache/stats")
    assert reply.status == 200
    body = reply.json
    assert "id" not in body
    assert set(body) == set(CacheStats.__struct_fields__) - {"id"}
    assert body["free"] + body["evictable"] + body["locked"] + body["private"] == body["capacity"]
    assert body["tenants"] == [
        {
            "tenant": "acme",
            "weight": 2.0,
            "running": 1,
            "waiting": 0,
            "slots": 20,
            "quota": None,
            "served": 12.5,
        }
    ]
    assert body["pins"] == [{"name": "p", "namespace": "", "tokens": 5, "expires_s": None}]
    assert body["tiers"][0]["corrupt_blocks_total"] == 7
    assert isinstance(engine.questions[0], AskStats)


async def test_errors_of_the_scheduler_keep_their_status(api: Any, engine: Any) -> None:
    for error, status in (
        (Unavailable("the server is starting", retry_after=2.0), 503),
        (NotFound("no such thing", code="gone"), 404),
    ):
        for answer in (error, Refused(0, error.to_info())):
            engine.answers = lambda question, a=answer: a
            reply = await api.call("GET", "/cache/stats")
            assert (reply.status, reply.json["error"]["message"]) == (status, error.message)
    engine.answers = lambda question: Flushed(0, 3)
    assert (await api.call("GET", "/cache/stats")).status == 500


# ----------------------------------------------------------------------- tree


def node(number: int, preview: bytes = b"") -> TreeNode:
    return TreeNode(number, 0, "@acme", 0, 5, 9, 1, 3, 0.5, 2, preview)


async def test_tree(api: Any, engine: Any) -> None:
    engine.answers = lambda question: CacheTree(0, [node(4), node(5)], truncated=True)
    reply = await api.call("GET", "/cache/tree")
    assert reply.json["truncated"] is True
    assert reply.json["nodes"][0] == {
        "node": 4,
        "parent": 0,
        "namespace": "@acme",
        "start": 0,
        "tokens": 5,
        "total": 9,
        "leases": 1,
        "hits": 3,
        "idle_s": 0.5,
        "children": 2,
    }
    assert engine.questions == [AskTree(0, limit=100)]


async def test_tree_is_filtered_and_shows_text_when_asked(api: Any, engine: Any) -> None:
    engine.answers = lambda question: CacheTree(0, [node(4, pack([72, 105]))], truncated=False)
    query = "?namespace=%40acme&prompt=H%C3%A9&min_tokens=8&limit=1000&text=true"
    reply = await api.call("GET", f"/cache/tree{query}")
    assert reply.json["nodes"][0]["text"] == "Hi"
    question = engine.questions[0]
    assert (question.namespace, unpack(question.prefix)) == ("@acme", [72, 195, 169])
    assert (question.min_tokens, question.limit) == (8, 1000)
    assert question.preview > 0


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=1001", "limit"),
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("min_tokens=-1", "min_tokens"),
        ("min_tokens=18446744073709551616", "min_tokens"),
        ("text=maybe", "text"),
        ("txt=true", "txt"),
        ("limit=1&limit=2", "limit"),
    ],
)
async def test_tree_refuses_by_name(api: Any, engine: Any, query: str, param: str) -> None:
    reply = await api.call("GET", f"/cache/tree?{query}")
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert not engine.questions


# ----------------------------------------------------------------------- prompts

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "none",
    "chat_template_kwargs": {"style": "plain"},
}


def whole(question: Question) -> Answer:
    """A tree that has everything."""
    match question:
        case AskExplain():
            matched = max(0, len(unpack(question.prompt)) - 1)
            return CacheExplanation(
                0, question.prompt, question.namespace, matched, MissReason.WHOLE
            )
        case Pin():
            return Pinned(0, 3, 5, 25)
    raise AssertionError(question)


async def test_prompts_are_those_of_generations(api: Any, engine: Any) -> None:
    """Whatever the spelling: the ids and the namespace that the request itself would have."""
    engine.answers = whole
    salts = {"cache_salt": "s", "extra_key": "e"}
    for path, generation, asked in (
        ("/v1/chat/completions", CHAT, CHAT),
        ("/v1/completions", {"prompt": "Hé"}, {"prompt": "Hé"}),
        ("/v1/completions", {"prompt": [5, 6]}, {"prompt": [5, 6]}),
        ("/generate", {"text": "Hé"}, {"prompt": "Hé"}),
        ("/generate", {"input_ids": [5, 6]}, {"input_ids": [5, 6]}),
    ):
        for more in ({}, salts):
            assert (await api.call("POST", path, {**generation, **more})).status == 200
            served = engine.requests[-1]
            for route in ("/cache/explain", "/cache/pin"):
                reply = await api.call("POST", route, {**asked, **more, "model": "tiny"})
                assert reply.status == 200, reply.raw
                question = engine.questions[-1]
                assert question.namespace == served.namespace
                prompt = served.prompt
                ids = await engine.tokenize(prompt) if isinstance(prompt, str) else prompt
                assert unpack(question.prompt) == ids
            assert (await api.call("POST", "/cache/warm", {**asked, **more})).status == 200
            warmed = engine.requests[-1]
            assert (warmed.prompt, warmed.namespace) == (ids, served.namespace)
    rendered = [one for one in engine.rendered if one["template_kwargs"]]
    assert len(rendered) == 8
    assert all(one == rendered[0] for one in rendered)


@pytest.mark.parametrize("path", ["/cache/explain", "/cache/pin", "/cache/warm"])
@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": "a", "input_ids": [1]}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [1000]}, 400, "prompt[0]"),
        ({"prompt": [1, "a"]}, 400, "prompt[1]"),
        ({"input_ids": [1, 1000]}, 400, "input_ids[1]"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "bot", "content": "a"}]}, 400, "messages[0].role"),
        ({"prompt": "a", "tools": CHAT["tools"]}, 400, "tools"),
        ({**CHAT, "chat_template_kwargs": {"tools": 1}}, 400, "chat_template_kwargs.tools"),
        ({"prompt": "a", "temperature": 1}, 400, "temperature"),
        ({"prompt": "a", "model": "other"}, 404, "model"),
        ({"prompt": "a", "tenant": "nobody"}, 400, "tenant"),
    ],
)
async def test_prompts_are_refused_by_field(
    api: Any, engine: Any, path: str, body: dict[str, object], status: int, param: str
) -> None:
    reply = await api.call("POST", path, body)
    assert (reply.status, reply.json["error"]["param"]) == (status, param), reply.raw
    assert not engine.questions
    assert not engine.requests


# ----------------------------------------------------------------------- pin


def partly(question: Question) -> Answer:
    if isinstance(question, AskExplain):
        return CacheExplanation(0, question.prompt, "", 0, MissReason.NEVER_SEEN)
    return whole(question)


async def test_a_pin_computes_what_is_missing(api: Any, engine: Any) -> None:
    engine.answers = partly
    reply = await api.call("POST", "/cache/pin", {"prompt": "abc", "name": "n/1", "ttl_s": 60})
    assert reply.json == {
        "name": "n/1",
        "prompt_tokens": 3,
        "tokens": 3,
        "ttl_s": 60.0,
        "pinned": 5,
        "budget": 25,
    }
    assert [type(question) for question in engine.questions] == [AskExplain, Pin]
    assert engine.questions[1] == Pin(0, "n/1", pack(list(b"abc")), "", 60.0)
    assert [r.sampling.max_tokens for r in engine.requests] == [0]
    assert engine.requests[0].prompt == list(b"abc")


async def test_a_pin_computes_nothing_needless_or_unwanted(api: Any, engine: Any) -> None:
    engine.answers = whole
    first = await api.call("POST", "/cache/pin", {"prompt": "abc"})
    engine.answers = partly
    second = await api.call("POST", "/cache/pin", {"prompt": "abc", "compute": False})
    assert not engine.requests
    names = {first.json["name"], second.json["name"]}
    assert len(names) == 2
    assert first.json["ttl_s"] is None
    assert {q.name for q in engine.questions if isinstance(q, Pin)} == names


async def test_a_pin_that_cannot_be(api: Any, engine: Any, script: Any) -> None:
    for body, param in (
        ({"prompt": "a", "ttl_s": 0}, "ttl_s"),
        ({"prompt": "a", "name": "a b"}, "name"),
        ({"prompt": "a", "name": ""}, "name"),
    ):
        reply = await api.call("POST", "/cache/pin", body)
        assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert not engine.questions
    refusal = Refused(0, Conflict("the budget is spent", code="pin_budget").to_info())
    engine.answers = lambda question: refusal if isinstance(question, Pin) else whole(question)
    spent = await api.call("POST", "/cache/pin", {"prompt": "abc"})
    assert (spent.status, spent.json["error"]["code"]) == (409, "pin_budget")
    engine.answers = partly
    engine.script = lambda request: script(refusal=PromptTooLong("too long", param="prompt"))
    questions = len(engine.questions)
    assert (await api.call("POST", "/cache/pin", {"prompt": "abc"})).status == 400
    assert not any(isinstance(q, Pin) for q in engine.questions[questions:])


async def test_unpin(api: Any, engine: Any) -> None:
    engine.answers = lambda question: Unpinned(0, 5)
    for name, path in (("n", "n"), ("n/1", "n/1"), ("n/1", "n%2F1")):
        reply = await api.call("DELETE", f"/cache/pin/{path}")
        assert reply.json == {"name": name, "tokens": 5}
        assert engine.questions[-1] == Unpin(0, name)
    engine.answers = lambda question: Refused(0, NotFound("no pin").to_info())
    assert (await api.call("DELETE", "/cache/pin/n")).status == 404


# ----------------------------------------------------------------------- warm and flush


async def test_warm_tells_each_prompt(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda request: script(cached_tokens=len(request.prompt) // 2)
    reply = await api.call("POST", "/cache/warm", {"prompts": ["abcd", [1, 2, 3, 4, 5, 6]]})
    assert reply.json == {
        "prompts": [
            {"prompt_tokens": 4, "cached_tokens": 2, "computed_tokens": 2},
            {"prompt_tokens": 6, "cached_tokens": 3, "computed_tokens": 3},
        ]
    }
    assert [r.prompt for r in engine.requests] == [list(b"abcd"), [1, 2, 3, 4, 5, 6]]
    assert {r.sampling.max_tokens for r in engine.requests} == {0}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompts": []}, "prompts"),
        ({"prompts": ["a"], "prompt": "b"}, "prompts"),
        ({"prompts": ["a"], "messages": CHAT["messages"]}, "prompts"),
        ({"prompts": ["a", ""]}, "prompts[1]"),
        ({"prompts": ["a", [1, 1000]]}, "prompts[1][1]"),
        ({"prompts": ["a"] * 1025}, "prompts"),
        ({"prompts": ["a"], "tools": CHAT["tools"]}, "tools"),
    ],
)
async def test_warm_refuses_by_field(
    api: Any, engine: Any, body: dict[str, object], param: str
) -> None:
    reply = await api.call("POST", "/cache/warm", body)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert not engine.requests


async def test_flush_takes_a_namespace_or_all(api: Any, engine: Any) -> None:
    await api.complete(cache_salt="s")
    salted = engine.requests[0].namespace
    for body, namespace in (
        (None, None),
        ({}, None),
        ({"namespace": "@acme"}, "@acme"),
        ({"namespace": ""}, ""),
        ({"cache_salt": "s"}, salted),
        ({"tenant": ""}, ""),
        ({"tenant": "", "cache_salt": "s"}, salted),
    ):
        reply = await api.call("POST", "/cache/flush", body)
        assert reply.json == {"success": True, "flushed_tokens": 17}
        assert engine.questions[-1] == Flush(0, namespace)
    for bad, param in (
        ({"namespace": "", "cache_salt": "s"}, "namespace"),
        ({"tenant": "nobody"}, "tenant"),
        ({"all": True}, "all"),
    ):
        reply = await api.call("POST", "/cache/flush", bad)
        assert (reply.status, reply.json["error"]["param"]) == (400, param)


# ----------------------------------------------------------------------- events


def frames(raw: str) -> list[tuple[str, Any]]:
    """(name, data) of each frame."""
    found = []
    for block in raw.removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line[0] != ":")
        if fields:
            data = fields["data"]
            found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


async def test_events_are_named_and_numbered(api: Any, engine: Any) -> None:
    stored = NodeStored(1, 0, "@acme", pack([5, 6]))
    engine.kv_events.put_nowait(KvEvents(4, [Cleared(), stored]))
    engine.kv_events.put_nowait(KvEvents(5, [NodeSplit(1, 2, 1), NodeRemoved(1, 0)]))
    engine.kv_events.put_nowait(Unavailable("the backend is gone"))
    reply = await api.call("GET", "/cache/events")
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    assert frames(reply.raw)[:4] == [
        ("cleared", {"sequence": 4}),
        (
            "stored",
            {"sequence": 4, "node": 1, "parent": 0, "namespace": "@acme", "tokens": [5, 6]},
        ),
        ("split", {"sequence": 5, "node": 1, "upper": 2, "at": 1}),
        ("removed", {"sequence": 5, "node": 1, "keep": 0}),
    ]
    (_, error), (_, done) = frames(reply.raw)[4:]
    assert (error["error"]["message"], done) == ("the backend is gone", "[DONE]")
    assert engine.watchers == 0


async def test_a_long_tree_comes_whole(api: Any, engine: Any) -> None:
    nodes = [NodeStored(i, 0, "", pack([i])) for i in range(1, 1001)]
    engine.kv_events.put_nowait(KvEvents(1, [Cleared(), *nodes]))
    engine.kv_events.put_nowait(Unavailable("over"))
    found = frames((await api.call("GET", "/cache/events")).raw)
    assert [data["node"] for name, data in found if name == "stored"] == list(range(1, 1001))


async def test_events_of_a_backend_that_is_down_are_a_503(api: Any, engine: Any) -> None:
    engine.kv_events.put_nowait(Unavailable("starting"))
    assert (await api.call("GET", "/cache/events")).status == 503


async def test_a_listener_that_leaves_is_let_go(
    serve: Any, engine: Any, eventually: Callable[..., Any]
) -> None:
    api = await serve(keepalive_s=0.01)
    engine.kv_events.put_nowait(KvEvents(1, [Cleared()]))
    async with api.session.get(f"{api.base}/cache/events") as response:
        async for line in response.content:
            if line.startswith(b":"):  # a comment, since there is nothing to tell
                break
        assert engine.watchers == 1
    await eventually(lambda: engine.watchers == 0)
