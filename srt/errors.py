"""Every error a client can meet, as one tree.

    PhloemError
    ├── InvalidRequest            400  the request itself is at fault
    │   ├── InvalidConstraint     400  a schema, regex or grammar that cannot be enforced
    │   └── PromptTooLong         400  the prompt alone does not fit the context or the KV pool
    ├── Unauthorized              401
    ├── Forbidden                 403  the key is valid, but not for this
    ├── NotFound                  404  unknown model, file, route, pin or request
    ├── Conflict                  409  what is asked for does not fit what is there
    ├── PayloadTooLarge           413
    ├── QueueFull                 429  the waiting queue is at its bound; carries retry_after
    ├── RateLimited               429  the tenant's quota is used up; carries retry_after
    ├── InternalError             500
    ├── Unavailable               503  the backend is starting, restarting or draining
    └── DeadlineExceeded          504

`ErrorInfo` is the same thing on the wire between processes; `to_info` and `from_info` convert.
Each HTTP protocol maps `status`, `kind`, `param` and `code` to its own shape in one table.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as it travels between processes.

    `kind` names the class below; `param` is the request field at fault (with its path, as in
    `response_format.json_schema.schema.properties.a.pattern`); `code` is a short machine-readable
    reason such as `unsupported_keyword`.
    """

    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None


class PhloemError(Exception):
    """Base of all errors that reach a client. `status` is the HTTP status."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def to_info(self) -> ErrorInfo:
        return ErrorInfo(
            kind=type(self).__name__,
            message=self.message,
            param=self.param,
            code=self.code,
            retry_after=self.retry_after,
        )

    @staticmethod
    def from_info(info: ErrorInfo) -> PhloemError:
        """Rebuild the error; an unknown kind becomes `InternalError`."""
        cls = _BY_NAME.get(info.kind, InternalError)
        return cls(info.message, param=info.param, code=info.code, retry_after=info.retry_after)


class InvalidRequest(PhloemError):
    status = 400
    kind = "invalid_request_error"


class InvalidConstraint(InvalidRequest):
    """The constraint is malformed, or has a keyword that would not be enforced in full."""


class PromptTooLong(InvalidRequest):
    """The prompt alone can never fit; the message gives both numbers."""


class Unauthorized(PhloemError):
    status = 401
    kind = "authentication_error"


class Forbidden(PhloemError):
    status = 403
    kind = "permission_error"


class NotFound(PhloemError):
    status = 404
    kind = "not_found_error"


class Conflict(PhloemError):
    status = 409
    kind = "conflict_error"


class PayloadTooLarge(PhloemError):
    status = 413
    kind = "invalid_request_error"


class QueueFull(PhloemError):
    status = 429
    kind = "rate_limit_error"


class RateLimited(PhloemError):
    status = 429
    kind = "rate_limit_error"


class InternalError(PhloemError):
    status = 500
    kind = "server_error"


class Unavailable(PhloemError):
    status = 503
    kind = "unavailable_error"


class DeadlineExceeded(PhloemError):
    status = 504
    kind = "timeout_error"


_BY_NAME: dict[str, type[PhloemError]] = {
    cls.__name__: cls
    for cls in (
        InvalidRequest,
        InvalidConstraint,
        PromptTooLong,
        Unauthorized,
        Forbidden,
        NotFound,
        Conflict,
        PayloadTooLarge,
        QueueFull,
        RateLimited,
        InternalError,
        Unavailable,
        DeadlineExceeded,
    )
}
