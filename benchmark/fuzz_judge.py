"""What a reply to a hostile constraint may be, judged without anything of the server's own."""

from __future__ import annotations

import json
import re
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import jsonschema_rs
from fuzz_bombs import MARK, Case

MAX_ERROR_CHARS = 4_000
BODY_BYTES = 4 << 20
"""What the server takes by default."""
MATCH_SECONDS = 2.0
_DRAFT_7 = "http://json-schema.org/draft-07/schema#"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What came back. `text` and `report` of a 200, `error` of all others (or of a stream that
    broke off)."""

    status: int
    text: str = ""
    finish_reason: str | None = None
    report: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    @property
    def code(self) -> str:
        """The error's code, or how the answer ended."""
        if self.error is not None:
            return str(self.error.get("code"))
        return str(self.finish_reason)


class Undecided(Exception):
    """No independent judge understands the constraint."""


def faults_of(case: Case, reply: Reply, body_bytes: int) -> Iterator[str]:
    """What is wrong with the reply, if anything is."""
    if reply.error is not None:
        yield from _refusal(reply, reply.error, body_bytes)
        return
    if reply.status != 200:
        yield f"HTTP {reply.status} without an error"
        return
    if case.beyond:
        yield "it is beyond a limit, and was answered"
    if reply.report is None or reply.finish_reason not in ("stop", "length"):
        yield f"a constrained answer ends by {reply.finish_reason} with report {reply.report}"
        return
    if reply.finish_reason == "stop" and not reply.report["complete"]:
        yield "an answer that stopped is not complete"
    if reply.report["complete"]:
        yield from _answer(case, reply, reply.report)


def _refusal(reply: Reply, error: dict[str, Any], body_bytes: int) -> Iterator[str]:
    allowed = {400, 429, 503} | ({413} if body_bytes > BODY_BYTES else set())
    if reply.status not in allowed and reply.status != 200:
        yield f"HTTP {reply.status}: {error}"
    if reply.status == 200 and error.get("type") != "invalid_request_error":
        yield f"a stream breaks off: {error}"
    if not error.get("code") or not error.get("message"):
        yield f"a refusal without code or message: {error}"
    told = f"{error.get('message')} {error.get('param')}"
    if MARK in told:
        yield f"a refusal echoes a value: {told}"
    if len(told) > MAX_ERROR_CHARS:
        yield f"a refusal of {len(told)} characters"


def _answer(case: Case, reply: Reply, report: dict[str, Any]) -> Iterator[str]:
    try:
        fault = fault_of(case, reply.text)
    except Undecided:
        return
    if report["enforcement"] == "full":
        if fault is not None:
            yield f"an invalid answer, {fault}: {reply.text!r}"
        if report.get("valid") is False:
            yield f"a full constraint reports an invalid answer: {reply.text!r}"
    elif "valid" in report and report["valid"] is not (fault is None):
        yield f"reported valid {report['valid']}, found {fault}: {reply.text!r}"


def fault_of(case: Case, text: str) -> str | None:
    """Why a complete text does not satisfy the case's constraint; None when it does.

    Raises:
        Undecided: nobody here can tell.
    """
    if case.kind == "choice":
        return None if text in json.loads(case.text) else "none of the choices"
    if case.kind == "schema":
        return _schema_fault(case.text, text)
    if case.pattern is None:
        raise Undecided
    return None if _matches(case.pattern, text) else "no match"


def _schema_fault(schema_text: str, text: str) -> str | None:
    try:
        schema = _strict(schema_text)
    except ValueError as error:
        return f"the schema itself is not strict JSON ({error})"
    try:  # of a member that comes twice the last counts, as for most parsers
        value = json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        return f"not JSON ({error})"
    fault = next(_validator(schema).iter_errors(value), None)
    return None if fault is None else f"{fault.schema_path} at {fault.instance_path}"


def _validator(schema: Any) -> Any:
    """In draft 7 when no dialect is named and the schema is none of the newest one."""
    attempts = [schema]
    if isinstance(schema, dict) and "$schema" not in schema:
        attempts.append({"$schema": _DRAFT_7, **schema})
    for attempt in attempts:
        try:
            return jsonschema_rs.validator_for(
                attempt, retriever=_no_document, validate_formats=True
            )
        except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError):
            continue
    raise Undecided


def _no_document(_uri: str) -> Any:
    raise ValueError("references out of the schema are not followed")


def _strict(text: str) -> Any:
    """JSON without duplicate members or constants that it does not have. Raises `ValueError`."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a member comes twice")
    return dict(pairs)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _matches(pattern: str, text: str) -> bool:
    """`re.fullmatch` with ASCII classes, as JSON Schema has them, within a time."""
    try:
        with warnings.catch_warnings(), _within(MATCH_SECONDS):
            warnings.simplefilter("ignore")  # of sets that may mean something else one day
            return re.fullmatch(pattern, text, re.ASCII) is not None
    except (re.error, OverflowError, RecursionError, TimeoutError) as error:
        raise Undecided from error


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """`TimeoutError` in what takes longer, in processor time; `re` looks for signals."""

    def over(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
