"""Chat conversations → prompts, by the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from phloem.srt.checkpoint import Checkpoint, CheckpointError
from phloem.srt.errors import InvalidRequest
from phloem.srt.generation import ChatMessage, ToolFormatName
from phloem.srt.tokenizer.chat_traits import detect_reasoning, detect_tool_format
from phloem.srt.tokenizer.escaping import Escaping, Markup, encode_escaped
from phloem.srt.tokenizer.jinja_environment import TemplateRefusal, make_environment
from phloem.srt.tokenizer.tokenizer import Tokenizer
from phloem.srt.tokenizer.tool_text import describe_tools, spell_tool_calls

MAX_RENDERED_CHARACTERS = 32 << 20

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
        "raise_exception",
        "strftime_now",
    }
)


@dataclass(frozen=True)
class RenderedPrompt:
    """A rendered conversation; markup that a user typed is still escaped in `template_text`."""

    template_text: str
    escaping: Escaping

    @property
    def text(self) -> str:
        """The prompt as text. Encoding this would take markup typed by a user for the model's."""
        return self.escaping.restore(self.template_text)


def load_chat_template(
    checkpoint: Checkpoint, tokenizer: Tokenizer, tool_format: ToolFormatName | None = None
) -> ChatTemplate:
    """The checkpoint's template. Raises `CheckpointError` when it is not valid Jinja."""
    sources = checkpoint.tokenizer_data().chat_templates
    return ChatTemplate(checkpoint.path, tokenizer, sources, tool_format)


class ChatTemplate:
    """Renders conversations. Safe to use from several threads.

    `sources` are Jinja templates by name: "default", and "tool_use" for requests with tools. One
    that is not valid Jinja raises `CheckpointError`; none at all is an error of each request.
    `tool_format` is how calls are written, None for what the templates show; `reasoning` how the
    model thinks, if it does.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer,
        sources: Mapping[str, str],
        tool_format: ToolFormatName | None = None,
    ) -> None:
        environment = make_environment()
        self._tokenizer = tokenizer
        self._sources = sources
        self._markup = Markup(tokenizer.controls)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise CheckpointError(
                    path, f"chat template {name!r}, line {error.lineno}: {error.message}"
                ) from None
        self._globals = tokenizer.special_tokens()
        self.tool_format = tool_format or detect_tool_format(sources)
        self.reasoning = detect_reasoning(sources, environment)

    @property
    def source(self) -> str:
        """The template for requests without tools; empty if there is none."""
        return self._sources.get("default", "")

    def encode_chat(
        self,
        messages: list[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, object]] | None = None,
        template_kwargs: dict[str, object] | None = None,
        documents: list[dict[str, object]] | None = None,
    ) -> list[int]:
        """`render`, then the prompt's token ids.

        Control tokens come from the template only: markup inside the conversation's strings is
        ordinary text. The template alone decides whether the prompt begins with BOS.
        """
        rendered = self.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
            documents=documents,
        )
        return encode_escaped(self._tokenizer, rendered.escaping, rendered.template_text)

    def render(
        self,
        messages: list[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, object]] | None = None,
        template_kwargs: dict[str, object] | None = None,
        documents: list[dict[str, object]] | None = None,
    ) -> RenderedPrompt:
        """Render the conversation.

        `add_generation_prompt` opens the assistant's turn. `continue_final_message` leaves the
        last message, the assistant's, open: the prompt ends with its content. `template_kwargs`
        are further variables of the template, `documents` what the answer is to be drawn from.

        Raises:
            InvalidRequest: the messages are malformed, the flags contradict, or the template
                refuses the conversation; the reason is the template's own.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message cannot both be true",
                param="continue_final_message",
            )
        name = self._pick(tools)
        if documents and "documents" not in self._sources[name]:
            raise InvalidRequest(
                "`documents` cannot be honoured: the model's chat template has no place for them",
                param="documents",
                code="unsupported_parameter",
            )
        turns = [_turn(index, message) for index, message in enumerate(messages)]
        if not turns:
            raise InvalidRequest("messages is empty", param="messages")
        extra = _checked_variables(template_kwargs or {})
        try:
            escaping = Escaping(self._markup, [turns, tools or [], extra, documents or []])
            turns = [_escape_turn(escaping, turn) for turn in turns]
            tools, extra = escaping.escape(tools), escaping.escape(extra)
            documents = escaping.escape(documents)
        except RecursionError:
            raise InvalidRequest("messages or tools are nested too deeply") from None
        if continue_final_message:
            _mark_end(turns, escaping.sentinel)
        turns, tools = self._fit_tools(name, turns, tools)
        text = self._run(
            self._templates[name],
            messages=turns,
            tools=tools or None,
            documents=documents or None,
            add_generation_prompt=add_generation_prompt,
            **self._globals,
            **extra,
        )
        if continue_final_message:
            text = _cut_at_end(text, escaping.sentinel)
        return RenderedPrompt(text, escaping)

    def _pick(self, tools: list[dict[str, object]] | None) -> str:
        """The name of the template for this request."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest(
                "the model has no chat template: use a plain prompt", code="no_chat_template"
            )
        return name

    def _fit_tools(
        self, name: str, turns: list[dict[str, Any]], tools: Any
    ) -> tuple[list[dict[str, Any]], Any]:
        """Say in text what the template has no variable for."""
        source = self._sources[name]
        if "tool_calls" not in source:
            for turn in turns:
                if calls := turn.pop("tool_calls", None):
                    spelled = spell_tool_calls(calls, self.tool_format)
                    turn["content"] = "\n".join(filter(None, (turn["content"], spelled)))
        if not tools or "tools" in source:
            return turns, tools
        description = describe_tools(tools, self.tool_format)
        if turns[0]["role"] == "system":
            head = {**turns[0], "content": f"{turns[0]['content']}\n\n{description}"}
            return [head, *turns[1:]], None
        return [{"role": "system", "content": description}, *turns], None

    @staticmethod
    def _run(template: jinja2.Template, **variables: Any) -> str:
        """Render, with every failure turned into the request's error."""
        pieces: list[str] = []
        room = MAX_RENDERED_CHARACTERS
        try:
            for piece in template.generate(**variables):
                room -= len(piece)
                if room < 0:
                    raise InvalidRequest("the rendered conversation is too long", param="messages")
                pieces.append(piece)
        except TemplateRefusal as refusal:
            raise InvalidRequest(f"chat template: {refusal}", param="messages") from None
        except jinja2.UndefinedError as error:
            raise InvalidRequest(f"chat template: {error}", param="messages") from None
        except InvalidRequest:
            raise
        except Exception:  # whatever a template does to values it did not expect
            raise InvalidRequest(
                "the model's chat template cannot express this conversation", param="messages"
            ) from None
        return "".join(pieces)


