"""Pages of other origins: which may read replies (the Fetch standard's CORS protocol).

Nobody's pages, unless `--cors-origin` names their origin. Credentials are never allowed: a key goes
in a header that the page sets, not in a cookie that the browser adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

ANY: Final = "*"
MAX_AGE_S: Final = 600
_EXPOSED: Final = (
    "X-Request-Id",
    "Retry-After",
    *(
        f"{protocol}-ratelimit-{name}"
        for protocol, names in (
            ("x", ("limit-{}", "remaining-{}", "reset-{}")),
            ("anthropic", ("{}-limit", "{}-remaining", "{}-reset")),
        )
        for kind in ("requests", "tokens")
        for name in (one.format(kind) for one in names)
    ),
)


class Cors:
    """The origins whose pages may read replies; `*` among them is every origin."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = ANY in origins
        self._origins = frozenset(origins)

    def attach(self, app: web.Application) -> None:
        """Have every response of `app` say who may read it."""
        if self._origins:
            app.on_response_prepare.append(self._tell)

    @web.middleware
    async def preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a browser's question before its request, which has no key with it."""
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
        is_question = request.method == hdrs.METH_OPTIONS and asked is not None
        if not is_question or self._allowed(request) is None:
            return await handler(request)
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST, PUT, DELETE, HEAD",
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: request.headers.get(
                hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "Authorization, Content-Type"
            ),
            hdrs.ACCESS_CONTROL_MAX_AGE: str(MAX_AGE_S),
            hdrs.VARY: "Access-Control-Request-Headers",
        }
        return web.Response(status=204, headers=headers)

    def _allowed(self, request: web.Request) -> str | None:
        """What `Access-Control-Allow-Origin` says to `request`, if anything."""
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None:
            return None
        if self._any:
            return ANY
        return origin if origin in self._origins else None

    async def _tell(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        assert isinstance(request, web.Request)
        if not self._any:
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)  # also where there is none
        allowed = self._allowed(request)
        if allowed is not None:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = allowed
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = ", ".join(_EXPOSED)
