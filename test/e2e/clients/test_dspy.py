"""dspy, with the server declared to it as one that honours schemas."""

from __future__ import annotations

from typing import Any, Literal

import pytest

dspy: Any = pytest.importorskip("dspy")

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.filterwarnings("default")]


@pytest.fixture
def lm(base: str) -> Any:
    lm15: Any = pytest.importorskip("dspy.lm15")
    access = lm15.AccessPolicy(provider="phloem", base_url=base, auth_modes=("api_key",))
    lm15.register_provider(
        lm15.ProviderDefinition.chat(access, compat=lm15.OpenAIChatCompat(json_schema="send")),
        supports=lm15.ModelSupport(response_schema=True, function_calling=True),
        replace=True,
    )
    return dspy.LM(
        "phloem/tiny", api_base=base, api_key="none", max_tokens=200, temperature=0, cache=False
    )


@pytest.mark.client("dspy", "Predict with JSONAdapter")
def test_a_typed_prediction(lm: Any) -> None:
    pick = dspy.Signature(
        {
            "question": (str, dspy.InputField()),
            "city": (Literal["Paris", "Rome"], dspy.OutputField()),
            "sure": (bool, dspy.OutputField()),
        },
        "Pick a city.",
    )
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        found = dspy.Predict(pick)(question="Where is the Colosseum?")
    assert found.city in ("Paris", "Rome")
    assert isinstance(found.sure, bool)


@pytest.mark.client("dspy", "LM called by itself")
def test_a_plain_call(lm: Any) -> None:
    (text,) = lm("Say hello.", max_tokens=8)
    assert text
