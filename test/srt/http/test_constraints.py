"""Every spelling of a constraint, and every way to get one wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phloem.constrained.spec import (
    Choice,
    Constraint,
    Ebnf,
    JsonObject,
    JsonSchema,
    Regex,
    StructuralTag,
    Whitespace,
)
from phloem.srt.errors import InvalidConstraint, InvalidRequest
from phloem.srt.http.body import BodyReader
from phloem.srt.http.constraint_fields import FoundConstraint, read_constraint
from phloem.srt.http.openai_routes import join_path
from phloem.srt.http.protocol import ChatRequest

_reader = BodyReader(ChatRequest)

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "null"}}}
TEXT = json.dumps(SCHEMA)
AS_SCHEMA = JsonSchema(schema=TEXT)
TREE = {"type": "const_string", "value": "x"}
TAG = StructuralTag(format=json.dumps(TREE))


def read(**fields: object) -> FoundConstraint | None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return read_constraint(_reader.decode(json.dumps(body).encode()))


@pytest.mark.parametrize(
    ("fields", "param", "constraint"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", JsonObject()),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": False, "schema": SCHEMA},
                }
            },
            "response_format.json_schema.schema",
            AS_SCHEMA,
        ),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA}},
            "response_format.schema",
            AS_SCHEMA,
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "response_format.schema",
            AS_SCHEMA,
        ),
        (
            {"response_format": {"type": "json", "value": SCHEMA}},
            "response_format.value",
            AS_SCHEMA,
        ),
        (
            {"response_format": {"type": "json", "schema": SCHEMA}},
            "response_format.schema",
            AS_SCHEMA,
        ),
        (
            {"response_format": {"type": "regex", "value": "a+"}},
            "response_format.regex",
            Regex(pattern="a+"),
        ),
        (
            {"response_format": {"type": "regex", "regex": "a+"}},
            "response_format.regex",
            Regex(pattern="a+"),
        ),
        (
            {"response_format": {"type": "ebnf", "ebnf": "root ::= x"}},
            "response_format.ebnf",
            Ebnf(grammar="root ::= x"),
        ),
        ({"response_format": {"type": "structural_tag", "format": TREE}}, "response_format", TAG),
        ({"regex": "a+"}, "regex", Regex(pattern="a+")),
        ({"ebnf": "root ::= x"}, "ebnf", Ebnf(grammar="root ::= x")),
        ({"json_schema": TEXT}, "json_schema", AS_SCHEMA),
        ({"json_schema": SCHEMA}, "json_schema", AS_SCHEMA),
        ({"json_schema": "$$ANY$$"}, "json_schema", JsonSchema(schema="{}")),
        ({"structural_tag": {"format": TREE}}, "structural_tag", TAG),
        ({"structural_tag": json.dumps({"format": TREE})}, "structural_tag", TAG),
        ({"grammar": "root ::= x"}, "grammar", Ebnf(grammar="root ::= x")),
        ({"grammar": {"type": "regex", "value": "a+"}}, "grammar.value", Regex(pattern="a+")),
        ({"grammar": {"type": "json", "value": SCHEMA}}, "grammar.value", AS_SCHEMA),
        (
            {"grammar": {"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}}},
            "grammar.value.schema",
            AS_SCHEMA,
        ),
        ({"format": "json"}, "format", JsonObject()),
        ({"format": SCHEMA}, "format", AS_SCHEMA),
        ({"guided_json": SCHEMA}, "guided_json", AS_SCHEMA),
        ({"guided_json": TEXT, "guided_decoding_backend": "outlines"}, "guided_json", AS_SCHEMA),
        ({"guided_json": True}, "guided_json", JsonSchema(schema="true")),
        ({"guided_regex": "a+"}, "guided_regex", Regex(pattern="a+")),
        ({"guided_choice": ["a", "b", "a"]}, "guided_choice", Choice(choices=("a", "b"))),
        ({"guided_grammar": "root ::= x"}, "guided_grammar", Ebnf(grammar="root ::= x")),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", AS_SCHEMA),
        (
            {"structured_outputs": {"json": TEXT, "disable_any_whitespace": True}},
            "structured_outputs.json",
            JsonSchema(schema=TEXT, whitespace=Whitespace.COMPACT),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            "structured_outputs.json_object",
            JsonObject(),
        ),
        (
            {"structured_outputs": {"regex": "a+"}},
            "structured_outputs.regex",
            Regex(pattern="a+"),
        ),
        (
            {"structured_outputs": {"choice": ["x"]}},
            "structured_outputs.choice",
            Choice(choices=("x",)),
        ),
        (
            {"structured_outputs": {"grammar": "root ::= x"}},
            "structured_outputs.grammar",
            Ebnf(grammar="root ::= x"),
        ),
        (
            {"structured_outputs": {"structural_tag": json.dumps({"format": TREE})}},
            "structured_outputs.structural_tag",
            TAG,
        ),
    ],
)
def test_spellings(fields: dict[str, object], param: str, constraint: Constraint) -> None:
    found = read(**fields)
    assert found == FoundConstraint(param, constraint)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"regex": "", "ebnf": "", "json_schema": "", "structural_tag": ""},
        {"format": ""},
        {"guided_json": None, "structured_outputs": None, "grammar": None},
    ],
)
def test_no_constraint(fields: dict[str, object]) -> None:
    assert read(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "schema": SCHEMA,
                    "json_schema": {"schema": SCHEMA},
                }
            },
            "response_format.json_schema",
        ),
        ({"response_format": {"type": "regex"}}, "response_format.regex"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"json_schema": "{broken"}, "json_schema"),
        ({"json_schema": '{"a": 1, "a": 2}'}, "json_schema"),
        ({"json_schema": '{"const": NaN}'}, "json_schema"),
        ({"json_schema": '{"const": "\\ud800"}'}, "json_schema"),
        ({"json_schema": 7}, "json_schema"),
        ({"json_schema": "[" * 100_000}, "json_schema"),
        ({"structural_tag": '{"format": ' + "[" * 100_000}, "structural_tag"),
        ({"guided_json": ""}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_lark": "x"}, "guided_lark"),
        ({"my_grammar": "x"}, "my_grammar"),
        ({"grammar": ""}, "grammar"),
        ({"grammar": {"type": "lark", "value": "x"}}, "grammar.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs.json"),
        ({"structured_outputs": {"lark": "x"}}, "structured_outputs.lark"),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
        ({"regex": 7}, "regex"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param


def test_a_schema_keeps_the_clients_own_text() -> None:
    body = (
        b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": '
        b'"json_schema", "json_schema": {"schema": { "properties" : {"z": true, "a": 1.0e2} }}}}'
    )
    found = read_constraint(_reader.decode(body))
    assert found is not None
    assert found.constraint == JsonSchema(schema='{ "properties" : {"z": true, "a": 1.0e2} }')


def test_old_structural_tags_become_a_tree() -> None:
    found = read(
        response_format={
            "type": "structural_tag",
            "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
            "triggers": ["<f"],
        }
    )
    assert found is not None
    assert isinstance(found.constraint, StructuralTag)
    assert json.loads(found.constraint.format) == {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [
            {
                "type": "tag",
                "begin": "<f>",
                "content": {"type": "json_schema", "json_schema": SCHEMA},
                "end": "</f>",
            }
        ],
        "at_least_one": False,
        "stop_after_first": False,
    }


async def test_what_the_engine_finds_is_reported_under_the_request_field(
    api: Any, engine: Any, script: Any
) -> None:
    refusal = InvalidConstraint("no", param="properties.a.pattern", code="unsupported_keyword")
    engine.script = lambda r: script(refusal=refusal)
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    for stream in (False, True):
        error = (await api.chat(response_format=form, stream=stream)).json["error"]
        assert error["param"] == "response_format.json_schema.schema.properties.a.pattern"
        assert error["code"] == "unsupported_keyword"
    native = await api.generate(text="a", sampling_params={"json_schema": TEXT})
    assert native.json["error"]["param"] == "sampling_params.json_schema.properties.a.pattern"


@pytest.mark.parametrize(
    ("path", "joined"),
    [
        (None, "regex"),
        ("", "regex"),
        ("$.a", "regex.a"),
        ("#/a/0/b", "regex.a.0.b"),
        ("/a~1b/0", "regex.a/b.0"),
        ("[0].a", "regex[0].a"),
        ("regex.a", "regex.a"),
    ],
)
def test_paths_join(path: str | None, joined: str) -> None:
    assert join_path("regex", path) == joined
