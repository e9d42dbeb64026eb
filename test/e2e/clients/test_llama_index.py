"""llama-index, through its model for servers that speak OpenAI's protocol."""

from typing import Any, Literal

import pytest

openai_like = pytest.importorskip("llama_index.llms.openai_like")

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.filterwarnings("default")]


@pytest.fixture
def llm(base: str) -> Any:
    return openai_like.OpenAILike(
        model="tiny",
        api_base=base,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        max_tokens=80,
        temperature=0,
        max_retries=0,
    )


@pytest.mark.client("llama-index-llms-openai-like", "complete, stream_complete")
def test_a_stream_says_what_complete_says(llm: Any) -> None:
    whole = llm.complete("Say hello.", max_tokens=10).text
    pieces = [piece.delta for piece in llm.stream_complete("Say hello.", max_tokens=10)]
    assert "".join(pieces) == whole != ""


@pytest.mark.client("llama-index-llms-openai-like", "structured output")
def test_structured_output(llm: Any, city: Any) -> None:
    assert isinstance(llm.as_structured_llm(city).complete("Name a city.").raw, city)


def weather(place: Literal["Paris", "Rome"]) -> str:
    """The weather of a place."""
    return place


@pytest.mark.client("llama-index-llms-openai-like", "tools")
def test_a_tool_is_called(llm: Any) -> None:
    from llama_index.core.tools import FunctionTool

    tool = FunctionTool.from_defaults(weather)
    reply = llm.chat_with_tools([tool], user_msg="The weather in Rome?", tool_required=True)
    call = llm.get_tool_calls_from_response(reply)[0]
    assert call.tool_name == "weather"
    assert call.tool_kwargs["place"] in ("Paris", "Rome")


@pytest.mark.client("llama-index-llms-openai-like", "async")
async def test_async(llm: Any) -> None:
    assert (await llm.acomplete("Say hello.", max_tokens=6)).text
