"""`/openapi.json` is of every route, and true: what it says is what is read and replied."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from phloem.srt.config import ServerOptions
from phloem.srt.http.app import GROUPS, create_app
from phloem.srt.http.body import BodyReader
from phloem.srt.http.openapi import openapi
from phloem.srt.http.routes import Access, Content, Route, add_routes

DOCUMENT = openapi(GROUPS, "1.2.3")
ROUTES = [route for routes in GROUPS.values() for route in routes]
OPERATIONS = [
    (method, path, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
]


def walk(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
    for child in (
        node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    ):
        yield from walk(child)


def validator(schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def json_schema(holder: Any) -> dict[str, Any] | None:
    content = holder.get("content", {}).get("application/json")
    return None if content is None else content["schema"]


def test_every_route_of_the_router_is_in_it(engine: Any) -> None:
    """None can be without: what the router has was declared, since there is no other way in."""
    router = create_app(engine, ServerOptions()).router
    served = {
        (route.method.lower(), route.resource.canonical)
        for route in router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert served == {(method, path) for method, path, _ in OPERATIONS}


def test_a_route_is_declared_once(engine: Any) -> None:
    app = create_app(engine, ServerOptions())
    twice = Route("GET", "/a/{x:.+}", ROUTES[0].handler, Access.KEY, "One")
    other = Route("GET", "/a/{x}", ROUTES[0].handler, Access.OPEN, "Another")
    with pytest.raises(ValueError, match=r"GET /a/\{x\} is declared twice"):
        add_routes(app, {"Group": (twice, other)})


def test_its_schemas_are_json_schema() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    for node in walk(DOCUMENT):
        if "$ref" in node:
            assert node["$ref"].removeprefix("#/components/schemas/") in schemas
        if isinstance(node.get("pattern"), str):
            assert r"\Z" not in node["pattern"]  # no other language knows it
            assert r"\A" not in node["pattern"]
        assert "phloem.srt" not in node.get("$ref", "")
    assert schemas["CalledFunction"] != schemas["ollama.CalledFunction"]
    assert len({operation["operationId"] for *_, operation in OPERATIONS}) == len(OPERATIONS)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.pattern}")
def test_a_route_says_all_there_is_to_say(route: Route) -> None:
    operation = DOCUMENT["paths"][route.pattern][route.method.lower()]
    assert operation["summary"]
    assert not operation["summary"].endswith(".")
    assert [one["name"] for one in operation["parameters"] if one["in"] == "path"] == re.findall(
        r"\{(\w+)\}", route.pattern
    )
    assert operation["security"] == [] if route.access is Access.OPEN else operation["security"]
    if isinstance(route.body, BodyReader):
        schema = json_schema(operation["requestBody"])
        assert schema is not None
        assert route.example is not None
        validator(schema).validate(dict(route.example))
        assert route.body.type_.__name__ in json.dumps(schema)
    elif route.method in ("POST", "PUT") and route.body is None:
        assert not operation.get("requestBody")


@pytest.mark.parametrize(
    ("path", "body", "valid"),
    [
        ("/v1/completions", {"prompt": "Hi", "rid": "a b"}, False),
        ("/v1/completions", {"prompt": "Hi", "rid": "a-b"}, True),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "temperature": None}, True),
        ("/v1/completions", {"temperature": 1}, False),
        ("/v1/chat/completions", {"messages": []}, False),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "n": 0}, False),
        ("/generate", {"text": "Hi", "typo": 1}, False),
    ],
)
def test_what_it_says_of_bodies_is_what_is_read(path: str, body: Any, valid: bool) -> None:
    schema = json_schema(DOCUMENT["paths"][path]["post"]["requestBody"])
    assert schema is not None
    assert validator(schema).is_valid(body) is valid


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/health", None),
        ("GET", "/v1/models", None),
        ("GET", "/version", None),
        ("GET", "/server_info", None),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("POST", "/v1/completions", {"prompt": "Hi", "logprobs": 2, "echo": True}),
        ("POST", "/generate", {"text": ["Hi", "Ho"], "return_logprob": True}),
        ("POST", "/tokenize", {"text": "Hi"}),
        ("POST", "/detokenize", {"tokens": [72]}),
        ("POST", "/abort", {"rid": "x"}),
        ("POST", "/v1/completions", {}),
        ("POST", "/v1/messages", {}),
        ("POST", "/api/chat", {"model": 3}),
    ],
)
async def test_replies_are_as_it_says(api: Any, method: str, path: str, body: Any) -> None:
    reply = await api.call(method, path, body)
    responses = DOCUMENT["paths"][path][method.lower()]["responses"]
    schema = json_schema(responses["200" if reply.status == 200 else f"{reply.status // 100}XX"])
    assert schema is not None
    validator(schema).validate(reply.json)


async def test_events_are_as_it_says(api: Any) -> None:
    reply = await api.chat(stream=True, stream_options={"include_usage": True})
    content = DOCUMENT["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    schema = content["text/event-stream"]["x-event-schema"]
    assert len(reply.events) > 3
    for event in reply.events:
        validator(schema).validate(event)


async def test_it_is_served_to_who_has_a_key(serve: Any) -> None:
    api = await serve(api_key="k")
    assert (await api.call("GET", "/openapi.json")).status == 401
    reply = await api.call("GET", "/openapi.json", headers={"Authorization": "Bearer k"})
    served = reply.json
    assert isinstance(served, dict)
    assert served["openapi"].startswith("3.1.")
    assert served["paths"] == json.loads(json.dumps(DOCUMENT["paths"]))
    assert served["components"] == json.loads(json.dumps(DOCUMENT["components"]))


class Assets(HTMLParser):
    """Everything that a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {"script": "src", "link": "href", "img": "src", "iframe": "src"}
        self.fetched += [value or "" for name, value in attrs if name == names.get(tag)]


async def test_the_page_needs_no_other_server_and_no_key(serve: Any) -> None:
    api = await serve(api_key="k")
    reply = await api.call("GET", "/docs")
    assert (reply.status, reply.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assets = Assets()
    assets.feed(reply.raw)
    assert assets.fetched == []
    assert "http://" not in reply.raw
    assert "https://" not in reply.raw
    policy = reply.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; connect-src 'self'; script-src 'sha256-")
    assert "innerHTML" not in reply.raw


def test_what_a_form_reads_is_declared_as_one() -> None:
    for route in ROUTES:
        if isinstance(route.body, Content):
            assert route.body.media_type == "multipart/form-data"


STATEFUL = ("/cache/", "/scheduler/", "/v1/batches", "/api/show", "/api/pull", "/api/delete")
"""Their examples need an answer of the scheduler, or something that is stored."""


@pytest.mark.parametrize(
    "route",
    [
        route
        for route in ROUTES
        if isinstance(route.body, BodyReader) and not route.pattern.startswith(STATEFUL)
    ],
    ids=lambda route: f"{route.method} {route.pattern}",
)
async def test_examples_are_answered_as_it_says(api: Any, route: Route) -> None:
    reply = await api.call(route.method, route.path, dict(route.example or {}))
    assert reply.status == 200, reply.raw
    content = DOCUMENT["paths"][route.pattern][route.method.lower()]["responses"]["200"]["content"]
    media_type = reply.headers["Content-Type"].partition(";")[0]
    if media_type == "application/json":
        validator(content[media_type]["schema"]).validate(reply.json)
    else:
        assert media_type == "application/x-ndjson"  # streamed by default
        for line in reply.raw.splitlines():
            validator(content[media_type]["x-event-schema"]).validate(json.loads(line))
