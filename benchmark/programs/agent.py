"""An agent that keeps a calendar. Each of its actions is JSON of one of three types, and there is a
loop that asks again when one does not parse. It never does: see `retries`."""

from __future__ import annotations

import random
from typing import Annotated, Literal

import msgspec
from demo import Workload, demo

import phloem

STEPS, ATTEMPTS = 4, 3
Day = Literal["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]
Hour = Annotated[int, msgspec.Meta(ge=8, le=18)]
Title = Annotated[str, msgspec.Meta(min_length=1, max_length=30)]


class Action(msgspec.Struct, forbid_unknown_fields=True, tag_field="tool"):
    """What the agent can do."""


class Add(Action, tag="add"):
    title: Title
    day: Day
    hour: Hour


class Show(Action, tag="show"):
    day: Day


class Finish(Action, tag="finish"):
    reply: Annotated[str, msgspec.Meta(max_length=100)]


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    action: Add | Show | Finish


class LastTurn(msgspec.Struct, forbid_unknown_fields=True):
    action: Finish


MANUAL = """\
You keep a calendar. Answer with one action at a time, as JSON:
{"action": {"tool": "add", "title": "dentist", "day": "Monday", "hour": 9}} enters an appointment,
{"action": {"tool": "show", "day": "Monday"}} lists the appointments of a day,
{"action": {"tool": "finish", "reply": "It is done."}} ends your work with a word to the user."""


def act(calendar: dict[str, dict[int, str]], action: Add | Show) -> str:
    """Do it, and say what came of it."""
    day = calendar.setdefault(action.day, {})
    if isinstance(action, Show):
        return f"{action.day}: " + (", ".join(f"{h}: {day[h]}" for h in sorted(day)) or "free")
    if action.hour in day:
        return f"{action.day} at {action.hour} is taken: {day[action.hour]}"
    day[action.hour] = action.title
    return f"entered {action.title}, {action.day} at {action.hour}"


def ask(s: phloem.State, step: int, form: type[Turn | LastTurn]) -> Add | Show | Finish:
    """The agent's next action; asks again if it does not parse."""
    for attempt in range(ATTEMPTS):
        name = f"action_{step}_{attempt}"
        s += phloem.assistant(phloem.gen(name, json_schema=form, max_tokens=140, temperature=0.0))
        try:
            return msgspec.json.decode(s[name], type=form).action
        except msgspec.DecodeError as error:
            s["retries"] += 1
            s += phloem.user(f"That is no action: {error}. Try again.")
    raise ValueError(f"no action in {ATTEMPTS} attempts")


@phloem.function
def assist(s: phloem.State, wish: str) -> str:
    calendar: dict[str, dict[int, str]] = {}
    s["calendar"], s["retries"] = calendar, 0
    s += phloem.system(MANUAL)
    s += phloem.user(wish)
    for step in range(STEPS):
        action = ask(s, step, Turn if step < STEPS - 1 else LastTurn)
        if isinstance(action, Finish):
            return action.reply
        s += phloem.user(act(calendar, action))
    raise AssertionError("the form of the last turn is to finish")


PEOPLE = ["Ada", "Bo", "Cleo", "Dov", "Esme", "Finn"]
REASONS = ["lunch", "the budget", "a walk", "the new office", "the piano", "his visa", "the roof"]


def programs(n: int, seed: int) -> Workload:
    """`n` wishes."""
    rng = random.Random(seed)
    return assist, [
        {
            "wish": f"Please find an hour on {rng.choice(['Monday', 'Tuesday', 'Friday'])} to see "
            f"{rng.choice(PEOPLE)} about {rng.choice(REASONS)}, and one on Thursday to call "
            f"{rng.choice(PEOPLE)} about {rng.choice(REASONS)}."
        }
        for _ in range(n)
    ]


def check(state: phloem.State) -> None:
    assert state["retries"] == 0
    entries = [(h, title) for day in state["calendar"].values() for h, title in day.items()]
    assert all(8 <= hour <= 18 and 1 <= len(title) <= 30 for hour, title in entries)
    assert len(state.returned) <= 100


if __name__ == "__main__":
    demo(programs, check)
