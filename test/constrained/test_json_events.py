"""Values of a growing document against `json.loads` of the whole."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.constrained.json_events import MAX_DEPTH, Field, JsonEvents

_keys = st.text(st.sampled_from('ab/~"\\ é😀\n0'), max_size=4)
_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
_documents = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_keys, inner, max_size=4),
    max_leaves=25,
)
_STYLES: list[dict[str, Any]] = [
    {"separators": (",", ":")},
    {"indent": 2},
    {"ensure_ascii": False},
    {"indent": "\t", "separators": (" ,", " : ")},
]


def cut(text: str, seed: int, most: int) -> list[str]:
    draw = random.Random(seed)
    pieces = []
    while text:
        size = draw.randint(1, most)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """The oracle: every scalar and every empty container, in the order of the text."""
    if isinstance(value, dict) and value:
        parts = [(k.replace("~", "~0").replace("/", "~1"), v) for k, v in value.items()]
    elif isinstance(value, list) and value:
        parts = [(str(i), v) for i, v in enumerate(value)]
    else:
        return [(path, value)]
    return [leaf for key, part in parts for leaf in leaves(part, f"{path}/{key}")]


def events(pieces: list[str], *, lines: bool = False) -> list[Field]:
    parser = JsonEvents(lines=lines)
    found = [field for piece in pieces for field in parser.feed(piece)]
    return found + parser.finish()


@settings(deadline=None, max_examples=300)
@given(
    document=_documents,
    style=st.sampled_from(_STYLES),
    seed=st.integers(0, 2**32),
    most=st.integers(1, 9),
)
def test_events_are_the_document(
    document: Any, style: dict[str, Any], seed: int, most: int
) -> None:
    text = json.dumps(document, **style)
    found = events(cut(text, seed, most))
    assert [(f.path, f.value) for f in found] == leaves(document)
    position = 0
    for field in found:  # each value is a slice of the text, in the text's order
        position = text.find(field.raw, position) if field.raw not in ("[]", "{}") else position
        assert position >= 0


@settings(deadline=None, max_examples=100)
@given(documents=st.lists(_documents, min_size=1, max_size=4), seed=st.integers(0, 2**32))
def test_lines_are_numbered(documents: list[Any], seed: int) -> None:
    text = "\n".join(json.dumps(document) for document in documents)
    found = events(cut(text, seed, 5), lines=True)
    assert [(f.path, f.value) for f in found] == [
        leaf for i, document in enumerate(documents) for leaf in leaves(document, f"/{i}")
    ]


def test_a_value_comes_with_its_last_character() -> None:
    parser = JsonEvents()
    told = [[f.path for f in parser.feed(char)] for char in '{"a":[1,"x"],"b":{}}']
    assert [paths for paths in told if paths] == [["/a/0"], ["/a/1"], ["/b"]]
    assert told[7] == ["/a/0"]  # a number ends with what follows it


@settings(deadline=None, max_examples=300)
@given(
    document=_documents,
    place=st.integers(0, 2**16),
    char=st.sampled_from('{}[]",:\\ 01-.eEtxn\n\x01'),
    insert=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_what_json_refuses_is_refused(
    document: Any, place: int, char: str, insert: bool, seed: int
) -> None:
    text = json.dumps(document)
    place %= len(text)
    text = text[:place] + char + text[place + (not insert) :]
    try:
        expected = leaves(json.loads(text, object_pairs_hook=_Pairs))
    except ValueError:
        expected = None
    try:
        found: Any = [(f.path, f.value) for f in events(cut(text, seed, 4))]
        complete = _complete(text)
    except ValueError:
        found, complete = None, False
    if expected is not None:
        assert found == expected
    else:
        assert not complete


class _Pairs(dict[str, Any]):
    """Members in order, with repeated keys."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self._pairs = pairs

    def items(self) -> Any:
        return self._pairs


def _complete(text: str) -> bool:
    parser = JsonEvents()
    parser.feed(text)
    parser.finish()
    return parser.complete


@pytest.mark.parametrize("text", ["01", "tru", '{"a" 1}', "[1,]", "[1 2]", '"\\x"', "{]", "1}"])
def test_broken(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        events([text])


def test_depth_is_bounded() -> None:
    parser = JsonEvents()
    parser.feed("[" * MAX_DEPTH)
    with pytest.raises(ValueError, match="nests"):
        parser.feed("[")


def test_a_cut_document_is_told_as_far_as_it_goes() -> None:
    assert [f.path for f in events(['{"a": 1, "b": "x', ""])] == ["/a"]
    assert events(['{"a": 1']) == []  # the number might have gone on
