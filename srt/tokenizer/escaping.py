"""Keeps control markup in user text from becoming control tokens.

Before a template is rendered, each control token's markup inside the user's strings is replaced
by one private-use character; in the rendered text only the template's own markup is left to be
recognised, and the characters are turned back into markup that is encoded as ordinary text.

Markup could also come together where a template puts two strings side by side ("<|im_" and
"end|>"), so a string that ends as a control token begins has those beginnings replaced as well,
and likewise one that begins as a control token ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from phloem.srt.errors import InvalidRequest
from phloem.srt.tokenizer.tokenizer import ControlToken, Tokenizer

_PRIVATE_USE = range(0xF0000, 0x10FFFE)  # supplementary planes 15 and 16
_MAX_DEPTH = 100


class Markup:
    """The control tokens of a model by their text, and a pattern that finds them."""

    def __init__(self, controls: tuple[ControlToken, ...]) -> None:
        self.token_of = {token.text: token for token in controls}
        # Of several that begin at one place the longest counts; no control token, no match.
        longest_first = sorted(self.token_of, key=len, reverse=True)
        alternatives = "|".join(re.escape(text) for text in longest_first) or r"(?!)"
        self.pattern = re.compile(f"({alternatives})")
        texts = [text for text in self.token_of if len(text) > 1]
        self.beginnings = {text[:cut] for text in texts for cut in range(1, len(text))}
        self.endings = {text[cut:] for text in texts for cut in range(1, len(text))}
        self.longest_part = max(map(len, self.beginnings), default=0)

    def literals(self) -> list[str]:
        """What a placeholder may stand for: a token's markup, or one character of it."""
        return list(dict.fromkeys([*self.token_of, *(c for text in self.token_of for c in text)]))


class Escaping:
    """Placeholders for one conversation, chosen so that its strings hold none of them.

    `user_values` are all strings, lists and objects that the user supplied. `sentinel` is one more
    such character, for the caller's use.

    Raises:
        RecursionError: the values are nested too deeply.
        InvalidRequest: the values use up the private-use characters.
    """

    def __init__(self, markup: Markup, user_values: list[Any]) -> None:
        self.markup = markup
        used: set[str] = set()
        for text in _strings(user_values):
            if not text.isascii():
                used.update(text)
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        literals = markup.literals()
        chosen = list(islice(free, len(literals) + 1))
        if len(chosen) <= len(literals):
            raise InvalidRequest("the messages hold too many private-use characters")
        self.sentinel = chosen.pop()
        self._of_literal = dict(zip(literals, chosen, strict=True))
        self._placeholders = frozenset(chosen)
        self._of_placeholder = {ord(c): text for text, c in self._of_literal.items()}

    def escape(self, value: Any) -> Any:
        """A copy of a string, or of a JSON-like value, without markup in any of its strings."""
        if isinstance(value, str):
            return self._escape_text(value)
        if isinstance(value, dict):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.escape(item) for item in value]
        return value

    def _escape_text(self, text: str) -> str:
        text = self.markup.pattern.sub(lambda match: self._of_literal[match[0]], text)
        for length in range(min(self.markup.longest_part, len(text)), 0, -1):
            start = len(text) - length
            if text[start:] in self.markup.beginnings:
                text = text[:start] + self._of_literal[text[start]] + text[start + 1 :]
            if text[:length] in self.markup.endings:
                end = length - 1
                text = text[:end] + self._of_literal[text[end]] + text[end + 1 :]
        return text

    def restore(self, text: str) -> str:
        """Placeholders back to the markup they stand for."""
        return text.translate(self._of_placeholder)

    def is_clean(self, text: str) -> bool:
        """Whether no placeholder is in the text."""
        return text.isascii() or self._placeholders.isdisjoint(text)


def encode_escaped(tokenizer: Tokenizer, escaping: Escaping, text: str) -> list[int]:
    """Ids of a rendered text: the markup in it is control tokens, placeholders are not."""
    if escaping.is_clean(text):
        return tokenizer.encode(text)
    token_of = escaping.markup.token_of
    ids: list[int] = []
    parts = escaping.markup.pattern.split(text)  # text, markup, text, markup, …, text
    for index, part in enumerate(parts):
        if index % 2:
            ids.append(token_of[part].id)
            continue
        if index and token_of[parts[index - 1]].rstrip:
            part = part.lstrip()
        if index + 1 < len(parts) and token_of[parts[index + 1]].lstrip:
            part = part.rstrip()
        literal = escaping.restore(part)
        ids += tokenizer.encode_inside(literal) if index else tokenizer.encode(literal, False)
    return ids


def _strings(value: Any, depth: int = 0) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        raise RecursionError
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key, depth + 1)
            yield from _strings(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, depth + 1)
