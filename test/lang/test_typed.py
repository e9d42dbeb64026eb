"""`schema=` gives objects, and `value` reads texts as what they are."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
import pydantic
import pytest

import phloem
from phloem.constrained.spec import Ebnf, JsonSchema
from phloem.lang.backend.base import TextPrompt
from phloem.lang.state import State

pytestmark = pytest.mark.timeout(30)


class Model(pydantic.BaseModel):
    name: str
    age: int

    @pydantic.field_validator("age")
    @classmethod
    def grown(cls, age: int) -> int:
        if age < 18:
            raise ValueError("too young")
        return age


@dataclasses.dataclass
class Data:
    name: str
    age: int


class Typed(TypedDict):
    name: str
    age: int


class Struct(msgspec.Struct):
    name: str
    age: int


class Pair(NamedTuple):
    name: str
    age: int


ADA = '{"name":"Ada","age":36}'


def ask(schema: Any, answer: Any, **options: Any) -> State:
    def body(s: State) -> None:
        s += "Who? " + phloem.gen("x", schema=schema, **options)

    return phloem.function(body).run(backend=phloem.MockBackend({"x": answer}))


@pytest.mark.parametrize(
    ("schema", "answer", "value"),
    [
        (Model, ADA, Model(name="Ada", age=36)),
        (Data, ADA, Data("Ada", 36)),
        (Typed, ADA, {"name": "Ada", "age": 36}),
        (Struct, ADA, Struct("Ada", 36)),
        (Pair, '["Ada",36]', Pair("Ada", 36)),
        (list[Model], f"[{ADA}]", [Model(name="Ada", age=36)]),
        ({"type": "object"}, ADA, {"name": "Ada", "age": 36}),
        ('{"type": "object"}', ADA, {"name": "Ada", "age": 36}),
        (int, "36", 36),
        (float, "36", 36.0),
        (bool, "true", True),
        (str, '"A\\n"', "A\n"),
        (list[int], "[1,2]", [1, 2]),
        (dict[str, list[float]], '{"a":[1]}', {"a": [1.0]}),
        (Literal["a", "b"], '"b"', "b"),
        (int | None, "null", None),
        (Annotated[int, msgspec.Meta(ge=3)], "3", 3),
    ],
)
def test_the_value_is_the_object_and_the_text_is_the_text(
    schema: Any, answer: str, value: object
) -> None:
    state = ask(schema, answer)
    assert state["x"] == value
    assert type(state["x"]) is type(value)
    assert state.text() == "Who? " + answer
    assert "".join(state.text_iter("x")) == answer


def test_the_schema_is_what_is_enforced() -> None:
    node = phloem.gen("x", schema=Literal["a", "b"])
    assert isinstance(node.constraint, JsonSchema)
    assert json.loads(node.constraint.schema) == {"enum": ["a", "b"]}
    with pytest.raises(ValueError, match="schema is not JSON"):
        phloem.gen("x", schema="{")
    with pytest.raises(TypeError, match="schema must be"):
        phloem.gen("x", schema=3)
    made = phloem.gen("x", grammar='root ::= "a"')
    assert made.constraint == Ebnf(grammar='root ::= "a"')


def test_it_goes_on_from_the_text_of_an_object() -> None:
    def body(s: State) -> None:
        s += "A: " + phloem.gen("x", schema=Data) + " B: " + phloem.gen("y")

    backend = phloem.MockBackend({"x": ADA, "y": "."})
    phloem.function(body).run(backend=backend)
    assert backend.calls[1].prompt == TextPrompt(f"A: {ADA} B: ")


def test_several_objects_are_a_list() -> None:
    assert ask(int, ["1", "2"], n=2)["x"] == [1, 2]


@pytest.mark.parametrize(
    ("schema", "answer", "cause"),
    [
        (Model, '{"name":"Tim","age":3}', pydantic.ValidationError),
        (Data, '{"name":"Tim"}', msgspec.ValidationError),
        ({}, "{", json.JSONDecodeError),
    ],
)
def test_a_text_that_is_no_such_object_is_an_error_at_its_variable(
    schema: Any, answer: str, cause: type[Exception]
) -> None:
    state = ask(schema, answer)
    with pytest.raises(phloem.GenerationError, match="'x' failed") as caught:
        state["x"]
    assert isinstance(caught.value.cause, cause)
    with pytest.raises(phloem.GenerationError):
        state.text()


def test_the_expression_is_a_key() -> None:
    person = phloem.gen("person", schema=Data)
    colour = phloem.select("colour", ["red", "blue"])

    @phloem.function
    def program(s: State) -> str:
        s += "Who? " + person + colour
        forks = s.fork(2)
        forks += " Again? " + phloem.gen("more", schema=int)
        assert forks[phloem.gen("more", schema=int)] == [1, 2]
        return s[person].name + s[colour]

    state = program.run(backend=phloem.MockBackend({"person": ADA, "more": ["1", "2"]}))
    assert (state.returned, state.ret_value) == ("Adared", "Adared")
    assert state[person] == Data("Ada", 36)
    with pytest.raises(KeyError, match="unnamed"):
        state[phloem.gen()]


@pytest.mark.parametrize(
    ("value", "form", "expected"),
    [
        ("36", int, 36),
        (" +36", int, 36),
        (".5", float, 0.5),
        ("true", bool, True),
        ("False", bool, False),
        ("text", str, "text"),
        (ADA, Data, Data("Ada", 36)),
        (ADA, Typed, {"name": "Ada", "age": 36}),
        ({"name": "Ada"}, Typed, {"name": "Ada"}),
        ({"name": "Ada", "age": 36}, Data, Data("Ada", 36)),
        ([{"name": "Ada", "age": 36}], tuple[Struct, ...], (Struct("Ada", 36),)),
        ([1], list[int], [1]),
        ("[1]", list[int], [1]),
        (7, int, 7),
    ],
)
def test_value_reads_a_text_as_a_type(value: Any, form: type, expected: object) -> None:
    @phloem.function
    def program(s: State) -> None:
        s["x"] = value

    assert program.run(backend=phloem.MockBackend()).value("x", form) == expected
    assert program.stream(backend=phloem.MockBackend()).value("x", form) == expected


@pytest.mark.parametrize(
    ("value", "form", "error"),
    [
        (7, str, TypeError),
        (Data("Ada", 36), Struct, TypeError),
        ([1], dict[str, int], msgspec.ValidationError),
        ("many", int, ValueError),
    ],
)
def test_value_is_what_it_says(value: Any, form: type, error: type[Exception]) -> None:
    @phloem.function
    def program(s: State) -> None:
        s["x"] = value

    with pytest.raises(error):
        program.run(backend=phloem.MockBackend()).value("x", form)
