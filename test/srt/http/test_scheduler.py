"""`/scheduler/policy`."""

from __future__ import annotations

from typing import Any

from phloem.srt.errors import InvalidRequest
from phloem.srt.messages import Answer, Question
from phloem.srt.questions import AskPolicy, Policy, Refused

POLICIES = ["fair", "fcfs", "lpm"]


async def test_the_policy_is_told_and_changed(api: Any, engine: Any) -> None:
    current = "fair"

    def answer(question: Question) -> Answer:
        nonlocal current
        assert isinstance(question, AskPolicy)
        if question.policy is not None and question.policy not in POLICIES:
            error = InvalidRequest(f"no policy {question.policy!r}", param="policy")
            return Refused(question.id, error.to_info())
        current = question.policy or current
        return Policy(question.id, current, POLICIES)

    engine.answers = answer
    before = await api.call("GET", "/scheduler/policy")
    assert before.json == {"policy": "fair", "policies": POLICIES}
    changed = await api.call("POST", "/scheduler/policy", {"policy": "lpm"})
    assert changed.json == {"policy": "lpm", "policies": POLICIES}
    refused = await api.call("POST", "/scheduler/policy", {"policy": "best"})
    assert (refused.status, refused.json["error"]["param"]) == (400, "policy")
    assert "'best'" in refused.json["error"]["message"]
    assert (await api.call("GET", "/scheduler/policy")).json["policy"] == "lpm"


async def test_a_policy_must_be_named(api: Any, engine: Any) -> None:
    for body, param in (
        ({}, "policy"),
        ({"policy": None}, "policy"),
        ({"policy": 1}, "policy"),
        ({"policy": "lpm", "polcy": "lpm"}, "polcy"),
    ):
        reply = await api.call("POST", "/scheduler/policy", body)
        assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert (await api.call("POST", "/scheduler/policy", raw=b"")).status == 400
    assert not engine.questions
