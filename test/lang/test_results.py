"""Results that outlive their batch: killed, cut short, gone on with."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import phloem
from phloem.lang.backend.base import Call, TextPrompt
from phloem.lang.line_file import DuplicateKey, LineFile, LineFileError
from phloem.lang.state import State

pytestmark = pytest.mark.timeout(120)


@phloem.function
def double(s: State, i: int) -> int:
    s += str(i)
    s += phloem.gen("first")
    s += phloem.gen("second")
    return 2 * i


def echo(call: Call) -> str | Exception:
    """Each seventh item fails."""
    assert isinstance(call.prompt, TextPrompt)
    number = int(call.prompt.text.partition("(")[0])
    return ValueError("no") if number % 7 == 3 else f"({call.prompt.text})"


class Counting(phloem.MockBackend):
    def __init__(self) -> None:
        super().__init__(echo)

    @property
    def items(self) -> set[int]:
        return {int(call.prompt.text.partition("(")[0]) for call in self.calls}  # type: ignore[union-attr]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(output: Any, items: Iterable[Any], backend: phloem.MockBackend) -> list[State]:
    return double.run_batch(items, backend=backend, output=output, concurrency=8)


CHILD = """
import sys, phloem

@phloem.function
def double(s, i):
    s += str(i)
    s += phloem.gen("first")

def items():
    for i in range(10_000):
        yield {"i": i}

backend = phloem.MockBackend(lambda call: f"({call.prompt.text})")
for state in double.iter_batch(items(), backend=backend, output=sys.argv[1], in_order=False):
    assert state["first"] == f"({state.arguments['i']})"
