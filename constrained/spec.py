"""What a user asks of the output: one tagged union, on the wire and as cache key.

Every protocol's spelling (`response_format`, `regex`, `guided_json`, `structured_outputs`, …) is
translated into one of these structs at the edge; nothing below the edge knows where it came from.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

import msgspec


class Whitespace(StrEnum):
    """The layout of JSON texts: what whitespace stands between their tokens.

    `compact` none; `bounded` one space or one line break and its indentation, or none, wherever
    JSON allows whitespace; `spaced` exactly one space behind each comma and colon, as `json.dumps`
    writes; `indented` one space behind each colon, a line break and an indentation of a multiple of
    two behind each comma and, or not, inside brackets (`json.dumps(value, indent=2)` is such a
    text; how deep a line is indented is not checked); `any` several spaces and line breaks.

    Never unbounded: a weak model would pad to `max_tokens`.
    """

    COMPACT = "compact"
    BOUNDED = "bounded"
    SPACED = "spaced"
    INDENTED = "indented"
    ANY = "any"


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, tag="json_schema"):
    """Output is a JSON document that satisfies `schema`, the schema's JSON text.

    The text keeps the user's property order, which is the order of the output's keys.
    """

    schema: str
    whitespace: Whitespace = Whitespace.BOUNDED


class JsonObject(msgspec.Struct, frozen=True, kw_only=True, tag="json_object"):
    """Output is any JSON object."""

    whitespace: Whitespace = Whitespace.BOUNDED


class Regex(msgspec.Struct, frozen=True, kw_only=True, tag="regex"):
    """Output matches `pattern` as a whole (`re.fullmatch` semantics)."""

    pattern: str


class Choice(msgspec.Struct, frozen=True, kw_only=True, tag="choice"):
    """Output is exactly one of `choices`."""

    choices: tuple[str, ...]


class Ebnf(msgspec.Struct, frozen=True, kw_only=True, tag="ebnf"):
    """Output is derived from the rule `root` of `grammar` (GBNF-style EBNF)."""

    grammar: str
    root: str = "root"


class StructuralTag(msgspec.Struct, frozen=True, kw_only=True, tag="structural_tag"):
    """Output follows a structural-tag `format` tree, as JSON text (free text around tags)."""

    format: str


class JsonLines(msgspec.Struct, frozen=True, kw_only=True, tag="json_lines"):
    """Output is `min_lines` to `max_lines` JSON documents (None: no bound), each on a line of its
    own and satisfying `schema`; a line feed between two lines, and none behind the last."""

    schema: str
    min_lines: int = 1
    max_lines: int | None = None


class JsonDocuments(msgspec.Struct, frozen=True, kw_only=True, tag="json_documents"):
    """Output is `begin`, then 1 to `max_documents` JSON documents that satisfy `schema`, in the
    `spaced` layout, with `separator` between two of them, then `end`."""

    schema: str
    begin: str = ""
    separator: str
    end: str = ""
    max_documents: int


Plain = JsonSchema | JsonObject | JsonLines | JsonDocuments | Regex | Choice | Ebnf | StructuralTag


WithSchema = JsonSchema | JsonLines | JsonDocuments


class Continued(msgspec.Struct, frozen=True, kw_only=True, tag="continued"):
    """`prefix` and the output together satisfy `constraint`: the prompt ends in the prefix."""

    constraint: Plain
    prefix: str


class Deferred(msgspec.Struct, frozen=True, kw_only=True, tag="deferred"):
    """Output is any text up to the first `end`, then at most two line feeds, then a text of
    `constraint` (None: any text again).

    With `begin`, the free text is there only if the output begins with `begin`; else the constraint
    holds from the start. At most `budget` tokens are free, then only `end` is legal. `seen` is free
    text that the prompt ends in.
    """

    constraint: Plain | None
    end: str
    begin: str = ""
    budget: int | None = None
    seen: str = ""


Constraint = Plain | Continued | Deferred

_encoder = msgspec.json.Encoder(order="sorted")


def constraint_key(constraint: Constraint) -> str:
    """A stable key for caching what was compiled from `constraint` (hex SHA-256)."""
    return hashlib.sha256(_encoder.encode(constraint)).hexdigest()
