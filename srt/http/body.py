"""Reading request bodies and queries: strict JSON, typed, and every refusal names the field.

msgspec decodes straight into the request's struct; a second pass by the standard library refuses
what msgspec lets through (duplicate keys, infinities in fields it skips) and yields the names of
all top-level keys, so that fields which would change the answer are never ignored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Final, Generic, NoReturn, TypeVar

import msgspec
from aiohttp import hdrs, web

from phloem.srt.errors import InvalidRequest

T = TypeVar("T", bound=msgspec.Struct)

ABSENT: Final[msgspec.Raw] = msgspec.field(default_factory=msgspec.Raw)
"""The default of a field that is kept raw: `x: Raw = ABSENT`. (A default `Raw()` would be the
same, but has no place in a JSON schema.)"""

_PATH = re.compile(r"^(?P<detail>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_FIELD = re.compile(r"Object (?:missing required|contains unknown) field `(?P<name>[^`]+)`")
_CONSTRAINT_LIKE = re.compile(r"guided|grammar|regex|schema|constraint|structur|json_object|lark")

_CONSTRAINT = re.compile(
    r"guided_\w+|json_schema|response_format|regex|ebnf|grammar|structured_outputs|structural_tag"
)
_FORM = "application/x-www-form-urlencoded"
_BROWSER = ("Origin", "Referer", "Sec-Fetch-Site")  # one of these comes with a page's request
_FREE = frozenset({"metadata"})  # the client's own words


class BodyReader(Generic[T]):
    """Decodes bodies of one route into `type_`.

    `unsupported` maps fields that exist elsewhere to the values that ask for nothing; any other
    value is refused. Fields unknown to both are accepted, unless their name says that they
    constrain the output; `read_noting` and `decode_noting` tell which they are, by path (also those
    of an object that a known field is). A null is as good as no field.
    """

    def __init__(
        self, type_: type[T], *, unsupported: Mapping[str, tuple[object, ...]] | None = None
    ) -> None:
        self.type_ = type_
        self.unsupported = dict(unsupported or {})
        self._decoder = msgspec.json.Decoder(type_)
        self._fields = frozenset(field.encode_name for field in msgspec.structs.fields(type_))

    async def read(self, request: web.Request) -> T:
        """The body of `request`. Raises `InvalidRequest`, or aiohttp's 413."""
        return (await self.read_noting(request))[0]

    async def read_noting(self, request: web.Request) -> tuple[T, list[str]]:
        """The body of `request`, and the fields that are not known. Raises as `read` does."""
        _check_content_type(request)
        return self.decode_noting(await request.read())

    async def read_or(self, request: web.Request, empty: T) -> T:
        """`read`, where the body may be left out."""
        return await self.read(request) if await request.read() else empty

    def decode(self, body: bytes) -> T:
        return self.decode_noting(body)[0]

    def decode_noting(self, body: bytes) -> tuple[T, list[str]]:
        try:
            value = self._decoder.decode(body)
            loaded = strict_loads(body)
        except msgspec.ValidationError as error:
            raise validation_error(error) from None
        except (msgspec.DecodeError, ValueError) as error:
            raise InvalidRequest(f"The body is not JSON: {error}", code="invalid_json") from None
        except RecursionError:
            raise InvalidRequest("The body is nested too deeply.", code="invalid_json") from None
        return value, self._check_fields(loaded, value)

    def _check_fields(self, body: object, decoded: T) -> list[str]:
        unknown: list[str] = []
        if not isinstance(body, dict):
            return unknown
        for name, value in body.items():
            if name in self._fields:
                inner = getattr(decoded, name, None)
                if isinstance(inner, msgspec.Struct) and isinstance(value, dict):
                    unknown += [f"{name}.{key}" for key in _unknown_keys(value, type(inner))]
            elif name in self.unsupported:
                if not _among(value, self.unsupported[name]):
                    raise unsupported(name)
            else:
                _refuse_constraint(name, value)
                unknown += [name] if value is not None else []
        return unknown


