"""The `input` of a request → items, each with its place in the request, which errors name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Raw

from phloem.srt.errors import InvalidRequest
from phloem.srt.http.body import ABSENT, given, invalid, unsupported
from phloem.srt.http.constraint_values import convert
from phloem.srt.http.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputText,
    Item,
    ItemStatus,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SummaryText,
    new_item_id,
)

ROLES: Final = ("user", "assistant", "system", "developer")


@dataclass(frozen=True)
class Placed:
    """An item, and where it stands in the request."""

    item: Item
    at: str


@dataclass(frozen=True)
class Reference:
    """An item that is stored, by its id."""

    id: str
    at: str


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Sent(msgspec.Struct):
    """The fields of all items; `_READERS` says which are whose."""

    type: str | None = None
    id: str | None = None
    status: ItemStatus | None = None
    role: str | None = None
    content: Raw = ABSENT
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Raw = ABSENT
    summary: Raw = ABSENT
    encrypted_content: str | None = None


def read_input(sent: str | list[Raw] | None) -> list[Placed | Reference]:
    """Raises `InvalidRequest` with the path of what cannot be understood."""
    if sent is None:
        return []
    if isinstance(sent, str):
        content: list[InputText | OutputText] = [InputText(sent)]
        message = MessageItem(id=new_item_id("msg"), role="user", content=content)
        return [Placed(message, "input")]
    return [_read(raw, f"input[{i}]") for i, raw in enumerate(sent)]


def _read(raw: Raw, at: str) -> Placed | Reference:
    sent = convert(raw, _Sent, at)
    kind = sent.type or ("message" if sent.role is not None else "item_reference")
    if kind == "item_reference":
        return Reference(_wanted(sent.id, f"{at}.id"), at)
    if kind not in _READERS:
        raise InvalidRequest(
            f"Items of type {kind!r} are not supported; known are "
            f"{', '.join([*_READERS, 'item_reference'])}.",
            param=f"{at}.type",
            code="unsupported_content",
        )
    return Placed(_READERS[kind](sent, at), at)


def _message(sent: _Sent, at: str) -> Item:
    role = _wanted(sent.role, f"{at}.role")
    if role not in ROLES:
        raise invalid(f"{role!r} is not a role: {', '.join(ROLES)}.", f"{at}.role")
    texts = _texts(sent.content, f"{at}.content", ("input_text", "output_text", "text", "refusal"))
    made = OutputText if role == "assistant" else InputText
    return MessageItem(
        id=sent.id or new_item_id("msg"),
        status=sent.status or "completed",
        role=role,
        content=[made(text=text) for text in texts],
    )


def _call(sent: _Sent, at: str) -> Item:
    return FunctionCallItem(
        id=sent.id or new_item_id("fc"),
        status=sent.status or "completed",
        call_id=_wanted(sent.call_id, f"{at}.call_id"),
        name=_wanted(sent.name, f"{at}.name"),
        arguments=_wanted(sent.arguments, f"{at}.arguments"),
    )


def _call_output(sent: _Sent, at: str) -> Item:
    texts = _texts(sent.output, f"{at}.output", ("input_text",))
    plain = bytes(sent.output).startswith(b'"')
    return FunctionCallOutputItem(
        id=sent.id or new_item_id("fco"),
        status=sent.status or "completed",
        call_id=_wanted(sent.call_id, f"{at}.call_id"),
        output=texts[0] if plain else [InputText(text) for text in texts],
    )


def _reasoning(sent: _Sent, at: str) -> Item:
    if sent.encrypted_content:
        raise unsupported(f"{at}.encrypted_content", "this server encrypts no reasoning")
    summary = _texts(sent.summary, f"{at}.summary", ("summary_text",), optional=True)
    content = _texts(sent.content, f"{at}.content", ("reasoning_text", "text"), optional=True)
    return ReasoningItem(
        id=sent.id or new_item_id("rs"),
        summary=[SummaryText(text) for text in summary],
        content=[ReasoningText(text) for text in content],
    )


_READERS: Final[dict[str, Callable[[_Sent, str], Item]]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _call_output,
    "reasoning": _reasoning,
}


def _texts(raw: Raw, at: str, types: tuple[str, ...], *, optional: bool = False) -> list[str]:
    """The texts of a field that is one text, or a list of parts of `types`."""
    if not given(raw):
        if optional:
            return []
        raise invalid(f"{at} is missing.", at)
    if bytes(raw).startswith(b'"'):
        return [convert(raw, str, at)]
    texts: list[str] = []
    for i, part in enumerate(convert(raw, list[_Part], at)):
        if part.type not in types:
            raise InvalidRequest(
                f"Content of type {part.type!r} is not supported here; known are "
                f"{', '.join(types)}.",
                param=f"{at}[{i}].type",
                code="unsupported_content",
            )
        field = "refusal" if part.type == "refusal" else "text"
        texts.append(_wanted(getattr(part, field), f"{at}[{i}].{field}"))
    return texts


def _wanted(value: str | None, param: str) -> str:
    if value is None:
        raise invalid(f"{param} is missing.", param)
    return value
