"""The measurement of HTTP's overhead: what it reads of streams and of clocks, and that it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from http_overhead import Cell, busiest, medians, process_seconds, read_stream, sample

SCRIPT = Path(__file__).parents[2] / "benchmark" / "http_overhead.py"


def cell(round_: int, itl: float, forward: float | None = None) -> Cell:
    return Cell(
        server="s",
        round=round_,
        streams=1,
        tokens=2,
        cpu_us=10.0,
        scheduler_us=None,
        itl_ms=itl,
        engine_ms=4.0,
        forward_ms=forward,
    )


def test_a_piece_arrives_with_the_end_of_its_frame() -> None:
    def frame(**delta: object) -> bytes:
        return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"

    last = b'data: {"choices": [], "timings": {"predicted_ms": 7.5}}\n\ndata: [DONE]\n\n'
    cut = frame(content="b")
    parts = [
        (1, b"HTTP/1.1 200 OK\r\n\r\n"),
        (2, frame(role="assistant", content="")),
        (3, frame(content="a") + cut[:9]),
        (4, cut[9:] + b": keep-alive\n\n"),
        (5, frame(content="c") + frame(content="d") + last),
    ]
    found = read_stream(parts)
    assert found.pieces == [3, 4, 5, 5]
    assert found.timings == {"predicted_ms": 7.5}


def test_the_threads_that_compute_are_the_busiest() -> None:
    before = {"a": 5.0, "b": 1.0}
    after = {"a": 5.5, "b": 3.0, "new": 1.0}
    assert busiest(before, after, 2) == 3.0
    assert busiest(before, after, 0) == 0.0


def test_a_process_has_a_clock_of_nanoseconds() -> None:
    if sys.platform != "linux":
        pytest.skip("the clock is Linux's")
    before, own = process_seconds(os.getpid()), time.process_time()
    assert abs(before - own) < 0.05
    sum(range(100_000))
    assert before < process_seconds(os.getpid())


def test_samples_are_read_with_their_labels() -> None:
    text = '# HELP a b\na_total 1.0\na_total{phase="x"} 2.5\na_total_created 9.0\n'
    assert (sample(text, "a_total"), sample(text, 'a_total{phase="x"}')) == (1.0, 2.5)


def test_medians_are_of_rounds() -> None:
    (row,) = medians([cell(0, 5.0, 3.0), cell(1, 9.0, 3.0), cell(2, 6.0, 3.0)])
    assert (row["rounds"], row["itl_ms"], row["added_us"]) == (3, 6.0, 2000.0)
    assert (row["beyond_forward_us"], row["scheduler_us"]) == (3000.0, None)


@pytest.mark.e2e
@pytest.mark.model
def test_it_runs(default_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    sizes = ("--streams", "1,3", "--tokens", "12", "--repeat", "1", "--threads", "1")
    subprocess.run(
        [
            *(sys.executable, str(SCRIPT), "--model", str(default_model)),
            *("--servers", "phloem", *sizes, "--json", str(file)),
        ],
        check=True,
        capture_output=True,
    )
    found = json.loads(file.read_text())
    assert [row["streams"] for row in found["medians"]] == [1, 3]
    for row in found["medians"]:
        assert row["cpu_us"] > 0 and row["scheduler_us"] > 0
        assert row["engine_ms"] > 0
        assert row["added_us"] < row["beyond_forward_us"]
