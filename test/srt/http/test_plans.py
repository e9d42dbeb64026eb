"""What programs may say of their calls to come, in the body or in headers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phloem.constrained.spec import Deferred, JsonSchema, Regex, Whitespace
from phloem.srt.generation import ReasoningMarks
from phloem.srt.http.caller import PLAN_HEADER
from phloem.srt.messages import CallPlan

PLAN = {
    "remaining": 3,
    "fork": 2,
    "group": "thoughts",
    "width": 4,
    "next_constraint": [{"regex": "a+"}, {"response_format": {"type": "json_object"}}],
}


def bodies(**more: Any) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **more}),
        ("/v1/completions", {"prompt": "Hi", **more}),
        ("/generate", {"text": "Hi", **more}),
    ]


def every_body(**more: Any) -> list[tuple[str, dict[str, Any]]]:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **more}
    return [
        *bodies(**more),
        ("/v1/messages", chat | {"max_tokens": 4}),
        ("/v1/responses", {"model": "tiny", "input": "Hi", "store": False, **more}),
        ("/api/chat", chat | {"stream": False}),
        ("/api/generate", {"model": "tiny", "prompt": "Hi", "stream": False, **more}),
    ]


async def test_a_plan_reaches_the_engine_from_each_protocol(api: Any, engine: Any) -> None:
    for path, body in every_body(program="p", plan=PLAN):
        reply = await api.call("POST", path, body)
        assert reply.status == 200, reply.raw
        assert "warnings" not in reply.raw
        plan = engine.requests.pop().plan
        assert (plan.remaining, plan.fork, plan.group, plan.width) == (3, 2, "thoughts", 4)
        assert plan.next_constraints[0] == Regex(pattern="a+")
        assert len(plan.next_constraints) == 2


async def test_headers_say_the_same_to_any_protocol(api: Any, engine: Any) -> None:
    headers = {"X-Program-Id": "p", PLAN_HEADER: json.dumps({"remaining": 0})}
    for path, body in every_body():
        reply = await api.call("POST", path, body, headers=headers)
        assert reply.status == 200, reply.raw
        request = engine.requests.pop()
        assert (request.program, request.plan) == ("p", CallPlan(remaining=0)), path


async def test_choices_are_scored_as_siblings_of_the_plan(api: Any, engine: Any) -> None:
    body = {"prompt": "Is it", "choices": [" yes", " no"], "program": "p"}
    plan = {"group": "g", "width": 2}
    assert (await api.call("POST", "/v1/score", body | {"plan": plan})).status == 200
    assert [r.plan for r in engine.requests] == [CallPlan(group="g", width=2)] * 2
    refused = await api.call("POST", "/v1/score", body | {"plan": {"fork": 1}})
    assert (refused.status, refused.json["error"]["param"]) == (400, "plan.fork")


async def test_embeddings_are_siblings_of_the_plan(api: Any, engine: Any) -> None:
    plan = {"group": "g", "width": 2}
    for path, body in (
        ("/v1/embeddings", {"input": ["a", "b"], "program": "p"}),
        ("/encode", {"text": ["a", "b"], "program": "p"}),
        ("/api/embed", {"model": "tiny", "input": ["a", "b"], "program": "p"}),
    ):
        reply = await api.call("POST", path, body | {"plan": plan})
        assert reply.status == 200, reply.raw
        assert [r.plan for r in engine.requests] == [CallPlan(group="g", width=2)] * 2
        engine.requests.clear()
        refused = await api.call("POST", path, body | {"plan": {"fork": 1}})
        assert refused.status == 400 and "plan.fork" in refused.raw
        assert not engine.requests


async def test_one_constraint_may_stand_alone_in_any_spelling(api: Any, engine: Any) -> None:
    for constraint, expected in (
        ({"regex": "a"}, Regex(pattern="a")),
        ({"guided_json": {"type": "null"}}, JsonSchema(schema='{"type":"null"}')),
        (
            {"json_schema": {"type": "null"}, "constraint_whitespace": "compact"},
            JsonSchema(schema='{"type":"null"}', whitespace=Whitespace.COMPACT),
        ),
    ):
        plan = {"next_constraint": constraint}
        assert (await api.complete(program="p", plan=plan)).status == 200
        assert engine.requests.pop().plan.next_constraints == [expected]


async def test_a_chat_that_thinks_prepares_what_holds_behind_its_thoughts(
    api: Any, engine: Any
) -> None:
    engine.reasoning = ReasoningMarks(begin="<think>", end="</think>")
    plan = {"next_constraint": {"regex": "a"}}
    assert (await api.chat(program="p", plan=plan)).status == 200
    assert (await api.chat(program="p", regex="a")).status == 200
    planned, asked = engine.requests
    (ahead,) = planned.plan.next_constraints
    assert isinstance(ahead, Deferred) and ahead == asked.constraint


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"plan": {}}, "program"),
        ({"program": "p", "plan": {"remaining": -1}}, "plan.remaining"),
        ({"program": "p", "plan": {"fork": 1.5}}, "plan.fork"),
        ({"program": "p", "plan": {"group": "g"}}, "plan.width"),
        ({"program": "p", "plan": {"width": 3}}, "plan.group"),
        ({"program": "p", "plan": {"group": "g", "width": 1}}, "plan.width"),
        ({"program": "p", "plan": {"remaning": 1}}, "plan.remaning"),
        ({"program": "p", "plan": {"next_constraint": {}}}, "plan.next_constraint"),
        (
            {"program": "p", "plan": {"next_constraint": {"regexp": "a"}}},
            "plan.next_constraint.regexp",
        ),
        (
            {"program": "p", "plan": {"next_constraint": [{"regex": "a", "ebnf": "root ::= a"}]}},
            "plan.next_constraint[0].ebnf",
        ),
        (
            {"program": "p", "plan": {"next_constraint": {"json_schema": 5}}},
            "plan.next_constraint.json_schema",
        ),
    ],
)
async def test_a_plan_that_cannot_be_meant_is_refused_by_name(
    api: Any, engine: Any, body: dict[str, Any], param: str
) -> None:
    for path, whole in bodies(**body):
        reply = await api.call("POST", path, whole)
        assert (reply.status, reply.json["error"]["param"]) == (400, param), reply.raw
    assert not engine.requests


async def test_a_header_that_is_no_plan_is_refused(api: Any, engine: Any) -> None:
    for header, body, param in (
        ("{", {"program": "p"}, None),
        ("[]", {"program": "p"}, "plan"),
        ('{"fork": "x"}', {"program": "p"}, "plan.fork"),
        ("{}", {}, "program"),
        ("{}", {"program": "p", "plan": {}}, "plan"),
    ):
        reply = await api.call(
            "POST", "/v1/completions", {"prompt": "Hi", **body}, headers={PLAN_HEADER: header}
        )
        assert (reply.status, reply.json["error"]["param"]) == (400, param), reply.raw
    assert not engine.requests
