"""Constraints that are small to send and dear to serve: the classics, within the limits and beyond.

Each bomb is built anew, with a number drawn into it: what was refused is remembered, and a bomb
that is known costs nobody anything.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["schema", "regex", "ebnf", "choice"]
Schema = dict[str, Any]

MARK = "qzjx"
"""In strings that no refusal may echo: values, patterns, descriptions; not in names of members."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A constraint to ask for. `text` is a schema's JSON text, a pattern, a grammar, or a JSON list
    of choices. `pattern` is a regular expression for what the output matches, where there is one.
    `beyond`: it is over a limit, so it must be refused."""

    name: str
    kind: Kind
    text: str
    pattern: str | None = None
    beyond: bool = False


def bomb(rng: random.Random) -> Case:
    """One of them."""
    return rng.choice(_BOMBS)(rng)


def _schema(name: str, schema: Schema, *, beyond: bool = False) -> Case:
    return Case(name=name, kind="schema", text=json.dumps(schema), beyond=beyond)


# ------------------------------------------------------------------------------ size


def _enum(rng: random.Random) -> Case:
    count = rng.choice([100, 999, 1_001, 10_000, 100_000])
    salt = rng.randrange(10**6)
    values = [f"{MARK}-{salt}-{i}" for i in range(count)]
    return _schema(f"enum of {count}", {"enum": values}, beyond=count > 1_000)


def _nested_objects(rng: random.Random) -> Case:
    depth = rng.choice([8, 16, 30, 40, 400, 1_000, 5_000])
    name = f"k{rng.randrange(10**6)}"
    text = f'{{"type":"object","required":["{name}"],"properties":{{"{name}":' * depth
    text += '{"type":"null"}' + "}}" * depth
    return Case(name=f"objects nested {depth}", kind="schema", text=text, beyond=depth > 32)


def _nested_arrays(rng: random.Random) -> Case:
    depth = rng.choice([8, 30, 40, 400, 1_000, 100_000])
    text = '{"type":"array","maxItems":3,"items":' * depth + '{"type":"null"}' + "}" * depth
    return Case(name=f"arrays nested {depth}", kind="schema", text=text, beyond=depth > 32)


def _properties(rng: random.Random) -> Case:
    count = rng.choice([200, 1_000, 4_000, 5_001, 40_000])
    names = [f"p{rng.randrange(100)}_{i}" for i in range(count)]
    schema: Schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "additionalProperties": False,
    }
    needed = rng.random() < 0.5
    if needed:
        schema["required"] = names
    name = f"{count} {'required' if needed else 'optional'} properties"
    return _schema(name, schema, beyond=count > 5_000)


def _branches(rng: random.Random) -> Case:
    count = rng.choice([64, 250, 257, 1_000, 10_000])
    word, salt = rng.choice(["anyOf", "oneOf"]), rng.randrange(10**6)
    prefix = "a" * rng.choice([0, 60])  # a long prefix keeps every branch open
    branches = [
        {
            "type": "object",
            "properties": {f"{prefix}{salt}_{i}": {"type": "string"}},
            "required": [f"{prefix}{salt}_{i}"],
            "additionalProperties": rng.random() < 0.5,
        }
        for i in range(count)
    ]
    return _schema(f"{word} of {count} objects", {word: branches}, beyond=count > 256)


def _description(rng: random.Random) -> Case:
    size = rng.choice([100_000, 300_000, 3_000_000, 5_000_000])
    schema = {"type": "boolean", "description": MARK * (size // len(MARK))}
    return _schema(f"a description of {size}", schema, beyond=size > 256 << 10)


# ------------------------------------------------------------------------------ expansion


def _one_of_inlined(rng: random.Random) -> Case:
    levels = rng.choice([4, 6, 8, 10])
    schema: Schema = {"type": "integer", "maximum": rng.randrange(10**6)}
    for _ in range(levels):
        inside = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        schema = {"oneOf": [inside, {"type": "object", "properties": {"b": schema}}]}
    return _schema(f"oneOf nested {levels}", schema)


def _shared(rng: random.Random) -> Case:
    """Levels that each name the next one twice: 2^levels when written out."""
    levels, word = rng.choice([8, 16, 25]), rng.choice(["oneOf", "anyOf", "allOf", "prefixItems"])
    definitions: Schema = {f"d{levels}": {"const": rng.randrange(10**6)}}
    for i in range(levels):
        below = {"$ref": f"#/$defs/d{i + 1}"}
        named = {"type": "object", "properties": {f"{word[0]}{i}": below}}
        definitions[f"d{i}"] = {
            "allOf": {"allOf": [below, below]},
            "prefixItems": {"type": "array", "prefixItems": [below, below], "minItems": 2},
        }.get(word, {word: [below, {**named, "required": [f"{word[0]}{i}"]}]})
    schema = {"$defs": definitions, "$ref": "#/$defs/d0"}
    return _schema(f"{levels} levels of $ref through {word}", schema)


def _product(rng: random.Random) -> Case:
    """`allOf` of `anyOf`: a product of branches."""
    factors, width = rng.choice([(6, 2), (12, 2), (20, 3)])
    parts = [{"anyOf": [{"required": [f"f{i}_{j}"]} for j in range(width)]} for i in range(factors)]
    schema = {"type": "object", "allOf": parts, "maxProperties": rng.randrange(20, 10**6)}
    return _schema(f"allOf of {factors} anyOf", schema)


def _negations(rng: random.Random) -> Case:
    levels = rng.choice([4, 12, 28])
    schema: Schema = {"properties": {"a": {"minimum": rng.randrange(10**6)}}, "required": ["a"]}
    for i in range(levels):
        schema = {"not": {"properties": {f"n{i % 3}": schema}}} if i % 2 else {"not": schema}
    return _schema(f"not nested {levels}", schema)


def _conditions(rng: random.Random) -> Case:
    count = rng.choice([4, 10, 30])
    rules = [
        {
            "if": {"properties": {f"c{i}": {"const": rng.randrange(9)}}, "required": [f"c{i}"]},
            "then": {"required": [f"c{(i + 1) % count}"]},
            "else": {"properties": {f"e{i}": {"type": "integer"}}},
        }
        for i in range(count)
    ]
    return _schema(f"{count} if/then/else", {"type": "object", "allOf": rules})


def _recursion(rng: random.Random) -> Case:
    salt = rng.randrange(10**6)
    schemas: list[tuple[str, Schema]] = [
        ("$ref to itself", {"$ref": "#"}),
        ("$ref in a circle", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                              "$ref": "#/$defs/a"}),
        ("no finite instance", {"type": "object", "properties": {f"r{salt}": {"$ref": "#"}},
                                "required": [f"r{salt}"]}),
        ("a tree", {"type": "object", "properties": {f"l{salt}": {"$ref": "#"},
                                                     f"r{salt}": {"$ref": "#"}},
                    "additionalProperties": False}),
        ("not itself", {"not": {"$ref": "#"}}),
        ("$ref out of the document", {"$ref": f"http://127.0.0.1:1/{MARK}.json"}),
        ("$ref to nothing", {"$ref": f"#/$defs/{salt}"}),
    ]  # fmt: skip
    name, schema = rng.choice(schemas)
    return _schema(name, schema)


# ------------------------------------------------------------------------------ counts


def _counts(rng: random.Random) -> Case:
    big = rng.choice([3_000, 10**6, 10**9, 10**30])
    schemas: list[tuple[str, Schema]] = [
        ("maxLength", {"type": "string", "maxLength": big}),
        ("minLength", {"type": "string", "minLength": big}),
        ("maxItems", {"type": "array", "items": {"enum": [0, 1]}, "maxItems": big}),
        ("minItems", {"type": "array", "items": {"type": "null"}, "minItems": big}),
        ("uniqueItems", {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9},
                         "uniqueItems": True, "minItems": 9, "maxItems": big}),
        ("contains", {"type": "array", "contains": {"const": 1}, "minContains": big % 1_000}),
        ("maxProperties", {"type": "object", "maxProperties": big, "minProperties": big % 7}),
        ("integer range", {"type": "integer", "minimum": -big, "maximum": 7 * big}),
        ("multipleOf", {"type": "integer", "multipleOf": big // 7, "maximum": 10**40}),
        ("multipleOf of decimals", {"type": "number", "multipleOf": 1e-9, "maximum": 1e20}),
        ("pattern in a count", {"type": "string", "pattern": f"^([a-f]{{1,{big % 9_999}}}x)+$"}),
    ]  # fmt: skip
    name, schema = rng.choice(schemas)
    return _schema(f"{name} {big}", schema)


def _impossible(rng: random.Random) -> Case:
    salt = rng.randrange(10**6)
    schemas: list[tuple[str, Schema]] = [
        ("nothing of a type", {"allOf": [{"type": "string"}, {"type": "integer"}]}),
        ("an empty range", {"type": "integer", "minimum": salt + 1, "maximum": salt}),
        ("an empty length", {"type": "string", "minLength": salt + 1, "maxLength": salt}),
        ("a required false", {"type": "object", "properties": {f"f{salt}": False},
                              "required": [f"f{salt}"]}),
        ("const against pattern", {"const": MARK, "pattern": f"^{salt}$"}),
    ]  # fmt: skip
    name, schema = rng.choice(schemas)
    return _schema(name, schema, beyond=True)


def _patterns(rng: random.Random) -> Case:
    """Automata whose intersection has a state for every set of their states."""
    count, span = rng.choice([(2, 8), (4, 10), (8, 14)])
    parts = [{"pattern": f"^[a-z]*{chr(97 + i)}[a-z]{{{span}}}$"} for i in range(count)]
    schema = {"type": "string", "maxLength": rng.randrange(50, 10**6), "allOf": parts}
    return _schema(f"{count} patterns at once", schema)


def _pattern_properties(rng: random.Random) -> Case:
    count = rng.choice([4, 12, 40])
    kinds = ["integer", "string", "null"]
    patterns = {
        f"{chr(97 + i % 26)}.{{{i % 5}}}{rng.randrange(10)}": {"type": kinds[i % 3]}
        for i in range(count)
    }
    schema = {"type": "object", "patternProperties": patterns, "minProperties": 1}
    return _schema(f"{count} patternProperties", schema)


# ------------------------------------------------------------------------------ texts


def _regex(rng: random.Random) -> Case:
    size = rng.choice([2, 30])
    words = [f"w{rng.randrange(10**6)}{i % 7}" for i in range(250)]
    name, pattern, beyond = rng.choice([
        ("(a+)+b", f"(a+)+b{{{size}}}", False),
        ("stars in stars", f"((((a*)*b)*c)*d){{0,{size}}}", False),
        ("many .*", "(.*)" * size + MARK, False),
        ("an exponential automaton", f"(a|b)*a(a|b){{{12 * size}}}", False),
        ("a long count", f"{MARK}{{1,{10**size}}}", False),
        ("counts in counts", f"((a{{1,{10 * size}}}b){{1,{10 * size}}}c){{1,300}}", False),
        ("250 words", "|".join(words), False),
        ("10,000 words", "|".join(words * 40), True),
        ("parentheses", "(" * 90 * size + "a" + ")" * 90 * size, size > 10),
        ("10,000 parentheses", "(" * 10_000 + ")" * 10_000, True),
        ("all characters", f"[\u0001-\uffff]{{1,{250 * size}}}", False),
        ("lines", f"(.{{1,{50 * size}}}\n){{1,50}}", False),
        ("an empty star", f"(|a|){{{size}}}*", False),
        ("a look-around", f"(?=.*{MARK}).*(?<!x)", False),
        ("a back-reference", f"(.{{1,{size}}})\\1", False),
    ])  # fmt: skip
    return Case(name=f"regex: {name}", kind="regex", text=pattern, pattern=pattern, beyond=beyond)


def _ebnf(rng: random.Random) -> Case:
    count = rng.choice([500, 1_900, 2_001, 20_000])
    rules = [f'r{i} ::= "{MARK[0]}{i}" r{i + 1} | "b"' for i in range(count)]
    chain = "\n".join(["root ::= r0", *rules, f'r{count} ::= "end"'])
    open_ = rng.choice([10, 63, 500, 10_000])
    name, grammar, beyond = rng.choice([
        ("ambiguous", 'root ::= root root | "a" | ""', False),
        ("nested stars", 'root ::= x*\nx ::= y*\ny ::= z*\nz ::= "a"* "b"*', False),
        ("left recursion", 'root ::= root "a" | root "b" | "c"', False),
        ("hidden recursion", 'root ::= e root "a" | "b"\ne ::= "" | e e', False),
        ("no end", 'root ::= "a" root', True),
        ("no such rule", f"root ::= rule{count}", True),
        (f"{count} rules", chain, count > 2_000),
        ("a long count", f'root ::= ("a" | "b"){{1,{10 ** rng.randrange(2, 9)}}}', False),
        ("a palindrome", 'root ::= "a" root "a" | "b" root "b" | [ab] | ""', False),
        (f"{open_} parentheses", "root ::= " + "(" * open_ + '"a"' + ")" * open_, open_ > 64),
        ("not a grammar", f'root ::= "{MARK}', True),
    ])  # fmt: skip
    return Case(name=f"ebnf: {name}", kind="ebnf", text=grammar, beyond=beyond)


def _choices(rng: random.Random) -> Case:
    count = rng.choice([300, 3_000, 10_000, 10_001, 60_000])
    salt = rng.randrange(10**6)
    texts = [f"{MARK}{salt + i * 7919}" for i in range(count)]
    if rng.random() < 0.3:
        count = rng.choice([90, 200])
        texts = [MARK[0] * i + str(salt) * (i % 2) for i in range(1, count)]
        return Case(name=f"{count} choices in one another", kind="choice", text=json.dumps(texts))
    name = f"{count} choices"
    return Case(name=name, kind="choice", text=json.dumps(texts), beyond=count > 10_000)


_BOMBS: list[Callable[[random.Random], Case]] = [
    _enum,
    _nested_objects,
    _nested_arrays,
    _properties,
    _branches,
    _description,
    _one_of_inlined,
    _shared,
    _product,
    _negations,
    _conditions,
    _recursion,
    _counts,
    _counts,
    _impossible,
    _patterns,
    _pattern_properties,
    _regex,
    _regex,
    _ebnf,
    _choices,
]
