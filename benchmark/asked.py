"""What programs asked of a model, and how little of it a server could have computed.

least = nodes of the trie of all prompts and choices, less those that decoding made
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path

from sides import Client

from phloem.lang.backend.base import Call, ChatPrompt, Delta, Prompt, TextPrompt
from phloem.lang.backend.selecting import Selected
from phloem.lang.choices import ChoicesMethod
from phloem.srt.bench.prefix import TokenTrie
from phloem.srt.checkpoint import open_checkpoint
from phloem.srt.generation import ChatMessage
from phloem.srt.tokenizer import load_chat_template, load_tokenizer

Tokenize = Callable[[Prompt], list[int]]


@dataclass
class Asked:
    """A `gen` and its answers so far, or a `select` with its choices."""

    prompt: Prompt
    choices: Sequence[str] = ()
    answers: dict[int, str] = field(default_factory=dict)


def watch(backend: Client) -> list[Asked]:
    """A list that grows by each call of `backend`, in the order in which they begin."""
    asked: list[Asked] = []
    selecting: ContextVar[bool] = ContextVar("selecting", default=False)
    generate, select = backend.generate, backend.select

    async def watched_generate(call: Call) -> AsyncGenerator[Delta, None]:
        one = Asked(call.prompt)
        if not selecting.get():  # by which some backends select
            asked.append(one)
        async with aclosing(generate(call)) as deltas:
            async for delta in deltas:
                one.answers[delta.index] = one.answers.get(delta.index, "") + delta.text
                yield delta

    async def watched_select(
        prompt: Prompt, choices: Sequence[str], method: ChoicesMethod
    ) -> Selected:
        asked.append(Asked(prompt, choices))
        token = selecting.set(True)
        try:
            return await select(prompt, choices, method)
        finally:
            selecting.reset(token)

    # on the object, so that it stays of its class, by which the DSL knows what it can do
    vars(backend).update(generate=watched_generate, select=watched_select)
    return asked


def least_prefill(asked: Sequence[Asked], tokenize: Tokenize, trie: TokenTrie) -> tuple[int, int]:
    """Prompt tokens that were asked for, and the least of them that any server had to compute
    which has had all that is in `trie`; what is asked is added to it.

    A call's prompt counts whole, and of a `select` also the tokens that each choice adds to it. To
    be computed is what no earlier prompt or answer has, but at least the last token, whose logits
    nobody keeps; of a choice all but its last token, behind which nothing is asked.
    """
    total, least = 0, 0
    for one in asked:
        prompts = [tokenize(extended(one.prompt, choice)) for choice in one.choices or [""]]
        own = TokenTrie()
        total += sum(own.insert(ids) for ids in prompts)
        if one.choices:
            least += max(1, sum(trie.insert(ids[:-1]) for ids in prompts))
            continue
        least += max(1, trie.insert(prompts[0]))
        for answer in one.answers.values():
            trie.insert(tokenize(extended(one.prompt, answer)))
    return total, least


def extended(prompt: Prompt, text: str) -> Prompt:
    """`prompt` with `text` behind it."""
    match prompt:
        case TextPrompt(begun):
            return TextPrompt(begun + text)
        case ChatPrompt(partial=begun):
            return replace(prompt, partial=begun + text)


def model_tokenizer(model: Path) -> Tokenize:
    """`Tokenize` of a model file or folder."""
    checkpoint = open_checkpoint(model)
    tokenizer = load_tokenizer(checkpoint)
    template = load_chat_template(checkpoint, tokenizer)

    def tokenize(prompt: Prompt) -> list[int]:
        if isinstance(prompt, TextPrompt):
            return tokenizer.encode_prompt(prompt.text)
        chat = [ChatMessage(role=m.role, content=m.content) for m in prompt.messages]
        if not prompt.partial:
            return template.encode_chat(chat)
        chat.append(ChatMessage(role="assistant", content=prompt.partial))
        return template.encode_chat(chat, add_generation_prompt=False, continue_final_message=True)

    return tokenize
