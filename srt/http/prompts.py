"""The prompts of the `/cache` routes: the ids, and the namespace, that a generation would have."""

from __future__ import annotations

from phloem.srt.generation import EngineClient
from phloem.srt.http.body import invalid
from phloem.srt.http.cache_protocol import PromptFields, WarmRequest
from phloem.srt.http.completion_prompts import MAX_PROMPTS
from phloem.srt.http.messages import render_chat
from phloem.srt.http.protocol import ChatRequest
from phloem.srt.http.sampling import check_model, token_ids
from phloem.srt.http.tools import plan_tools

_CHAT_ONLY = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


async def read_prompt(body: PromptFields, engine: EngineClient) -> list[int]:
    """The one prompt of `body`. Raises `InvalidRequest` with the field's path, and `NotFound` for
    another model."""
    check_model(body.model, engine.card)
    given = [one for one in (body.prompt, body.input_ids, body.messages) if one is not None]
    if len(given) != 1:
        raise invalid("Exactly one of prompt, input_ids and messages is wanted.", "prompt")
    if body.messages is not None:
        return await _read_chat(body, engine)
    _refuse_chat_fields(body)
    if body.input_ids is not None:
        return list(token_ids(body.input_ids, engine.card, "input_ids"))
    assert body.prompt is not None
    return await _ids(body.prompt, "prompt", engine)


async def read_warm_prompts(body: WarmRequest, engine: EngineClient) -> list[list[int]]:
    """All prompts of `body`. Raises as `read_prompt` does."""
    if body.prompts is None:
        return [await read_prompt(body, engine)]
    check_model(body.model, engine.card)
    if any(one is not None for one in (body.prompt, body.input_ids, body.messages)):
        raise invalid("prompts comes alone, without another prompt.", "prompts")
    if len(body.prompts) > MAX_PROMPTS:
        raise invalid(f"At most {MAX_PROMPTS} prompts, not {len(body.prompts)}.", "prompts")
    _refuse_chat_fields(body)
    return [await _ids(one, f"prompts[{i}]", engine) for i, one in enumerate(body.prompts)]


async def _ids(prompt: str | list[int], param: str, engine: EngineClient) -> list[int]:
    if not isinstance(prompt, str):
        return list(token_ids(prompt, engine.card, param))
    ids = await engine.tokenize(prompt)
    if not ids:
        raise invalid("The prompt is empty.", param)
    return ids


async def _read_chat(body: PromptFields, engine: EngineClient) -> list[int]:
    request = ChatRequest(
        messages=body.messages or [],
        tools=body.tools,
        tool_choice=body.tool_choice,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return await render_chat(request, plan_tools(request).rendered, engine)


def _refuse_chat_fields(body: PromptFields) -> None:
    for name in _CHAT_ONLY:
        if getattr(body, name) is not None:
            raise invalid(f"{name} is for messages.", name)
