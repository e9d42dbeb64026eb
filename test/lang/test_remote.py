"""Programs that are sent whole: the steps they become, what is refused and where, and what comes of
the server's events."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import pytest

import phloem as sgl
from phloem.lang.background import background
from phloem.lang.state import State

pytestmark = pytest.mark.timeout(30)

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def calls(steps: list[dict[str, Any]], path: str = "steps") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each call of steps, in order, with its path."""
    for i, step in enumerate(steps):
        here = f"{path}[{i}]"
        if "gen" in step or "select" in step:
            yield here, step
        yield from calls(step.get("content", []), f"{here}.content")
        for k, branch in enumerate(step.get("fork", [])):
            yield from calls(branch, f"{here}.fork[{k}]")


def answered(path: str, step: dict[str, Any]) -> dict[str, Any]:
    """The event of a call: an answer that tells its name and place, or the last choice."""
    event = {"type": "variable", "path": path, "usage": USAGE}
    if "select" in step:
        choices = step["select"]["choices"]
        score = {"tokens": ["t"], "logprobs": [-1.0], "value": -1.0}
        name = step["select"]["name"]
        return event | {"name": name, "value": choices[-1], "scores": [score] * len(choices)}
    name, n = step["gen"]["name"], step["gen"].get("n", 1)
    if n > 1:
        values = [f"<{name}.{i}>" for i in range(n)]
        return event | {"name": name, "value": values, "finish_reason": ["stop"] * n}
    return event | {"name": name, "value": f"<{name}>", "finish_reason": "stop"}


