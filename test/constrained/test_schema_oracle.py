"""What a schema's grammar takes is what an independent validator calls valid, both ways.

The grammar fixes the order of keys, so a value counts as taken when some order of its keys is."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs
import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phloem.constrained import bitmask
from phloem.constrained.base import Backend, CompiledGrammar, ConstraintError, MalformedConstraint
from phloem.constrained.spec import Constraint, JsonSchema

Judge = Callable[[Constraint], Callable[[str], bool]]

SCALARS: list[Any] = [None, True, False, 0, 1, -3, 2.5, "", "a", "ab", "b1"]
NAMES = ["a", "b", "ab"]
VALUES = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from([*NAMES, "z"]), inner, max_size=3),
    ),
    max_leaves=5,
)
SMALL = st.integers(0, 3)
LEAVES = st.one_of(
    st.booleans(),
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(
                ["null", "boolean", "integer", "number", "string", "array", "object"]
            )
        },
    ),
    st.sampled_from([{"const": 1}, {"enum": ["a", 0, None]}, {"const": [1]}, {"const": {"a": 1}}]),
    st.sampled_from([{"minimum": 1}, {"exclusiveMaximum": 1}, {"multipleOf": 2}]),
    st.sampled_from([{"minLength": 1}, {"maxLength": 1}, {"pattern": "^a"}]),
)


def keywords(inner: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    """Keywords of arrays and objects, and those that combine schemas."""
    names = st.sampled_from(NAMES)
    some = st.lists(inner, min_size=1, max_size=3)
    return {
        "type": st.sampled_from(["array", "object", ["array", "string"], ["object", "integer"]]),
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "contains": inner,
        "minContains": SMALL,
        "maxContains": SMALL,
        "uniqueItems": st.just(True),
        "minItems": SMALL,
        "maxItems": SMALL,
        "properties": st.dictionaries(names, inner, max_size=3),
        "required": st.lists(names, unique=True, max_size=2),
        "additionalProperties": inner,
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), inner, max_size=2),
        "propertyNames": st.sampled_from(
            [{"pattern": "^a"}, {"enum": ["a", "b"]}, {"maxLength": 1}, {"not": {"const": "a"}}]
        ),
        "minProperties": SMALL,
        "maxProperties": SMALL,
        "dependentRequired": st.dictionaries(names, st.lists(names, max_size=1), max_size=1),
        "dependentSchemas": st.dictionaries(names, inner, max_size=1),
        "unevaluatedItems": inner,
        "unevaluatedProperties": inner,
        "allOf": some,
        "anyOf": some,
        "oneOf": some,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
    }


def schemas(depth: int) -> st.SearchStrategy[Any]:
    """Schemas of a few keywords, `depth` levels of them."""
    if depth == 0:
        return LEAVES
    named = keywords(schemas(depth - 1))
    chosen = st.lists(st.sampled_from(sorted(named)), min_size=1, max_size=3, unique=True)
    return st.one_of(
        LEAVES, chosen.flatmap(lambda keys: st.fixed_dictionaries({k: named[k] for k in keys}))
    )


def spellings(value: Any) -> Iterator[str]:
    """The value as text, with its keys in every order."""
    match value:
        case list():
            for parts in itertools.product(*(list(spellings(v)) for v in value)):
                yield "[" + ",".join(parts) + "]"
        case dict():
            members = [[f"{json.dumps(k)}:{t}" for t in spellings(v)] for k, v in value.items()]
            for order in itertools.permutations(members):
                for parts in itertools.product(*order):
                    yield "{" + ",".join(parts) + "}"
        case _:
            yield json.dumps(value)


def check(judge: Judge, schema: Any, values: list[Any]) -> None:
    validator = jsonschema_rs.validator_for(schema)
    try:
        accepts = judge(JsonSchema(schema=json.dumps(schema)))
    except MalformedConstraint:  # nothing satisfies it
        assert not any(map(validator.is_valid, values))
        return
    except ConstraintError:
        assume(False)
        return
    for value in values:
        taken = any(map(accepts, itertools.islice(spellings(value), 2_000)))
        assert taken == validator.is_valid(value), value


@settings(max_examples=400)
@given(schema=schemas(2), values=st.lists(VALUES, min_size=10, max_size=16))
def test_random_schemas(judge: Judge, schema: Any, values: list[Any]) -> None:
    check(judge, schema, values)


@settings(max_examples=200)
@given(one=schemas(1), other=schemas(1), values=st.lists(VALUES, min_size=10, max_size=16))
def test_overlapping_branches(judge: Judge, one: Any, other: Any, values: list[Any]) -> None:
    check(judge, {"oneOf": [one, other]}, values)


@settings(max_examples=200)
@given(schema=schemas(2), values=st.lists(VALUES, min_size=10, max_size=16))
def test_complements(judge: Judge, schema: Any, values: list[Any]) -> None:
    check(judge, {"not": schema}, values)


CLOSING = b"]}"
USUAL = b'abz019"{}[],:truefalsn'


def wander(grammar: CompiledGrammar, source: random.Random, length: int) -> str | None:
    """A text of random legal bytes, biased to end; None if it did not."""
    matcher, text = grammar.matcher(), bytearray()
    row = np.zeros(bitmask.words(258), dtype=np.int32)
    for _ in range(length):
        matcher.fill(row)
        legal = bitmask.allowed_tokens(row, 258)
        assert legal, bytes(text)
        if matcher.is_complete and source.random() < 0.7:
            return text.decode()
        bytes_ = [b for b in legal if b < 128]
        if not bytes_:
            return text.decode() if matcher.is_complete else None
        weights = [100 if b in CLOSING else 30 if b in USUAL else 1 for b in bytes_]
        byte = source.choices(bytes_, weights)[0]
        matcher.accept(byte)
        text.append(byte)
    return None


@settings(max_examples=200)
@given(schema=schemas(2), seed=st.integers(0, 2**16))
def test_what_is_written_is_valid(backend: Backend, schema: Any, seed: int) -> None:
    validator = jsonschema_rs.validator_for(schema)
    try:
        grammar = backend.compile(JsonSchema(schema=json.dumps(schema)))
    except ConstraintError:
        assume(False)
        return
    source = random.Random(seed)
    for _ in range(3):
        text = wander(grammar, source, 120)
        if text is not None:
            assert validator.is_valid(json.loads(text)), text
