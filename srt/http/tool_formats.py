"""How models write calls of tools: one object a format, for the constraint and for the parser.

- `hermes`: `<tool_call>` line feed `{"name", "arguments"}` line feed `</tool_call>` (Qwen too)
- `llama3`: the whole answer is `{"name", "parameters"}`; one call only, as its template has it
- `mistral`: `[TOOL_CALLS][{"name", "arguments"}, …]`
- `mistral-args`: `[TOOL_CALLS]name[ARGS]{…}`, once for each call
- `json`: calls in text as `hermes` has them; where a call must come, `{"name", "arguments"}` alone

In all of them the arguments satisfy the tool's parameters. What may be a call is a call: text that
begins like one is not legal unless it goes on like one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Raw

from phloem.constrained.schema_node import MAPS
from phloem.constrained.spec import JsonDocuments, JsonSchema, Plain, StructuralTag, Whitespace
from phloem.srt.generation import ToolFormatName
from phloem.srt.http.structural_tags import tag, triggered_tags
from phloem.srt.http.tool_parser import CallSyntax

MAX_CALLS: Final = 16
"""Calls of one answer where the format counts them: a weak model would never stop."""

Schema = dict[str, object]
Places = tuple[tuple[str, str], ...]
"""Where in a constraint each tool's parameters are: JSON pointer → the request's field."""


@dataclass(frozen=True)
class CallConstraint:
    """What an answer is held to."""

    constraint: Plain
    places: Places


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls. `arguments` is the key of the arguments beside the name."""

    name: ToolFormatName
    syntax: CallSyntax
    arguments: str = "arguments"

    def must_call(self, tools: Mapping[str, Tool], *, once: bool) -> CallConstraint:
        """The answer is one call, or (unless `once`) several."""
        most = 1 if once else MAX_CALLS
        if self.name == "mistral-args":
            return self._named_calls(tools, once=once, must=True)
        if self.name == "mistral":
            schema, places = self._list(tools, most)
            return CallConstraint(_documents(schema, self.syntax.begin, "", "", 1), places)
        schema, places = self._any_call(tools)
        if self.name == "hermes":
            begin, end = f"{self.syntax.begin}\n", f"\n{self.syntax.end}"
            constraint: Plain = _documents(schema, begin, f"{end}\n{begin}", end, most)
        elif self.name == "llama3" or once:
            constraint = JsonSchema(schema=_text(schema), whitespace=Whitespace.SPACED)
        else:
            constraint = _documents(schema, "", "\n", "", most)
        return CallConstraint(constraint, places)

    def may_call(self, tools: Mapping[str, Tool], *, once: bool) -> CallConstraint:
        """The answer is text, in which calls may be."""
        match self.name:
            case "llama3":
                return self._text_or_call(tools)
            case "mistral-args":
                return self._named_calls(tools, once=once, must=False)
            case "mistral":
                schema, places = self._list(tools, 1 if once else MAX_CALLS)
                tags, places = (
                    [tag(self.syntax.begin, _text(schema), "")],
                    _under("/tags/0/content", places),
                )
                once = True
            case _:
                opening = f'{self.syntax.begin}\n{{"name": "'
                tags = [
                    tag(
                        f'{opening}{name}", "{self.arguments}": ',
                        _text(one.schema),
                        f"}}\n{self.syntax.end}",
                    )
                    for name, one in tools.items()
                ]
                places = _places_of_tags(tools)
        constraint = triggered_tags(
            [self.syntax.begin], tags, at_least_one=False, stop_after_first=once
        )
        return CallConstraint(constraint, places)

    def _named_calls(self, tools: Mapping[str, Tool], *, once: bool, must: bool) -> CallConstraint:
        tags = [
            tag(f"{self.syntax.begin}{name}{ARGS}", _text(one.schema), "")
            for name, one in tools.items()
        ]
        if must:
            tree = {
                "type": "repeat",
                "min": 1,
                "max": 1 if once else MAX_CALLS,
                "content": {"type": "or", "elements": tags},
            }
            constraint = StructuralTag(format=_text(tree))
        else:
            constraint = triggered_tags(
                [self.syntax.begin], tags, at_least_one=False, stop_after_first=once
            )
        at = "/content/elements" if must else "/tags"
        return CallConstraint(constraint, _places_of_tags(tools, at))

    def _text_or_call(self, tools: Mapping[str, Tool]) -> CallConstraint:
        """Either one call and nothing else, or text that does not begin like one."""
        schema, places = self._any_call(tools)
        begin = {"type": "const_string", "value": self.syntax.begin}
        call = {
            "type": "sequence",
            "elements": [
                {"type": "optional", "content": begin},
                {"type": "json_schema", "json_schema": Raw(_text(schema).encode())},
            ],
        }
        text = {"type": "regex", "pattern": _no_call(self.syntax.begin)}
        tree = {"type": "or", "elements": [call, text]}
        return CallConstraint(
            StructuralTag(format=_text(tree)), _under("/elements/0/elements/1", places)
        )

    def _list(self, tools: Mapping[str, Tool], most: int) -> tuple[Schema, Places]:
        schema, places = self._any_call(tools)
        definitions = schema.pop("$defs", None)
        listed: Schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": most}
        if definitions is not None:
            listed["$defs"] = definitions
        return listed, tuple(
            (pointer if pointer.startswith("/$defs") else f"/items{pointer}", field)
            for pointer, field in places
        )

    def _any_call(self, tools: Mapping[str, Tool]) -> tuple[Schema, Places]:
        """One object of a name and arguments, of any of the tools."""
        calls: list[Schema] = []
        definitions: Schema = {}
        places: list[tuple[str, str]] = []
        for i, (name, one) in enumerate(tools.items()):
            arguments: object = one.schema
            pointer = f"/properties/{self.arguments}"
            if len(tools) > 1:
                pointer = f"/anyOf/{i}{pointer}"
            if '"$ref"' in _text(one.schema):  # its references count from its own root
                key = f"tool{i}"
                definitions[key] = rebase(one.schema, f"#/$defs/{key}")
                arguments, pointer = {"$ref": f"#/$defs/{key}"}, f"/$defs/{key}"
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": name}, self.arguments: arguments},
                    "required": ["name", self.arguments],
                    "additionalProperties": False,
                }
            )
            places.append((pointer, one.field))
        root: Schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
        return ({**root, "$defs": definitions} if definitions else root), tuple(places)


