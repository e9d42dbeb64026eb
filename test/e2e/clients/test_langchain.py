"""langchain-openai: what its chat model does by way of tools and schemas."""

from __future__ import annotations

from typing import Any, Literal

import pytest

langchain_openai = pytest.importorskip("langchain_openai")

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.filterwarnings("default")]


@pytest.fixture
def llm(base: str) -> Any:
    return langchain_openai.ChatOpenAI(
        model="tiny", base_url=base, api_key="none", temperature=0, max_tokens=80, max_retries=0
    )


def weather(city: Literal["Paris", "Rome"], hours: Literal[1, 2]) -> str:
    """The weather of a city, some hours from now."""
    return f"{city} {hours}"


@pytest.mark.client("langchain-openai", "invoke, stream")
def test_a_stream_says_what_invoke_says(llm: Any) -> None:
    short = llm.bind(max_tokens=10)
    whole = short.invoke("Say hello.")
    assert "".join(piece.content for piece in short.stream("Say hello.")) == whole.content
    assert whole.usage_metadata["output_tokens"] == 10


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.client("langchain-openai", "with_structured_output")
def test_structured_output(llm: Any, city: Any, method: str) -> None:
    found = llm.with_structured_output(city, method=method).invoke("Name a city.")
    assert isinstance(found, city)


@pytest.mark.client("langchain-openai", "bind_tools")
def test_a_bound_tool_is_called(llm: Any) -> None:
    bound = llm.bind_tools([weather], tool_choice="weather")
    whole = bound.invoke("The weather in Rome?")
    (call,) = whole.tool_calls
    assert call["name"] == "weather"
    assert call["args"]["city"] in ("Paris", "Rome")
    assert call["args"]["hours"] in (1, 2)
    pieces = None
    for piece in bound.stream("The weather in Rome?"):
        pieces = piece if pieces is None else pieces + piece
    assert pieces is not None
    assert [c["args"] for c in pieces.tool_calls] == [call["args"]]


@pytest.mark.client("langchain-openai", "tool results in the history")
def test_an_answer_after_a_tool(llm: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    asked = HumanMessage("The weather in Rome?")
    said = llm.bind_tools([weather], tool_choice="required").invoke([asked])
    answers = [ToolMessage("sunny", tool_call_id=call["id"]) for call in said.tool_calls]
    last = llm.bind_tools([weather]).invoke([asked, said, *answers])
    assert last.content or last.tool_calls


@pytest.mark.client("langchain-openai", "async batch")
async def test_a_batch(llm: Any) -> None:
    replies = await llm.bind(max_tokens=4).abatch(["One.", "Two.", "Three."])
    assert all(1 <= reply.usage_metadata["output_tokens"] <= 4 for reply in replies)


@pytest.mark.client("langchain-openai", "embeddings")
def test_embeddings(base: str) -> None:
    embeddings = langchain_openai.OpenAIEmbeddings(
        model="tiny", base_url=base, api_key="none", check_embedding_ctx_length=False
    )
    one, two = embeddings.embed_documents(["A cat.", "A dog."])
    assert len(one) == len(two) > 0
    assert one != two
