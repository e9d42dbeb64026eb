"""`/docs` without a script: every route is on it, examples are commands, fields are explained."""

from __future__ import annotations

import json
import re
import shlex
from html.parser import HTMLParser
from typing import Any

import pytest

from phloem.srt.http import native_protocol, scoring_protocol
from phloem.srt.http.app import GROUPS
from phloem.srt.http.docs_page import page, policy
from phloem.srt.http.embeddings import protocol as embedding_protocol
from phloem.srt.http.field_notes import NOTES, REFUSED
from phloem.srt.http.openapi import openapi

DOCUMENT = openapi(GROUPS, "1.2.3")
SCHEMAS = DOCUMENT["components"]["schemas"]
VOID = {"meta", "input", "link"}
LINKS = ("src", "href", "action", "srcset", "data", "poster")


class Page(HTMLParser):
    """What a reader without a script sees: routes with their anchors and examples. Every element
    is closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.routes: dict[tuple[str, str], str] = {}
        self.commands: dict[str, str] = {}
        self.links: list[str] = []
        self.ids: list[str] = []
        self._open: list[tuple[str, str]] = []
        self._anchor = ""
        self._method = ""
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        assert not [name for name in found if name.startswith("on")]
        self.links += [found[name] for name in LINKS if name in found]
        if "id" in found:
            self.ids.append(found["id"])
        if tag == "details":
            self._anchor = found["id"]
        if tag not in VOID:
            self._open.append((tag, found.get("class", "")))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self._open]
        if "pre" in tags:
            self.commands[self._anchor] = self.commands.get(self._anchor, "") + data
        elif self._open and self._open[-1][1] == "method":
            self._method = data
        elif self._open and self._open[-1][1] == "path":
            self.routes[self._method.lower(), data] = self._anchor


async def served(serve: Any, **options: Any) -> Page:
    reply = await (await serve(**options)).call("GET", "/docs")
    assert reply.status == 200
    assert reply.headers["Content-Security-Policy"] == policy()
    return Page(reply.raw)


async def test_every_route_is_on_the_page_without_a_script(serve: Any) -> None:
    api = await serve()
    document = (await api.call("GET", "/openapi.json")).json
    shown = await served(serve)
    assert shown.routes == {
        (method, path): operation["operationId"]
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert len(set(shown.ids)) == len(shown.ids)


async def test_it_links_to_nothing_but_the_document(serve: Any) -> None:
    assert set((await served(serve)).links) == {"openapi.json"}


@pytest.mark.parametrize("key", [None, "k"])
async def test_examples_are_commands(serve: Any, key: str | None) -> None:
    shown = await served(serve, api_key=key)
    for (method, path), anchor in shown.routes.items():
        operation = DOCUMENT["paths"][path][method]
        name, *words = shlex.split(shown.commands[anchor])
        assert name == "curl"
        url = re.sub(r"\{(\w+)\}", lambda match: f"${match[1].upper()}", path)
        assert words.pop() == f"localhost:30000{url}"
        has_key = "Authorization: Bearer $KEY" in words
        assert has_key == (key is not None and operation["security"] != [])
        example = example_of(operation)
        if "--json" in words:
            assert json.loads(words[words.index("--json") + 1]) == example
        else:
            assert words.count("-F") == len(example or {})
        default = "GET" if example is None else "POST"
        asked = words[words.index("-X") + 1] if "-X" in words else default
        assert asked == method.upper()


def example_of(operation: dict[str, Any]) -> Any:
    contents: dict[str, Any] = operation.get("requestBody", {}).get("content", {})
    return next((content.get("example") for content in contents.values()), None)


def test_what_the_document_says_is_text_on_the_page() -> None:
    operation = {
        "operationId": "post_a",
        "tags": ["<b>"],
        "summary": "<img src=x>",
        "description": "`<i>` & so",
        "requestBody": {"content": {"application/json": {"example": {"a": "'</pre>"}}}},
        "security": [],
    }
    document = {"tags": [{"name": "<b>"}], "paths": {"/a/{b}": {"post": operation}}}
    shown = Page(page(document, keys=True))
    assert shown.routes == {("post", "/a/{b}"): "post_a"}
    words = shlex.split(shown.commands["post_a"])
    assert words == ["curl", "--json", '{"a": "\'</pre>"}', "localhost:30000/a/$B"]
    assert shown.links == ["openapi.json"] * 2


BODIES = {
    name: SCHEMAS[name]
    for operation in (one for methods in DOCUMENT["paths"].values() for one in methods.values())
    for content in operation.get("requestBody", {}).get("content", {}).values()
    for name in re.findall(r'"#/components/schemas/([\w.]+)"', json.dumps(content["schema"]))
}


@pytest.mark.parametrize("name", BODIES)
def test_every_field_of_a_body_is_explained(name: str) -> None:
    for field, schema in BODIES[name]["properties"].items():
        assert schema.get("description"), field
    assert set(BODIES[name].get("required", ())) <= set(BODIES[name]["properties"])


def test_every_note_is_of_a_field() -> None:
    said = {
        (key, schema["description"])
        for name, struct in SCHEMAS.items()
        for field, schema in struct.get("properties", {}).items()
        for key in (f"{name}.{field}", field)
        if "description" in schema
    }
    assert [key for key, note in NOTES.items() if (key, note) not in said] == []


def test_a_field_without_a_note_is_one_that_is_refused() -> None:
    """Else what a new field means would be left out of the page, or told wrongly."""
    refused = {
        f"{name}.{field}"
        for name, struct in BODIES.items()
        for field, schema in struct["properties"].items()
        if schema.get("description") == REFUSED
    }
    known = {
        *(*native_protocol.UNSUPPORTED_RAW, *native_protocol.UNSUPPORTED_FLAGS, "session_id"),
        *(*embedding_protocol.UNSUPPORTED_RAW, *embedding_protocol.UNSUPPORTED_FLAGS),
        *scoring_protocol.CROSS_ENCODER_FIELDS,
    }
    assert {path.partition(".")[2] for path in refused} == known


def test_a_structs_own_fields_come_first() -> None:
    fields = list(SCHEMAS["ChatRequest"]["properties"])
    assert fields[0] == "messages"
    assert fields.index("model") < fields.index("seed") < fields.index("guided_json")
