"""For whom a generation runs: the tenant, the program that it is a call of, and its plan."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from phloem.srt.http.access import CALLER
from phloem.srt.http.body import invalid
from phloem.srt.http.plans import call_plan, header_plan
from phloem.srt.http.protocol import PlanFields
from phloem.srt.messages import CallPlan
from phloem.srt.tenants import Tenant, scoped

PROGRAM_HEADER: Final = "X-Program-Id"
PLAN_HEADER: Final = "X-Program-Plan"
_PROGRAM: Final = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True)
class Caller:
    """`program` is as the engine knows it: apart from other tenants' programs of that name."""

    tenant: Tenant
    program: str = ""
    plan: CallPlan | None = None

    @classmethod
    def of(cls, tenant: Tenant, program: str | None, plan: PlanFields | None) -> Caller:
        """As a body says it. Raises `InvalidRequest` for a plan that is none, or of no program."""
        if plan is not None and not program:
            raise invalid("A plan is that of a program: `program` is missing.", "program")
        name = scoped(tenant.name, program) if program else ""
        return cls(tenant, name, None if plan is None else call_plan(plan))

    def priority(self, asked: int | None) -> int:
        """A request's priority: its own on top of its tenant's."""
        return self.tenant.priority + (asked or 0)


def caller_of(request: web.Request, program: str | None, plan: PlanFields | None) -> Caller:
    """Who sent `request`; `program` and `plan` are fields of the body, or in a header each.

    Raises `InvalidRequest` when field and header differ, a header is malformed, or there is a plan
    of no program.
    """
    header = request.headers.get(PROGRAM_HEADER)
    if header is not None and (program or header) != header:
        raise invalid(f"`program` and the header {PROGRAM_HEADER} differ.", "program")
    if header is not None:
        program = program_id(header)
    header = request.headers.get(PLAN_HEADER)
    if header is not None:
        if plan is not None:
            raise invalid(f"`plan` comes in the body and in {PLAN_HEADER}.", "plan")
        plan = header_plan(header)
    return Caller.of(request[CALLER], program, plan)


def program_id(text: str) -> str:
    """`text`, if it can be a program's id. Raises `InvalidRequest`."""
    if not _PROGRAM.fullmatch(text):
        raise invalid(
            "A program's id is 1 to 128 printable ASCII characters without a space.", "program"
        )
    return text
