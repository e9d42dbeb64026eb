"""`multipart/form-data` of an upload: the file goes to disk as it comes, whatever its size."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import BodyPartReader, MultipartReader, hdrs, web
from aiohttp.http_exceptions import BadHttpMessage

from phloem.srt.disk import write_all
from phloem.srt.errors import InvalidRequest, PayloadTooLarge
from phloem.srt.http.batches.protocol import UploadForm
from phloem.srt.http.body import invalid, validation_error

CHUNK: Final = 1 << 16
WRITE: Final = 1 << 20
"""Bytes that are held before they are written."""

MAX_FIELD: Final = 4096
"""Bytes of a field that is not the file, and of its name."""

MAX_PARTS: Final = 16
FORM_OVERHEAD: Final = 1 << 16
"""What a form may have beside its file."""

_PLAIN: Final = ("", "binary", "8bit", "7bit")


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A form that was received; the file's content is at the path that was given, synced."""

    form: UploadForm
    filename: str
    size: int


async def receive(request: web.Request, path: Path, limit: int) -> Upload:
    """Read a form, its file of at most `limit` bytes into `path`.

    Raises `InvalidRequest`, `PayloadTooLarge`, and aiohttp's 415; then, and when the client leaves,
    there may be a part of a file, which is the caller's to remove.
    """
    if request.content_type != "multipart/form-data":
        raise web.HTTPUnsupportedMediaType(
            reason=f"Content-Type must be multipart/form-data, not {request.content_type}"
        )
    if (request.content_length or 0) > limit + FORM_OVERHEAD:
        raise _too_large(limit)
    try:
        return await _Form(path, limit).read(await request.multipart())
    except (ValueError, AssertionError, RuntimeError, BadHttpMessage) as error:
        raise InvalidRequest(f"The form is malformed: {error}", code="invalid_multipart") from None


class _Form:
    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._fields: dict[str, object] = {}
        self._filename = ""
        self._size = 0

    async def read(self, parts: MultipartReader) -> Upload:
        count = 0
        async for part in parts:
            count += 1
            if not isinstance(part, BodyPartReader) or count > MAX_PARTS:
                raise InvalidRequest("The form has too many parts.", code="invalid_multipart")
            await self._take(part)
        try:
            form = msgspec.convert(self._fields, UploadForm, strict=False)
        except msgspec.ValidationError as error:
            raise validation_error(error) from None
        if (form.expires_after_anchor is msgspec.UNSET) != (
            form.expires_after_seconds is msgspec.UNSET
        ):
            raise invalid("expires_after has an anchor and seconds.", "expires_after")
        return Upload(form=form, filename=self._filename, size=self._size)

    async def _take(self, part: BodyPartReader) -> None:
        name = part.name or ""
        if name in self._fields:
            raise invalid(f"{name} comes twice.", name)
        if name not in _FIELDS:
            raise invalid(f"{name!r} is not a field of an upload.", name or "file")
        if part.headers.get(hdrs.CONTENT_TRANSFER_ENCODING, "").lower() not in _PLAIN:
            raise invalid("A transfer encoding is not supported.", name)
        if name == "file":
            self._filename = (part.filename or "")[:MAX_FIELD]
            if not self._filename:
                raise invalid("The file has no name.", "file")
            await self._write(part)
            self._fields[name] = b""
        else:
            self._fields[name] = await _text(part, name)

    async def _write(self, part: BodyPartReader) -> None:
        buffer = bytearray()
        with self._path.open("xb", buffering=0) as file:
            while chunk := await part.read_chunk(CHUNK):
                self._size += len(chunk)
                if self._size > self._limit:
                    raise _too_large(self._limit)
                buffer += chunk
                if len(buffer) >= WRITE:
                    await asyncio.to_thread(write_all, file.fileno(), bytes(buffer))
                    buffer.clear()
            await asyncio.to_thread(write_all, file.fileno(), bytes(buffer))
            await asyncio.to_thread(os.fsync, file.fileno())


_FIELDS: Final = frozenset(f.encode_name for f in msgspec.structs.fields(UploadForm))


async def _text(part: BodyPartReader, name: str) -> str:
    data = bytearray()
    while chunk := await part.read_chunk(MAX_FIELD):
        data += chunk
        if len(data) > MAX_FIELD:
            raise invalid(f"{name} is too long.", name)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise invalid(f"{name} is not UTF-8.", name) from None


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"A file has at most {limit:,} bytes.", param="file")
