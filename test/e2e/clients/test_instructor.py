"""instructor: every mode of it in which the server is told the schema."""

from __future__ import annotations

from typing import Any

import openai
import pytest

instructor = pytest.importorskip("instructor")

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.filterwarnings("default")]

ASK = [{"role": "user", "content": "Name a city."}]


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
@pytest.mark.client("instructor", "response_model in the modes TOOLS, TOOLS_STRICT, JSON_SCHEMA")
def test_a_response_model(base: str, city: Any, mode: str) -> None:
    client = instructor.from_openai(
        openai.OpenAI(base_url=base, api_key="none", max_retries=0), mode=instructor.Mode[mode]
    )
    for temperature in (0, 1.5):
        found = client.chat.completions.create(
            model="tiny",
            messages=ASK,
            response_model=city,
            max_retries=0,
            temperature=temperature,
            max_tokens=120,
            seed=1,
        )
        assert isinstance(found, city)


@pytest.mark.client("instructor", "partial results of a stream")
def test_partial_results(base: str, city: Any) -> None:
    client = instructor.from_openai(
        openai.OpenAI(base_url=base, api_key="none"), mode=instructor.Mode.JSON_SCHEMA
    )
    parts = list(
        client.chat.completions.create_partial(
            model="tiny", messages=ASK, response_model=city, max_tokens=120, temperature=0
        )
    )
    assert len(parts) > 1
    city.model_validate(parts[-1].model_dump())