class Whole(sgl.MockBackend):
    """A backend whose server runs programs, and keeps what it was sent. `change` may make other
    events of those that there are; `hold` is what it waits for before the last."""

    def __init__(self, change: Callable[[list[dict[str, Any]]], list[Any]] = lambda e: e) -> None:
        super().__init__({})
        self.bodies: list[dict[str, Any]] = []
        self.change = change
        self.hold: asyncio.Event | None = None
        self.left = False

    async def run_program(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        self.bodies.append(msgspec.json.decode(msgspec.json.encode(body)))
        events = [answered(path, step) for path, step in calls(body["steps"])]
        try:
            for event in self.change([*events, {"type": "done", "id": "run-1"}]):
                if isinstance(event, Exception):
                    raise event
                if self.hold is not None and event["type"] == "done":
                    await self.hold.wait()
                yield json.dumps(event).encode()
        finally:
            self.left = True

    @property
    def steps(self) -> list[dict[str, Any]]:
        steps: list[dict[str, Any]] = self.bodies[-1]["steps"]
        return steps


def sent(fn: Callable[[State], Any], **options: Any) -> tuple[list[dict[str, Any]], State]:
    """What a function becomes, and the state at its end."""
    backend = Whole()
    state = sgl.function(fn).run_remote(backend=backend, **options)
    assert state.error() is None
    return backend.steps, state


# ----------------------------------------------------------------------------- steps


def test_text_and_calls() -> None:
    def program(s: State) -> Any:
        s += "A " + sgl.gen("x", max_tokens=3, stop=".") + "B"
        s += sgl.select("y", choices=["u", "v", "u"]) + sgl.gen("z", regex="[a-z]")
        return s["x"], {"y": [s["y"]]}

    steps, state = sent(program, temperature=0)
    assert steps == [
        {"text": "A "},
        {"gen": {"name": "x", "max_tokens": 3, "temperature": 0, "stop": ["."]}},
        {"text": "B"},
        {"select": {"name": "y", "choices": ["u", "v"], "normalization": "token"}},
        {"gen": {"name": "z", "max_tokens": 128, "temperature": 0, "regex": "[a-z]"}},
    ]
    assert state.text() == "A <x>Bv<z>"
    assert (state["x"], state["y"], state["z"]) == ("<x>", "v", "<z>")
    assert state.returned == ("<x>", {"y": ["v"]})
    assert state.meta("x").usage.prompt_tokens == 3 and state.meta("x").finish_reason == "stop"
    assert state.meta("y").values == (-1.0,) * 3
    spans = [(span.kind, span.name, span.needs, span.read) for span in state.trace.spans]
    assert spans == [("gen", "x", (), True), ("select", "y", (0,), True), ("gen", "z", (1,), True)]
    with pytest.raises(sgl.UsageError, match="has ended"):
        state += "more"


def test_one_choice_is_judged_too() -> None:
    def program(s: State) -> None:
        s += "A " + sgl.select("y", choices=["u", "u"])

    steps, state = sent(program)
    assert steps[1]["select"]["choices"] == ["u"]
    assert (state.text(), state["y"], state.meta("y").values) == ("A u", "u", (-1.0, -1.0))


def test_values_that_are_put_in() -> None:
    def program(s: State) -> None:
        s += sgl.gen("x") + "," + sgl.gen("x") + sgl.gen()
        s += s["x"]
        s["kept"] = s["x"]
        s["both"] = [s["kept"], 1]
        s["plain"] = "p"
        s += "-" + s["plain"] + s["kept"]

    steps, state = sent(program)
    names = [step["gen"]["name"] for step in steps if "gen" in step]
    assert names == ["x", "x (2)", "unnamed"]
    assert steps[-3:] == [{"insert": "x (2)"}, {"text": "-p"}, {"insert": "x (2)"}]
    assert state.text() == "<x>,<x (2)><unnamed><x (2)>-p<x (2)>"
    assert (state["kept"], state["both"]) == ("<x (2)>", ["<x (2)>", 1])


def test_a_chat() -> None:
    def program(s: State) -> None:
        s += sgl.system("S") + sgl.user("Q")
        s += sgl.assistant("So " + sgl.gen("x"))
        with s.user():
            s += "Say " + s["x"]
        s += sgl.assistant_begin()
        s += sgl.gen("y")

    steps, state = sent(program)
    gen = {"max_tokens": 128}
    assert steps == [
        {"role": "system", "content": [{"text": "S"}]},
        {"role": "user", "content": [{"text": "Q"}]},
        {"role": "assistant", "content": [{"text": "So "}, {"gen": {"name": "x"} | gen}]},
        {"role": "user", "content": [{"text": "Say "}, {"insert": "x"}]},
        {"role": "assistant", "content": [{"gen": {"name": "y"} | gen}]},
    ]
    assert [m["content"] for m in state.messages()] == ["S", "Q", "So <x>", "Say <x>", "<y>"]


def test_forks() -> None:
    def program(s: State) -> None:
        s += "A" + sgl.gen("x")
        forks = s.fork(2)
        forks += lambda i: f"{i}" + sgl.gen("idea") + sgl.gen("x")
        forks.join()
        s += "Ideas: "
        for idea in s["idea"]:
            s += "- " + idea + "\n"
        s += forks["idea"][0] + forks["idea"][1]

    steps, state = sent(program)
    gen = {"max_tokens": 128}
    branch = [{"gen": {"name": "idea"} | gen}, {"gen": {"name": "x (2)"} | gen}]
    assert steps[2:] == [
        {"fork": [[{"text": "0"}, *branch], [{"text": "1"}, *branch]]},
        {"text": "Ideas: - "},
        {"insert": "idea", "separator": "\n- "},
        {"text": "\n"},
        {"insert": "idea", "separator": ""},
    ]
    assert state["idea"] == ["<idea>"] * 2
    assert state["x"] == "<x>", "it is the state's own"
    assert state.text().endswith("Ideas: - <idea>\n- <idea>\n<idea><idea>")
    assert [span.branch for span in state.trace.spans] == [0, 1, 1, 2, 2]


def test_texts_of_forks_and_a_copy() -> None:
    def program(s: State) -> None:
        s += sgl.user("Q")
        forks = s.fork(2)
        forks += sgl.assistant(sgl.gen("y"))
        forks.join("append")
        with s.copy() as t:
            t += sgl.assistant(sgl.gen("z"))
        s += sgl.user(s["z"][0])
        s.fork(2)  # in which nothing is asked

    steps, state = sent(program)
    assert [step.get("join") for step in steps] == [None, "append", None, None]
    assert steps[3] == {"role": "user", "content": [{"insert": "z"}]}
    assert [m["content"] for m in state.messages()] == ["Q", "<y>", "<y>", "<z>"]


def test_several_answers() -> None:
    def program(s: State) -> Any:
        s += "A" + sgl.gen("x", n=2)
        assert len(s["x"]) == 2
        s += s["x"][0] + ", " + s["x"][1]
        return s["x"][1]

    steps, state = sent(program)
    assert steps[1]["gen"]["n"] == 2 and steps[2] == {"insert": "x", "separator": ", "}
    assert state.text() == "A<x.0>, <x.1>" and state.returned == "<x.1>"


def test_scopes_objects_and_programs_in_programs() -> None:
    @sgl.function
    def inner(s: State, what: str) -> None:
        s += what + sgl.gen("inner")

    def program(s: State) -> None:
        inner(s, "deep ")
        with s.var_scope("both"):
            s += "(" + sgl.gen("x", max_tokens=9) + ")"
        s += sgl.gen("n", schema=list[int])

    backend = Whole(
        lambda events: [e | {"value": "[1]"} if e.get("name") == "n" else e for e in events]
    )
    state = sgl.function(program).run_remote(backend=backend)
    assert (state["inner"], state["both"], state["n"]) == ("<inner>", "(<x>)", [1])


def test_a_program_that_asks_nothing_sends_nothing() -> None:
    def program(s: State, x: int) -> int:
        s += "A"
        return x + 1

    backend = Whole()
    state = sgl.function(program).run_remote(1, backend=backend)
    assert (state.text(), state.returned, backend.bodies) == ("A", 2, [])


def test_a_time_limit_is_the_servers() -> None:
    backend = Whole()
    sgl.function(lambda s: s.__iadd__("A" + sgl.gen("x"))).run_remote(
        backend=backend, timeout_s=2.5
    )
    assert backend.bodies[0]["timeout"] == 2.5


# ----------------------------------------------------------------------------- refusals


@dataclass
class Form:
    field: int


class Pair(NamedTuple):
    one: Any


def branches(s: State) -> None:
    if s["x"] == "yes":
        s += "!"


def truth(s: State) -> None:
    s += "!" if s["x"] else "?"


def catches(s: State) -> None:
    try:
        int(s["x"])
    except Exception:
        s += "no number"


def looks_up(s: State) -> None:
    s += {"yes": "!"}[s["x"]]


def formats(s: State) -> None:
    s += f"It is {s['x']}."


def asks_type(s: State) -> None:
    s += "text" if isinstance(s["x"], str) else "?"


def reads_text(s: State) -> None:
    s += s.text()[:3]


def parses(s: State) -> None:
    json.loads(s["x"])


def joins(s: State) -> None:
    s += ", ".join([s["x"]])


def strips(s: State) -> None:
    s += s["x"].strip()


def matches(s: State) -> None:
    match Pair(s["x"]):
        case Pair("yes"):
            s += "!"


def objects(s: State) -> None:
    s += sgl.gen("o", schema=Form)
    s += s["o"]


def scopes(s: State) -> None:
    with s.var_scope("v"):
        s += sgl.gen("o")
    s += s["v"]


def no_thoughts(s: State) -> None:
    s += sgl.separate_reasoning(sgl.gen("o", regex="a"), model_type="qwen3")
    s += s["o_reasoning_content"]


def one_of_several(s: State) -> None:
    s += sgl.gen("o", n=3)
    s += s["o"][1]


def one_fork_only(s: State) -> None:
    forks = s.fork(2)
    forks += sgl.gen("o")
    s += forks["o"][1]


def across_forks(s: State) -> None:
    one, other = s.fork(2)
    one += sgl.gen("o")
    other += one["o"] + sgl.gen("p")


def goes_on(s: State) -> None:
    forks = s.fork(2)
    forks += sgl.gen("o")
    s += "meanwhile"
    forks.join("append")


def images(s: State) -> None:
    s += sgl.image("cat.png")


NOT_STRAIGHT: dict[Callable[[State], None], tuple[str, str]] = {
    branches: ("s['x'] == ", "a comparison looks at s['x']"),
    truth: ("if s['x']", "a condition looks at s['x']"),
    catches: ("int(s['x'])", "a number is made of s['x']"),
    looks_up: ("{'yes': '!'}[s['x']]", "key of a dict looks at s['x']"),
    formats: ('f"It is', "an f-string needs the text of"),
    asks_type: ("isinstance", "isinstance looks at s['x']"),
    reads_text: ("s.text()", "text() needs all values"),
    parses: ("json.loads", "s['x']"),
    joins: ("join([", "TypeError: sequence item 0"),
    strips: (".strip()", ".strip is asked of s['x']"),
    matches: ("case Pair", "a comparison looks at s['x']"),
    objects: ("s += s['o']", "an object and no text"),
    scopes: ("s += s['v']", "which no call makes"),
    no_thoughts: ("s['o_reasoning_content']", "cannot be appended here"),
    one_of_several: ("s['o'][1]", "s['o[1]'] cannot be appended here"),
    one_fork_only: ("forks['o'][1]", "s['o'] cannot be appended here"),
    across_forks: ("one['o']", "a fork knows what was there"),
    goes_on: ("forks.join", 'join("append") after the state itself has gone on'),
}


@pytest.mark.parametrize("fn", NOT_STRAIGHT, ids=lambda fn: fn.__name__)
def test_what_no_steps_can_say_is_refused_with_its_line(fn: Callable[[State], None]) -> None:
    operation, reason = NOT_STRAIGHT[fn]
    lines, first = inspect.getsourcelines(fn)
    line = first + next(
        i for i, x in enumerate(lines) if operation in x.replace('"', "'") or operation in x
    )
    backend = Whole()

    @sgl.function
    def program(s: State) -> None:
        s += "A" + sgl.gen("x")
        fn(s)

    with pytest.raises(sgl.UsageError) as caught:
        program.run_remote(backend=backend)
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"test_remote.py, line {line}: ")
    assert "run_remote" in str(caught.value) and not backend.bodies


