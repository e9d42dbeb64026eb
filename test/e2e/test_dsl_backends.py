"""Programs against a real server by every API that it has."""

from __future__ import annotations

import json
from typing import Any

import pytest

import phloem
from phloem.lang.choices import ChoicesMethod

pytestmark = [pytest.mark.e2e, pytest.mark.model]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 48}


@phloem.function
def extract(s: phloem.State) -> None:
    s += phloem.system("You extract data.")
    s += phloem.user("Ada is 36.")
    s += phloem.assistant("Here it is: " + phloem.gen("person", json_schema=SCHEMA))
    s += phloem.user("Thanks. One word more.")
    s += phloem.assistant(phloem.gen("word", max_tokens=4))


@phloem.function
def choose(s: phloem.State, method: ChoicesMethod) -> None:
    s += "The capital of France is" + phloem.select(
        "city", [" Paris", " London"], choices_method=method
    )


@phloem.function
def choose_in_chat(s: phloem.State) -> None:
    s += phloem.user("What colour is grass?")
    s += phloem.assistant("It is" + phloem.select("colour", [" red", " green", " greenish"]))


def backends(url: str) -> dict[str, Any]:
    return {
        "phloem": phloem.HttpBackend(url),
        "as phloem": phloem.OpenAIBackend(url, dialect="phloem"),
        "as vllm": phloem.OpenAIBackend(f"{url}/v1", dialect="vllm"),
        "as anthropic": phloem.AnthropicBackend("tiny", base_url=url, api_key="none"),
    }


def test_all_apis_give_one_answer(server: Any) -> None:
    found = {}
    for name, backend in backends(server.url).items():
        state = extract.run(backend=backend, **GREEDY)
        person = state["person"]
        person = json.loads(person) if isinstance(person, str) else person
        assert set(person) == {"name", "age"}
        found[name] = state.messages()
        assert state.meta("word").usage.prompt_tokens > 10
        streamed = extract.stream(backend=backend, **GREEDY)
        assert "".join(streamed.text_iter("word")) == state["word"]
        backend.close()
    assert found["as phloem"] == found["as vllm"] == found["phloem"]
    # how JSON is laid out cannot be said to Anthropic's
    assert found["as anthropic"][:2] == found["phloem"][:2]


@pytest.mark.parametrize("method", ChoicesMethod)
def test_all_apis_with_scores_choose_alike(server: Any, method: ChoicesMethod) -> None:
    apis = backends(server.url) | {"as openai": phloem.OpenAIBackend(server.url)}
    del apis["as anthropic"]
    values = []
    for backend in apis.values():
        state = choose.run(method=method, backend=backend)
        assert state["city"] == " Paris"
        values.append(state.meta("city").values)
        backend.close()
    for found in values[1:]:
        assert found == pytest.approx(values[0], abs=1e-3)


def test_all_apis_with_scores_choose_alike_in_a_chat(server: Any) -> None:
    values = []
    for name, backend in backends(server.url).items():
        state = choose_in_chat.run(backend=backend)
        if name == "as anthropic":
            with pytest.raises(phloem.GenerationError, match="no logprobs"):
                state["colour"]
        else:
            assert "".join(state.meta("colour").scores[1].tokens) == " green"
            values.append(state.meta("colour").values)
        backend.close()
    for found in values[1:]:
        assert found == pytest.approx(values[0], abs=1e-3)


def test_an_older_server_is_asked_in_the_older_way(server: Any) -> None:
    newer = phloem.HttpBackend(server.url)
    older = phloem.HttpBackend(server.url)
    older._scores_at_once = False
    values = []
    for backend in (newer, older):
        values.append(choose_in_chat.run(backend=backend).meta("colour").values)
        backend.close()
    assert values[0] == pytest.approx(values[1], abs=1e-3)


@phloem.function
def choose_in_a_message(s: phloem.State) -> None:
    s += phloem.user("What colour is grass: red, green or blue? Answer in JSON.")
    s += phloem.assistant(phloem.select("colour", ["red", "green", "blue"]))
    s += phloem.user("Why?")
    s += phloem.assistant(phloem.gen("why", max_tokens=4))


def test_a_choice_is_generated_where_chat_is_all_there_is(server: Any) -> None:
    backends: list[Any] = [
        phloem.OpenAIBackend(server.url, kind="chat", select_by_generation=True),
        phloem.AnthropicBackend("tiny", base_url=server.url, select_by_generation=True),
    ]
    found = set()
    for backend in backends:
        state = choose_in_a_message.run(backend=backend, temperature=0.0)
        assert state.error() is None
        assert state["colour"] in ("red", "green", "blue")
        assert [m["content"] for m in state.messages()][1] == state["colour"]
        assert state.meta("colour").scores == ()
        assert state.meta("colour").usage.completion_tokens > 0
        found.add(state["colour"])
        backend.close()
    assert len(found) == 1
