"""What surrounds every handler: request id, errors, counting (and `access`: keys)."""

from __future__ import annotations

import logging
import re
import uuid
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from phloem.srt.errors import InternalError, PhloemError
from phloem.srt.http.access import CALLER
from phloem.srt.http.context import serving
from phloem.srt.http.errors import (
    REQUEST_ID,
    error_response,
    http_exception_response,
    shape_for,
)

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER: Final = "X-Request-Id"
CLIENT_LEFT: Final = 499
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@web.middleware
async def request_id_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every response an id: the answer's own, the client's, or a fresh one."""
    sent = request.headers.get(REQUEST_ID_HEADER, "")
    REQUEST_ID.set(sent if _REQUEST_ID.fullmatch(sent) else f"req-{uuid.uuid4().hex}")
    response = await handler(request)
    if not response.prepared:
        response.headers.setdefault(REQUEST_ID_HEADER, REQUEST_ID.get())
    return response


@web.middleware
async def metrics_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count the exchange under its route's pattern, also when its client left."""
    status = CLIENT_LEFT
    try:
        response = await handler(request)
        status = response.status
    finally:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unmatched"
        serving(request).metrics.http_request(request.method, route, status)
    return response


async def tell_quotas(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Every response to a tenant that has quotas says what is left of them, a stream when it
    begins."""
    assert isinstance(request, web.Request)
    tenant = request.get(CALLER)
    quota = None if tenant is None else serving(request).quotas.of(tenant.name)
    if quota is not None:
        response.headers.update(quota.headers(shape_for(request)))


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """No exception leaves as anything but an error in the shape of the route's protocol."""
    shape = shape_for(request)
    try:
        return await handler(request)
    except PhloemError as error:
        if error.status >= 500:
            logger.warning("%s %s: %s", request.method, request.path, error)
        return error_response(error, shape)
    except web.HTTPException as error:
        return http_exception_response(error, shape)
    except Exception:
        logger.exception("%s %s failed (%s)", request.method, request.path, REQUEST_ID.get())
        return error_response(
            InternalError(f"The server failed; its log has the reason ({REQUEST_ID.get()})."),
            shape,
        )
