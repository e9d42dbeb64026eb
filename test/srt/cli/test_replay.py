"""`phloem replay`, on a recording of a scheduler with a fake worker."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phloem.srt.cli.outcome import ExitCode
from phloem.srt.messages import SamplingParams, Submit
from phloem.srt.scheduler.core import SchedulerLimits
from phloem.srt.scheduler.record import RecordingScheduler
from phloem.srt.scheduler.trace import read_trace
from phloem.srt.testing import FakeWorker, ManualClock
from phloem.srt.wire import pack

Phloem = Callable[..., Any]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Forty requests, a second apart in twos, that share one of two prefixes."""
    rng = random.Random(0)
    worker, clock = FakeWorker(300, 4, vocab_size=1000), ManualClock()
    limits = SchedulerLimits(
        max_running=4, max_waiting=100, max_step_tokens=32, request_timeout_s=60.0
    )
    scheduler = RecordingScheduler(limits, worker.ready(), clock, tmp_path / "server.rec")
    for number in range(40):
        prompt = [number % 2] * 20 + [rng.randrange(1000) for _ in range(5)]
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        scheduler.receive(Submit(f"r{number}", pack(prompt), sampling))
        scheduler.to_frontend.clear()
        while number % 2 and (plan := scheduler.next_step()) is not None:
            clock.advance(0.02)
            scheduler.apply(worker.run(plan))
            scheduler.to_frontend.clear()
        clock.advance(1.0 * (number % 2))
    scheduler.close()
    return scheduler.path


def test_it_says_that_the_decisions_are_the_same(phloem: Phloem, recording: Path) -> None:
    done = phloem("replay", str(recording))
    assert done.code == ExitCode.OK and not done.err
    said = {line.split("  ")[0]: line for line in done.out.splitlines()}
    assert "then it was killed, or still ran" in said["recorded"]
    assert "40, 0 of them failed" in said["requests"]
    assert "76.0% of 1,000 prompt tokens" in said["hit rate"]
    assert "the same decisions" in said["result"]
    assert phloem("replay", str(recording), "--no-check").out == done.out


def test_a_file_cut_off_is_replayed_and_told(phloem: Phloem, recording: Path) -> None:
    recording.write_bytes(recording.read_bytes()[:-100])
    done = phloem("replay", str(recording))
    assert done.code == ExitCode.OK and "in the middle of a record" in done.out


def test_another_decision_is_exit_code_1(phloem: Phloem, recording: Path) -> None:
    data = bytearray(recording.read_bytes())
    place = data.rindex(b"plan", 0, len(data) // 2)
    digest = data.index(b"\xc4\x08", place) + 2  # 8 bytes of it
    data[digest] ^= 1
    recording.write_bytes(data)
    done = phloem("replay", str(recording))
    assert done.code == ExitCode.FAILED
    assert "after step" in done.err and "other rows or slots" in done.err
    assert "the same" not in done.out


def test_it_writes_a_trace(phloem: Phloem, recording: Path, tmp_path: Path) -> None:
    done = phloem("replay", str(recording), "--trace", str(tmp_path / "out.jsonl"))
    assert done.code == ExitCode.OK
    trace = read_trace(tmp_path / "out.jsonl")
    assert len(trace) == 40
    assert trace[0].prompt[:20] == trace[2].prompt[:20] != trace[1].prompt[:20]
    assert trace[0].prompt[20:] != trace[2].prompt[20:]
    assert all(len(request.output_tokens()) == 4 for request in trace)
    assert trace[39].arrival == pytest.approx(19 * 1.0, abs=4)


@pytest.mark.parametrize("data", [None, b"something else"])
def test_other_files_are_refused(phloem: Phloem, tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "other"
    if data is not None:
        path.write_bytes(data)
    done = phloem("replay", str(path))
    assert done.code == ExitCode.FAILED and "other" in done.err and not done.out
