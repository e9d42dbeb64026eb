"""A choice that the model generates, for servers that score nothing: greedily, and constrained to
the choices. Where a server knows no constraint to texts, the answer is JSON that has one of them.

No score comes of that. The model goes for what is likeliest token by token, so that another choice
may win than by any method of `select`; and what it says in JSON need not be what it would go on
with in words.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from phloem.constrained.spec import Choice, JsonSchema
from phloem.lang.backend.base import Backend, Call, ChatPrompt, Prompt, Usage
from phloem.lang.backend.dialects import unsupported
from phloem.lang.backend.selecting import Selected
from phloem.lang.choices import ChoicesMethod
from phloem.lang.errors import BackendError
from phloem.lang.sampling import Sampling

_LAYOUT_TOKENS = 32  # of white space that a server may put between those of the JSON


class _Answer(msgspec.Struct):
    choice: str


async def select_by_generation(
    backend: Backend,
    title: str,
    prompt: Prompt,
    choices: Sequence[str],
    method: ChoicesMethod,
    *,
    as_json: bool,
) -> Selected:
    """The choice that `backend`, whose server is called `title`, generates.

    Raises `RequestRefused` for a method that needs scores, and of JSON for a prompt that it cannot
    stand behind; `BackendError` for an answer that is none of the choices.
    """
    if method is ChoicesMethod.UNCONDITIONAL_LIKELIHOOD_NORMALIZED:
        raise unsupported(f"{method} needs scores, and select_by_generation has none", "method")
    if as_json:
        _check_alone(prompt, title)
    longest = max(len(_written(choice, as_json)) for choice in choices)
    sampling = Sampling(max_tokens=longest + (_LAYOUT_TOKENS if as_json else 1), temperature=0.0)
    constraint = _schema(choices) if as_json else Choice(choices=tuple(choices))
    deltas = [delta async for delta in backend.generate(Call(prompt, sampling, constraint))]
    text = "".join(delta.text for delta in deltas)
    choice = _read(text) if as_json else text
    if choice is None or choice not in choices:
        raise BackendError(f"{title} generated {text!r}, which is no choice")
    usage = next((delta.usage for delta in deltas if delta.usage), None)
    return Selected(list(choices).index(choice), usage=usage or Usage())


def _check_alone(prompt: Prompt, title: str) -> None:
    """Raise `RequestRefused` unless JSON can be all of a message."""
    if not isinstance(prompt, ChatPrompt):
        raise unsupported(
            f"{title} can be held to one of the choices in a chat only: put all text into roles",
            "choices",
        )
    if prompt.partial:
        raise unsupported(
            f"{title} is held to one of the choices by JSON, which cannot go on from the text "
            f"before it ({prompt.partial[-40:]!r}): put the select into a message of its own",
            "messages",
        )


def _schema(choices: Sequence[str]) -> JsonSchema:
    schema = {
        "type": "object",
        "properties": {"choice": {"type": "string", "enum": list(choices)}},
        "required": ["choice"],
        "additionalProperties": False,
    }
    return JsonSchema(schema=msgspec.json.encode(schema).decode())


def _written(choice: str, as_json: bool) -> bytes:
    """How it stands in an answer; each of its tokens has at least a byte."""
    return json.dumps({"choice": choice}).encode() if as_json else choice.encode()


def _read(text: str) -> str | None:
    try:
        return msgspec.json.decode(text, type=_Answer).choice
    except msgspec.DecodeError:
        return None