def _unknown_keys(value: dict[str, object], type_: type[msgspec.Struct]) -> list[str]:
    known = {field.encode_name for field in msgspec.structs.fields(type_)}
    return [key for key, one in value.items() if key not in known and one is not None]


def _refuse_constraint(name: str, value: object) -> None:
    """What a client took for a constraint must not be ignored, nor what it put one level down:
    `extra_body` is an argument of the Python client, whose content belongs at the top."""
    if value is None or value == {} or name in _FREE:
        return
    inside = value if isinstance(value, dict) else {}
    inner = next((key for key in inside if _CONSTRAINT.fullmatch(key)), None)
    if name == "extra_body" or _CONSTRAINT_LIKE.search(name) or inner is not None:
        param = name if inner is None or name == "extra_body" else f"{name}.{inner}"
        raise InvalidRequest(
            f"`{param}` looks like a constraint, and is not one that is known.",
            param=param,
            code="unknown_constraint",
        )


def read_query(request: web.Request, type_: type[T]) -> T:
    """The query as a `type_`, numbers and booleans in their usual spelling. Raises
    `InvalidRequest`."""
    names = [name for name, _ in request.query.items()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"{twice} comes twice.", param=twice, code="invalid_value")
    try:
        return msgspec.convert(dict(request.query), type_, strict=False)
    except msgspec.ValidationError as error:
        raise validation_error(error) from None


def unsupported(name: str, why: str = "it is not supported") -> InvalidRequest:
    """The refusal of a field whose meaning is known and not offered."""
    return InvalidRequest(
        f"`{name}` cannot be honoured: {why}.", param=name, code="unsupported_parameter"
    )


def invalid(message: str, param: str) -> InvalidRequest:
    """The refusal of a field for its value."""
    return InvalidRequest(message, param=param, code="invalid_value")


def invalid_at(message: str, param: str) -> InvalidRequest:
    """`invalid`, of a message that needs the field in front to be understood."""
    return invalid(f"{param}: {message}", param)


def validation_error(error: msgspec.ValidationError, prefix: str = "") -> InvalidRequest:
    """msgspec's complaint as a 400, with the JSON path (below `prefix`) as `param`."""
    match = _PATH.match(str(error))
    detail = match["detail"] if match else str(error)
    path = (match["path"] if match else None) or ""
    parts = [part for part in (prefix, path.removeprefix("$").removeprefix(".")) if part]
    if named := _FIELD.search(detail):
        parts.append(named["name"])
    param = ".".join(parts).replace(".[", "[") or None
    message = f"{param}: {detail}" if param else f"The body is not valid: {detail}"
    return InvalidRequest(message, param=param, code="invalid_value")


def given(raw: msgspec.Raw) -> bool:
    """Whether a raw field was sent with anything but null."""
    return bytes(raw) not in (b"", b"null")


def strict_loads(data: bytes) -> object:
    """JSON with no duplicate key, no NaN and no infinity. Raises `ValueError`, `RecursionError`."""
    return json.loads(
        data.decode(),
        object_pairs_hook=_unique,
        parse_constant=_refuse_constant,
        parse_float=_finite,
    )


def _check_content_type(request: web.Request) -> None:
    """Browsers send other types across origins without asking, and say where from, so of them only
    JSON is read. `curl -d` declares a form whatever it sends."""
    declared = request.headers.get(hdrs.CONTENT_TYPE)
    kind = request.content_type
    if kind == _FORM and not any(name in request.headers for name in _BROWSER):
        return
    if declared and kind != "application/json" and not kind.endswith("+json"):
        raise web.HTTPUnsupportedMediaType(reason=f"Content-Type must be JSON, not {kind}")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} comes twice in one object")
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is out of range")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _among(value: object, values: tuple[object, ...]) -> bool:
    """Equality that keeps 1 and true apart."""
    return any(type(value) is type(one) and value == one for one in values)
