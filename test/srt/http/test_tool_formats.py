"""Formats of tool calls: what a constraint allows is what the parser reads, on any split."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import pairwise
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.constrained.backends import load_backend
from phloem.constrained.base import CompiledGrammar, MatcherRejected
from phloem.constrained.bitmask import allowed_tokens, words
from phloem.constrained.vocab import Vocabulary
from phloem.srt.http.tool_formats import FORMATS, MAX_CALLS, Tool
from phloem.srt.http.tool_parser import (
    MAX_HEAD,
    AnswerParser,
    CallsParser,
    CallSyntax,
    NamedParser,
    Piece,
    TextParser,
    ToolArguments,
    ToolStart,
)
from phloem.srt.tokenizer.tool_text import describe_tools, spell_tool_calls

NAMES = sorted(FORMATS)
CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", '}"O']},
        "n": {"type": "integer", "maximum": 9, "minimum": 0},
    },
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
POINTED = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/A"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"A": {"enum": [1, None]}},
}
TOOLS = {
    "get_weather": Tool(CITY, "tools[0]"),
    "get_time": Tool(NOTHING, "tools[1]"),
    "point.at-it": Tool(POINTED, "tools[2]"),
}
TOKENS = [bytes([b]) for b in range(128)] + [b""]
END = len(TOKENS) - 1


@cache
def compiled(name: str, *, must: bool, once: bool) -> CompiledGrammar:
    form = FORMATS[name]
    calls = (form.must_call if must else form.may_call)(TOOLS, once=once)
    vocabulary = Vocabulary(TOKENS, frozenset(), (END,))
    return load_backend("routed", vocabulary).compile(calls.constraint)


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    try:
        for byte in text.encode():
            matcher.accept(byte)
    except MatcherRejected:
        return False
    return matcher.is_complete


def drawn(grammar: CompiledGrammar, rng: random.Random, begin: str) -> str:
    """A random text that begins so; calls come to their end, text after them does not last."""
    matcher = grammar.matcher()
    text = begin
    for byte in begin.encode():
        matcher.accept(byte)
    row = np.zeros(words(len(TOKENS)), np.int32)
    while True:
        matcher.fill(row)
        legal = allowed_tokens(row, len(TOKENS))
        assert legal
        if END in legal and (legal == [END] or rng.random() < 0.6):
            return text
        choices = [i for i in legal if i != END]
        inside = [i for i in choices if chr(i) not in " \t\r\n"] or choices
        token = rng.choice(choices if rng.random() < 0.1 else inside)
        matcher.accept(token)
        text += chr(token)


Calls = list[tuple[str, str]]


def run(parser: AnswerParser, text: str, cuts: list[int]) -> tuple[str, Calls]:
    """Feed `text` cut at `cuts`; content and (name, arguments) of the calls."""
    places = sorted({min(c, len(text)) for c in cuts} | {0, len(text)})
    pieces: list[Piece] = []
    for a, b in pairwise(places):
        pieces += parser.feed(text[a:b])
    pieces += parser.finish()
    starts = [p for p in pieces if isinstance(p, ToolStart)]
    assert [s.index for s in starts] == list(range(len(starts)))
    texts = {s.index: "" for s in starts}
    last = -1
    for piece in pieces:
        if isinstance(piece, ToolStart):
            last = piece.index
        if isinstance(piece, ToolArguments):
            assert piece.index == last
            assert piece.text
            texts[piece.index] += piece.text
    content = "".join(p for p in pieces if isinstance(p, str))
    assert all(p != "" for p in pieces)
    return content, [(s.name, texts[s.index]) for s in starts]


def parser(name: str, *, must: bool = False) -> CallsParser:
    return CallsParser(FORMATS[name].syntax, must_call=must)


def written(name: str, calls: list[tuple[str, Any]]) -> str:
    """Calls as the model writes them."""
    return spell_tool_calls(
        [{"function": {"name": n, "arguments": a}} for n, a in calls], FORMATS[name].name
    )


# ------------------------------------------------------------------ the constraint and the parser


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_what_must_be_calls_is_read_as_valid_calls(name: str, once: bool) -> None:
    rng = random.Random(name)
    grammar = compiled(name, must=True, once=once)
    counts = set()
    for _ in range(30):
        text = drawn(grammar, rng, "")
        content, calls = run(parser(name, must=True), text, rng.choices(range(200), k=20))
        assert content == ""
        assert calls
        for called, arguments in calls:
            assert jsonschema_rs.is_valid(TOOLS[called].schema, json.loads(arguments))
            assert called != "get_time" or json.loads(arguments) == {}
        counts.add(len(calls))
    assert max(counts) <= (1 if once or name == "llama3" else MAX_CALLS)
    assert once or name == "llama3" or max(counts) > 1


BEGIN = {
    "hermes": "Hm.\n<tool_call>",
    "json": "<tool_call>",
    "llama3": '{"name":',
    "mistral": "Hm. [TOOL_CALLS]",
    "mistral-args": "Hm.[TOOL_CALLS]",
}


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_what_begins_like_a_call_is_a_valid_one(name: str, once: bool) -> None:
    rng = random.Random(name)
    grammar = compiled(name, must=False, once=once)
    for _ in range(8):
        text = drawn(grammar, rng, BEGIN[name])
        content, calls = run(parser(name), text, rng.choices(range(200), k=20))
        assert content.startswith("Hm." if "Hm" in BEGIN[name] else "")
        for called, arguments in calls:
            assert jsonschema_rs.is_valid(TOOLS[called].schema, json.loads(arguments))
        assert len(calls) == 1 if once else calls


@pytest.mark.parametrize("name", NAMES)
def test_models_may_talk_where_calls_may_be(name: str) -> None:
    grammar = compiled(name, must=False, once=False)
    for text in ("Hello, {world}!", '{"city": 5}', "<b> [x]", "", "{", '[{"name": "f"}]'):
        assert accepts(grammar, text), text
        assert run(parser(name), text, list(range(len(text)))) == (text, [])
    # What the parser would take for a call of no tool is not to be said.
    begin = "" if name == "llama3" else written(name, [("x", {})]).partition("x")[0]
    key = FORMATS[name].arguments
    assert not accepts(grammar, f'{begin}{{"name": "x", "{key}": {{}}}}')
    assert not accepts(compiled(name, must=True, once=False), "Hello")
    assert not accepts(compiled(name, must=True, once=False), "")


@pytest.mark.parametrize("name", NAMES)
def test_calls_as_the_prompt_shows_them_are_legal(name: str) -> None:
    """History, description, constraint and parser agree on the form."""
    one = [("get_weather", {"city": "Oslo"})]
    several = [*one, ("get_time", {}), ("point.at-it", {"a": None})]
    for calls in (one, several[: 1 if name == "llama3" else 3]):
        text = written(name, calls)
        assert accepts(compiled(name, must=False, once=False), text)
        read = [(n, json.dumps(a)) for n, a in calls]
        assert run(parser(name), text, [3, 9, 20, 21, 40]) == ("", read)
        if name != "json":
            assert accepts(compiled(name, must=True, once=False), text)
        assert run(parser(name, must=True), text, [1, 7, 30]) == ("", read)
    if name != "llama3":
        assert not accepts(compiled(name, must=False, once=True), written(name, several))
    function = {"name": "f", "parameters": NOTHING}
    text = describe_tools([{"type": "function", "function": function}], FORMATS[name].name)
    assert text.endswith(written(name, [("function name", {})]))


# ------------------------------------------------------------------ the parser on any text

_values = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(alphabet='a"\\{}[]<>/é ,;', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(alphabet='k"}<', max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
_arguments = st.dictionaries(st.text(alphabet="ab", max_size=2), _values, max_size=3)
_cuts = st.lists(st.integers(0, 400), max_size=12)
_noise = st.text(alphabet='a<tool_c>\n {}[],;"T', max_size=8) | st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[TOOL_CALLS]f",
        "<|python_tag|>",
        '{"name": "f"',
        '{"name": "f", "arguments": ',
        '{"name": "f\\"", "parameters": 5}',
        '"name"',
        "[TOOL_CALLS] [",
    ]
)


@given(
    name=st.sampled_from(NAMES),
    must=st.booleans(),
    parts=st.lists(_noise | _arguments, max_size=5),
    cuts=_cuts,
)
def test_any_text_is_read_alike_on_any_split(
    name: str, must: bool, parts: list[Any], cuts: list[int]
) -> None:
    text = "".join(p if isinstance(p, str) else written(name, [("f", p)]) for p in parts)
    whole = run(parser(name, must=must), text, [])
    assert run(parser(name, must=must), text, cuts) == whole
    assert run(parser(name, must=must), text, list(range(len(text)))) == whole


@given(calls=st.lists(_arguments, min_size=1, max_size=3), cuts=_cuts, name=st.sampled_from(NAMES))
def test_arguments_come_as_they_were_written(
    calls: list[dict[str, Any]], cuts: list[int], name: str
) -> None:
    text = written(name, [("f", a) for a in calls])
    expected = ("", [("f", json.dumps(a, ensure_ascii=False)) for a in calls])
    assert run(parser(name), text, cuts) == expected
    assert run(parser(name, must=True), f" {text}\n", cuts) == expected
    one = json.dumps(calls[0])
    assert run(NamedParser("f"), one, cuts) == ("", [("f", one)])
    assert run(TextParser(), text, cuts) == (text, [])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\n{broken}\n</tool_call>",
        "a <tool",
        "<<tool_call",
        "x\n",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        f'<tool_call>{{"name": "{"x" * MAX_HEAD}", "arguments": {{}}}}</tool_call>',
        f"<tool_call>{' ' * (MAX_HEAD + 1)}",
        "[TOOL_CALLS]",
        "[TOOL_CALLS][",
        "[TOOL_CALLS]f(x)",
        "[TOOL_CALLS] [1, 2]",
        '{"name": "f", "args": {}}',
        "<|python_tag|>print(1)",
        " \n",
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_call_is_text(name: str, text: str) -> None:
    assert run(parser(name), text, list(range(len(text)))) == (text, [])


def test_a_call_behind_what_was_none() -> None:
    text = f"<tool_call>{{x<tool_call>\n{json.dumps({'name': 'f', 'arguments': {}})}\n</tool_call>b"
    for cuts in ([], list(range(len(text)))):
        assert run(parser("hermes"), text, cuts) == ("<tool_call>{xb", [("f", "{}")])


@pytest.mark.parametrize("name", NAMES)
def test_pieces_come_as_early_as_they_are_certain(name: str) -> None:
    reader = parser(name)
    text = written(name, [("f", {"a": "some longer text"})])
    begin, inside, rest = text.partition("some longer")
    pieces = reader.feed(begin)
    assert [type(p) for p in pieces] == [ToolStart, ToolArguments]
    assert reader.feed(inside) == [ToolArguments(0, inside)]
    assert reader.feed(rest[:1]) == [ToolArguments(0, rest[:1])]
    assert parser("hermes").feed("Hi <") == ["Hi "]


def test_a_forced_call_that_was_cut_off_is_nothing() -> None:
    for text in ("{", '{"name": "f', '{"name": "f", "arguments": '):
        assert run(parser("json", must=True), text, []) == ("", [])
    assert run(parser("json", must=True), '{"name": "f", "arguments": {"a', []) == (
        "",
        [("f", '{"a')],
    )


def test_ids_are_new_and_of_the_wanted_form() -> None:
    for syntax, length in ((CallSyntax("x"), 29), (CallSyntax("x", id_length=9), 9)):
        ids = {syntax.new_id() for _ in range(100)}
        assert len(ids) == 100
        assert {len(i) for i in ids} == {length}
