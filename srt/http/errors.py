"""From exceptions to the OpenAI error envelope: the one place that decides what a client reads.

    {"error": {"message": …, "type": …, "param": … | null, "code": … | null}}

`PhloemError` carries status, type and code itself; what aiohttp raises (unknown route, body too
large) is translated; anything else is a fault of ours, logged and answered with a plain 500.
"""

from __future__ import annotations

import math
from http import HTTPStatus

import msgspec
from aiohttp import web

from phloem.srt.errors import (
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InternalError,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    PhloemError,
    QueueFull,
    Unauthorized,
    Unavailable,
)

DEFAULT_RETRY_AFTER_S = 1.0

_DEFAULT_CODES: dict[type[PhloemError], str] = {
    Unauthorized: "invalid_api_key",
    Forbidden: "forbidden",
    NotFound: "not_found",
    Conflict: "conflict",
    PayloadTooLarge: "payload_too_large",
    QueueFull: "queue_full",
    InternalError: "internal_error",
    Unavailable: "unavailable",
    DeadlineExceeded: "deadline_exceeded",
}


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorBody


_encoder = msgspec.json.Encoder()


def envelope(error: PhloemError) -> ErrorEnvelope:
    """The error as clients of every route see it, in a body or in a stream's frame."""
    return ErrorEnvelope(
        ErrorBody(
            message=error.message,
            type=error.kind,
            param=error.param,
            code=error.code or _DEFAULT_CODES.get(type(error)),
        )
    )


def error_response(error: PhloemError) -> web.Response:
    """The whole response to a request that ended in `error`."""
    headers: dict[str, str] = {}
    if isinstance(error, QueueFull | Unavailable):
        seconds = DEFAULT_RETRY_AFTER_S if error.retry_after is None else error.retry_after
        headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return _response(envelope(error), error.status, headers)


def http_exception_response(error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals, in the same envelope and with their status."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return error_response(PayloadTooLarge(f"The request body is too large: {error.text}"))
    if isinstance(error, web.HTTPNotFound):
        return error_response(NotFound("There is no such route.", code="unknown_route"))
    kind = InvalidRequest.kind if error.status < 500 else InternalError.kind
    phrase = HTTPStatus(error.status).phrase
    body = ErrorBody(message=error.reason, type=kind, code=phrase.lower().replace(" ", "_"))
    allow = error.headers.get("Allow")
    return _response(ErrorEnvelope(body), error.status, {"Allow": allow} if allow else {})


def _response(body: ErrorEnvelope, status: int, headers: dict[str, str]) -> web.Response:
    return web.Response(
        body=_encoder.encode(body), status=status, headers=headers, content_type="application/json"
    )
