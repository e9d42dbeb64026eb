"""`/openapi.json`: the OpenAPI 3.1 document, made of the routes' declarations and of the types that
decode what they read and encode what they reply. `/docs` shows it.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin

import msgspec
from aiohttp import web

from phloem.srt.http.body import BodyReader
from phloem.srt.http.docs_page import page, policy
from phloem.srt.http.errors import AnthropicError, ErrorEnvelope, ErrorShape, OllamaError, shape_of
from phloem.srt.http.field_notes import describe_body, describe_part
from phloem.srt.http.framing import SSE
from phloem.srt.http.routes import JSON, Access, Content, Groups, Route

Node = dict[str, Any]

_REF: Final = "#/components/schemas/{name}"
_ERRORS: Final = {
    ErrorShape.OPENAI: ErrorEnvelope,
    ErrorShape.ANTHROPIC: AnthropicError,
    ErrorShape.OLLAMA: OllamaError,
}
_ACCESS: Final = {
    Access.OPEN: "No key is asked for.",
    Access.KEY: "Where keys are asked for, any that is known.",
    Access.INFERENCE: "Where keys are asked for, one with the scope `inference`.",
    Access.ADMIN: "Where keys are asked for, one with the scope `admin`.",
}
_KEYS: Final[list[dict[str, list[str]]]] = [{"bearer": []}, {"x-api-key": []}]


class ApiDocument:
    """The document of `groups`, and its page, made when they are first asked for. `keys` says
    whether the server asks for keys."""

    def __init__(self, groups: Groups, version: str, *, keys: bool) -> None:
        self._groups = groups
        self._version = version
        self._keys = keys

    @cached_property
    def json(self) -> bytes:
        return msgspec.json.encode(self._document)

    @cached_property
    def page(self) -> str:
        return page(self._document, keys=self._keys)

    @cached_property
    def _document(self) -> Node:
        return openapi(self._groups, self._version)


DOCUMENT: Final = web.AppKey("document", ApiDocument)


def openapi(groups: Groups, version: str) -> Node:
    """The whole document. Raises `TypeError` for a type that no JSON schema describes."""
    types = dict.fromkeys(
        [type_ for routes in groups.values() for route in routes for type_ in _types(route)]
    )
    schemas, components = msgspec.json.schema_components(
        types, schema_hook=_any_value, ref_template=_REF
    )
    described = dict(zip(types, map(_portable, schemas), strict=True))
    paths: dict[str, Node] = {}
    for group, routes in groups.items():
        for route in routes:
            operation = {"tags": [group], **_operation(route, described)}
            paths.setdefault(route.pattern, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Phloem", "version": version},
        "tags": [{"name": group} for group in groups],
        "paths": paths,
        "components": {
            "schemas": _components(components, groups, described),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _types(route: Route) -> Iterator[Any]:
    """Everything that a route reads and replies, as msgspec knows types."""
    yield from _alternatives(_error_type(route))
    body = route.body.type_ if isinstance(route.body, BodyReader) else route.body
    for one in (body, route.reply, route.events):
        type_ = one.type_ if isinstance(one, Content) else one
        if type_ is not None:
            yield from _alternatives(type_)


def _components(components: Node, groups: Groups, described: dict[Any, Node]) -> Node:
    """The named schemas, those of bodies with what their fields mean."""
    readers = [route.body for routes in groups.values() for route in routes]
    types = [one.type_ for one in readers if isinstance(one, BodyReader | Content) and one.type_]
    bodies = {described[one]["$ref"].rpartition("/")[2]: one for one in types}
    found: Node = {}
    for name, schema in ((_public(name), _portable(one)) for name, one in components.items()):
        body = bodies.get(name)
        found[name] = (
            describe_part(name, schema) if body is None else describe_body(name, schema, body)
        )
    return found


def _error_type(route: Route) -> Any:
    return route.error or _ERRORS[shape_of(route.pattern)]


def _operation(route: Route, described: dict[Any, Node]) -> Node:
    said = [inspect.cleandoc(route.handler.__doc__ or ""), _ACCESS[route.access]]
    found: Node = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.pattern}").strip("_"),
        "summary": route.summary,
        "description": "\n\n".join(filter(None, said)),
        "parameters": [*_path_parameters(route), *_query_parameters(route)],
        "responses": _responses(route, described),
        "security": [] if route.access is Access.OPEN else _KEYS,
    }
    if route.body is not None:
        found["requestBody"] = _request_body(route, described)
    return found


def _path_parameters(route: Route) -> Iterator[Node]:
    for name in route.parameters:
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _query_parameters(route: Route) -> Iterator[Node]:
    if route.query is None:
        return
    (schema,), components = msgspec.json.schema_components([route.query], ref_template="{name}")
    table = _portable(components[schema["$ref"]])
    for name, field in table["properties"].items():
        needed = name in table["required"]
        yield {"name": name, "in": "query", "required": needed, "schema": field}


def _request_body(route: Route, described: dict[Any, Node]) -> Node:
    body = route.body
    if isinstance(body, Content):
        content, refused = _content(body.media_type, body.type_, described), []
    else:
        assert body is not None
        content, refused = _content(JSON, body.type_, described), sorted(body.unsupported)
    found: Node = {"required": not route.optional_body, "content": content}
    if route.example is not None:
        next(iter(content.values()))["example"] = dict(route.example)
    if refused:
        names = ", ".join(f"`{name}`" for name in refused)
        found["description"] = f"Refused, unless their value asks for nothing: {names}."
    return found


def _responses(route: Route, described: dict[Any, Node]) -> Node:
    content: Node = {}
    if isinstance(route.reply, Content):
        content |= _content(route.reply.media_type, route.reply.type_, described)
    elif route.reply is not None:
        content |= _content(JSON, route.reply, described)
    if route.events is not None:
        media_type = route.framing.content_type.partition(";")[0]
        what = "One frame an event" if route.framing is SSE else "One event after another"
        content[media_type] = {
            # Of no type: to some readers it is of the whole text, to others of each frame.
            "schema": {"description": f"{what}, of `x-event-schema`."},
            "x-event-schema": _schema(route.events, described),
        }
    refusal = {"content": _content(JSON, _error_type(route), described)}
    return {
        "200": {"description": route.summary} | ({"content": content} if content else {}),
        "4XX": {"description": "The request is refused."} | refusal,
        "5XX": {"description": "The server cannot answer."} | refusal,
    }


def _content(media_type: str, type_: Any, described: dict[Any, Node]) -> Node:
    return {media_type: {"schema": _schema(type_, described)}}


def _schema(type_: Any, described: dict[Any, Node]) -> Node:
    if type_ is None:
        return {"type": "string"}
    schemas = [described[one] for one in _alternatives(type_)]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _alternatives(type_: Any) -> tuple[Any, ...]:
    """The members of a union; msgspec knows none of structs that have no tags."""
    return get_args(type_) if get_origin(type_) in (UnionType, Union) else (type_,)


def _any_value(type_: type) -> Node:
    if type_ is object:
        return {"description": "Any JSON value."}
    raise NotImplementedError


def _portable(node: Any) -> Any:
    """`node` without what is Python's: names of modules, and `\\Z` of its regular expressions,
    which is `$` elsewhere."""
    if isinstance(node, list):
        return [_portable(one) for one in node]
    if not isinstance(node, dict):
        return node
    found = {key: _portable(value) for key, value in node.items()}
    match found:
        case {"pattern": str(pattern)}:
            found["pattern"] = pattern.replace(r"\Z", "$")
        case {"$ref": str(reference)}:
            folder, _, name = reference.rpartition("/")
            found["$ref"] = f"{folder}/{_public(name)}"
    return found


def _public(name: str) -> str:
    """A schema's name. Where two types have one name, msgspec puts their modules in front, of which
    the protocol is left: `ollama.ToolCall`."""
    *modules, own = name.removeprefix("phloem.srt.http.").split(".")
    return ".".join([*modules[:-1], own])


# ----------------------------------------------------------------------- routes


async def document(request: web.Request) -> web.Response:
    api = request.config_dict[DOCUMENT]
    body = await asyncio.to_thread(lambda: api.json)
    return web.Response(body=body, content_type=JSON)


async def docs(request: web.Request) -> web.Response:
    """A page that shows `/openapi.json`; it asks nothing of any other server."""
    api = request.config_dict[DOCUMENT]
    text = await asyncio.to_thread(lambda: api.page)
    headers = {"Content-Security-Policy": policy()}
    return web.Response(text=text, content_type="text/html", headers=headers)


ROUTES: Final = (
    Route("GET", "/openapi.json", document, Access.KEY, "This document", reply=Content(JSON)),
    Route("GET", "/docs", docs, Access.OPEN, "This document as a page", reply=Content("text/html")),
)
