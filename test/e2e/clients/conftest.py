"""What the clients' tests share. Each says with `@pytest.mark.client(package, what)` what it
exercises; `table.py` makes docs/clients.md of that."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

# Before any of them is imported: they would call home.
os.environ.update(
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    DSPY_CACHEDIR=os.devnull,
    DO_NOT_TRACK="1",
    LANGSMITH_TRACING="false",
    PYDANTIC_AI_HIDE_BANNER="1",
)


class City(BaseModel):
    """Small, and such that a model which is not held to it never says it."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Paris", "Rome", "Oslo"]
    founded: Literal[-52, -753, 1048]
    coast: bool


@pytest.fixture
def city() -> type[BaseModel]:
    return City


@pytest.fixture
def base(server: Any) -> str:
    """The address of the OpenAI routes."""
    return f"{server.url}/v1"


@pytest.fixture(scope="session")
def connect() -> Callable[[Any], openai.OpenAI]:
    """OpenAI's client, for a server."""
    return lambda server: openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(server: Any, connect: Callable[[Any], openai.OpenAI]) -> openai.OpenAI:
    return connect(server)


@pytest.fixture(autouse=True)
def leaks_forgiven() -> Iterator[None]:
    """Some of the packages leave connections to the garbage collector, which complains of that: it
    is to do so here, and not in a test of ours later on."""
    yield
    _collect()


@pytest.fixture(autouse=True, scope="module")
def leaks_of_loops_forgiven() -> Iterator[None]:
    """The same, when event loops are gone too. What there is before is not looked at each time, but
    at the end: a package's cache may have let go of a connection of another module's."""
    gc.freeze()
    yield
    gc.unfreeze()
    _collect()


def _collect() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
