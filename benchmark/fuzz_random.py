"""Random constraints: schemas, patterns and grammars of every keyword, sound and broken.

All from one `random.Random`: the same seed asks for the same things in the same order.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

from fuzz_bombs import MARK, Case, Schema

MAX_DEPTH = 4
FORMATS = [
    "date", "date-time", "time", "duration", "email", "idn-email", "hostname", "idn-hostname",
    "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template",
    "json-pointer", "relative-json-pointer", "regex", "int32", "made-up",
]  # fmt: skip
NAMES = ["a", "b", "c", "name", "é", "x y", "$ref", "/", "~", '"', "\n", "", "longer-name_9"]
PATTERNS = [
    "^[a-z]+$", "^[A-Z]{2}[0-9]{1,4}$", "a", "^$", "^(a|bc)*$", r"^\d{4}-\d{2}$", r"^\w+@\w+$",
    "^.{2,5}$", "[^a]", r"^\S+\s\S+$", "b$", "^(?!x)[a-z]+$", r"(.)\1", r"\p{Lu}", "^x{0,300}$",
    r"^\u00e9+$", "(?i)abc", f"^{MARK}(0|1)+$",
]  # fmt: skip
ONLY_REGEX = [
    "$", r"\b", r"(?=a)", r"(?!a)b", r"(a)\1", "a*?", "a++", r"\p{L}", "(?i:a)", "(?P<n>a)",
    r"\x41", r"\D", r"[\w-]", r"[]a]", r"\Z", "(?#c)", "[[:alpha:]]", r"\N",
]  # fmt: skip
BROKEN: list[Schema] = [
    {"type": "strng"}, {"minLength": -1}, {"pattern": f"({MARK}"}, {"required": "a"},
    {"properties": []}, {"enum": MARK}, {"items": 3}, {"$ref": 7}, {"multipleOf": 0},
    {"anyOf": []}, {"type": []}, {"minimum": "1"}, {"pattern": "[z-a]"}, {"pattern": "^a{2,1}$"},
    {"$ref": "#/properties/a"}, {"$ref": "#/$defs/none"}, {"$ref": "#nowhere"},
    {"$schema": f"http://{MARK}"}, {"$id": ":"},
]  # fmt: skip


def random_case(rng: random.Random) -> Case:
    """A schema more often than a pattern, a pattern more often than a grammar."""
    draw = rng.random()
    if draw < 0.65:
        return _schema_case(rng)
    regex, grammar = Patterns(rng).both()
    if draw < 0.85:
        if rng.random() < 0.15:
            regex += rng.choice(ONLY_REGEX)
        regex = _spoil(rng, regex) if rng.random() < 0.2 else regex
        return Case(name="random regex", kind="regex", text=regex, pattern=regex)
    if rng.random() < 0.2:
        return Case(name="random ebnf, spoilt", kind="ebnf", text=_spoil(rng, grammar))
    return Case(name="random ebnf", kind="ebnf", text=grammar, pattern=regex)


def _schema_case(rng: random.Random) -> Case:
    schema = Schemas(rng).whole()
    text = json.dumps(schema, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.12:
        spoil = rng.choice([_spoil, _twice, _constants, _surrogate])
        return Case(name="random schema, spoilt", kind="schema", text=spoil(rng, text))
    return Case(name="random schema", kind="schema", text=text)


# ------------------------------------------------------------------------------ spoiling


def _spoil(rng: random.Random, text: str) -> str:
    """Cut, swap or double something."""
    at = rng.randrange(len(text) + 1)
    to = min(len(text), at + rng.randrange(1, 6))
    return rng.choice([
        text[:at],
        text[:at] + text[to:],
        text[:at] + rng.choice("{}[]()\"\\,:|*+?\x00\n") + text[at:],
        text[:to] + text[at:],
    ])  # fmt: skip


def _twice(rng: random.Random, text: str) -> str:
    """A member twice in one object."""
    member = rng.choice(['"type":"string"', '"properties":{}', f'"x":"{MARK}"'])
    return text.replace("{", f"{{{member},{member},", 1).replace(",}", "}")


def _constants(rng: random.Random, text: str) -> str:
    """A number that JSON, or a double, does not have."""
    number = rng.choice(["NaN", "Infinity", "-Infinity", "1e999", "01", "+1", "1.", "0x1"])
    return text.replace("{", f'{{"maximum":{number},', 1).replace(",}", "}")


def _surrogate(rng: random.Random, text: str) -> str:
    value = rng.choice([r"\ud800", r"\udc00\ud800", "\ud800", r"\u0000"])
    return text.replace("{", f'{{"const":"{value}",', 1).replace(",}", "}")


# ------------------------------------------------------------------------------ schemas


class Schemas:
    """Schemas of one generator."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._definitions: list[str] = []
        self._kinds: list[Callable[[int], Schema]] = [
            *[self._string] * 3,
            *[self._number] * 3,
            *[self._object] * 5,
            *[self._array] * 3,
            *[self._values] * 2,
            *[self._combined] * 3,
            self._reference,
            self._simple,
        ]

    def whole(self) -> Any:
        """A schema with its definitions."""
        rng = self._rng
        if rng.random() < 0.02:
            return rng.choice([True, False, [], "string", 7])
        self._definitions = [f"d{i}" for i in range(rng.choice([0, 0, 1, 3]))]
        schema = self._object(0) if rng.random() < 0.6 else self.schema(0)
        if self._definitions:
            schema["$defs"] = {name: self.schema(2) for name in self._definitions}
        if rng.random() < 0.05:
            schema["$schema"] = rng.choice(
                [f"http://json-schema.org/draft-0{n}/schema#" for n in (4, 6, 7)]
                + ["https://json-schema.org/draft/2020-12/schema"]
            )
        return schema

    def schema(self, depth: int) -> Schema:
        """One subschema, `depth` levels below the root."""
        rng = self._rng
        if depth >= MAX_DEPTH:
            return rng.choice([self._string, self._number, self._values, self._simple])(depth)
        schema = rng.choice(self._kinds)(depth)
        if rng.random() < 0.08:  # keywords of two kinds, side by side
            schema = {**rng.choice(self._kinds)(depth), **schema}
        if rng.random() < 0.01:
            schema = {**schema, **rng.choice(BROKEN)}
        if rng.random() < 0.1:
            schema["description"] = MARK
        return schema

    def _some(self, **keywords: Any) -> Schema:
        """Each keyword, or not."""
        return {name: value for name, value in keywords.items() if self._rng.random() < 0.3}

    def _count(self) -> int:
        return self._rng.choice([0, 1, 1, 2, 3, 5, 20, 300])

    def _name(self) -> str:
        return self._rng.choice(NAMES)

    def _simple(self, _depth: int) -> Schema:
        types = ["string", "integer", "number", "boolean", "null", "object", "array"]
        rng = self._rng
        several = rng.sample(types, rng.randrange(1, 4))
        return rng.choice([{}, {"type": rng.choice(types)}, {"type": several}])

    def _string(self, _depth: int) -> Schema:
        rng = self._rng
        low = self._count()
        return {"type": "string"} | self._some(
            minLength=low,
            maxLength=low + self._count() - (rng.random() < 0.05),
            pattern=rng.choice(PATTERNS),
            format=rng.choice(FORMATS),
        )

    def _number(self, _depth: int) -> Schema:
        rng = self._rng
        low = rng.choice([0, -1, 1.5, -(10**9), 10**18, 1e-7, -0.0, 3])
        high = low + rng.choice([0, 1, 0.5, 100, 1e9, 10**20, -1])
        return {"type": rng.choice(["integer", "number"])} | self._some(
            minimum=low,
            maximum=high,
            exclusiveMinimum=rng.choice([low, high]),
            exclusiveMaximum=rng.choice([high, low + 7]),
            multipleOf=rng.choice([1, 2, 7, 0.1, 0.25, 12, 1e-3, 1_000, 999_983]),
        )

    def _object(self, depth: int) -> Schema:
        rng = self._rng
        below = depth + 1
        names = list(dict.fromkeys(self._name() for _ in range(rng.choice([0, 1, 2, 3, 5]))))
        needed = [name for name in names if rng.random() < 0.6]
        if rng.random() < 0.1:
            needed.append(self._name())
        schema: Schema = {
            "type": "object",
            "properties": {name: self.schema(below) for name in names},
            "required": list(dict.fromkeys(needed)),
        }
        if rng.random() < 0.6:
            schema["additionalProperties"] = rng.choice([False, False, True, self.schema(below)])
        if rng.random() < 0.3:
            schema |= self._some(
                minProperties=rng.randrange(4),
                maxProperties=rng.randrange(6),
                propertyNames={"pattern": rng.choice(PATTERNS)},
                patternProperties={
                    rng.choice(PATTERNS[:-1]): self.schema(below)
                },  # a name in a path
                dependentRequired={self._name(): [self._name()]},
                dependentSchemas={self._name(): self.schema(below)},
                unevaluatedProperties=rng.choice([False, self.schema(below)]),
            )
        return schema

    def _array(self, depth: int) -> Schema:
        rng = self._rng
        low = rng.choice([0, 0, 1, 2, 5])
        return {"type": "array", "items": self.schema(depth + 1)} | self._some(
            minItems=low,
            maxItems=low + self._count(),
            uniqueItems=True,
            prefixItems=[self.schema(depth + 1) for _ in range(rng.randrange(1, 4))],
            contains=self.schema(depth + 1),
            minContains=rng.randrange(3),
            maxContains=rng.randrange(4),
            unevaluatedItems=False,
        )

    def _values(self, depth: int) -> Schema:
        rng = self._rng
        if rng.random() < 0.3:
            return {"const": self._value(depth)}
        return {"enum": [self._value(depth) for _ in range(rng.choice([1, 2, 3, 12]))]}

    def _value(self, depth: int) -> Any:
        rng = self._rng
        if depth < MAX_DEPTH and rng.random() < 0.2:
            inner = [self._value(depth + 1) for _ in range(rng.randrange(3))]
            return rng.choice([inner, {self._name(): value for value in inner}])
        return rng.choice([
            None, True, False, 0, 1, -1, 1.0, 1.5, 1e30, 10**20, "", "a", "b", f"{MARK} é\u2028",
            '"\\\n\x7f', "😀", f"{MARK}{rng.randrange(99)}",
        ])  # fmt: skip

    def _combined(self, depth: int) -> Schema:
        rng = self._rng
        below = depth + 1
        word = rng.choice(["anyOf", "anyOf", "oneOf", "allOf", "not", "if"])
        if word == "not":
            return self.schema(below) | {"not": self.schema(below)}
        if word == "if":
            keywords = self._some(then=self.schema(below), **{"else": self.schema(below)})
            return {"if": self.schema(below), **keywords}
        return {word: [self.schema(below) for _ in range(rng.choice([1, 2, 3]))]}

    def _reference(self, depth: int) -> Schema:
        rng = self._rng
        targets = [f"#/$defs/{name}" for name in self._definitions] * 6
        reference = {"$ref": rng.choice([*targets, "#"])}
        return reference | self._string(depth) if rng.random() < 0.1 else reference


