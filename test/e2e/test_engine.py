"""The engine inside a Python program, without HTTP, with and without an event loop."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from phloem.constrained.spec import Choice, Regex
from phloem.srt.blocking import BlockingEngine
from phloem.srt.config import CacheOptions, ModelOptions, ServeConfig
from phloem.srt.engine import Engine, StartupError
from phloem.srt.errors import InvalidConstraint, InvalidRequest, PhloemError, PromptTooLong
from phloem.srt.generation import ChatMessage, GenerateRequest
from phloem.srt.messages import FinishReason, SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.model]

SHORT = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def engine(default_model: Path) -> Iterator[BlockingEngine]:
    config = ServeConfig(
        model=ModelOptions(model=str(default_model)), cache=CacheOptions(kv_tokens=4096)
    )
    with BlockingEngine(config) as running:
        yield running


def test_complete_and_stream_agree(engine: BlockingEngine) -> None:
    request = GenerateRequest(prompt="The sky is", sampling=SHORT)
    whole = engine.complete(request)
    chunks = list(engine.stream(request))
    assert "".join(c.text for c in chunks) == whole.text
    assert chunks[0].text == ""
    assert chunks[-1].finish == whole.finish
    assert chunks[-1].cached_tokens == whole.prompt_tokens - 1


def test_constraints(engine: BlockingEngine) -> None:
    free = SamplingParams(temperature=1.5, seed=3, max_tokens=40)
    matched = engine.complete(
        GenerateRequest(prompt="Call ", sampling=free, constraint=Regex(pattern=r"\d{3}-\d{4}"))
    )
    assert re.fullmatch(r"\d{3}-\d{4}", matched.text)
    assert matched.finish.reason is FinishReason.STOP
    chosen = engine.complete(
        GenerateRequest(prompt="Yes?", sampling=free, constraint=Choice(choices=("ja", "nein")))
    )
    assert chosen.text in ("ja", "nein")


def test_errors_come_before_anything_is_computed(engine: BlockingEngine) -> None:
    with pytest.raises(InvalidConstraint):
        engine.complete(GenerateRequest(prompt="x", constraint=Regex(pattern="(?=a)b")))
    with pytest.raises(InvalidRequest):
        engine.complete(GenerateRequest(prompt=[10**6]))
    with pytest.raises(InvalidRequest):
        engine.complete(GenerateRequest(prompt=[]))
    with pytest.raises(PromptTooLong):
        engine.complete(GenerateRequest(prompt=[5] * 5000))


def test_leaving_a_stream_aborts_it(engine: BlockingEngine) -> None:
    endless = SamplingParams(max_tokens=2000, ignore_eos=True)
    for chunk in engine.stream(GenerateRequest(prompt="Once", sampling=endless)):
        if chunk.completion_tokens >= 3:
            break
    after = engine.complete(GenerateRequest(prompt="The sky is", sampling=SHORT))
    assert after.completion_tokens == 8


def test_stop_strings_end_the_answer(engine: BlockingEngine) -> None:
    text = engine.complete(GenerateRequest(prompt="The sky is", sampling=SHORT)).text
    middle = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = engine.complete(GenerateRequest(prompt="The sky is", sampling=SHORT, stop=(middle,)))
    assert stopped.text == text[: text.index(middle)]
    assert stopped.finish.matched == middle


def test_many_at_once(engine: BlockingEngine) -> None:
    prompts = [f"Number {i} is" for i in range(12)]
    answers = engine.complete_many([GenerateRequest(prompt=p, sampling=SHORT) for p in prompts])
    alone = [engine.complete(GenerateRequest(prompt=p, sampling=SHORT)) for p in prompts]
    assert [a.text for a in answers] == [a.text for a in alone]


def test_prompt_logprobs(engine: BlockingEngine) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=0, logprobs=1)
    ids = engine.complete(GenerateRequest(prompt="The sky is blue", sampling=SHORT)).prompt_tokens
    whole = engine.complete(
        GenerateRequest(prompt="The sky is blue", sampling=sampling, prompt_logprobs_from=0)
    )
    assert whole.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == ids
    assert whole.prompt_logprobs[0] is None
    assert all(e is not None and e.logprob < 0 for e in whole.prompt_logprobs[1:])


def test_chat(engine: BlockingEngine) -> None:
    prompt = engine.render_chat([ChatMessage(role="user", content="Say hello.")])
    assert engine.complete(GenerateRequest(prompt=prompt, sampling=SHORT)).text


def test_close_twice_is_fine(default_model: Path) -> None:
    running = BlockingEngine(
        ServeConfig(
            model=ModelOptions(model=str(default_model)), cache=CacheOptions(kv_tokens=1024)
        )
    )
    running.close()
    running.close()


async def test_a_model_that_is_not_there_is_an_error() -> None:
    engine = Engine(ServeConfig(model=ModelOptions(model="no-such-model")))
    with pytest.raises((PhloemError, StartupError), match="no-such-model"):
        await engine.start()
    await engine.close()
