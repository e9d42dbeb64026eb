"""The lines of `phloem batch`: requests (as OpenAI's batches have them, or bare) and results."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Raw

from phloem.srt.http.batches.lines import Line
from phloem.srt.http.batches.protocol import LineError, LineResponse, OutputLine

OPENING: Final = b'{"id":"batch_req_'
"""How a line of results begins."""

ENDPOINTS: Final = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/responses",
}
"""A field that a bare body has → where it is sent, in the order in which they are looked for."""


@dataclass(frozen=True)
class Request:
    """What is sent, and whose result it is."""

    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True)
class Fault:
    """A line that cannot be sent."""

    custom_id: str
    code: str
    message: str


class _Body(msgspec.Struct):
    stream: bool | None = None


class _Result(msgspec.Struct):
    """Of a line of results, what counts."""

    class _Response(msgspec.Struct):
        status_code: int

    custom_id: str
    response: _Response | None = None


_fields = msgspec.json.Decoder(dict[str, Raw])
_text = msgspec.json.Decoder(str)
_body = msgspec.json.Decoder(_Body)
_result = msgspec.json.Decoder(_Result)
_encoder = msgspec.json.Encoder()


def read(line: Line, endpoint: str | None) -> Request | Fault:
    """What a line asks for. Bare bodies go to `endpoint`, or where their fields belong; without a
    `custom_id` their number in the file stands for it."""
    name = f"line-{line.number}"
    if line.text is None:
        return Fault(name, "line_too_long", "The line is longer than a request may be.")
    try:
        fields = _fields.decode(line.text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Fault(name, "invalid_json_line", f"The line is not a JSON object: {error}")
    try:
        if "custom_id" in fields:
            name = _text.decode(fields["custom_id"])
        if "body" in fields:
            return _checked(_batch_line(name, fields))
        return _checked(_bare(name, fields, endpoint))
    except (msgspec.DecodeError, _Unusable) as error:
        return Fault(name, "invalid_request", str(error))


def succeeded(result: bytes) -> bool:
    """Whether a line of results has an answer, and not an error."""
    response = _result.decode(result).response
    return response is not None and response.status_code < 400


def custom_id_of(result: bytes) -> str:
    """Whose result a line is. Raises `ValueError` for what is no result."""
    try:
        return _result.decode(result).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError("no result of a batch") from error


def result(
    custom_id: str, *, response: LineResponse | None = None, error: LineError | None = None
) -> bytes:
    """A line of results, of the form that OpenAI's batches have."""
    return _encoder.encode(
        OutputLine(
            id=f"batch_req_{uuid.uuid4().hex}",
            custom_id=custom_id,
            response=response,
            error=error,
        )
    )


class _Unusable(Exception):
    """The message says what is wrong with a line."""


def _batch_line(name: str, fields: dict[str, Raw]) -> Request:
    if "custom_id" not in fields:
        raise _Unusable("A line with a body has a custom_id.")
    method = _text.decode(fields.get("method", Raw(b'"POST"')))
    if method != "POST":
        raise _Unusable(f"The method of a request is POST, not {method!r}.")
    if "url" not in fields:
        raise _Unusable("A line with a body has a url.")
    return Request(name, _text.decode(fields["url"]), bytes(fields["body"]))


def _bare(name: str, fields: dict[str, Raw], endpoint: str | None) -> Request:
    url = endpoint or next((ENDPOINTS[field] for field in ENDPOINTS if field in fields), None)
    if url is None:
        raise _Unusable(
            f"The line is no batch line and has none of {', '.join(ENDPOINTS)}, so that nobody "
            "knows where to send it: give --endpoint."
        )
    body = {field: value for field, value in fields.items() if field != "custom_id"}
    return Request(name, url, _encoder.encode(body))


def _checked(request: Request) -> Request:
    if not request.custom_id:
        raise _Unusable("The custom_id is empty.")
    if not request.url.startswith("/"):
        raise _Unusable(f"The url is a path, as in /v1/chat/completions, not {request.url!r}.")
    if _body.decode(request.body).stream:
        raise _Unusable("A request of a batch has a whole reply: stream cannot be true.")
    return request
