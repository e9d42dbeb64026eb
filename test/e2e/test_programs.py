"""Programs against a real server: holds, grammars compiled ahead, whole programs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

import phloem

pytestmark = [pytest.mark.e2e, pytest.mark.model]

DOCUMENT = (Path(__file__).parents[2] / "docs" / "programs.md").read_text(encoding="utf-8")
GREEDY = {"temperature": 0, "max_tokens": 8}


def commands() -> Iterator[tuple[str, bytes | None]]:
    """Paths and bodies of the curl commands of docs/programs.md."""
    for block in re.findall(r"```bash\n(.*?)```", DOCUMENT, re.DOTALL):
        words = shlex.split(block)
        starts = [i for i, word in enumerate(words) if word == "curl"] + [len(words)]
        for start, end in pairwise(starts):
            command = words[start:end]
            url = next(word for word in command if word.startswith("localhost:30000"))
            body = command[command.index("--json") + 1].encode() if "--json" in command else None
            yield url.removeprefix("localhost:30000"), body


def test_the_examples_of_the_documentation_are_answered(server: Any) -> None:
    found = list(commands())
    assert {path for path, _ in found} == {"/v1/completions", "/programs/run", "/programs/tips/end"}
    for path, body in found:
        if body is not None and b'"stream": true' in body:
            request = msgspec.json.decode(body)
            body = msgspec.json.encode(request | {"stream": False})
        status, reply = server.post(path, body or b"{}")
        assert status == 200, reply


def test_a_whole_program_says_what_its_calls_say_one_by_one(server: Any) -> None:
    def complete(prompt: str, **more: Any) -> str:
        status, reply = server.post("/v1/completions", {"prompt": prompt, **GREEDY, **more})
        assert status == 200, reply
        text: str = reply["choices"][0]["text"]
        return text

    steps = [
        {"text": "The capital of France is"},
        {"gen": {"name": "city", "stop": "."}},
        {
            "fork": [
                [{"text": ". In winter it is"}, {"gen": {"name": "weather"}}],
                [{"text": ". In summer it is"}, {"gen": {"name": "weather"}}],
            ]
        },
        {"text": ". It is a"},
        {"select": {"name": "kind", "choices": [" city", " river"], "normalization": "none"}},
        {"text": " of about"},
        {"gen": {"name": "size", "regex": " [0-9]{2,6}"}},
    ]
    status, reply = server.post("/programs/run", {"steps": steps, "defaults": GREEDY})
    assert status == 200, reply
    start = "The capital of France is"
    city = complete(start, stop=".")
    weather = [complete(f"{start}{city}. In {season} it is") for season in ("winter", "summer")]
    line = f"{start}{city}. It is a"
    body = {"prompt": line, "choices": [" city", " river"], "normalization": "none"}
    kind = server.post("/v1/score", body)[1]["choice"]
    size = complete(f"{line}{kind} of about", regex=" [0-9]{2,6}")
    assert reply["variables"] == {"city": city, "weather": weather, "kind": kind, "size": size}
    assert reply["text"] == f"{line}{kind} of about{size}"
    assert re.fullmatch(" [0-9]{2,6}", size)


def test_a_chat_program_says_what_its_messages_say(server: Any) -> None:
    steps = [
        {"role": "user", "content": "Say hello."},
        {"role": "assistant", "content": [{"gen": {"name": "hello"}}]},
        {"role": "user", "content": "Again, in French."},
        {"role": "assistant", "content": [{"text": "Bon"}, {"gen": {"name": "rest"}}]},
    ]
    status, reply = server.post("/programs/run", {"steps": steps, "defaults": GREEDY})
    assert status == 200, reply
    messages = reply["messages"]
    body = {"messages": messages[:1], **GREEDY}
    first = server.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
    assert first == reply["variables"]["hello"]
    begun = [*messages[:3], {"role": "assistant", "content": "Bon"}]
    body = {"messages": begun, "continue_final_message": True, **GREEDY}
    rest = server.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
    assert rest == reply["variables"]["rest"]


def test_a_constraint_that_is_refused_names_its_step(server: Any) -> None:
    schema = {"type": "object", "unevaluatedProperties": {"$ref": "#/nowhere"}}
    steps = [
        {"text": "a"},
        {"gen": {"name": "x", "max_tokens": 1}},
        {"gen": {"name": "y", "json_schema": schema}},
    ]
    status, reply = server.post("/programs/run", {"steps": steps})
    assert status == 400, reply
    assert reply["error"]["param"].startswith("steps[2].gen.json_schema")


@pytest.fixture(scope="module")
def small(start_server: Callable[..., Any]) -> Any:
    """A server whose cache holds a thousand tokens."""
    return start_server("--kv-tokens", "1024", "--pin-share", "0.5")


def test_the_next_grammar_is_there_when_its_call_comes(small: Any) -> None:
    """No other test compiles anything on this server."""

    def grammars() -> tuple[float, float]:
        compiles = small.metric("phloem_grammar_compiles_total")
        return compiles, small.metric("phloem_grammar_cache_hits_total")

    regex = "(north|south|east|west){2,9}x"
    plan = {"next_constraint": {"regex": regex}}
    body = {"prompt": "Go", "program": "compass", **GREEDY}
    assert grammars() == (0, 0)
    assert small.post("/v1/completions", body | {"plan": plan})[0] == 200
    small.until(lambda: grammars() == (1, 0))
    assert small.post("/v1/completions", body | {"regex": regex, "max_tokens": 40})[0] == 200
    small.until(lambda: grammars() == (1, 1))


def cached_after_pressure(small: Any, name: str, plan: dict[str, Any]) -> tuple[int, int]:
    """What of a call's prompt and answer is cached after others have used up the cache, and how
    much there was."""
    prompt = f"Notes of {name}: " + " ".join(f"{name}{i}" for i in range(40))
    body = {"prompt": prompt, "program": name, "ignore_eos": True, **GREEDY}
    status, reply = small.post("/v1/completions", body | {"plan": plan})
    assert status == 200, reply
    answer = reply["choices"][0]["text"]
    for i in range(8):
        words = " ".join(f"{name}{i}word{j}" for j in range(60))
        assert small.post("/v1/completions", {"prompt": words, "max_tokens": 1})[0] == 200
    more = {"prompt": prompt + answer + " So", "program": name, "max_tokens": 1}
    status, reply = small.post("/v1/completions", more)
    assert status == 200, reply
    usage = reply["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def test_what_a_call_goes_on_from_stays_under_pressure(small: Any) -> None:
    cached, _ = cached_after_pressure(small, "plain", {})
    assert cached < 4, "it was evicted"
    cached, prompt = cached_after_pressure(small, "held", {"fork": 1})
    assert cached >= prompt - 6
    locked = small.get("/cache/stats")[1]
    assert msgspec.json.decode(locked)["locked"] == 0, "the call that was waited for has come"


def test_a_program_that_ends_gives_back_what_was_held(small: Any) -> None:
    body = {"prompt": "One two three four five six", "program": "gone", **GREEDY}
    assert small.post("/v1/completions", body | {"plan": {"fork": 5}})[0] == 200
    stats = msgspec.json.decode(small.get("/cache/stats")[1])
    assert stats["locked"] > 0
    assert small.post("/programs/gone/end", b"{}")[0] == 200
    small.until(lambda: msgspec.json.decode(small.get("/cache/stats")[1])["locked"] == 0)


def test_a_program_of_the_dsl_is_one_for_the_server(server: Any) -> None:
    @phloem.function
    def ideas(s: phloem.State, *, known: bool) -> int:
        s += "Two ideas." + phloem.gen("plan", max_tokens=4)
        assert s["plan"]
        alive = programs()
        forks = s.fork(2)
        for i, fork in enumerate(forks):
            fork += f" Idea {i}:" + phloem.gen("idea", max_tokens=4)
        forks.join()
        if not known:
            assert len(s["idea"]) == 2
        return alive

    def programs() -> int:
        count: int = msgspec.json.decode(server.get("/cache/stats")[1])["programs"]
        return count

    before = programs()
    for known in (True, False):  # that no call follows the last ones
        state = ideas.run(backend=server.url, known=known)
        assert state.returned == before + 1
        server.until(lambda: programs() == before)
