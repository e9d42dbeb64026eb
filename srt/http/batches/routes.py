"""`/v1/files` and `/v1/batches`, as OpenAI's API reference has them."""

from __future__ import annotations

import asyncio
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Final

from aiohttp import hdrs, web
from msgspec import UNSET

from phloem.srt.disk import sync
from phloem.srt.errors import Forbidden, InvalidRequest, NotFound
from phloem.srt.http.access import CALLER
from phloem.srt.http.batches import store
from phloem.srt.http.batches.endpoints import ENDPOINTS
from phloem.srt.http.batches.protocol import (
    Batch,
    BatchList,
    BatchQuery,
    BatchRequest,
    FileDeleted,
    FileList,
    FileObject,
    FileQuery,
    UploadForm,
)
from phloem.srt.http.batches.service import batches_of
from phloem.srt.http.batches.store import NewBatch, Page
from phloem.srt.http.batches.uploads import receive
from phloem.srt.http.body import BodyReader, read_query
from phloem.srt.http.context import serving
from phloem.srt.http.cors import ANY
from phloem.srt.http.responding import json_response
from phloem.srt.http.routes import Access, Content, Route

MAX_WINDOW_S: Final = 30 * 86_400
_UNITS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}

_batch_reader = BodyReader(BatchRequest)


async def upload_file(request: web.Request) -> web.Response:
    """The file may have `max_file_bytes`. `expires_after` is two fields, `expires_after[anchor]`
    and `expires_after[seconds]`; without it a file stays until it is deleted."""
    _refuse_other_pages(request)
    batches = batches_of(request)
    paths = batches.place.paths
    file_id = f"file-{uuid.uuid4().hex}"
    incoming = paths.uploads / file_id
    try:
        upload = await receive(request, incoming, serving(request).options.max_file_bytes)
        now = int(time.time())
        seconds = upload.form.expires_after_seconds
        file = FileObject(
            id=file_id,
            bytes=upload.size,
            created_at=now,
            expires_at=UNSET if seconds is UNSET else now + seconds,
            filename=upload.filename,
            purpose=upload.form.purpose,
        )
        await asyncio.to_thread(_keep, incoming, paths.file(file_id))
    finally:
        await asyncio.to_thread(incoming.unlink, missing_ok=True)
    await batches.query(partial(store.add_file, tenant=request[CALLER].name, file=file))
    return json_response(file)


async def list_files(request: web.Request) -> web.Response:
    query = read_query(request, FileQuery)
    page = Page(limit=query.limit, after=query.after, newest_first=query.order == "desc")
    data, more = await batches_of(request).query(
        lambda c: store.list_files(c, request[CALLER].name, query.purpose, page)
    )
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return json_response(FileList(data=data, first_id=first, last_id=last, has_more=more))


async def get_file(request: web.Request) -> web.Response:
    return json_response(await _file(request))


async def file_content(request: web.Request) -> web.StreamResponse:
    file = await _file(request)
    path = batches_of(request).place.paths.file(file.id)
    if not await asyncio.to_thread(path.is_file):
        raise NotFound(f"The content of {file.id!r} is gone.", code="file_not_found")
    return web.FileResponse(
        path,
        headers={
            hdrs.CONTENT_TYPE: "application/octet-stream",
            "X-Content-Type-Options": "nosniff",  # whatever it holds, it is no page of this server
        },
    )


async def delete_file(request: web.Request) -> web.Response:
    """A file that an unfinished batch reads stays."""
    batches = batches_of(request)
    file_id = request.match_info["id"]
    await batches.query(lambda c: store.delete_file(c, request[CALLER].name, file_id))
    await asyncio.to_thread(batches.place.paths.file(file_id).unlink, missing_ok=True)
    return json_response(FileDeleted(id=file_id))


