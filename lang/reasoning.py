"""What a model thinks before it answers, told apart from the answer, where the server has not done
so: in plain text, and from servers that leave the marks in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Marks:
    """Thoughts stand between `begin` and `end`, at the beginning of an answer. `opened`: the prompt
    has the opening mark, so that the answer begins with thoughts."""

    begin: str
    end: str
    opened: bool = False


_THINK = Marks("<think>", "</think>")
_OPENED = Marks("<think>", "</think>", opened=True)

MARKS: Mapping[str, Marks] = {
    "deepseek-r1": _OPENED,
    "deepseek-v3": _THINK,
    "glm45": _THINK,
    "interns1": _THINK,
    "kimi": Marks("◁think▷", "◁/think▷"),
    "kimi_k2": _OPENED,
    "minimax": _OPENED,
    "mistral": Marks("[THINK]", "[/THINK]"),
    "qwen3": _THINK,
    "qwen3-thinking": _OPENED,
    "step3": _OPENED,
}
"""By SGLang's names of models (`--reasoning-parser`)."""


class Splitter:
    """Pieces of an answer → pieces of its thoughts and of what it says.

    Both are without the marks, and without white space at their beginning and end.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._begun = False  # whether it is clear if the answer begins with thoughts
        self._inside = False
        self._held = ""  # may be part of a mark
        self._thoughts = _Trimmed()
        self._said = _Trimmed()

    def feed(self, piece: str) -> tuple[str, str]:
        """What of thoughts and of the answer is certain now."""
        self._held += piece
        if not self._begun and not self._begin():
            return "", ""
        thoughts = ""
        if self._inside:
            thoughts, found, rest = self._held.partition(self._marks.end)
            if found:
                self._inside, self._held = False, rest
            else:
                keep = _overlap(self._held, self._marks.end)
                thoughts, self._held = _cut(self._held, keep)
            thoughts = self._thoughts.feed(thoughts)
        if self._inside:
            return thoughts, ""
        said, self._held = self._held, ""
        return thoughts, self._said.feed(said)

    def finish(self) -> tuple[str, str]:
        """What is left, at the answer's end: of thoughts that were cut off, all are thoughts."""
        rest, self._held = self._held, ""
        if self._inside or (not self._begun and self._marks.opened):
            return self._thoughts.feed(rest), ""
        return "", self._said.feed(rest)

    def _begin(self) -> bool:
        """Look whether the answer begins with the opening mark, if that can be told."""
        text = self._held.lstrip()
        if text.startswith(self._marks.begin):
            self._inside, self._held = True, text.removeprefix(self._marks.begin)
        elif self._marks.begin.startswith(text):
            return False
        else:
            self._inside = self._marks.opened
        self._begun = True
        return True


class _Trimmed:
    """Text in pieces, without white space at its beginning and end."""

    def __init__(self) -> None:
        self._begun = False
        self._held = ""

    def feed(self, piece: str) -> str:
        text = self._held + piece
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        shown = text.rstrip()
        self._held = text[len(shown) :]
        return shown


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may begin `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def _cut(text: str, keep: int) -> tuple[str, str]:
    """`text` without its last `keep` characters, and those."""
    return (text[:-keep], text[-keep:]) if keep else (text, "")
