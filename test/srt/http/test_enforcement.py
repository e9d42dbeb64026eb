"""What a reply says of its constraint: strict and not, valid, cut, broken."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phloem.constrained.base import ConstraintError
from phloem.constrained.schema import lower_schema
from phloem.constrained.schema_canonical import canonical_text
from phloem.constrained.spec import (
    Choice,
    Continued,
    Deferred,
    JsonSchema,
    Regex,
    Whitespace,
    WithSchema,
)
from phloem.srt.errors import InvalidConstraint
from phloem.srt.generation import GenerateRequest
from phloem.srt.messages import FinishReason, JumpForward

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 3}},
    "required": ["a"],
}
BEYOND = {**SCHEMA, "properties": {**SCHEMA["properties"], "c": {"pattern": r"^(.)\1$"}}}  # type: ignore[dict-item]
FULL = {"kind": "json_schema", "enforcement": "full", "complete": True, "valid": True}


def form(schema: object, strict: bool | None = None) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}


async def outcome(api: Any, **body: object) -> dict[str, Any]:
    """What the reply says, whole and streamed the same."""
    whole = await api.chat(**body)
    assert whole.status == 200, whole.raw
    told: dict[str, Any] = whole.json["constraint"]
    events = (await api.chat(**body, stream=True)).events
    assert [e["constraint"] for e in events if "constraint" in e] == [told]
    valid = whole.json["choices"][0].get("constraint_valid")
    assert valid == told.get("valid")
    plain = (await api.complete(**{k: v for k, v in body.items() if k != "messages"})).json
    assert plain["constraint"] == told
    return told


async def test_a_free_answer_has_none(api: Any) -> None:
    assert "constraint" not in (await api.chat()).json
    assert "constraint" not in (await api.complete()).json


async def test_a_whole_answer(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(['{"a"', ": 1", "}"])
    assert await outcome(api, response_format=form(SCHEMA)) == FULL


async def test_annotations_are_told(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: refuse_or(r, script, lambda: script(['"x"']))
    schema: dict[str, object] = {"type": "string", "format": "color"}
    told = await outcome(api, response_format=form(schema))
    assert told == {**FULL, "unsupported": ["/format"]}
    schema["minlength"] = 1  # a misspelt keyword is refused, so it can be left out
    told = await outcome(api, response_format=form(schema, strict=False))
    assert told["enforced"] == ["/type"]
    assert told["unsupported"] == ["/minlength", "/format"]


async def test_without_a_validator(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(["aa"])
    told = await outcome(api, regex="a+")
    assert told == {"kind": "regex", "enforcement": "full", "complete": True}


async def test_a_cut_answer_is_no_violation(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(['{"a"', ": 1"], FinishReason.LENGTH)
    told = await outcome(api, response_format=form(SCHEMA))
    assert told == {"kind": "json_schema", "enforcement": "full", "complete": False}
    engine.script = lambda r: script(['{"a"', ": 1}"], FinishReason.LENGTH)
    assert await outcome(api, response_format=form(SCHEMA)) == FULL


@pytest.mark.parametrize(("matched", "complete"), [(":", False), (7, False), (2, True)])
async def test_what_a_stop_ended(
    api: Any, engine: Any, script: Any, matched: object, complete: bool
) -> None:
    """A stop string, and a stop token of the request's; but not the model's own end token."""
    text = '{"a": 1}' if complete else '{"a": '
    engine.script = lambda r: script([text], matched=matched)
    told = await outcome(api, response_format=form(SCHEMA), stop=":", stop_token_ids=[7])
    assert told["complete"] is complete


@pytest.mark.parametrize("text", ['{"b": "x"}', '{"a": 1.5}', "{", '{"a": 1} x', "", '{"a": NaN}'])
async def test_a_violation_is_an_error(api: Any, engine: Any, script: Any, text: str) -> None:
    engine.script = lambda r: script([text])
    body = {"response_format": form(SCHEMA)}
    reply = await api.chat(**body)
    assert reply.status == 500
    assert reply.json["error"]["code"] == "constraint_violated"
    assert "constraint_violated" in (await api.chat(**body, stream=True)).frames[-2]
    assert (await api.generate(text="a", sampling_params={"json_schema": SCHEMA})).status == 500
    metrics = (await api.call("GET", "/metrics")).raw
    assert 'constraint_violations_total{enforcement="full"} 3.0' in metrics


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "z": 1, "z": 2}',
        '{"a": 1, "z": 1e999}',
        '{"a": 1, "z": "\\ud800"}',
        '{"a": 1, "z": ' + "[" * 5000 + "]" * 5000 + "}",
    ],
)
async def test_what_validators_read_differently_is_no_violation(
    api: Any, engine: Any, script: Any, text: str
) -> None:
    engine.script = lambda r: script([text])
    told = await outcome(api, response_format=form(SCHEMA))
    assert told["complete"] is True
    assert told.get("valid") is not False


async def test_special_tokens_in_the_text_are_not_judged(
    api: Any, engine: Any, script: Any
) -> None:
    engine.script = lambda r: script(['{"a": 1}', "<|end|>"], matched=2)
    told = await outcome(
        api,
        response_format=form(SCHEMA),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
    )
    assert "valid" not in told


async def test_choices_are_told_together_and_each(api: Any, engine: Any, script: Any) -> None:
    texts = iter(['{"a": 1}', '{"a": 1, "c": "x"}'])
    engine.script = lambda r: refuse_or(r, script, lambda: script([next(texts)]))
    reply = (await api.chat(n=2, response_format=form(BEYOND, strict=False))).json
    assert reply["constraint"]["valid"] is False
    assert sorted(c["constraint_valid"] for c in reply["choices"]) == [False, True]


# ----------------------------------------------------------------------- strict: false


def refuse_or(request: GenerateRequest, script: Any, answer: Any) -> Any:
    """As the grammar process refuses."""
    constraint = request.constraint
    if isinstance(constraint, Continued):
        constraint = constraint.constraint
    assert isinstance(constraint, WithSchema)
    try:
        lower_schema(constraint.schema, Whitespace.COMPACT)
    except ConstraintError as error:
        refusal = InvalidConstraint(str(error), param=error.path or None, code=error.reason)
        return script(refusal=refusal)
    return answer()


@pytest.mark.parametrize("strict", [None, True])
async def test_strict_refuses(api: Any, engine: Any, script: Any, strict: bool | None) -> None:
    engine.script = lambda r: refuse_or(r, script, script)
    reply = await api.chat(response_format=form(BEYOND, strict))
    assert reply.status == 400
    error = reply.json["error"]
    assert error["code"] == "unsupported_regex"
    assert error["param"] == "response_format.json_schema.schema.properties.c.pattern"


@pytest.mark.parametrize(
    ("text", "valid"), [('{"a": 1, "c": "yy"}', True), ('{"a": 1, "c": "x"}', False)]
)
async def test_not_strict_leaves_out_and_validates(
    api: Any, engine: Any, script: Any, text: str, valid: bool
) -> None:
    engine.script = lambda r: refuse_or(r, script, lambda: script([text]))
    told = await outcome(api, response_format=form(BEYOND, strict=False))
    assert told == {
        "kind": "json_schema",
        "enforcement": "partial",
        "complete": True,
        "valid": valid,
        "enforced": [
            "/properties",
            "/properties/a/type",
            "/properties/b/maxLength",
            "/properties/b/type",
            "/required",
            "/type",
        ],
        "validated": ["/properties/c/pattern"],
        "unsupported": [],
    }
    expected = json.loads(json.dumps(BEYOND))
    expected["properties"]["c"] = {}
    assert json.loads(engine.requests[-1].constraint.schema) == expected
    refused = [r for r in engine.requests if r"^(.)\\1$" in r.constraint.schema]
    assert len(refused) == 1  # it is found out once, for all replies
    metrics = (await api.call("GET", "/metrics")).raw
    count = 0.0 if valid else 3.0
    assert f'constraint_violations_total{{enforcement="partial"}} {count}' in metrics


async def test_not_strict_that_can_be_enforced_is_full(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: refuse_or(r, script, lambda: script(['{"a": 1}']))
    assert await outcome(api, response_format=form(SCHEMA, strict=False)) == FULL


async def test_json_lines_may_be_not_strict(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: refuse_or(r, script, lambda: script(['{"a": 1}\n', '{"a": 2}']))
    told = await outcome(
        api, response_format={"type": "json_lines", "schema": BEYOND, "strict": False}
    )
    assert (told["kind"], told["valid"]) == ("json_lines", True)
    assert told["validated"] == ["/properties/c/pattern"]


@pytest.mark.parametrize(
    ("strict", "status"), [((False, False), 200), ((False, None), 400), ((True, False), 400)]
)
async def test_required_tools_may_be_not_strict(
    api: Any, engine: Any, script: Any, strict: tuple[bool | None, ...], status: int
) -> None:
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": BEYOND, "strict": s}}
        for i, s in enumerate(strict)
    ]
    text = '{"name": "f1", "arguments": {"a": 1, "c": "yy"}}'
    engine.script = lambda r: refuse_or(r, script, lambda: script([text]))
    reply = await api.chat(tools=tools, tool_choice="required")
    assert reply.status == status, reply.raw
    if status == 200:
        assert reply.json["constraint"]["enforcement"] == "partial"
    named = {"type": "function", "function": {"name": "f1"}}
    text = '{"a": 1, "c": "x"}'
    reply = await api.chat(tools=tools, tool_choice=named)
    assert reply.status == (200 if strict[1] is False else 400)
    if reply.status == 200:
        assert reply.json["constraint"]["valid"] is False


@pytest.mark.parametrize(
    ("param", "code"),
    [
        ("", "limit_exceeded"),
        ("/properties/a/type", "compile_timeout"),
        ("properties.a.type", "unsupported_keyword"),
        ("/properties/nothing", "unsupported_keyword"),
        ("/properties", "malformed_constraint"),
    ],
)
async def test_other_refusals_stay(
    api: Any, engine: Any, script: Any, param: str, code: str
) -> None:
    refusal = InvalidConstraint("no", param=param, code=code)
    engine.script = lambda r: script(refusal=refusal)
    reply = await api.chat(response_format=form(SCHEMA, strict=False))
    assert (reply.status, reply.json["error"]["code"]) == (400, code)
    assert len(engine.requests) == 1


async def test_leaving_out_has_an_end(api: Any, engine: Any, script: Any) -> None:
    many = {"properties": {f"p{i}": {"pattern": r"^(.)\1$"} for i in range(100)}}
    engine.script = lambda r: refuse_or(r, script, script)
    reply = await api.chat(response_format=form(many, strict=False))
    assert reply.status == 400
    assert len(engine.requests) == 33


async def test_what_is_too_large_is_left_out_a_few_times(
    api: Any, engine: Any, script: Any
) -> None:
    def refuse(request: GenerateRequest) -> Any:
        constraint = request.constraint
        assert isinstance(constraint, JsonSchema)
        name = next(iter(p for p, s in json.loads(constraint.schema)["properties"].items() if s))
        refusal = InvalidConstraint("no", param=f"/properties/{name}", code="limit_exceeded")
        return script(refusal=refusal)

    engine.script = refuse
    many = {"properties": {f"p{i}": {"maxLength": 10**6} for i in range(10)}}
    reply = await api.chat(response_format=form(many, strict=False))
    assert (reply.status, reply.json["error"]["code"]) == (400, "limit_exceeded")
    assert len(engine.requests) == 5


async def test_what_cannot_be_validated_either_is_refused(
    api: Any, engine: Any, script: Any
) -> None:
    """`not` with a reference out of the document: without it nobody could say what was meant."""
    schema = {"not": {"$ref": "https://example.com/s"}}
    engine.script = lambda r: refuse_or(r, script, script)
    assert (await api.chat(response_format=form(schema, strict=False))).status == 400


@pytest.mark.parametrize("jump", [None, *JumpForward])
async def test_jump_forward_may_be_chosen(api: Any, engine: Any, jump: JumpForward | None) -> None:
    await api.chat(jump_forward=jump, regex="a")
    await api.complete(jump_forward=jump, regex="a")
    await api.generate(text="a", jump_forward=jump, sampling_params={"regex": "a"})
    assert [r.jump for r in engine.requests] == [jump or JumpForward.CANONICAL] * 3
    assert (await api.chat(jump_forward="far")).status == 400


# ----------------------------------------------------------------------- prefix and marker


async def test_a_constraint_goes_on_with_the_assistants_message(
    api: Any, engine: Any, script: Any
) -> None:
    engine.script = lambda r: script([" 1}"])
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": 'It is {"a":'},
    ]
    body = {
        "messages": messages,
        "continue_final_message": True,
        "response_format": form(SCHEMA),
        "constraint_prefix": '{"a":',
    }
    reply = await api.chat(**body)
    assert reply.status == 200, reply.raw
    assert reply.json["constraint"] == FULL
    assert engine.requests[0].constraint == Continued(
        constraint=JsonSchema(schema=canonical_text(SCHEMA)), prefix='{"a":'
    )
    messages[1]["content"] = '{"a":'
    await api.chat(**{**body, "constraint_prefix": True})
    assert engine.requests[1].constraint == engine.requests[0].constraint
    await api.chat(**{**body, "constraint_prefix": False, "response_format": None, "regex": "1+"})
    assert engine.requests[2].constraint == Regex(pattern="1+")


async def test_a_constraint_goes_on_with_a_prompt(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(["s"])
    body = {"prompt": ["say ye", "yes or no: ye"], "guided_choice": ["yes", "no"]}
    reply = await api.complete(**body, constraint_prefix="ye")
    assert reply.json["constraint"]["valid"] is True
    inner = Choice(choices=("yes", "no"))
    assert engine.requests[1].constraint == Continued(constraint=inner, prefix="ye")


async def test_not_strict_goes_on_too(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: refuse_or(r, script, lambda: script(['1, "c": "x"}']))
    reply = await api.complete(
        prompt='{"a": ',
        response_format=form(BEYOND, strict=False),
        constraint_prefix=True,
    )
    assert reply.json["constraint"]["valid"] is False


async def test_a_constraint_after_a_marker(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(["hm {", "</thi", 'nk>\n\n{"a"', ": 1}"])
    reply = await api.chat(response_format=form(SCHEMA), constraint_after="</think>")
    assert reply.json["constraint"] == FULL
    sent = engine.requests[0].constraint
    assert isinstance(sent, Deferred)
    assert (sent.end, sent.budget) == ("</think>", None)
    assert isinstance(sent.constraint, JsonSchema)
    assert json.loads(sent.constraint.schema) == SCHEMA
    engine.script = lambda r: script(["hm {", "</thi", 'nk>\n\n{"b"', ": 1}"])
    reply = await api.chat(response_format=form(SCHEMA), constraint_after="</think>")
    assert reply.status == 500
    refusal = InvalidConstraint("no", param="/properties/a", code="malformed_constraint")
    engine.script = lambda r: script(refusal=refusal)
    reply = await api.chat(response_format=form(SCHEMA), constraint_after="</think>")
    param = reply.json["error"]["param"]
    assert param == "response_format.json_schema.schema.properties.a"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"constraint_prefix": True}, "constraint_prefix"),
        ({"constraint_after": "x"}, "constraint_after"),
        ({"regex": "a", "constraint_after": ""}, "constraint_after"),
        ({"regex": "a", "constraint_prefix": ""}, "constraint_prefix"),
        ({"regex": "a", "constraint_prefix": 7}, "constraint_prefix"),
        ({"regex": "a", "constraint_prefix": "other"}, "constraint_prefix"),
        ({"regex": "a", "constraint_prefix": True, "prompt": [1, 2]}, "constraint_prefix"),
        ({"regex": "a", "constraint_prefix": True, "prompt": ["a", "b"]}, "constraint_prefix"),
        ({"regex": "a", "constraint_text": "x"}, "constraint_text"),
    ],
)
async def test_misplaced(api: Any, engine: Any, body: dict[str, object], param: str) -> None:
    reply = await api.complete(**body)
    assert (reply.status, reply.json["error"]["param"]) == (400, param), reply.raw
    assert not engine.requests


async def test_a_prefix_needs_a_message_that_goes_on(api: Any) -> None:
    reply = await api.chat(regex="a", constraint_prefix=True)
    assert (reply.status, reply.json["error"]["param"]) == (400, "constraint_prefix")


# ----------------------------------------------------------------------- fields


def told_fields(events: list[Any]) -> list[tuple[str, object]]:
    return [
        (field["path"], field["value"])
        for event in events
        for choice in event["choices"]
        for field in choice.get("fields", [])
    ]


PIECES = ['{"a"', ": 12", ', "b": "x', '\\n"', ', "c": [{}, ', "1e2]}"]
FIELDS = [("/a", 12), ("/b", "x\n"), ("/c/0", {}), ("/c/1", 100.0)]


async def test_fields_come_with_the_text_that_completes_them(
    api: Any, engine: Any, script: Any
) -> None:
    engine.script = lambda r: script(PIECES)
    body = {
        "response_format": form(SCHEMA),
        "stream": True,
        "stream_options": {"include_fields": True},
    }
    for events in ((await api.chat(**body)).events, (await api.complete(**body)).events):
        assert told_fields(events) == FIELDS
        first = next(c for e in events for c in e["choices"] if "fields" in c)
        assert (first.get("text") or first["delta"]["content"]) == PIECES[2]
    body["stream_options"] = {}
    assert told_fields((await api.chat(**body)).events) == []


async def test_fields_of_lines_prefix_and_root(api: Any, engine: Any, script: Any) -> None:
    options = {"stream": True, "stream_options": {"include_fields": True}}
    engine.script = lambda r: script(["1\n", "2", "3"])
    lines = {"type": "json_lines", "schema": {"type": "integer"}}
    events = (await api.chat(**options, response_format=lines)).events
    assert told_fields(events) == [("/0", 1), ("/1", 23)]
    engine.script = lambda r: script([', "b": "y"}'])
    reply = await api.complete(
        **options,
        prompt='{"a": 5, "z": 7',
        response_format=form(SCHEMA),
        constraint_prefix=True,
    )
    assert told_fields(reply.events) == [("/a", 5), ("/z", 7), ("/b", "y")]
    engine.script = lambda r: script(["a {<", ' /x>\n{"a": 1}'])
    reply = await api.chat(**options, response_format=form(SCHEMA), constraint_after="< /x>")
    assert told_fields(reply.events) == [("/a", 1)]


@pytest.mark.parametrize("fields", [{}, {"regex": "a"}])
async def test_only_json_has_fields(api: Any, fields: dict[str, object]) -> None:
    reply = await api.chat(**fields, stream=True, stream_options={"include_fields": True})
    assert (reply.status, reply.json["error"]["param"]) == (400, "stream_options.include_fields")