async def create_batch(request: web.Request) -> web.Response:
    """`completion_window` may be any from `1s` to `30d`."""
    body = await _batch_reader.read(request)
    if body.endpoint not in ENDPOINTS:
        raise InvalidRequest(
            f"A batch may go to {', '.join(ENDPOINTS)}.", param="endpoint", code="invalid_value"
        )
    window = int(body.completion_window[:-1]) * _UNITS[body.completion_window[-1]]
    if window > MAX_WINDOW_S:
        raise InvalidRequest(
            "The longest window is 30d.", param="completion_window", code="invalid_value"
        )
    batches = batches_of(request)
    lifetime = body.output_expires_after
    new = NewBatch(
        tenant=request[CALLER].name,
        owner=batches.server,
        model=serving(request).engine.card.name,
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        window=body.completion_window,
        window_s=window,
        metadata=body.metadata,
        lifetime_s=None if lifetime is None else lifetime.seconds,
    )
    batch = await batches.query(lambda c: store.add_batch(c, new))
    batches.wake()
    return json_response(batch)


async def list_batches(request: web.Request) -> web.Response:
    query = read_query(request, BatchQuery)
    page = Page(limit=query.limit, after=query.after)
    data, more = await batches_of(request).query(
        lambda c: store.list_batches(c, request[CALLER].name, page)
    )
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return json_response(BatchList(data=data, first_id=first, last_id=last, has_more=more))


async def get_batch(request: web.Request) -> web.Response:
    batch_id = request.match_info["id"]
    return json_response(
        await batches_of(request).query(
            lambda c: store.get_batch(c, request[CALLER].name, batch_id)
        )
    )


async def cancel_batch(request: web.Request) -> web.Response:
    """Requests that run are aborted; those that were not made are in the error file."""
    batches = batches_of(request)
    batch_id = request.match_info["id"]
    batch = await batches.query(lambda c: store.cancel_batch(c, request[CALLER].name, batch_id))
    batches.wake()
    return json_response(batch)


def _refuse_other_pages(request: web.Request) -> None:
    """A browser lets a page of any origin send a form, as it does not with JSON, and says whose it
    is. Raises `Forbidden`, unless that page may read replies, too."""
    site = request.headers.get("Sec-Fetch-Site", "none")
    origins = serving(request).options.cors_origin
    known = ANY in origins or request.headers.get(hdrs.ORIGIN) in origins
    if site not in ("none", "same-origin") and not known:
        raise Forbidden("A page of another origin may not upload files.", code="other_origin")


def _keep(incoming: Path, path: Path) -> None:
    incoming.replace(path)
    sync(path.parent)


async def _file(request: web.Request) -> FileObject:
    file_id = request.match_info["id"]
    return await batches_of(request).query(
        lambda c: store.get_file(c, request[CALLER].name, file_id)
    )


_BINARY: Final = Content("application/octet-stream")
_FORM: Final = Content("multipart/form-data", UploadForm)
_USE: Final = Access.INFERENCE

ROUTES: Final = (
    Route(
        "POST",
        "/v1/files",
        upload_file,
        _USE,
        "Store a file",
        body=_FORM,
        reply=FileObject,
        example={"purpose": "batch", "file": "@requests.jsonl"},
    ),
    Route("GET", "/v1/files", list_files, _USE, "The files", query=FileQuery, reply=FileList),
    Route("GET", "/v1/files/{id}", get_file, _USE, "A file", reply=FileObject),
    Route("GET", "/v1/files/{id}/content", file_content, _USE, "Its content", reply=_BINARY),
    Route("DELETE", "/v1/files/{id}", delete_file, _USE, "Delete a file", reply=FileDeleted),
    Route(
        "POST",
        "/v1/batches",
        create_batch,
        _USE,
        "Make the requests that are in a file",
        body=_batch_reader,
        reply=Batch,
        example={
            "input_file_id": "file-1",
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        },
    ),
    Route(
        "GET", "/v1/batches", list_batches, _USE, "The batches", query=BatchQuery, reply=BatchList
    ),
    Route("GET", "/v1/batches/{id}", get_batch, _USE, "A batch, and how far it is", reply=Batch),
    Route("POST", "/v1/batches/{id}/cancel", cancel_batch, _USE, "End a batch", reply=Batch),
)
