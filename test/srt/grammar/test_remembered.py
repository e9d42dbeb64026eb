"""What was compiled is known to the next start, and a bad file is nobody's problem."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from phloem.constrained.spec import Choice, Constraint, Regex
from phloem.srt.grammar import remembered
from phloem.srt.grammar.remembered import Remembered


def regex(i: int) -> Regex:
    return Regex(pattern=f"a{{{i}}}")


def after(path: Path, *compiled: Constraint, used: tuple[str, ...] = ()) -> list[Constraint]:
    """What the run after one that compiled these knows; their keys are their positions."""
    run = Remembered(path)
    run.load()
    for i, constraint in enumerate(compiled):
        run.compiled(str(i), constraint)
    for key in used:
        run.used(key)
    run.close()
    following = Remembered(path)
    found = following.load()
    following.close()
    return found


def test_the_last_used_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "new" / "c.sqlite"
    assert after(path) == []
    assert after(path, regex(1), Choice(choices=("b",)), regex(3), used=("1",)) == [
        Choice(choices=("b",)),
        regex(3),
        regex(1),
    ]
    # A later run changes the order of what an earlier one wrote.
    assert after(path, used=("0", "unknown")) == [regex(1), Choice(choices=("b",)), regex(3)]


def test_as_many_as_are_of_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "MOST", 3)
    long = Regex(pattern="b" * remembered.MOST_BYTES)
    found = after(tmp_path / "c.sqlite", *map(regex, range(1, 5)), long, used=("0",))
    assert found == [regex(4), regex(3), regex(2)]


def test_a_bad_file_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "c.sqlite"
    path.write_bytes(b"no database at all" * 100)
    assert after(path, regex(1)) == []
    assert "constraints of earlier runs are not known" in caplog.text
    assert "a constraint is not remembered" in caplog.text


def test_what_another_version_wrote_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    after(path, regex(1), regex(2))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE constraints SET spec = ? WHERE key = '1'", (b"\x81\xa1x\x01",))
    connection.close()
    assert after(path) == [regex(1)]