print("done")
"""


def test_ten_thousand_programs_and_two_kills(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", CHILD, str(path)]
    done = 0
    for at_least in (2_000, 6_000):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
            while child.poll() is None and done < at_least:
                time.sleep(0.01)
                done = path.read_bytes().count(b"\n") if path.exists() else 0
            child.kill()
        assert child.returncode == -9
        with path.open("ab") as file:
            file.write(b'{"key":"9999","argu')  # as if the kill had come within a write
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == "done\n"
    keys = Counter(line["key"] for line in lines_of(path))
    assert keys == Counter(map(str, range(10_000)))
    assert all(line["variables"] == {"first": f"({line['key']})"} for line in lines_of(path))


def test_what_a_line_says_and_what_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    items = [{"i": i} for i in range(10)]
    first = run(path, items, Counting())
    by_key = {line["key"]: line for line in lines_of(path)}
    assert by_key["2"] == {
        "key": "2",
        "arguments": {"i": 2},
        "variables": {"first": "(2)", "second": "(2(2))"},
        "returned": 4,
        "usage": {
            "calls": 2,
            "prompt_tokens": 2,
            "cached_tokens": 0,
            "completion_tokens": 2,
        },
    }
    assert by_key["3"]["error"] == {"type": "ValueError", "message": "no", "variable": "first"}
    backend = Counting()
    again = run(str(path), items, backend)
    assert backend.calls == []
    for old, new in zip(first, again, strict=True):
        assert new.arguments == old.arguments
        assert new.returned == old.returned
        assert (new.error() is None) == (old.error() is None)
        if old.error() is None:
            assert new["second"] == old["second"]
    failed = again[3].error()
    assert isinstance(failed, phloem.GenerationError)
    assert isinstance(failed.cause, phloem.RecordedFailure)
    with pytest.raises(phloem.GenerationError, match="ValueError: no"):
        again[3]["second"]
    with pytest.raises(phloem.UsageError, match="earlier run"):
        again[0] += "more"


def test_more_items_and_failed_ones_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    run(path, [{"i": i} for i in range(10)], Counting())
    backend = Counting()
    output = phloem.BatchOutput(path, retry_failed=True)
    run(output, ({"i": i} for i in range(12)), backend)
    assert backend.items == {3, 10, 11}
    assert Counter(line["key"] for line in lines_of(path)) == Counter(map(str, range(12)))
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_keys_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    by_name = phloem.BatchOutput(path, key="i")
    run(by_name, [{"i": i} for i in (5, 6, 7)], Counting())
    backend = Counting()
    states = run(by_name, [{"i": i} for i in (8, 7, 6, 5)], backend)
    assert backend.items == {8}
    assert [state["first"] for state in states] == ["(8)", "(7)", "(6)", "(5)"]
    by_function = phloem.BatchOutput(path, key=lambda item: item[0])
    assert [state["first"] for state in run(by_function, [(6,), (5,)], backend)] == ["(6)", "(5)"]
    with pytest.raises(DuplicateKey, match="'9'"):
        run(by_name, [{"i": 9}, {"i": 9}], Counting())
    with pytest.raises(ValueError, match="'i'"):
        run(by_name, [(1,)], Counting())


def test_another_item_under_the_key_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    run(path, [{"i": 1}, {"i": 2}], Counting())
    with pytest.raises(ValueError, match=r"key '0' is another one.* its 'i' is 2, and was 1"):
        run(path, [{"i": 2}, {"i": 1}], Counting())


def test_a_batch_that_is_left_writes_no_line_for_what_it_cancels(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"

    def latency(call: Call) -> float:
        return 0.0 if call.prompt == TextPrompt("0") else 3600

    backend = phloem.MockBackend({"x": "y"}, latency_s=latency)
    one = phloem.function(lambda s, i: s.__iadd__(str(i) + phloem.gen("x")))
    batch = one.iter_batch(
        [(i,) for i in range(4)], backend=backend, concurrency=4, output=path, in_order=False
    )
    assert next(batch)["x"] == "y"
    while len(backend.calls) < 4:
        time.sleep(0.005)
    batch.close()  # type: ignore[attr-defined]
    while backend.cancelled < 3:
        time.sleep(0.005)
    assert [line["key"] for line in lines_of(path)] == ["0"]
    with pytest.raises(OSError, match="disk"):
        one.run_batch(_broken_source(), backend=backend, output=path)
    assert [line["key"] for line in lines_of(path)] == ["0"]


def _broken_source() -> Iterator[tuple[int]]:
    yield (0,)
    yield (1,)
    raise OSError("disk")


def test_what_json_lacks_is_named(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"

    @dataclasses.dataclass
    class Point:
        x: int

    @phloem.function
    def objects(s: State, thing: Any) -> object:
        s["point"] = Point(3)
        s["thing"] = thing
        return thing

    objects.run_batch([{"thing": object()}], backend=phloem.MockBackend(), output=path)
    (line,) = lines_of(path)
    assert line["variables"] == {"point": {"x": 3}}
    assert sorted(line["left_out"]) == ["returned", "thing", "thing"]
    (state,) = objects.run_batch([{"thing": 1}], backend=phloem.MockBackend(), output=path)
    assert state["point"] == {"x": 3}


# ------------------------------------------------------------------ the file


def key_of(line: bytes) -> str:
    try:
        return str(json.loads(line)["key"])
    except KeyError as error:
        raise ValueError("no key") from error


def opened(path: Path, **given: Any) -> LineFile:
    return LineFile(path, opening=b'{"key":', key_of=key_of, **given)


@pytest.mark.parametrize(
    "content",
    [b"some notes", b"some notes\n", b'{"key":"a"}\n{"other":1}\n', b'{"key":"a"}\nnotes'],
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(LineFileError):
        opened(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("torn", [b"{", b'{"key"', b'{"key":"b","x":"', b'{"key":"b"}'])
def test_a_torn_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "out"
    path.write_bytes(b'{"key":"a"}\n' + torn)
    with opened(path) as file:
        assert (file.found, file.claim("a"), file.claim("b")) == (1, b'{"key":"a"}\n', None)
        file.append(b'{"key":"b"}')
    assert path.read_bytes() == b'{"key":"a"}\n{"key":"b"}\n'


def test_a_file_has_one_writer(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as file:
        with pytest.raises(LineFileError, match="in use"):
            opened(tmp_path / "out")
        file.append(b'{"key":"a"}')
    with opened(tmp_path / "out", keep=lambda line: False) as again:
        assert again.found == 0
        with pytest.raises(LineFileError, match="in use"):
            opened(tmp_path / "out")


def test_many_threads_share_the_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = 0
    gate = threading.Event()

    def fsync(file: int) -> None:
        nonlocal synced
        synced += 1
        assert gate.wait(30)

    path = tmp_path / "out"
    with opened(path) as file:
        monkeypatch.setattr("phloem.lang.line_file.os.fsync", fsync)
        threads = [
            threading.Thread(target=file.append, args=(b'{"key":"%d"}' % i,)) for i in range(50)
        ]
        for thread in threads:
            thread.start()
        while file._put < 50:
            time.sleep(0.005)
        gate.set()
        for thread in threads:
            thread.join()
    assert synced == 2
    assert {line["key"] for line in lines_of(path)} == set(map(str, range(50)))


def test_a_failing_disk_is_told_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    write = os.write
    with opened(path) as file:
        file.append(b'{"key":"a"}')

        def failing(number: int, data: Any) -> int:
            write(number, bytes(data)[:5])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("phloem.lang.line_file.os.write", failing)
        for _ in range(2):
            with pytest.raises(OSError, match="space"):
                file.append(b'{"key":"b"}')
    assert path.read_bytes() == b'{"key":"a"}\n'
    with opened(path) as again:
        assert again.found == 1
    with pytest.raises(OSError, match="closed"):
        again.append(b'{"key":"c"}')
