"""Sampling options, schemas, and what `gen` and `select` refuse at once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest

import phloem
from phloem.constrained.spec import JsonSchema, Regex, Whitespace
from phloem.lang import ir
from phloem.lang.sampling import SAMPLING_FIELDS, Sampling, SamplingOverrides, sampling_of
from phloem.lang.schema import schema_text


def test_keywords_and_struct_have_the_same_fields() -> None:
    assert SamplingOverrides.__annotations__.keys() == SAMPLING_FIELDS


def test_merge_prefers_the_inner_options() -> None:
    inner = sampling_of({"temperature": 0.0, "stop": "\n"})
    outer = sampling_of({"temperature": 1.5, "max_tokens": 7})
    assert inner.over(outer) == Sampling(temperature=0.0, max_tokens=7, stop=("\n",))
    assert Sampling().over(outer) is outer


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"n": 0},
        {"max_tokens": -1},
        {"repetition_penalty": 0},
        {"min_p": 2},
        {"top_k": -2},
    ],
)
def test_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        sampling_of(options)


def test_wrong_type_and_unknown_name() -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        sampling_of({"max_tokens": "many"})
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        sampling_of({"temprature": 1})
    with pytest.raises(TypeError, match="unknown option 'max_new_tokens'"):
        phloem.gen("x", max_new_tokens=3)  # type: ignore[call-overload]


class Point(pydantic.BaseModel):
    y: int
    x: int


@dataclasses.dataclass
class Place:
    name: str
    where: list[float]


class Movie(TypedDict):
    title: str


class Song(msgspec.Struct):
    title: str


def test_schema_keeps_the_order_of_properties() -> None:
    assert list(json.loads(schema_text(Point))["properties"]) == ["y", "x"]
    text = '{"type": "object", "properties": {"z": {}, "a": {}}}'
    assert schema_text(text) == text
    assert schema_text(json.loads(text)) == text


@pytest.mark.parametrize(("cls", "name"), [(Place, "name"), (Movie, "title"), (Song, "title")])
def test_schema_of_a_class(cls: type, name: str) -> None:
    schema = json.loads(schema_text(cls))
    definition = schema["$defs"][cls.__name__]
    assert definition["properties"][name] == {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "error", "reason"),
    [
        ("{", ValueError, "not JSON"),
        ("[1]", ValueError, "JSON object"),
        (3, TypeError, "must be a dict"),
        (object, TypeError, "no schema"),
        ({"a": object()}, TypeError, "does not fit into JSON"),
    ],
)
def test_bad_schema(schema: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        phloem.gen("x", json_schema=schema)


def test_gen_makes_a_node() -> None:
    assert phloem.gen("x", regex="a+", max_tokens=3) == ir.Gen(
        "x", Sampling(max_tokens=3), Regex(pattern="a+")
    )
    made = phloem.gen("x", json_schema={"type": "object"}, return_logprob=True)
    schema = JsonSchema(schema='{"type": "object"}', whitespace=Whitespace.COMPACT)
    assert made == ir.Gen("x", Sampling(logprobs=0), schema)
    assert phloem.gen("x", choices=["a", "b"]) == phloem.select("x", ["a", "b"])


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"regex": "("}, ValueError, "regex"),
        ({"regex": "a", "json_schema": {}}, ValueError, "exclude"),
        ({"regex": "a", "choices": ["a"]}, ValueError, "exclude"),
        ({"choices": []}, ValueError, "at least one"),
        ({"choices": ["a", ""]}, ValueError, "non-empty"),
        ({"choices": "ab"}, TypeError, "list of texts"),
        ({"choices": ["a", 1]}, TypeError, "texts"),
        ({"choices": ["a"], "max_tokens": 3}, UserWarning, "max_tokens has no effect"),
        ({"choices": ["a"], "temperature": 0.5}, ValueError, "not drawn"),
        ({"choices": ["a"], "n": 2}, TypeError, "n=2"),
        ({"dtype": complex}, ValueError, "dtype"),
        ({"dtype": int, "regex": "a"}, ValueError, "dtype and regex exclude"),
        ({"schema": {}, "grammar": "root ::= x"}, ValueError, "exclude"),
        ({"stop_regex": "("}, ValueError, "stop_regex"),
        ({"logprob_start_len": 0}, ValueError, "logprob_start_len=0"),
        ({"choices": ["a"], "choices_method": "best"}, ValueError, "best"),
        ({"choices_method": "greedy_token_selection"}, TypeError, "needs choices"),
    ],
)
def test_gen_refuses(options: dict[str, Any], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        phloem.gen("x", **options)


def test_names_of_variables() -> None:
    with pytest.raises(TypeError, match="name"):
        phloem.gen("")
    with pytest.raises(TypeError, match="name"):
        phloem.select(["a"])  # type: ignore[arg-type]


def test_expressions_join_and_never_become_text() -> None:
    a, b = phloem.gen("a"), phloem.gen("b")
    joined = "x" + a + ("y" + b) + "z"
    assert joined == ir.Seq((ir.Text("x"), a, ir.Text("y"), b, ir.Text("z")))
    spoilers: list[Callable[[], str]] = [
        lambda: f"{a}",
        lambda: str(a),
        lambda: f"{joined}",
        lambda: "%s" % (a,),  # noqa: UP031
    ]
    for spoil in spoilers:
        with pytest.raises(TypeError, match="no text yet"):
            spoil()
    with pytest.raises(TypeError, match="int"):
        a + 3
    with pytest.raises(TypeError, match="None was appended"):
        phloem.user(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "schema"),
    [
        (
            phloem.gen_int("x", minimum=1, maximum=9),
            {"type": "integer", "minimum": 1, "maximum": 9},
        ),
        (phloem.gen_float("x", minimum=0.5), {"type": "number", "minimum": 0.5}),
        (phloem.gen_bool("x"), {"type": "boolean"}),
        (
            phloem.gen_string("x", max_length=3, pattern="^a"),
            {"type": "string", "maxLength": 3, "pattern": "^a"},
        ),
    ],
)
def test_typed_scalars_are_schemas(made: ir.Gen[str], schema: dict[str, object]) -> None:
    assert isinstance(made.constraint, JsonSchema)
    assert json.loads(made.constraint.schema) == schema
    assert made.constraint.whitespace is Whitespace.COMPACT


def test_typed_scalars_check_their_options() -> None:
    with pytest.raises(TypeError):
        phloem.gen_bool(7)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="unknown option"):
        phloem.gen_int("x", minimun=3)  # type: ignore[call-overload]
