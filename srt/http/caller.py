"""For whom a generation runs: the tenant, and the program that it is a call of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from phloem.srt.errors import InvalidRequest
from phloem.srt.http.access import CALLER
from phloem.srt.tenants import Tenant, scoped

PROGRAM_HEADER: Final = "X-Program-Id"
_PROGRAM: Final = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True)
class Caller:
    """`program` is as the engine knows it: apart from other tenants' programs of that name."""

    tenant: Tenant
    program: str = ""

    def priority(self, asked: int | None) -> int:
        """A request's priority: its own on top of its tenant's."""
        return self.tenant.priority + (asked or 0)


def caller_of(request: web.Request, program: str | None) -> Caller:
    """Who sent `request`; `program` is the body's field, which the header may say instead.

    Raises `InvalidRequest` when the two differ, or the header has no id in it.
    """
    header = request.headers.get(PROGRAM_HEADER)
    if header is not None and (program or header) != header:
        raise _invalid(f"`program` and the header {PROGRAM_HEADER} differ.")
    if header is not None:
        program = program_id(header)
    tenant = request[CALLER]
    return Caller(tenant, scoped(tenant.name, program) if program else "")


def program_id(text: str) -> str:
    """`text`, if it can be a program's id. Raises `InvalidRequest`."""
    if not _PROGRAM.fullmatch(text):
        raise _invalid("A program's id is 1 to 128 printable ASCII characters without a space.")
    return text


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="program", code="invalid_value")
