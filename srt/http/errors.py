"""From exceptions to what a client reads: the one table of the shapes that protocols have.

    OpenAI     {"error": {"message": …, "type": …, "param": … | null, "code": … | null}}
    Anthropic  {"type": "error", "error": {"type": …, "message": …}, "request_id": …}
    Ollama     {"error": "…"}

`PhloemError` carries status, type and code itself; what aiohttp raises (unknown route, body too
large) is translated; anything else is a fault of ours, logged and answered with a plain 500.
"""

from __future__ import annotations

import logging
import math
from contextvars import ContextVar
from enum import Enum, auto
from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

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
    RateLimited,
    Unauthorized,
    Unavailable,
)

logger = logging.getLogger(__name__)

DEFAULT_RETRY_AFTER_S = 1.0

REQUEST_ID: Final[ContextVar[str]] = ContextVar("request_id")
"""The id that the current request's response carries; routes that generate set their own."""

_DEFAULT_CODES: dict[type[PhloemError], str] = {
    Unauthorized: "invalid_api_key",
    Forbidden: "forbidden",
    NotFound: "not_found",
    Conflict: "conflict",
    PayloadTooLarge: "payload_too_large",
    QueueFull: "queue_full",
    RateLimited: "rate_limit_exceeded",
    InternalError: "internal_error",
    Unavailable: "unavailable",
    DeadlineExceeded: "deadline_exceeded",
}


class ErrorShape(Enum):
    OPENAI = auto()
    ANTHROPIC = auto()
    OLLAMA = auto()


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorBody


class AnthropicErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """`param` and `code` are ours: which field is at fault, and a machine-readable reason."""

    type: str
    message: str
    param: str | UnsetType = UNSET
    code: str | UnsetType = UNSET


class AnthropicError(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    error: AnthropicErrorBody
    request_id: str | UnsetType = UNSET


class OllamaError(msgspec.Struct, frozen=True):
    error: str


_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_VERSION_HEADER: Final = "anthropic-version"

_encoder = msgspec.json.Encoder()


def shape_of(path: str) -> ErrorShape:
    """The shape that clients of the route at `path` read, of routes that there are not, too."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return ErrorShape.ANTHROPIC
    return ErrorShape.OLLAMA if path.startswith("/api/") else ErrorShape.OPENAI


def shape_for(request: web.BaseRequest) -> ErrorShape:
    """`shape_of` the path of `request`; of the models, which two protocols have at one path, as the
    header says that Anthropic's clients always send."""
    path = request.path
    if _VERSION_HEADER in request.headers and (path + "/").startswith("/v1/models/"):
        return ErrorShape.ANTHROPIC
    return shape_of(path)


def known_error(error: Exception, what: str) -> PhloemError:
    """`error`, of which `what` failed, as one that may be told; what nobody foresaw is logged."""
    if isinstance(error, PhloemError):
        return error
    logger.error("%s failed", what, exc_info=error)
    return InternalError("The server failed while answering.")


def error_body(error: PhloemError, shape: ErrorShape) -> msgspec.Struct:
    """The error in the shape of a protocol, for a body or for a stream's frame."""
    body = ErrorBody(
        message=error.message,
        type=error.kind,
        param=error.param,
        code=error.code or _DEFAULT_CODES.get(type(error)),
    )
    return _shaped(body, error.status, shape)


def _shaped(body: ErrorBody, status: int, shape: ErrorShape) -> msgspec.Struct:
    match shape:
        case ErrorShape.OPENAI:
            return ErrorEnvelope(body)
        case ErrorShape.ANTHROPIC:
            kind = "invalid_request_error" if status < 500 else "api_error"
            return AnthropicError(
                error=AnthropicErrorBody(
                    type=_ANTHROPIC_TYPES.get(status, kind),
                    message=body.message,
                    param=body.param or UNSET,
                    code=body.code or UNSET,
                ),
                request_id=REQUEST_ID.get("") or UNSET,
            )
        case ErrorShape.OLLAMA:
            named = body.param is None or body.param in body.message
            return OllamaError(body.message if named else f"{body.param}: {body.message}")


def error_response(error: PhloemError, shape: ErrorShape) -> web.Response:
    """The whole response to a request that ended in `error`."""
    headers: dict[str, str] = {}
    if isinstance(error, QueueFull | RateLimited | Unavailable):
        seconds = DEFAULT_RETRY_AFTER_S if error.retry_after is None else error.retry_after
        headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return _response(error_body(error, shape), error.status, headers)


def http_exception_response(error: web.HTTPException, shape: ErrorShape) -> web.Response:
    """aiohttp's own refusals, in the same shape and with their status."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return error_response(
            PayloadTooLarge(f"The request body is too large: {error.text}"), shape
        )
    if isinstance(error, web.HTTPNotFound):
        return error_response(NotFound("There is no such route.", code="unknown_route"), shape)
    kind = InvalidRequest.kind if error.status < 500 else InternalError.kind
    phrase = HTTPStatus(error.status).phrase
    body = ErrorBody(message=error.reason, type=kind, code=phrase.lower().replace(" ", "_"))
    allow = error.headers.get("Allow")
    headers = {"Allow": allow} if allow else {}
    return _response(_shaped(body, error.status, shape), error.status, headers)


def _response(body: msgspec.Struct, status: int, headers: dict[str, str]) -> web.Response:
    return web.Response(
        body=_encoder.encode(body), status=status, headers=headers, content_type="application/json"
    )
