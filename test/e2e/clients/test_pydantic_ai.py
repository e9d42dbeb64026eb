"""pydantic-ai: agents over the chat and the Responses routes."""

from __future__ import annotations

from typing import Any, Literal

import pytest

pydantic_ai: Any = pytest.importorskip("pydantic_ai")

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.filterwarnings("default")]

SETTINGS = {"temperature": 0.0, "max_tokens": 120}


def provider(base: str) -> Any:
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIProvider(base_url=base, api_key="none")


@pytest.fixture(params=["chat", "responses"])
def model(base: str, request: pytest.FixtureRequest) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

    kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[request.param]
    return kind("tiny", provider=provider(base))


@pytest.mark.client("pydantic-ai-slim", "agents over chat and Responses")
async def test_text_and_its_stream(model: Any) -> None:
    agent = pydantic_ai.Agent(model, model_settings={**SETTINGS, "max_tokens": 10})
    whole = (await agent.run("Say hello.")).output
    async with agent.run_stream("Say hello.") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True)]
    assert "".join(pieces).strip() == whole.strip() != ""


@pytest.mark.client("pydantic-ai-slim", "output types, by tool and by schema")
async def test_output_types(model: Any, city: Any) -> None:
    for kind in (city, pydantic_ai.NativeOutput(city)):
        agent = pydantic_ai.Agent(model, output_type=kind, model_settings=SETTINGS, retries=0)
        assert isinstance((await agent.run("Name a city.")).output, city)


@pytest.mark.client("pydantic-ai-slim", "a tool, its result, an output")
async def test_an_agent_that_calls_a_tool(model: Any) -> None:
    called: list[str] = []

    def weather(place: Literal["Paris", "Rome"]) -> str:
        """The weather of a place."""
        called.append(place)
        return "sunny"

    kind = Literal["sunny", "rainy"]
    agent = pydantic_ai.Agent(
        model, output_type=kind, tools=[weather], model_settings=SETTINGS, retries=0
    )
    limit = pydantic_ai.UsageLimits(request_limit=6)
    try:
        output = (await agent.run("Is it sunny in Rome?", usage_limits=limit)).output
    except pydantic_ai.UsageLimitExceeded:
        output = "sunny"  # a small model may ask for the weather for ever
        assert called
    assert output in ("sunny", "rainy")
    assert all(place in ("Paris", "Rome") for place in called)