def test_what_the_function_raises_by_itself_is_raised() -> None:
    def fails(s: State) -> None:
        s += sgl.gen("x")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sgl.function(fails).run_remote(backend=Whole())
    with pytest.raises(sgl.UsageError, match="no model that takes images"):
        sgl.function(images).run_remote(backend=Whole())


def test_backends_without_such_a_server() -> None:
    program = sgl.function(branches)
    for backend in (sgl.MockBackend({}), sgl.OpenAIBackend("http://localhost:1/v1", model="m")):
        with pytest.raises(sgl.UsageError, match="is no Phloem server"):
            program.run_remote(backend=backend)
    older = Whole(lambda events: [sgl.RequestRefused("not found", status=404)])
    with pytest.raises(sgl.UsageError, match="has no /programs/run"):
        sgl.function(three).run_remote(backend=older)


# ----------------------------------------------------------------------------- events


def three(s: State) -> None:
    s += "A" + sgl.gen("a")
    forks = s.fork(2)
    forks += sgl.gen("b")
    forks.join()
    s += sgl.gen("c")


def at(path: str) -> Callable[[list[dict[str, Any]]], list[Any]]:
    """An error of the step at `path`, behind what was there before it."""

    def change(events: list[dict[str, Any]]) -> list[Any]:
        error = {"message": "no", "param": path, "code": "unsupported_regex"}
        return [*events[:1], {"error": error}]

    return change