@dataclass(frozen=True)
class Tool:
    """The schema of a tool's arguments, and the request's field that it came from."""

    schema: Schema
    field: str


ARGS: Final = "[ARGS]"
_HERMES: Final = CallSyntax("<tool_call>", "</tool_call>")
_MISTRAL: Final = CallSyntax("[TOOL_CALLS]", id_length=9)  # its template takes no other ids

FORMATS: Final[dict[str, ToolFormat]] = {
    one.name: one
    for one in (
        ToolFormat("hermes", _HERMES),
        ToolFormat("llama3", CallSyntax("<|python_tag|>", bare=True), "parameters"),
        ToolFormat("mistral", _MISTRAL),
        ToolFormat("mistral-args", CallSyntax("[TOOL_CALLS]", named=ARGS, id_length=9)),
        ToolFormat("json", _HERMES),
    )
}


def rebase(schema: object, root: str) -> object:
    """The same schema placed at the pointer `root` of a bigger one: local references follow."""
    if isinstance(schema, list):
        return [rebase(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _rebased(key, value, root) for key, value in schema.items()}


_PLAIN_VALUES: Final = frozenset({"const", "enum", "default", "examples"})


def _rebased(key: str, value: object, root: str) -> object:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return root + value[1:]
    if key in _PLAIN_VALUES:
        return value
    if key in MAPS and isinstance(value, dict):
        return {name: rebase(sub, root) for name, sub in value.items()}
    return rebase(value, root)


def _documents(schema: Schema, begin: str, separator: str, end: str, most: int) -> JsonDocuments:
    return JsonDocuments(
        schema=_text(schema), begin=begin, separator=separator, end=end, max_documents=most
    )


def _no_call(marker: str) -> str:
    """A pattern of texts that a parser would not take for the beginning of a call."""
    return rf'(?!\s*(?:\{{\s*"name"\s*:|{re.escape(marker)}))[\s\S]*'


def _under(pointer: str, places: Places) -> Places:
    return tuple((pointer + inner, field) for inner, field in places)


def _places_of_tags(tools: Mapping[str, Tool], at: str = "/tags") -> Places:
    return tuple((f"{at}/{i}/content", one.field) for i, one in enumerate(tools.values()))


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
