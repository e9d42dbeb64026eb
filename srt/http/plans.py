"""What a program says of its calls to come: the field `plan`, or the header of that name.

All of it is a hint (docs/programs.md): it changes when a call is served and what stays cached for
it, never what is answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from phloem.constrained.spec import Constraint, Continued, Deferred, Plain
from phloem.srt.errors import InvalidRequest
from phloem.srt.http.body import BodyReader, invalid_at
from phloem.srt.http.constraint_fields import read_constraint
from phloem.srt.http.found_constraint import FoundConstraint, placed
from phloem.srt.http.protocol import NextConstraint, PlanFields
from phloem.srt.messages import CallPlan


class _Header(msgspec.Struct, kw_only=True):
    plan: PlanFields


_reader: Final = BodyReader(_Header)


def header_plan(text: str) -> PlanFields:
    """The plan in a header: a JSON object, as the field is one. Raises `InvalidRequest`."""
    return _reader.decode(b'{"plan":%b}' % text.encode()).plan


def call_plan(fields: PlanFields) -> CallPlan:
    """What the scheduler is told. Raises `InvalidRequest` under the plan's own fields."""
    if (fields.group is None) != (fields.width is None):
        missing = "group" if fields.group is None else "width"
        raise invalid_at("A group has a name and a width.", f"plan.{missing}")
    given = fields.next_constraint or []
    at = "plan.next_constraint"
    if isinstance(given, list):
        found = [_constraint(one, f"{at}[{i}]") for i, one in enumerate(given)]
    else:
        found = [_constraint(given, at)]
    return CallPlan(
        remaining=fields.remaining,
        fork=fields.fork or 0,
        group=fields.group or "",
        width=fields.width or 0,
        next_constraints=[one.for_engine() for one in found],
    )


def _constraint(fields: NextConstraint, at: str) -> FoundConstraint:
    try:
        found = placed(read_constraint(fields), fields, [None])
    except InvalidRequest as error:
        param = f"{at}.{error.param}" if error.param else at
        raise type(error)(error.message, param=param, code=error.code) from error
    if found is None:
        raise invalid_at("There is no constraint in it.", at)
    return found


def constraints_placed(
    plan: CallPlan | None, place: Callable[[FoundConstraint | None], FoundConstraint | None]
) -> CallPlan | None:
    """The plan, with constraints where `place` puts those of calls like this one."""
    if plan is None or not plan.next_constraints:
        return plan
    placed_all = [
        constraint if isinstance(constraint, Continued | Deferred) else _placed(constraint, place)
        for constraint in plan.next_constraints
    ]
    return msgspec.structs.replace(plan, next_constraints=placed_all)


def _placed(
    constraint: Plain, place: Callable[[FoundConstraint | None], FoundConstraint | None]
) -> Constraint:
    found = place(FoundConstraint("plan", constraint))
    assert found is not None, "a constraint is placed somewhere"
    return found.for_engine()