def causes(state: State) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in "abc":
        try:
            found[name] = state[name]
        except sgl.GenerationError as error:
            found[name] = (error.variable, error.cause)
    return found


def test_a_failed_step_is_that_of_its_variable() -> None:
    backend = Whole(at("steps[2].fork[1][0].gen.regex"))
    state = sgl.function(three).run_remote(backend=backend)
    found = causes(state)
    assert found["a"] == "<a>"
    variable, cause = found["b"]
    assert variable == "b" and isinstance(cause, sgl.Cancelled), "the first of the two forks"
    error = state.error()
    assert isinstance(error, sgl.GenerationError) and isinstance(error.cause, sgl.RequestRefused)
    failed = [span.error for span in state.trace.spans if span.error]
    assert len(failed) == 3 and "RequestRefused: no" in failed[1]
    assert isinstance(found["c"][1], sgl.Cancelled)
    refused = [v.error.cause for v in state._run._variables if v.error and v.name == "b"]
    (cause,) = [one for one in refused if isinstance(one, sgl.RequestRefused)]
    assert (cause.param, cause.code) == ("regex", "unsupported_regex")


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda events: events[:1], sgl.BackendUnavailable, "broke off"),
        (lambda events: [*events[:1], {"type": 3}], sgl.BackendError, "not what it should be"),
        (
            lambda events: [events[0], {"error": {"message": "busy", "code": "queue_full"}}],
            sgl.BackendUnavailable,
            "busy",
        ),
        (
            lambda events: [events[0], {"error": {"message": "no", "param": "steps"}}],
            sgl.RequestRefused,
            "no",
        ),
        (lambda events: [events[0], OSError("disk")], OSError, "disk"),
    ],
)
def test_what_is_no_calls_fault_is_the_error_of_all_that_are_left(
    change: Any, kind: type[Exception], message: str
) -> None:
    found = causes(sgl.function(three).run_remote(backend=Whole(change)))
    assert found["a"] == "<a>"
    for name in "bc":
        _, cause = found[name]
        assert isinstance(cause, kind) and message in str(cause)


