"""Typed results, and where programs run, on real engines."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal

import pytest

import phloem

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(120)]


@dataclasses.dataclass
class Person:
    name: str
    age: int
    mood: Literal["good", "bad"]


PERSON = phloem.gen("person", schema=Person, max_tokens=80)


@phloem.function
def extract(s: phloem.State, text: str) -> None:
    s += phloem.user(f"Who is it? {text}")
    s += phloem.assistant(PERSON)
    s += phloem.user("Three numbers.")
    s += phloem.assistant(phloem.gen("numbers", schema=list[int], max_tokens=40, n=2))


def test_objects(server: Any) -> None:
    state = extract.run(text="Ada, 36, is glad.", backend=server.url, temperature=0.0)
    assert state[PERSON].mood in ("good", "bad")
    assert isinstance(state[PERSON].age, int)
    assert all(isinstance(n, int) for answer in state["numbers"] for n in answer)
    assert len(state["numbers"]) == 2


@phloem.function
def count(s: phloem.State) -> None:
    s += "1 2 3 4 5 6" + phloem.gen("more", max_tokens=24, stop_regex=["[89]"], logprobs=2)
    s += "; vowels: " + phloem.gen("vowels", grammar='root ::= [aeiou] [aeiou] "!"')


@pytest.mark.parametrize("where", ["server", "process"])
def test_stops_grammars_and_logprobs(where: str, default_model: Path, server: Any) -> None:
    if where == "server":
        endpoint = phloem.RuntimeEndpoint(server.url)
        assert endpoint.get_model_name() == "tiny"
        check(endpoint)
        assert endpoint.get_server_info() == phloem.get_server_info(server.url)
        endpoint.close()
        return
    with phloem.Runtime(model_path=str(default_model), kv_tokens=4096) as runtime:
        check(runtime)
        assert phloem.get_server_info(runtime)["vocab_size"] > 1000
        runtime.shutdown()


def check(backend: Any) -> None:
    state = count.run(backend=backend, temperature=0.0)
    assert not re.search("[89]", state["more"])
    info = state.get_meta_info("more")
    if info["finish_reason"]["type"] == "stop":
        assert info["finish_reason"]["matched"] == "[89]"
    assert all(len(top) == 2 for top in info["output_top_logprobs"])
    assert all(logprob <= 0.0 for logprob, _, _ in info["output_token_logprobs"])
    assert re.fullmatch("[aeiou]{2}!", state["vowels"])
    assert phloem.flush_cache(backend) is True


def test_an_engine_has_no_options_of_a_server() -> None:
    with pytest.raises(TypeError, match="unknown option 'port'"):
        phloem.Runtime(model_path="x", port=30000)
