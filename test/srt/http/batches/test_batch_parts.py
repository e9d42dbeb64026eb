"""The journal, the input file and the slots by themselves."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from pathlib import Path

from phloem.srt.http.batches.journal import Journal, record_id
from phloem.srt.http.batches.lines import InputCheck, InputFile
from phloem.srt.http.batches.slots import Slots

CHAT = "/v1/chat/completions"
LINE = {"method": "POST", "url": CHAT}
PADDING = {"padding": "x" * 10_000}


async def test_a_journal_cut_anywhere_loses_only_the_last_line(tmp_path: Path) -> None:
    output, errors = tmp_path / "o", tmp_path / "e"

    async def written(completed: int, failed: int) -> None:
        seen.append((completed, failed))

    def line(index: int) -> bytes:
        return json.dumps({"id": record_id("batch_ab", index), "custom_id": "x\n-9"}).encode()

    seen: list[tuple[int, int]] = []
    journal = Journal(output, errors, written)
    journal.open()
    await asyncio.gather(
        *(journal.append(i, line(i), failed=i % 3 == 0) for i in (5, 0, 1, 4, 2, 3))
    )
    assert seen[-1] == (4, 2)
    await journal.close()
    whole = output.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        output.write_bytes(whole[:cut])
        journal = Journal(output, errors, written)
        journal.open()
        left = sum(end <= cut for end in ends)
        assert [i for i in range(6) if journal.done(i)] == sorted([0, 3, *(5, 1, 4, 2)[:left]])
        assert (journal.completed, journal.failed) == (left, 2)
        assert await journal.close() == (ends[left - 1] if left else 0, errors.stat().st_size)
    output.write_bytes(whole + b"\0" * 4096)  # what a file system may leave behind
    journal = Journal(output, errors, written)
    journal.open()
    await journal.append(9, line(9), failed=False)
    await journal.close()
    assert output.read_bytes() == whole + line(9) + b"\n"


async def test_a_line_is_one_to_any_reader(tmp_path: Path) -> None:
    """Clients split what they get by Python's `splitlines`, which knows more ends of lines."""

    async def written(completed: int, failed: int) -> None:
        return

    output = tmp_path / "o"
    journal = Journal(output, tmp_path / "e", written)
    journal.open()
    said = "a\x85b\u2028c\u2029d"
    told = {"id": record_id("batch_ab", 0), "said": said}
    await journal.append(0, json.dumps(told, ensure_ascii=False).encode(), failed=False)
    await journal.close()
    (line,) = output.read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["said"] == said


def test_a_file_of_any_size_is_read_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        for i in range(3000):
            file.write(json.dumps({**LINE, "custom_id": f"r{i}", "body": PADDING}) + "\n")
        file.write("y" * (16 << 20))  # one line that is longer than it may be, to the end
    tracemalloc.start()
    try:
        check = InputCheck(path, CHAT, 20_000)
        while check.advance(100):
            pass
        check.close()
        with InputFile(path, 20_000) as lines:
            assert sum(1 for line in lines) == 3001
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [(p.line, p.code) for p in check.problems] == [(3001, "line_too_long")]
    assert peak < 2 << 20


async def test_slots_are_given_in_order() -> None:
    slots = Slots(4)
    got: list[str] = []

    async def take(name: str, count: int) -> None:
        await slots.acquire(count)
        got.append(name)

    await slots.acquire(3)
    tasks = [asyncio.create_task(take(name, n)) for name, n in (("big", 4), ("x", 1), ("y", 2))]
    await asyncio.sleep(0)
    assert got == []  # one is free, and the first in the queue wants four
    tasks[0].cancel()
    await asyncio.gather(*tasks[:2], return_exceptions=True)
    assert got == ["x"]
    slots.release(3)
    await tasks[2]
    tasks.append(asyncio.create_task(take("late", 4)))
    await asyncio.sleep(0)
    slots.release(3)
    tasks[3].cancel()  # in the moment in which its turn comes
    await asyncio.gather(tasks[3], return_exceptions=True)
    await asyncio.wait_for(slots.acquire(4), 1)
