"""What a server hears of programs: the plans in the bodies of calls, and the end of a program."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import phloem
from phloem.constrained.spec import Ebnf, Regex
from phloem.lang.backend.wire import hint_fields
from phloem.lang.hints import Hint

pytestmark = pytest.mark.timeout(60)

SCORES = {
    "index": 0,
    "choices": [{"tokens": [t], "logprobs": [-1.0], "value": -1.0} for t in "ab"],
}


class Server:
    """Answers every call by "hi", and knows what it was asked. `refuse` may say what is wrong with
    a body."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.refuse: Callable[[dict[str, Any]], str | None] = lambda body: None
        self.end_status = 200
        self.ending = asyncio.Event()
        self.ending.set()

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        self.asked.append((request.path, body))
        if request.path.endswith("/end"):
            await self.ending.wait()
            return web.json_response({}, status=self.end_status)
        param = self.refuse(body)
        if param is not None:
            error = {"message": "no", "param": param, "code": "invalid_value"}
            return web.json_response({"error": error}, status=400)
        if request.path == "/v1/score":
            return web.json_response(SCORES)
        return web.json_response({"choices": [{"text": "hi", "finish_reason": "stop"}]})

    @property
    def plans(self) -> list[Any]:
        return [body.get("plan") for path, body in self.asked if not path.endswith("/end")]

    @property
    def ends(self) -> list[str]:
        return [path for path, _ in self.asked if path.endswith("/end")]

    async def until(self, ends: int) -> None:
        while len(self.ends) < ends:  # noqa: ASYNC110  (the server is not to know who waits)
            await asyncio.sleep(0.005)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, phloem.HttpBackend]]:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with TestServer(app) as listening:
        backend = phloem.HttpBackend(str(listening.make_url("/")), model="m")
        yield server, backend
        await backend.aclose()


@phloem.function
def reads(s: phloem.State) -> Any:
    """The server cannot know of the last call that it is."""
    s += "A" + phloem.gen("a") + phloem.gen("b", regex="[a-z]+")
    return s["a"] + s["b"]


@phloem.function
def writes(s: phloem.State) -> None:
    s += "A" + phloem.gen("a") + phloem.gen("b", regex="[a-z]+")


@phloem.function
def judges(s: phloem.State) -> None:
    s += "A" + phloem.select("a", choices=["a", "b"])
    s += phloem.gen("b", regex="[a-z]+")


def test_a_hint_as_fields() -> None:
    assert hint_fields(None) == {}
    assert hint_fields(Hint("p")) == {"program": "p"}
    ahead = (Regex(pattern="a"), Ebnf(grammar="r ::= 'a'", root="r"), Ebnf(grammar="root ::= 'a'"))
    assert hint_fields(Hint("p", "fork", 3, 0, ahead)) == {
        "program": "p",
        "plan": {
            "remaining": 0,
            "group": "fork",
            "width": 3,
            "next_constraint": [{"regex": "a"}, {"ebnf": "root ::= 'a'"}],
        },
    }


@pytest.mark.parametrize("program", [writes, judges])
async def test_a_plan_that_is_refused_fails_no_call(program: Any) -> None:
    """The constraint of the second call is no good: that fails, and not the one before it."""

    def refuse(body: dict[str, Any]) -> str | None:
        if body.get("plan", {}).get("next_constraint"):
            return "plan.next_constraint[0].regex"
        return "regex" if "regex" in body else None

    async with serving() as (server, backend):
        server.refuse = refuse
        states = [await program.arun(backend=backend) for _ in range(20)]
        for state in states:
            assert state["a"] in ("hi", "a")
            error = state.error()
            assert isinstance(error, phloem.GenerationError) and error.variable == "b"
        assert any(plan for plan in server.plans), "it was said of one of them at least"


async def test_calls_are_refused_for_what_they_are() -> None:
    async with serving() as (server, backend):
        server.refuse = lambda body: "prompt"
        error = (await writes.arun(backend=backend)).error()
        assert isinstance(error, phloem.GenerationError) and error.variable == "a"
        assert len(server.asked) == 1
        assert isinstance(error.cause, phloem.RequestRefused)


async def test_programs_are_ended_once_and_nobody_waits() -> None:
    async with serving() as (server, backend):
        server.ending.clear()
        states = [await reads.arun(backend=backend) for _ in range(3)]
        assert [state.returned for state in states] == ["hihi"] * 3
        await server.until(3)
        server.ending.set()
        programs = {body["program"] for path, body in server.asked if not path.endswith("/end")}
        assert len(programs) == 3
        assert {f"/programs/{program}/end" for program in programs} == set(server.ends)


async def test_closing_waits_for_what_is_told_and_leaves_nothing() -> None:
    async with serving() as (server, backend):
        await reads.arun(backend=backend)
        await asyncio.to_thread(backend.close)
        assert len(server.ends) == 1
        server.ending.clear()  # a server that does not answer is not waited for
        await reads.arun(backend=backend)
        await backend.aclose()
        server.ending.set()
        gc.collect()


async def test_an_older_server_is_not_told_again() -> None:
    async with serving() as (server, backend):
        server.end_status = 404
        await reads.arun(backend=backend)
        await server.until(1)
        await backend.aclose()
        await reads.arun(backend=backend)
        await backend.aclose()
        assert len(server.ends) == 1


async def test_a_server_that_is_gone_is_nobodys_concern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phloem.lang.backend.retry._FIRST_S", 0.001)
    async with serving() as (_, backend):
        pass
    assert (await writes.arun(backend=backend)).error() is not None
    await backend.aclose()


SCRIPT = """
import sys
import phloem

@phloem.function
def reads(s):
    s += "A" + phloem.gen("a") + phloem.gen("b")
    return s["b"]

print(reads.run(backend=phloem.HttpBackend(sys.argv[1], model="m")).returned)
"""


async def test_a_script_that_exits_at_once_ends_its_program() -> None:
    async with serving() as (server, backend):
        command = [sys.executable, "-W", "error", "-c", SCRIPT, backend.base_url]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=30
        )
        assert (done.stdout, done.stderr, done.returncode) == ("hi\n", "", 0)
        assert len(server.ends) == 1
