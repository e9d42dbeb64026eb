"""Requests made at random from /openapi.json, such as it describes and such as it does not: none is
answered with a fault of the server's nor otherwise than the document says, and the server lives
and does not grow.

`HTTP_FUZZ_EXAMPLES` is how many requests an operation gets (default 8; with 150 they are more than
10,000 in all, which takes some minutes: `-s` shows the count). `-k` chooses operations.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from jsonschema import Draft202012Validator
from msgspec import inspect as mi

from phloem.srt.http.app import GROUPS
from phloem.srt.http.body import BodyReader

schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, given, settings  # noqa: E402  behind the package that needs it
from hypothesis import strategies as st  # noqa: E402
from hypothesis.errors import Unsatisfiable  # noqa: E402
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.specs.openapi import checks  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(1800)]

EXAMPLES = int(os.environ.get("HTTP_FUZZ_EXAMPLES", "8"))

LEFT_OUT = {"/cache/events", "/openapi.json"}
"""The answer that has no end, and the document itself, which is no operation to schemathesis."""

ROUTES = {
    f"{route.method} {route.pattern}": route
    for routes in GROUPS.values()
    for route in routes
    if route.pattern not in LEFT_OUT
}

EXAMPLES_OF = {
    label: dict(route.example)
    for label, route in ROUTES.items()
    if route.example is not None
    and isinstance(route.body, BodyReader)
    and route.pattern != "/api/pull"  # its example would be fetched
}
"""Bodies that are answered."""

for route, limit in (
    ("/v1/chat/completions", {"max_tokens": 4}),
    ("/api/generate", {"options": {"num_predict": 4}}),
    ("/api/chat", {"options": {"num_predict": 4}}),
):
    EXAMPLES_OF[f"POST {route}"] |= limit  # else they go on until the context is full

ONE_EACH = {(route.handler, route.body): label for label, route in ROUTES.items()}.values()
"""One operation of each handler, of which some answer under several names."""

COUNTS = {"n", "best_of"} | {
    f"max_{name}" for name in ("tokens", "completion_tokens", "output_tokens", "new_tokens")
}

TOLD = {503, 504}
"""Not faults: a backend that is not there, and a deadline that the request itself set."""

STREAMS = ("text/event-stream", "application/x-ndjson")

AS_DESCRIBED = [checks.response_schema_conformance, checks.content_type_conformance]

MOST_GROWTH = 96 << 20


def short(body: dict[str, Any]) -> dict[str, Any]:
    """`body` with few answers, of few tokens."""
    found = {
        key: min(value, 4) if key in COUNTS and isinstance(value, int) else value
        for key, value in body.items()
    }
    match found:
        case {"sampling_params": dict(inner)}:
            found["sampling_params"] = short(inner)
        case {"options": dict(inner)}:
            found["options"] = inner | {"num_predict": 4}
    return found


class Fuzzed:
    """A server, its operations, and what it answered."""

    def __init__(self, server: Any) -> None:
        self.server = server
        document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        found = [one.ok() for one in document.get_all_operations()]
        self.operations = {one.label: one for one in found}
        self.events = dict(self._events(document.raw_schema))
        self.statuses: Counter[int] = Counter()
        self.streamed = 0

    @staticmethod
    def _events(document: dict[str, Any]) -> Iterator[tuple[str, Draft202012Validator]]:
        """What validates the events of each operation that streams; an error may be among them."""
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                answers = operation["responses"]
                error = answers["4XX"]["content"]["application/json"]["schema"]
                for content in answers["200"].get("content", {}).values():
                    if "x-event-schema" in content:
                        schema = {"anyOf": [content["x-event-schema"], error]}
                        yield (
                            f"{method.upper()} {path}",
                            Draft202012Validator(schema | {"components": document["components"]}),
                        )

    def check(self, case: Any) -> None:
        response = case.call(timeout=60)
        status = response.status_code
        self.statuses[status] += 1
        assert status < 500 or status in TOLD, response.text
        if status >= 400 and case.method != "HEAD":
            assert response.json()
        for fault in ("Traceback", "The server failed"):  # also in a stream, behind its 200
            assert fault not in response.text
        if response.headers.get("content-type", [""])[0].startswith(STREAMS):
            for line in response.text.split("\n"):  # others may stand in a text
                event = line.removeprefix("data: ")
                if event.startswith("{"):
                    self.events[case.operation.label].validate(json.loads(event))
                    self.streamed += 1
        case.validate_response(response, checks=AS_DESCRIBED)

    def cases(self, label: str, mode: GenerationMode = GenerationMode.POSITIVE) -> Any:
        """The strategy that makes requests of an operation."""
        return self.operations[label].as_strategy(generation_mode=mode)

    def attack(self, cases: Any, examples: int) -> None:
        """Send what a strategy makes; raises what went wrong, with the request that shows it."""
        run = given(case=cases)(self.check)
        settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )(run)()

    def size(self) -> int:
        """Bytes of its processes."""
        processes = [psutil.Process(self.server.process.pid), *self.server.children().values()]
        return sum(process.memory_info().rss for process in processes)


@pytest.fixture(scope="module")
def fuzzed(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fuzzed]:
    """A server whose answers are short, however many tokens are asked for, and that pulls models
    from nowhere and deletes none but its own."""
    home: Path = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("PHLOEM_HOME", str(home))
        server = start_server("--context-length", "160", "--kv-tokens", "8192")
    found = Fuzzed(server)
    before = found.size()
    yield found
    told = dict(sorted(found.statuses.items()))
    grown = (found.size() - before) / 2**20
    print(f"\n{found.statuses.total()} requests: {told}; {found.streamed} events; {grown:+.0f} MiB")
    assert server.get("/health")[0] == 200
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200


@pytest.mark.parametrize("label", ROUTES)
def test_no_request_is_a_fault_of_the_server(fuzzed: Fuzzed, label: str) -> None:
    fuzzed.attack(fuzzed.cases(label), EXAMPLES)


@pytest.mark.parametrize("label", ROUTES)
def test_nor_is_one_that_is_not_as_described(fuzzed: Fuzzed, label: str) -> None:
    try:
        fuzzed.attack(fuzzed.cases(label, GenerationMode.NEGATIVE), max(1, EXAMPLES // 4))
    except Unsatisfiable:  # nothing that is sent can be wrong
        return


@pytest.mark.parametrize("label", EXAMPLES_OF)
def test_nor_is_one_that_is_answered_but_for_a_field_or_two(fuzzed: Fuzzed, label: str) -> None:
    """Most of what is made at random has one fault or another, and gets no further than that."""

    streams = st.booleans() if ROUTES[label].events is not None else st.just(False)

    def nearly(case: Any) -> st.SearchStrategy[Any]:
        names = sorted(set(case.body) - {"model"}) if isinstance(case.body, dict) else []
        chosen = st.sets(st.sampled_from(names), max_size=2) if names else st.just(set())
        return st.builds(changed, st.just(case), chosen, streams)

    def changed(case: Any, names: set[str], stream: bool) -> Any:
        fields = {name: case.body[name] for name in names}
        case.body = short(EXAMPLES_OF[label] | fields | ({"stream": True} if stream else {}))
        return case

    fuzzed.attack(fuzzed.cases(label).flatmap(nearly), EXAMPLES)


BEYOND = (2**64, -(2**63) - 1)
"""Integers of JSON for which a message between processes has no room."""


def integers(type_: mi.Type, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where integers may stand in a value of `type_`; 0 is in a list."""
    match type_:
        case mi.IntType():
            yield path
        case mi.StructType(fields=fields):
            for field in fields:
                if field.encode_name not in path:  # it may be within itself
                    yield from integers(field.type, (*path, field.encode_name))
        case mi.UnionType(types=types):
            for one in types:
                yield from integers(one, path)
        case mi.ListType(item_type=item):
            yield from integers(item, (*path, 0))


