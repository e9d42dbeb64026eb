"""`/cache/explain`: where a prompt stops being cached, why, and what of that a tenant is told."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from phloem.srt.errors import NotFound
from phloem.srt.messages import Answer, Question
from phloem.srt.questions import AskExplain, CacheExplanation, Elsewhere, MissReason, Refused
from phloem.srt.wire import pack


def ids(text: str) -> bytes:
    return pack(list(text.encode()))


def explanation(prompt: str, matched: int, reason: MissReason, **more: Any) -> CacheExplanation:
    return CacheExplanation(0, ids(prompt), more.pop("namespace", ""), matched, reason, **more)


async def explain(api: Any, engine: Any, answer: CacheExplanation, **headers: str) -> Any:
    engine.answers = lambda question: answer
    reply = await api.call("POST", "/cache/explain", {"prompt": "x"}, headers=headers)
    assert reply.status == 200, reply.raw
    return reply.json


async def test_the_text_around_a_divergence(api: Any, engine: Any) -> None:
    prompt = "You are a helpful assistant. Today is Monday, and it rains."
    cached = "Tuesday."
    matched = prompt.index("Monday")
    answer = explanation(
        prompt, matched, MissReason.OTHER_TOKEN, branches=3, cached=[ids(cached), ids("a day")]
    )
    body = await explain(api, engine, answer)
    assert body["around"] == {
        "matched": "stant. Today is ",
        "prompt": "Monday, and it r",
        "cached": ["Tuesday.", "a day"],
    }
    assert (body["matched_tokens"], body["prompt_tokens"]) == (matched, len(prompt))
    assert (body["reason"], body["branches"]) == ("other_token", 3)
    assert body["summary"] == (
        f"{matched} of the prompt's {len(prompt)} tokens come from the cache: then the prompt goes "
        "on with 'Monday, and it r', the cache with 'Tuesday.' (and 2 other ways)."
    )
    assert (body["evicted"], body["elsewhere"], body["rid"]) == (None, [], None)


async def test_text_that_is_cut_inside_a_character(api: Any, engine: Any) -> None:
    """The match may end inside a character: what is shown is still each side's own text."""
    prompt = "äö"  # two bytes each
    answer = explanation(prompt, 1, MissReason.OTHER_TOKEN, cached=[ids("ü")[4:]])
    around = (await explain(api, engine, answer))["around"]
    assert around["matched"] == "�"
    assert around["prompt"].endswith("ö")


@pytest.mark.parametrize(
    ("reason", "matched", "more", "told"),
    [
        (MissReason.WHOLE, 1199, {}, "1,199 of the prompt's 1,200 tokens come from the cache: all"),
        (MissReason.NEVER_SEEN, 0, {}, "None of the prompt's 1,200 tokens come from the cache: no"),
        (
            MissReason.EVICTED,
            3,
            {"evicted_tokens": 1000, "evicted_s": 7500.0, "evicted_by": "acme job"},
            "1,000 tokens that follow were evicted 2 h ago for request job of acme.",
        ),
        (
            MissReason.EVICTED,
            3,
            {"evicted_tokens": 1, "evicted_s": 125.0, "evicted_by": "job"},
            "1 token that follow were evicted 2 min ago for request job.",
        ),
        (MissReason.FLUSHED, 3, {"evicted_s": 5.2}, "what follows was flushed 5 s ago."),
        (MissReason.COMPUTING, 3, {}, "a running request is about to compute what follows."),
        (
            MissReason.NAMESPACE,
            0,
            {"elsewhere": [Elsewhere("@acme", 1100)]},
            "in others there is (1,100 tokens in '@acme').",
        ),
        (MissReason.LIMITED, 3, {}, "more is cached, but"),
        (MissReason.OTHER_TOKEN, 3, {"branches": 1}, "and the cache does otherwise."),
        (MissReason.EVICTED, 3, {"restorable": 64}, "64 tokens more can be read back from a lower"),
        (MissReason.WHOLE, 9, {"at_admission": True}, "9 of the prompt's 1,200 tokens came from"),
    ],
)
async def test_every_reason_has_a_sentence(
    api: Any, engine: Any, reason: MissReason, matched: int, more: dict[str, Any], told: str
) -> None:
    body = await explain(api, engine, explanation("a" * 1200, matched, reason, **more))
    assert told in body["summary"], body["summary"]
    assert body["reason"] == reason.value
    if "evicted_tokens" in more:
        assert body["evicted"]["tokens"] == more["evicted_tokens"]
        assert body["evicted"]["rid"] == "job"
        assert body["evicted"]["tenant"] == ("acme" if "acme" in more["evicted_by"] else "")


