"""outlines, which leaves the constraint to the server: OpenAI's spelling and vLLM's."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pytest

outlines = pytest.importorskip("outlines")

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.filterwarnings("default")]


@pytest.mark.client("outlines", "output types with from_openai")
def test_a_model_as_output_type(base: str, city: Any) -> None:
    model = outlines.from_openai(openai.OpenAI(base_url=base, api_key="none"), "tiny")
    city.model_validate_json(model("Name a city.", city, max_tokens=120, temperature=0))


@pytest.mark.client("outlines", "schemas, choices and regexes with from_vllm")
def test_what_vllm_takes(base: str, city: Any) -> None:
    from outlines.types import Regex

    model = outlines.from_vllm(openai.OpenAI(base_url=base, api_key="none"), "tiny")
    limits = {"max_tokens": 400, "temperature": 0}
    closed = city.model_json_schema() | {"additionalProperties": False}
    city.model_validate(json.loads(model("A city.", outlines.json_schema(closed), **limits)))
    assert model("Yes or no?", Literal["yes", "no"], **limits) in ("yes", "no")
    assert re.fullmatch("[0-9]{3}", model("Digits.", Regex("[0-9]{3}"), **limits))
