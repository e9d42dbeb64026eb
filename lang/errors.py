"""Every error a program can meet, as one tree.

    LangError
    ├── UsageError            the program is put together wrongly; raised at the line at fault
    ├── GenerationError       a variable has no value; carries the variable and the cause
    ├── Cancelled             the run was cancelled before the variable had a value
    ├── RecordedFailure       the program failed in an earlier run, whose output is gone on with
    ├── Truncated             max_tokens ended an answer before its constraint was satisfied
    └── BackendError          a call failed; carries the HTTP status where there was one
        ├── RequestRefused    the backend found fault with the request (4xx)
        └── BackendUnavailable  nobody answers, or it is too busy or too slow

A wrong *type* (`s += None`, an f-string around a `gen`) is a plain `TypeError`, a wrong value of an
option a `ValueError`, an unknown variable a `KeyError`.
"""

from __future__ import annotations


class LangError(Exception):
    """Base of the errors of `phloem.lang`."""


class UsageError(LangError):
    """The program cannot mean anything as written."""


class Cancelled(LangError):
    """The run was cancelled."""


class RecordedFailure(LangError):
    """What a file of results says of a program that failed when the file was written."""


class Truncated(LangError):
    """The answer hit `max_tokens` while its constraint still wanted more."""


class BackendError(LangError):
    """A call to the model failed.

    `status` is the HTTP status if there was one, `param` the request field at fault, `code` a short
    machine-readable reason.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message if status is None else f"{message} (HTTP {status})")
        self.message = message
        self.status = status
        self.param = param
        self.code = code


class RequestRefused(BackendError):
    """The request itself is at fault: another try would fail the same way."""


class BackendUnavailable(BackendError):
    """Connection refused or lost, queue full after all retries, or a deadline passed."""


class GenerationError(LangError):
    """A variable has no value, because its call, or one that it depends on, failed.

    `variable` is the one whose own call failed (None for an unnamed `gen`), `cause` the reason. It
    is raised wherever that variable, or any that builds on it, is read; `handled` says that this
    has happened.
    """

    def __init__(self, variable: str | None, cause: BaseException) -> None:
        name = "an unnamed gen" if variable is None else f"variable {variable!r}"
        super().__init__(f"{name} failed: {type(cause).__name__}: {cause}")
        self.variable = variable
        self.cause = cause
        self.handled = False

    def reraised(self) -> GenerationError:
        """A fresh copy to raise, so that tracebacks of several readers do not pile up in one."""
        self.handled = True
        return GenerationError(self.variable, self.cause)