def test_answers_that_cannot_be() -> None:
    def program(s: State) -> None:
        s += "A" + sgl.gen("a", n=2)
        s += sgl.select("b", choices=["u", "v"])
        s += sgl.gen("c")

    def change(events: list[dict[str, Any]]) -> list[Any]:
        a, b, c, done = events
        return [
            a | {"finish_reason": "stop"},
            b | {"value": "w"},
            c | {"finish_reason": "abort"},
            done,
        ]

    found = causes(sgl.function(program).run_remote(backend=Whole(change)))
    assert "1 ends of 2 answers" in str(found["a"][1])
    assert "'w' is none of 2 choices" in str(found["b"][1])
    assert found["c"][0] == "b"


def test_constraints_are_checked_as_in_any_run() -> None:
    def program(s: State) -> None:
        s += "A" + sgl.gen("a", json_schema={"type": "object"}, max_tokens=1)

    def cut(events: list[dict[str, Any]]) -> list[Any]:
        return [events[0] | {"value": "{", "finish_reason": "length"}, events[1]]

    error = sgl.function(program).run_remote(backend=Whole(cut)).error()
    assert isinstance(error, sgl.GenerationError) and isinstance(error.cause, sgl.Truncated)


def test_variables_can_be_read_as_they_come() -> None:
    backend = Whole()
    backend.hold = asyncio.Event()
    stream = sgl.function(three).run_remote(backend=backend, stream=True)
    assert (stream["a"], stream["b"], stream["c"]) == ("<a>", ["<b>"] * 2, "<c>")
    background.call_soon(backend.hold.set)
    assert stream.text() == "A<a><c>" and "".join(stream.text_iter()) == "A<a><c>"
    refused = sgl.function(three).run_remote(backend=backend, stream=True, temperature=0)
    assert refused.error() is None
    wrong = sgl.function(branches).run_remote(backend=backend, stream=True)
    assert isinstance(wrong.error(), KeyError)


async def test_cancelling_leaves_the_server() -> None:
    backend = Whole()
    backend.hold = asyncio.Event()
    task = asyncio.create_task(sgl.function(three).arun_remote(backend=backend))
    while not backend.bodies:  # noqa: ASYNC110  (the backend is not to know that it is watched)
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while not backend.left:  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def test_on_an_event_loop() -> None:
    state = await sgl.function(three).arun_remote(backend=Whole())
    assert state["c"] == "<c>"