def _checked_variables(variables: dict[str, object]) -> dict[str, object]:
    """Refuse a request's variables that would take the place of the template's own."""
    reserved = sorted(_RESERVED & variables.keys())
    if reserved:
        raise InvalidRequest(
            f"{reserved[0]!r} cannot be set through chat_template_kwargs",
            param=f"chat_template_kwargs.{reserved[0]}",
        )
    return variables


def _escape_turn(escaping: Escaping, turn: dict[str, Any]) -> dict[str, Any]:
    """Escape all but the role, which is of a fixed set and compared by templates."""
    escaped: dict[str, Any] = escaping.escape(turn)
    return {**escaped, "role": turn["role"]}


def _turn(index: int, message: ChatMessage) -> dict[str, Any]:
    """A message as templates take it."""
    where = f"messages[{index}]"
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(
            f"{where}.role {message.role!r} is none of {', '.join(_ROLES)}", param=f"{where}.role"
        )
    if message.content is None and not (role == "assistant" and message.tool_calls):
        raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
    turn: dict[str, Any] = {"role": role, "content": message.content or ""}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        turn["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        turn["tool_calls"] = [
            _tool_call(f"{where}.tool_calls[{position}]", call)
            for position, call in enumerate(message.tool_calls)
        ]
    return turn


def _tool_call(where: str, call: dict[str, object]) -> dict[str, Any]:
    """A tool call with its arguments as an object: clients send JSON text, templates want more."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function.name is missing", param=f"{where}.function")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(
            f"{where}.function.arguments is not a JSON object",
            param=f"{where}.function.arguments",
        )
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


def _mark_end(turns: list[dict[str, Any]], sentinel: str) -> None:
    if turns[-1]["role"] != "assistant":
        raise InvalidRequest(
            "continue_final_message needs the last message to be the assistant's",
            param="continue_final_message",
        )
    if turns[-1].get("tool_calls"):
        raise InvalidRequest(
            "continue_final_message cannot go on after tool calls", param="continue_final_message"
        )
    turns[-1]["content"] += sentinel


def _cut_at_end(text: str, sentinel: str) -> str:
    end = text.rfind(sentinel)
    if end < 0:
        raise InvalidRequest(
            "the model's chat template does not show the last message, so it cannot be continued",
            param="continue_final_message",
        )
    return text[:end].replace(sentinel, "")