def put(value: Any, path: tuple[str | int, ...], number: int) -> Any:
    """`value` with a number at `path`, and nothing else beside it in lists."""
    if not path:
        return number
    head, *rest = path
    if head == 0:
        return [put(None, tuple(rest), number)]
    held = value if isinstance(value, dict) else {}
    return held | {str(head): put(held.get(str(head)), tuple(rest), number)}


@pytest.mark.parametrize("label", [label for label in ONE_EACH if label in EXAMPLES_OF])
def test_a_number_that_no_message_holds_is_refused_or_cut(fuzzed: Fuzzed, label: str) -> None:
    body = ROUTES[label].body
    assert isinstance(body, BodyReader)
    method, path = label.split()
    for place in set(integers(mi.type_info(body.type_))):
        for number in BEYOND:
            sent = put(EXAMPLES_OF[label], place, number)
            response = requests.request(method, fuzzed.server.url + path, json=sent, timeout=60)
            assert response.status_code < 500, (place, number, response.text)
            assert "The server failed" not in response.text, (place, number)


@pytest.mark.parametrize("label", [label for label, route in ROUTES.items() if route.query])
def test_nor_does_a_query_hold_it(fuzzed: Fuzzed, label: str) -> None:
    query = ROUTES[label].query
    assert query is not None
    method, path = label.split()
    for (name,) in set(integers(mi.type_info(query))):
        for number in BEYOND:
            url = f"{fuzzed.server.url}{path}?{name}={number}"
            response = requests.request(method, url, timeout=60)
            assert response.status_code < 500, (name, number, response.text)


def test_the_server_does_not_grow(fuzzed: Fuzzed) -> None:
    """The same requests again and again leave its processes as large as they were."""
    body = {"prompt": "a b c", "max_tokens": 3, "json_schema": {"type": "integer"}}

    def some() -> None:
        for _ in range(100):
            assert fuzzed.server.post("/v1/completions", body)[0] == 200

    some()
    before = fuzzed.size()
    some()
    assert fuzzed.size() - before < MOST_GROWTH
