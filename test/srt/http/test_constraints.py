"""Every spelling of a constraint, and every way to get one wrong."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from phloem.constrained.schema_canonical import canonical_text
from phloem.constrained.spec import (
    Choice,
    Constraint,
    Continued,
    Ebnf,
    JsonLines,
    JsonObject,
    JsonSchema,
    Plain,
    Regex,
    StructuralTag,
    Whitespace,
)
from phloem.lang.backend.wire import constraint_fields
from phloem.srt.errors import InvalidConstraint, InvalidRequest
from phloem.srt.http.body import BodyReader
from phloem.srt.http.constraint_fields import read_constraint
from phloem.srt.http.found_constraint import FoundConstraint, placed
from phloem.srt.http.protocol import ChatRequest, CompletionRequest
from phloem.srt.http.responding import join_path

_reader = BodyReader(ChatRequest)
_completions = BodyReader(CompletionRequest)

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "null"}}}
TEXT = canonical_text(SCHEMA)
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
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
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
            "response_format.value",
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
        (
            {"response_format": {"type": "json_object", "value": SCHEMA}},
            "response_format.value",
            AS_SCHEMA,
        ),
        (
            {"response_format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
            "response_format.schema",
            AS_SCHEMA,
        ),
        (
            {"response_format": {"type": "choice", "choice": ["a"]}},
            "response_format.choice",
            Choice(choices=("a",)),
        ),
        (
            {"response_format": {"type": "grammar", "grammar": "root ::= x"}},
            "response_format.grammar",
            Ebnf(grammar="root ::= x"),
        ),
        (
            {"response_format": {"type": "json_lines", "schema": SCHEMA, "max_lines": 3}},
            "response_format.schema",
            JsonLines(schema=TEXT, max_lines=3),
        ),
        (
            {
                "response_format": {
                    "type": "json_lines",
                    "json_schema": {"schema": SCHEMA},
                    "min_lines": 2,
                }
            },
            "response_format.json_schema.schema",
            JsonLines(schema=TEXT, min_lines=2),
        ),
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
def test_spellings(fields: dict[str, object], param: str, constraint: Plain) -> None:
    found = read(**fields)
    assert found == FoundConstraint(param, constraint)


@pytest.mark.parametrize(
    ("form", "strict"),
    [
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, True),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": None}}, True),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}, False),
        ({"type": "json_schema", "schema": SCHEMA, "strict": False}, False),
        ({"type": "json_lines", "json_schema": {"schema": SCHEMA, "strict": False}}, False),
    ],
)
def test_only_an_explicit_false_is_not_strict(form: dict[str, object], strict: bool) -> None:
    found = read(response_format=form)
    assert found is not None
    assert found.strict is strict


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
        (
            {"response_format": {"type": "regex", "regex": "a", "pattern": "b"}},
            "response_format.pattern",
        ),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "regex": "a"}}, "response_format.regex"),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA, "shema": {}}},
            "response_format.shema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": SCHEMA, "scheme": {}},
                }
            },
            "response_format.json_schema.scheme",
        ),
        (
            {
                "response_format": {
                    "type": "json_lines",
                    "schema": SCHEMA,
                    "min_lines": 3,
                    "max_lines": 2,
                }
            },
            "response_format.max_lines",
        ),
        (
            {"response_format": {"type": "json_lines", "schema": SCHEMA, "min_lines": 0}},
            "response_format.min_lines",
        ),
        ({"extra_body": {"guided_json": SCHEMA}}, "extra_body"),
        ({"nvext": {"guided_regex": "a"}}, "nvext.guided_regex"),
        ({"structural_tag": {"format": TREE, "trigger": "x"}}, "structural_tag.trigger"),
        ({"grammar": {"type": "regex", "value": "a", "values": "b"}}, "grammar.values"),
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


def test_schemas_that_say_the_same_are_one_constraint() -> None:
    def found(schema: bytes) -> object:
        body = (
            b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": '
            b'"json_schema", "json_schema": {"schema": ' + schema + b"}}}"
        )
        constraint = read_constraint(_reader.decode(body))
        assert constraint is not None
        return constraint.constraint

    one = found(
        b'{ "properties" : {"z": {"title": "t", "type": "null"}, "a": true}, "type":"object"}'
    )
    assert one == found(
        b'{"type": "object", "properties": {"z":{"type":"null","title":"t"},"a":true}}'
    )
    assert one != found(
        b'{"type": "object", "properties": {"a":true,"z":{"type":"null","title":"t"}}}'
    )


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


COMPACT = Whitespace.COMPACT


@pytest.mark.parametrize("whitespace", list(Whitespace))
def test_whitespace_may_be_chosen(whitespace: Whitespace) -> None:
    def chosen(**fields: object) -> FoundConstraint | None:
        body = _completion(constraint_whitespace=whitespace.value, **fields)
        return placed(read_constraint(body), body, ["x"])

    found = chosen(guided_json=SCHEMA)
    assert found is not None
    assert found.constraint == JsonSchema(schema=TEXT, whitespace=whitespace)
    for fields, param in (
        ({"regex": "a"}, "constraint_whitespace"),
        ({}, "constraint_whitespace"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            chosen(**fields)
        assert caught.value.param == param


@pytest.mark.parametrize(
    "constraint",
    [
        AS_SCHEMA,
        JsonSchema(schema=TEXT, whitespace=COMPACT),
        JsonObject(whitespace=COMPACT),
        JsonLines(schema=TEXT, min_lines=2, max_lines=3),
        JsonLines(schema=TEXT),
        Regex(pattern="a+"),
        Choice(choices=("a", "b")),
        Ebnf(grammar="root ::= x"),
        TAG,
        Continued(constraint=AS_SCHEMA, prefix='{"a"'),
    ],
)
def test_what_programs_send_arrives(constraint: Constraint) -> None:
    prompt = 'so {"a"'
    sent = {"prompt": prompt, **(constraint_fields(constraint) or {})}
    body = _completions.decode(msgspec.json.encode(sent))
    found = placed(read_constraint(body), body, [prompt])
    assert found is not None
    assert found.for_engine() == constraint


def _completion(**fields: object) -> CompletionRequest:
    return _completions.decode(json.dumps({"prompt": "x", **fields}).encode())
