"""How few prompt tokens a run could have computed, if every shared prefix were computed once.

    minimum = nodes of the trie of all prompts, less those that decoding made

Every server's figure can be held against it: prompt tokens less cached ones is what it computed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias

import aiohttp

from phloem.srt.bench.load import Call, Message

Tokenize = Callable[[list[Message], bool], Awaitable[list[int]]]
"""A conversation → its token ids; the flag adds the opening of the next answer."""


class CannotTokenize(Exception):
    """The server does not tokenise conversations."""


_Node: TypeAlias = "dict[int, _Node]"


class TokenTrie:
    """Token sequences, shared prefixes stored once."""

    def __init__(self) -> None:
        self._root: _Node = {}

    def insert(self, tokens: Iterable[int]) -> int:
        """Add a sequence; the number of tokens that were not there yet."""
        node, new = self._root, 0
        for token in tokens:
            child = node.get(token)
            if child is None:
                child = node[token] = {}
                new += 1
            node = child
        return new


async def minimum_prefill(calls: Sequence[Call], tokenize: Tokenize) -> int:
    """A lower bound of the prompt tokens that `calls` (in the order they started) must compute.

    A prompt computes what no earlier prompt or answer has, but at least its last token, whose
    logits give the first token of the answer. An answer is taken as the tokens of its text within
    the conversation, with the template's closing markup for free.
    """
    trie, minimum = TokenTrie(), 0
    for call in calls:
        if call.error is None:
            minimum += max(1, trie.insert(await tokenize(call.messages, True)))
            if call.turn.then:
                trie.insert(await tokenize(call.answered, False))
    return minimum


def server_tokenizer(session: aiohttp.ClientSession, base_url: str, model: str) -> Tokenize:
    """`Tokenize` by the server's `/tokenize` with `messages` (vLLM's form, and ours). The function
    raises `CannotTokenize` where the server has no such thing."""
    url = f"{base_url.rstrip('/')}/tokenize"

    async def tokenize(messages: list[Message], opening: bool) -> list[int]:
        body = {"model": model, "messages": messages, "add_generation_prompt": opening}
        async with session.post(url, json=body) as response:
            reply = await response.json(content_type=None) if response.status == 200 else None
        tokens = reply.get("tokens") if isinstance(reply, dict) else None
        if not isinstance(tokens, list) or not tokens:
            raise CannotTokenize(f"{url} does not tokenise conversations (HTTP {response.status})")
        return tokens

    return tokenize
