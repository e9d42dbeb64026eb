"""Requests made at random from /openapi.json: none is answered with a fault of the server's, and
the server lives and does not grow.

`HTTP_FUZZ_EXAMPLES` is how many requests an operation gets (default 8; 150 are more than 10,000 in
all).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, given, settings  # noqa: E402  behind the package that needs it

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(3600)]

EXAMPLES = int(os.environ.get("HTTP_FUZZ_EXAMPLES", "8"))

ENDLESS = {"/cache/events"}
"""Routes whose answer has no end."""

TOLD = {503, 504}
"""Not faults: a backend that is not there, and a deadline that the request itself set."""

MOST_GROWTH = 96 << 20


@pytest.fixture(scope="module")
def fuzzed(start_server: Callable[..., Any]) -> Iterator[Any]:
    """A server whose answers are short, however many tokens are asked for."""
    server = start_server("--context-length", "160", "--kv-tokens", "8192")
    yield server
    assert server.get("/health")[0] == 200
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200


def check(case: Any) -> None:
    response = case.call(timeout=60)
    assert response.status_code < 500 or response.status_code in TOLD, response.text
    if response.status_code >= 400:
        assert response.json()["error"]
    assert "Traceback" not in response.text


def attack(operation: Any) -> str | None:
    """Send an operation its examples; what went wrong, with the request that shows it."""
    run = given(case=operation.as_strategy())(check)
    fuzz = settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )(run)
    try:
        fuzz()
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        return f"{operation.label}: {error}\n{notes}"
    return None


def test_no_request_is_a_fault_of_the_server(fuzzed: Any) -> None:
    document = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) > 60
    faults = [attack(one) for one in operations if one.path not in ENDLESS]
    assert [fault for fault in faults if fault is not None] == []


def test_the_server_does_not_grow(fuzzed: Any) -> None:
    """The same requests again and again leave its processes as large as they were."""
    body = {"prompt": "a b c", "max_tokens": 3, "json_schema": {"type": "integer"}}

    def size() -> int:
        processes = [psutil.Process(fuzzed.process.pid), *fuzzed.children().values()]
        return sum(process.memory_info().rss for process in processes)

    def some() -> None:
        for _ in range(100):
            assert fuzzed.post("/v1/completions", body)[0] == 200

    some()
    before = size()
    some()
    assert size() - before < MOST_GROWTH