# ------------------------------------------------------------------------------ patterns


class Patterns:
    """A regular expression, and a grammar of the same language."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._rules: list[str] = []

    def both(self) -> tuple[str, str]:
        """The expression and the grammar."""
        regex, body = self._alternatives(0)
        return regex, "\n".join([f"root ::= {body}", *self._rules])

    def _alternatives(self, depth: int) -> tuple[str, str]:
        parts = [self._sequence(depth) for _ in range(self._rng.choice([1, 1, 2, 3]))]
        return "|".join(a for a, _ in parts), " | ".join(b for _, b in parts)

    def _sequence(self, depth: int) -> tuple[str, str]:
        parts = [self._repeated(depth) for _ in range(self._rng.choice([1, 2, 3]))]
        return "".join(a for a, _ in parts), " ".join(b for _, b in parts)

    def _repeated(self, depth: int) -> tuple[str, str]:
        rng = self._rng
        regex, body = self._atom(depth)
        if rng.random() < 0.6:
            return regex, body
        low = rng.choice([0, 1, 2, 7, 40])
        high = low + rng.choice([0, 1, 5, 1_000])
        mark = rng.choice(["*", "+", "?", f"{{{low}}}", f"{{{low},}}", f"{{{low},{high}}}"])
        return f"(?:{regex}){mark}", f"({body}){mark}"

    def _atom(self, depth: int) -> tuple[str, str]:
        rng = self._rng
        if depth < MAX_DEPTH and rng.random() < 0.35:
            regex, body = self._alternatives(depth + 1)
            if rng.random() < 0.5:
                name = f"rule-{len(self._rules)}"
                self._rules.append(f"{name} ::= {body}")
                body = name
            return f"({regex})", f"({body})"
        if rng.random() < 0.4:
            both = rng.choice(["[a-f]", "[^a]", "[0-9]", "[a-zA-Z_]", "[ab]", "[é-ü]", "[ \\n]"])
            return both, both
        text = "".join(rng.choices("abcxyz019 .,-é😀", k=rng.choice([1, 1, 2, 6])))
        return re.escape(text), json.dumps(text, ensure_ascii=False)
