"""The fuzzer's short form: hostile constraints at a real server, and what neighbours notice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fuzz import Books

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmark"
SECONDS = 8.0


@pytest.fixture(scope="module")
def books(server: Any) -> Books:
    """What came of some seconds of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARK))
        from fuzz import Settings, fuzz
        from peers import Running

        target = Running(url=server.url, pid=server.process.pid, model="tiny", start_seconds=0.0)
        return asyncio.run(fuzz(target, Settings(quiet_s=0.0, hostile_s=SECONDS, seed=20)))


def test_no_hostile_request_breaks_a_rule(books: Books) -> None:
    assert books.attack.faults == []
    assert books.attack.asked == sum(books.attack.ends.values()) > 10
    assert any(end.startswith("400 ") for end in books.attack.ends)
    assert any(end.endswith("complete") for end in books.attack.answers)


def test_the_neighbours_stream_and_the_server_lives(books: Books, server: Any) -> None:
    assert books.faults == []
    finished = [call for call in books.neighbours if call.finish_reason is not None]
    assert {call.turn.schema is None for call in finished} == {True, False}
    assert {role for role, count in books.deaths.items() if count} <= {"grammar"}
    assert server.get("/ready")[0] == 200
