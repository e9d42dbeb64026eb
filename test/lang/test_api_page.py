"""docs/dsl-api.md: it is as the docstrings say, all public names are on it, and its links lead
somewhere."""

from __future__ import annotations

import builtins
import collections.abc
import re
import typing
from pathlib import Path
from typing import Any, TypedDict

import pytest

import phloem
from phloem.lang.api_entries import item, markdown, prose
from phloem.lang.api_page import TOPICS, found, render
from phloem.lang.options import GenOptions

PAGE = (Path(__file__).parents[2] / "docs" / "dsl-api.md").read_text(encoding="utf-8")
NAMES = [name for topic in TOPICS for entry in topic.entries for name in entry.split()]

# type variables, and what other pages or libraries describe
ELSEWHERE = {
    *("AbstractContextManager", "Concatenate", "PathLike", "P", "R", "T"),
    *("AsyncEngine", "Constraint", "EngineHandle", "Literal"),
}


def test_page_is_fresh() -> None:
    """`make docs` writes it anew."""
    assert render() == PAGE


def test_every_public_name_is_on_it_once() -> None:
    assert len(NAMES) == len(set(NAMES))
    assert set(phloem.__all__) <= set(NAMES)


def test_names_that_phloem_has_are_taken_from_there() -> None:
    for name in set(NAMES) & set(phloem.__all__):
        assert found(name) is getattr(phloem, name)


def test_links_and_headings() -> None:
    headings = re.findall(r"^##+ (.*)$", PAGE, re.MULTILINE)
    anchors = [re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings]
    assert len(anchors) == len(set(anchors))
    links = set(re.findall(r"\]\(#([^)]+)\)", PAGE))
    assert len(links) > 20
    assert links <= set(anchors)


def test_types_of_signatures_are_on_it() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    written = [*blocks, *re.findall(r"^- `([^`]*)`:", PAGE, re.MULTILINE)]
    code = " ".join(re.sub(r'"[^"]*"', "", one) for one in written)
    used = set(re.findall(r"(?<![\w.])[A-Z]\w*", code))
    known = {*dir(builtins), *typing.__all__, *collections.abc.__all__, *ELSEWHERE, *NAMES}
    assert {"BackendLike", "GenOptions", "State"} <= used
    assert used <= known


def test_links_are_only_where_they_lead_elsewhere() -> None:
    section = PAGE.partition("### `Stream`\n")[2].partition("\n### ")[0]
    assert "[`Program.run`](#programrun)" in section
    assert "(#stream)" not in section


class Documented:
    """One."""

    def does(self, times: int = 1, *, kind: str = "a") -> None:
        """Something. Raises `ValueError` for a `kind` that is `a.b`. And nothing."""

    async def waits(self) -> int:
        """For it."""
        return 1

    def _inner(self) -> None: ...


class Overriding(Documented):
    """Two."""

    def does(self, times: int = 1, *, kind: str = "a") -> None: ...


class Undocumented(Documented):
    """Three."""

    def more(self) -> None: ...


class Options(TypedDict, total=False):
    """Four."""

    first: int | str | None
    """Said
    in two lines."""
    second: int


def entry(value: Any) -> str:
    return markdown(value.__name__, value, constructed=False, entries=frozenset({"Documented"}))


def test_class() -> None:
    raised = "**Raises** `ValueError` for a `kind` that is `a.b`."
    does = f'- `does(times: int = 1, *, kind: str = "a") -> None`: Something. And nothing. {raised}'
    assert entry(Documented) == f"One.\n\n{does}\n- `async waits() -> int`: For it."
    assert entry(Overriding) == "Two."


def test_what_has_no_docstring_is_an_error() -> None:
    for value, name in ((Undocumented, "Undocumented.more"), (Options, "Options.second")):
        with pytest.raises(LookupError, match=rf"^{name} has no docstring$"):
            entry(value)
    with pytest.raises(LookupError, match=r"^entry has no docstring$"):
        entry(entry)
    with pytest.raises(LookupError, match=r"^name has no docstring$"):
        item("name", "")


def test_table() -> None:
    table = entry(GenOptions)
    assert "\n| `choices_method` | `ChoicesMethod \\| str` | How `choices` are judged" in table
    assert table.endswith("Besides these, those of `AnswerOptions`.")


def test_prose_keeps_lists_and_code() -> None:
    doc = "One\ntwo.\n\n- a\n  b\n\n    code\n    more\n\nRaises what it raises (see\n`a.b`)."
    lines = ["One two.", "- a\n  b", "    code\n    more", "**Raises** what it raises (see `a.b`)."]
    assert prose(doc) == "\n\n".join(lines)
