"""The items that conversations are made of, as they are replied, stored and listed.

A message has parts of text; reasoning, calls of functions and their outputs are items beside it
(https://platform.openai.com/docs/api-reference/responses/object).
"""

from __future__ import annotations

import uuid
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from phloem.srt.http.replies import TokenLogprobEntry

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    text: str


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """`annotations` cite files and pages, which there are none of."""

    text: str
    annotations: list[object] = []
    logprobs: list[TokenLogprobEntry] = []


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(msgspec.Struct, frozen=True, tag_field="type", tag="summary_text"):
    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus = "completed"
    role: str
    content: list[InputText | OutputText]


class FunctionCallItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"
):
    id: str
    status: ItemStatus = "completed"
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"
):
    id: str
    status: ItemStatus = "completed"
    call_id: str
    output: str | list[InputText]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """The model's own words are in `content`; nobody summarises them."""

    id: str
    status: ItemStatus | UnsetType = UNSET
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []


OutputItem = MessageItem | FunctionCallItem | ReasoningItem
Item = OutputItem | FunctionCallOutputItem


def new_item_id(prefix: str) -> str:
    """An id for an item that came without one."""
    return f"{prefix}_{uuid.uuid4().hex}"
