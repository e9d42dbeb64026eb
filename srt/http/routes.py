"""What a route is: one declaration beside its handler, which the router, the access check and the
OpenAPI document are all made of.

A module of handlers ends in a tuple of `Route`s; `app.GROUPS` lists the tuples.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from phloem.srt.http.body import BodyReader
from phloem.srt.http.framing import SSE, Framing

JSON: Final = "application/json"
_PATTERN: Final = re.compile(r"\{(?P<name>\w+)(?::[^{}]*)?\}")


class Access(Enum):
    """What a route asks for."""

    OPEN = auto()  # nothing
    KEY = auto()  # any key that is known
    INFERENCE = auto()  # a key of that scope
    ADMIN = auto()


@dataclass(frozen=True)
class Content:
    """A body that is not plain JSON: its media type, and the type that its fields are of, if it
    has fields. Without one it is text or bytes."""

    media_type: str
    type_: Any = None


@dataclass(frozen=True)
class Route:
    """One method of one path. `summary` is a phrase for the documentation.

    `body` is what reads the body (None: it has none, or none that matters), `optional_body` that
    it may be left out, `query` the type of the query. `reply` is the type of the whole reply, as
    msgspec knows types, or a union of such; `events` is the same for each event when it is a
    stream, in `framing`.
    `error` is the type of replies with an error status, if it is not that of all routes of the
    protocol. `example` is a body that is answered, for the documentation.
    """

    method: str
    path: str
    handler: Handler
    access: Access
    summary: str
    body: BodyReader[Any] | Content | None = None
    optional_body: bool = False
    query: type | None = None
    reply: Any = None
    events: Any = None
    framing: Framing = SSE
    error: Any = None
    example: Mapping[str, Any] | None = None

    @property
    def pattern(self) -> str:
        """The path as OpenAPI, metrics and aiohttp's `canonical` have it: `/v1/models/{model}`."""
        return _PATTERN.sub(r"{\g<name>}", self.path)

    @property
    def parameters(self) -> list[str]:
        """The names of what stands in the path."""
        return [match["name"] for match in _PATTERN.finditer(self.path)]


Groups = Mapping[str, Iterable[Route]]
"""Routes by the protocol that they belong to."""

TABLE: Final = web.AppKey("routes", dict[tuple[str, str], Route])
"""(method, pattern) of each route → its declaration."""


def add_routes(app: web.Application, groups: Groups) -> None:
    """Add routes to `app` and to its table; there is no other way into either.

    Raises:
        ValueError: two routes have one method and pattern.
    """
    table = app[TABLE] = {}
    for route in (route for routes in groups.values() for route in routes):
        key = route.method, route.pattern
        if key in table:
            raise ValueError(f"{route.method} {route.pattern} is declared twice")
        table[key] = route
        # What streams, or may change something, is not for HEAD.
        allow_head = {"allow_head": route.events is None and route.access is not Access.ADMIN}
        more = allow_head if route.method == hdrs.METH_GET else {}
        app.router.add_routes([web.RouteDef(route.method, route.path, route.handler, more)])


def route_of(request: web.Request) -> Route | None:
    """The declaration of the route that `request` came to; None where there is no such route."""
    resource = request.match_info.route.resource
    if resource is None:
        return None
    method = hdrs.METH_GET if request.method == hdrs.METH_HEAD else request.method
    return request.config_dict[TABLE][method, resource.canonical]