def test_no_reason_is_forgotten() -> None:
    marks = [m for m in test_every_reason_has_a_sentence.pytestmark if m.name == "parametrize"]
    assert {case[0] for case in marks[0].args[1]} == set(MissReason)


async def test_a_past_request(api: Any, engine: Any) -> None:
    def answer(question: Question) -> Answer:
        assert isinstance(question, AskExplain)
        if question.rid != "chatcmpl/1":
            return Refused(0, NotFound(f"no request {question.rid}", param="rid").to_info())
        return explanation(
            "abcd", 3, MissReason.WHOLE, rid=question.rid, at_admission=True, namespace="1:s"
        )

    engine.answers = answer
    for reply in (
        await api.call("GET", "/cache/explain/chatcmpl%2F1"),
        await api.call("GET", "/cache/explain/chatcmpl/1"),
        await api.call("POST", "/cache/explain", {"rid": "chatcmpl/1"}),
    ):
        assert reply.status == 200, reply.raw
        assert (reply.json["rid"], reply.json["at_admission"]) == ("chatcmpl/1", True)
        assert reply.json["namespace"] == "1:s"
    unknown = await api.call("GET", "/cache/explain/other")
    assert (unknown.status, unknown.json["error"]["param"]) == (404, "rid")
    both = await api.call("POST", "/cache/explain", {"rid": "a", "prompt": "b"})
    assert (both.status, both.json["error"]["param"]) == (400, "rid")
    bad = await api.call("GET", "/cache/explain/a?tennant=b")
    assert (bad.status, bad.json["error"]["param"]) == (400, "tennant")


# ----------------------------------------------------------------------- tenants


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture
async def guarded(serve: Any, tmp_path: Path) -> Any:
    path = tmp_path / "tenants.toml"
    path.write_text(
        f'[tenants.acme]\nkey_sha256 = "{sha("k-acme")}"\n'
        f'[tenants.beta]\nkey_sha256 = "{sha("k-beta")}"\n'
        f'[tenants.open]\nkey_sha256 = "{sha("k-open")}"\nshare = true\n'
    )
    return await serve(tenants=str(path), api_key="k-root")


