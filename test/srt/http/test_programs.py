"""`POST /programs/run`: straight-line programs in one round trip, and `/programs/{program}/end`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from phloem.srt.errors import InvalidConstraint, QueueFull
from phloem.srt.http.caller import PLAN_HEADER
from phloem.srt.http.program_steps import MAX_CALLS, MAX_DEPTH, MAX_STEPS

Wait = Callable[[Callable[[], bool]], Awaitable[None]]


def gen(name: str, **fields: Any) -> dict[str, Any]:
    return {"gen": {"name": name, **fields}}


def says(script: Any, answers: dict[str, str]) -> Callable[[Any], Any]:
    """Answers by what the prompt ends in."""

    def answer(request: Any) -> Any:
        prompt = request.prompt
        text = prompt if isinstance(prompt, str) else bytes(prompt).decode()
        said = next((a for end, a in answers.items() if text.endswith(end)), "?")
        return script(pieces=list(said))

    return answer


async def run(api: Any, steps: list[Any], **more: Any) -> Any:
    return await api.call("POST", "/programs/run", {"steps": steps, **more})


def events_of(raw: str) -> list[tuple[str, Any]]:
    found = []
    for block in raw.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


# ----------------------------------------------------------------------------- text


async def test_a_line_of_text_and_variables(api: Any, engine: Any, script: Any) -> None:
    engine.script = says(script, {"Q: one A:": "two", "next:": "three"})
    steps = [
        {"text": "Q: "},
        {"insert": "question"},
        {"text": " A:"},
        gen("first", max_tokens=8, temperature=0),
        {"text": " next:"},
        gen("second", max_tokens=8),
    ]
    reply = await run(api, steps, variables={"question": "one"}, rid="mine")
    assert reply.status == 200, reply.raw
    assert reply.json["variables"] == {"question": "one", "first": "two", "second": "three"}
    assert reply.json["text"] == "Q: one A:two next:three"
    assert (reply.json["id"], reply.json["model"], reply.json["object"]) == (
        "mine",
        "tiny",
        "program.run",
    )
    assert "messages" not in reply.json
    assert [call["path"] for call in reply.json["calls"]] == ["steps[3]", "steps[5]"]
    assert reply.json["calls"][0]["finish_reason"] == "stop"
    assert [r.prompt for r in engine.requests] == ["Q: one A:", "Q: one A:two next:"]
    assert [r.rid for r in engine.requests] == ["mine-1", "mine-2"]
    assert engine.requests[0].sampling.temperature == 0
    assert reply.json["usage"]["completion_tokens"] == 3 + 5


async def test_several_answers_are_a_list_and_no_text(api: Any, engine: Any, script: Any) -> None:
    engine.script = says(script, {"Say:": "so", "so\nso": "!"})
    steps = [
        {"text": "Say:"},
        gen("many", n=2, max_tokens=4),
        {"insert": "many"},
        gen("last", max_tokens=4),
    ]
    reply = await run(api, steps)
    assert reply.json["variables"] == {"many": ["so", "so"], "last": "!"}
    assert reply.json["text"] == "Say:so\nso!"
    assert reply.json["calls"][0]["finish_reason"] == ["stop", "stop"]


async def test_defaults_hold_where_a_step_says_nothing(api: Any, engine: Any) -> None:
    steps = [{"text": "a"}, gen("x"), gen("y", max_tokens=1, temperature=1)]
    shared = {"priority": 3, "cache_salt": "s", "timeout": 9}
    reply = await run(api, steps, defaults={"temperature": 0, "max_tokens": 2}, **shared)
    assert reply.status == 200, reply.raw
    first, second = engine.requests
    assert (first.sampling.temperature, first.sampling.max_tokens) == (0, 2)
    assert (second.sampling.temperature, second.sampling.max_tokens) == (1, 1)
    assert (first.priority, first.deadline_s) == (3, 9) and "s" in first.namespace


async def test_a_choice_is_scored_and_gone_on_with(api: Any, engine: Any, script: Any) -> None:
    engine.script = says(script, {"Is it? no.": "Why."})
    select = {"name": "it", "choices": [" yes", " no"], "normalization": "none"}
    steps = [{"text": "Is it?"}, {"select": select}, {"text": "."}, gen("why", max_tokens=9)]
    reply = await run(api, steps)
    assert reply.status == 200, reply.raw
    assert reply.json["variables"] == {"it": " no", "why": "Why."}
    (scored, _) = reply.json["calls"]
    assert [one["text"] for one in scored["scores"]] == [" yes", " no"]
    assert scored["scores"][1]["sum"] == scored["scores"][1]["value"]


# ----------------------------------------------------------------------------- chats


async def test_a_chat(api: Any, engine: Any, script: Any) -> None:
    engine.script = says(script, {"<user>Hi": "Hello", "(": "smiles"})
    steps = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"text": "H"}, {"insert": "rest"}]},
        {"role": "assistant", "content": [gen("greeting"), {"text": " ("}, gen("how")]},
    ]
    reply = await run(api, steps, variables={"rest": "i"})
    assert reply.status == 200, reply.raw
    assert reply.json["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello (smiles"},
    ]
    assert "text" not in reply.json
    first, second = engine.rendered
    assert not first["continue_final_message"] and first["add_generation_prompt"]
    assert second["continue_final_message"]
    assert second["messages"][-1] == {"role": "assistant", "content": "Hello ("}


async def test_a_choice_in_a_chat(api: Any, engine: Any) -> None:
    select = {"name": "mood", "choices": ["good", "bad"]}
    steps = [
        {"role": "user", "content": "How?"},
        {"role": "assistant", "content": [{"text": "It is "}, {"select": select}]},
    ]
    reply = await run(api, steps)
    assert reply.json["variables"]["mood"] in ("good", "bad")
    assert engine.rendered[-1]["messages"][-1]["content"] == "It is bad"


# ----------------------------------------------------------------------------- forks


async def test_branches_run_at_once_and_are_gathered(
    api: Any, engine: Any, script: Any, eventually: Wait
) -> None:
    hold = asyncio.Event()
    answers = says(script, {"A:": "1", "B:": "2", "1 2": "3"})

    def held(request: Any) -> Any:
        one = answers(request)
        one.hold = hold
        return one

    engine.script = held
    steps = [
        {"text": "T."},
        {"fork": [[{"text": " A:"}, gen("x")], [{"text": " B:"}, gen("x"), gen("own")]]},
        {"text": " "},
        {"insert": "x", "separator": " "},
        gen("sum"),
    ]
    task = asyncio.create_task(run(api, steps))
    await eventually(lambda: len(engine.running) == 2)
    hold.set()
    reply = await task
    assert reply.json["variables"] == {"x": ["1", "2"], "sum": "3"}
    assert reply.json["text"] == "T. 1 23"
    paths = {call["path"]: call["name"] for call in reply.json["calls"]}
    assert paths["steps[1].fork[1][2]"] == "own"


async def test_branches_can_be_appended(api: Any, engine: Any, script: Any) -> None:
    engine.script = says(script, {"a": "1", "b": "2"})
    steps = [
        {"text": "T:"},
        {"fork": [[{"text": " a"}, gen("x")], [{"text": " b"}, gen("x")]], "join": "append"},
    ]
    reply = await run(api, steps)
    assert reply.json["text"] == "T: a1 b2"
    chat = [
        {"role": "user", "content": "Q"},
        {"fork": [[{"role": "assistant", "content": [gen("x")]}]] * 2, "join": "append"},
    ]
    reply = await run(api, chat)
    assert [m["role"] for m in reply.json["messages"]] == ["user", "assistant", "assistant"]


# ----------------------------------------------------------------------------- what it announces


async def test_the_scheduler_knows_what_comes(api: Any, engine: Any) -> None:
    steps = [
        {"text": "a"},
        gen("plan", regex="a+"),
        {"fork": [[gen("x"), gen("y", regex="b+")], [gen("x")], [gen("x")]]},
        {"select": {"name": "s", "choices": ["1", "2"]}},
        gen("end", regex="a+"),
    ]
    reply = await run(api, steps)
    assert reply.status == 200, reply.raw
    plans = [request.plan for request in engine.requests]
    assert plans[0].fork == 3 and plans[0].remaining == 6
    assert [c.pattern for c in plans[0].next_constraints] == ["a+", "b+"]
    siblings = plans[1:4]
    assert {(p.group, p.width) for p in siblings} == {("steps[2].fork", 3)}
    assert sorted(p.fork for p in siblings) == [0, 0, 1]
    scored = plans[-3:-1]
    assert all((p.fork, p.remaining) == (0, 1) for p in scored)
    assert (plans[-1].remaining, plans[-1].fork) == (0, 0)
    assert not any(p.next_constraints for p in plans[1:])
    (program,) = {request.program for request in engine.requests}
    assert program and engine.ended == [program]


async def test_a_program_of_the_clients_own_goes_on(api: Any, engine: Any) -> None:
    steps = [{"text": "a"}, gen("x")]
    assert (await run(api, steps, program="mine")).status == 200
    (request,) = engine.requests
    assert request.program == "mine" and request.plan.remaining is None and not engine.ended


# ----------------------------------------------------------------------------- streams


async def test_variables_are_told_as_they_come(api: Any, engine: Any, script: Any) -> None:
    engine.script = says(script, {"a": "1", "1": "2"})
    reply = await run(api, [{"text": "a"}, gen("x"), gen("y")], stream=True)
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    events = events_of(reply.raw)
    assert [name for name, _ in events] == ["variable", "variable", "done"]
    assert [(e["path"], e["name"], e["value"]) for _, e in events[:2]] == [
        ("steps[1]", "x", "1"),
        ("steps[2]", "y", "2"),
    ]
    done = events[2][1]
    assert (done["variables"], done["text"]) == ({"x": "1", "y": "2"}, "a12")
    assert done["usage"]["total_tokens"] == sum(e["usage"]["total_tokens"] for _, e in events[:2])


async def test_a_failure_is_told_with_its_step_and_ends_the_rest(
    api: Any, engine: Any, script: Any, eventually: Wait
) -> None:
    never = asyncio.Event()

    def answer(request: Any) -> Any:
        if request.prompt == "ab":
            return script(refusal=QueueFull("full", retry_after=1.0))
        return script(pieces=["1"], hold=never if request.prompt == "ac" else None)

    engine.script = answer
    steps = [gen("w"), {"fork": [[{"text": "b"}, gen("x")], [{"text": "c"}, gen("x")]]}]
    steps[:1] = [{"text": "a"}]
    reply = await run(api, steps, stream=True)
    ((name, event),) = events_of(reply.raw)
    assert name == "error"
    assert event["error"]["param"] == "steps[1].fork[0][1].gen"
    assert event["error"]["code"] == "queue_full"
    await eventually(lambda: not engine.running)
    whole = await run(api, steps)
    assert (whole.status, whole.json["error"]["param"]) == (429, "steps[1].fork[0][1].gen")
    assert not engine.running and len(engine.ended) == 2


async def test_a_refused_constraint_is_named(api: Any, engine: Any, script: Any) -> None:
    refusal = InvalidConstraint("no", param="properties.a.pattern", code="unsupported_regex")
    engine.script = lambda request: script(refusal=refusal)
    reply = await run(api, [{"text": "a"}, gen("x", json_schema={"type": "object"})])
    assert reply.status == 400
    assert reply.json["error"]["param"] == "steps[1].gen.json_schema.properties.a.pattern"


async def test_a_client_that_leaves_ends_its_program(
    api: Any, engine: Any, script: Any, eventually: Wait
) -> None:
    never = asyncio.Event()
    engine.script = lambda request: script(hold=never)
    steps = [{"text": "a"}, {"fork": [[gen("x")], [gen("x")]]}, gen("never")]
    task = asyncio.create_task(run(api, steps))
    await eventually(lambda: len(engine.running) == 2)
    task.cancel()
    await eventually(lambda: not engine.running and len(engine.ended) == 1)
    assert len(engine.closed) == 2 and len(engine.requests) == 2


# ----------------------------------------------------------------------------- refusals

TEXT = {"text": "a"}
USER = {"role": "user", "content": "a"}


def nested(depth: int) -> list[Any]:
    line: list[Any] = [gen("x")]
    for _ in range(depth):
        line = [{"fork": [line]}]
    return line


@pytest.mark.parametrize(
    ("steps", "param"),
    [
        ([], "steps"),
        ([{}], "steps[0]"),
        ([{"text": "a", "insert": "b"}], "steps[0]"),
        ([{"txt": "a"}], "steps[0].txt"),
        ([{"text": "a", "join": "append"}], "steps[0].join"),
        ([{"text": "a", "separator": ","}], "steps[0].separator"),
        ([TEXT, {"insert": "x"}], "steps[1].insert"),
        ([TEXT, {"fork": [[gen("x")], [gen("y")]]}, {"insert": "x"}], "steps[2].insert"),
        ([TEXT, gen("x"), gen("x")], "steps[2].gen.name"),
        ([TEXT, gen("x"), {"fork": [[gen("x")]]}], "steps[2].fork[0][0].gen.name"),
        ([TEXT, {"gen": {}}], "steps[1].gen.name"),
        ([TEXT, {"gen": {"name": 5}}], "steps[1].gen.name"),
        ([TEXT, gen("x", temperature=9)], "steps[1].gen.temperature"),
        ([TEXT, gen("x", regex="a", ebnf="b")], "steps[1].gen.ebnf"),
        ([TEXT, gen("x", jsonschema={"type": "null"})], "steps[1].gen.jsonschema"),
        ([TEXT, gen("x", prompt="b")], "steps[1].gen.prompt"),
        ([TEXT, gen("x", stream=True)], "steps[1].gen.stream"),
        ([TEXT, gen("x", use_beam_search=True)], "steps[1].gen.use_beam_search"),
        ([TEXT, {"select": {"name": "s", "choices": []}}], "steps[1].select.choices"),
        ([TEXT, {"fork": []}], "steps[1].fork"),
        ([TEXT, USER], "steps[0].text"),
        ([USER, gen("x")], "steps[1].gen"),
        ([{"role": "user", "content": [gen("x")]}], "steps[0].content[0].gen"),
        ([{"role": "user"}], "steps[0].content"),
        ([{"role": "user", "content": [USER]}], "steps[0].content[0].role"),
        ([TEXT, *nested(MAX_DEPTH + 1)], "steps[1]" + ".fork[0][0]" * MAX_DEPTH + ".fork[0]"),
        ([TEXT] * (MAX_STEPS + 1), "steps"),
        ([TEXT, *(gen(f"x{i}") for i in range(MAX_CALLS + 1))], "steps"),
    ],
)
async def test_a_program_that_cannot_run_is_refused_before_it_does(
    api: Any, engine: Any, steps: list[Any], param: str
) -> None:
    reply = await run(api, steps)
    assert (reply.status, reply.json["error"]["param"]) == (400, param), reply.raw[:300]
    assert not engine.requests and not engine.ended


async def test_what_else_is_refused(api: Any, engine: Any) -> None:
    steps = [TEXT, gen("x")]
    for more, param in (
        ({"plan": {"fork": 1}}, "plan"),
        ({"variables": {"a": 5}}, "variables[...]"),
        ({"variables": {"a": ["b", 5]}}, "variables.a"),
        ({"variables": {"x": "known"}}, "steps[1].gen.name"),
        ({"defaults": {"top_p": 5}}, "steps[1].gen.top_p"),
        ({"model": "other"}, "model"),
    ):
        reply = await run(api, steps, **more)
        assert reply.json["error"]["param"] == param, reply.raw
    headers = {PLAN_HEADER: "{}", "X-Program-Id": "p"}
    reply = await api.call("POST", "/programs/run", {"steps": steps}, headers=headers)
    assert (reply.status, reply.json["error"]["param"]) == (400, PLAN_HEADER)
    assert not engine.requests


# ----------------------------------------------------------------------------- the end


async def test_a_program_ends(api: Any, engine: Any) -> None:
    assert (await api.call("POST", "/programs/p-1/end")).json == {"ended": "p-1"}
    for path in ("/programs/a%20b/end", f"/programs/{'x' * 129}/end"):
        reply = await api.call("POST", path)
        assert (reply.status, reply.json["error"]["param"]) == (400, "program")
    assert (await api.call("POST", "/programs//end")).status == 404
    assert engine.ended == ["p-1"]