def auth(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_a_tenant_asks_about_its_own_namespaces_only(guarded: Any, engine: Any) -> None:
    engine.answers = lambda question: explanation(
        "ab", 1, MissReason.WHOLE, namespace=question.namespace
    )
    asked = []
    for key, fields in (
        ("k-acme", {}),
        ("k-acme", {"cache_salt": "s"}),
        ("k-beta", {}),
        ("k-root", {"tenant": "acme"}),
        ("k-acme", {"tenant": "acme"}),
    ):
        body = {"prompt": "ab", **fields}
        reply = await guarded.call("POST", "/cache/explain", body, headers=auth(key))
        assert reply.status == 200
        asked.append(engine.questions[-1].namespace)
    assert asked[0] == asked[3] == asked[4]
    assert len(set(asked)) == 3
    foreign = {"prompt": "ab", "tenant": "beta"}
    for key in ("k-acme", "k-open"):
        reply = await guarded.call("POST", "/cache/explain", foreign, headers=auth(key))
        assert (reply.status, reply.json["error"]["param"]) == (403, "tenant")


async def test_what_others_have_is_not_told(guarded: Any, engine: Any) -> None:
    """The same facts of the tree, as each reader may know them."""
    others = [Elsewhere("@beta", 40), Elsewhere("", 30), Elsewhere("@acme/1:s", 20)]
    facts = {"elsewhere": others, "evicted_tokens": 9, "evicted_s": 1.0, "evicted_by": "beta job"}
    secret = [ids("a secret of somebody")]
    mine = {"namespace": "@acme", "cached": secret, **facts}
    common = {"namespace": "", "cached": secret, **facts}

    async def told(key: str, reason: MissReason, more: dict[str, Any]) -> Any:
        answer = explanation("abcd", 2, reason, **more)
        return await explain(guarded, engine, answer, **auth(key))

    root = await told("k-root", MissReason.EVICTED, mine)
    assert [e["namespace"] for e in root["elsewhere"]] == ["@beta", "", "@acme/1:s"]
    assert (root["evicted"]["tenant"], root["evicted"]["rid"]) == ("beta", "job")

    own = await told("k-acme", MissReason.EVICTED, mine)
    assert [e["namespace"] for e in own["elsewhere"]] == ["@acme/1:s"]
    assert own["evicted"] == {"tokens": 9, "seconds_ago": 1.0, "rid": None, "tenant": None}
    assert own["around"]["cached"] == ["a secret of some"]  # its own secret

    shared = await told("k-open", MissReason.OTHER_TOKEN, common)
    assert (shared["elsewhere"], shared["around"]["cached"]) == ([], [])
    assert "secret" not in str(shared)
    assert "beta" not in str(shared)

    nobody = {"namespace": "@acme", "elsewhere": others[:2]}
    hidden = await told("k-acme", MissReason.NAMESPACE, nobody)
    seen = await told("k-acme", MissReason.NEVER_SEEN, {"namespace": "@acme"})
    assert hidden == seen
    assert (await told("k-root", MissReason.NAMESPACE, nobody))["reason"] == "namespace"
    assert (await told("k-acme", MissReason.NAMESPACE, mine))["reason"] == "namespace"


async def test_requests_of_others_are_unknown(guarded: Any, engine: Any) -> None:
    for key in ("k-acme", "k-beta", "k-root"):
        body = {"text": "ab", "rid": "job"}
        await guarded.call("POST", "/generate", body, headers=auth(key))
    spaces = {request.rid: request.namespace for request in engine.requests}
    assert len(spaces) == 3

    def answer(question: Question) -> Answer:
        assert isinstance(question, AskExplain)
        if question.rid not in spaces:
            return Refused(0, NotFound("no such request", param="rid").to_info())
        space = spaces[question.rid]
        return explanation("ab", 1, MissReason.WHOLE, rid=question.rid, namespace=space)

    engine.answers = answer
    found = {}
    for key, query in (("k-acme", ""), ("k-beta", ""), ("k-root", ""), ("k-root", "?tenant=beta")):
        path = f"/cache/explain/job{query}"
        reply = await guarded.call("GET", path, headers=auth(key))
        assert reply.json["rid"] == "job"
        found[key + query] = reply.json["namespace"]
    assert found["k-root?tenant=beta"] == found["k-beta"]
    assert len(set(found.values())) == 3
    reply = await guarded.call("GET", "/cache/explain/job?tenant=beta", headers=auth("k-acme"))
    assert reply.status == 403
    for path in ("beta job", "beta%20job", "acme%20job"):
        reply = await guarded.call("GET", f"/cache/explain/{path}", headers=auth("k-acme"))
        assert reply.status == 404
        assert reply.json["error"]["message"].count("acme") == path.count("acme")
    # Even an answer about another's request, whatever its id, is not handed on.
    spaces["acme odd"] = "@beta"
    assert (await guarded.call("GET", "/cache/explain/odd", headers=auth("k-acme"))).status == 404


async def test_an_admin_works_for_a_tenant(guarded: Any, engine: Any) -> None:
    body = {"text": "ab"}
    await guarded.call("POST", "/generate", body, headers=auth("k-beta"))
    warm = {"prompt": "ab", "tenant": "beta"}
    assert (await guarded.call("POST", "/cache/warm", warm, headers=auth("k-root"))).status == 200
    served, warmed = engine.requests
    assert (warmed.tenant, warmed.namespace) == ("beta", served.namespace)
