"""What templates say of their models; marks in the vocabulary; reasoning counted by the token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from phloem.srt.generation import ChatMessage, GenerateRequest, ReasoningMarks, Thoughts
from phloem.srt.messages import FinishReason, Tokens
from phloem.srt.tokenizer.answer import AnswerBuilder
from phloem.srt.tokenizer.chat_traits import detect_reasoning, detect_tool_format
from phloem.srt.tokenizer.jinja_environment import make_environment
from phloem.srt.tokenizer.template import ChatTemplate
from phloem.srt.tokenizer.thought_counter import ThoughtCounter

QWEN = """
{%- if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}
<tool_call>\n{"name": <function-name>, "arguments": <args>}\n</tool_call>{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content is string %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor -%}
<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}
{%- endif %}"""


@pytest.mark.parametrize(
    ("sources", "form"),
    [
        ({}, "json"),
        ({"default": "{{ messages }}"}, "json"),
        ({"default": QWEN}, "hermes"),
        ({"default": "x", "tool_use": QWEN}, "hermes"),
        ({"default": '{{ "[TOOL_CALLS] [" }}'}, "mistral"),
        ({"default": '{{ "[TOOL_CALLS]" + name + "[ARGS]" }}'}, "mistral-args"),
        ({"default": "{{ '<|python_tag|>' }}"}, "llama3"),
        (
            {
                "default": '{{ \'Respond in the format {"name": function name, "parameters":'
                " dictionary of argument name and its value}.' }}"
            },
            "llama3",
        ),
    ],
)
def test_formats_of_calls(sources: dict[str, str], form: str) -> None:
    assert detect_tool_format(sources) == form


@pytest.mark.parametrize(
    ("source", "marks"),
    [
        ("{{ messages }}", None),
        (QWEN, ReasoningMarks(begin="<think>", end="</think>", switch="enable_thinking")),
        (
            "{% if thinking %}<think>{% endif %}{{ x.split('</think>') }}{{ reasoning_effort }}",
            ReasoningMarks(begin="<think>", end="</think>", switch="thinking", efforts=True),
        ),
        # What the template sets itself is no switch.
        (
            "{% set enable_thinking = true %}{{ enable_thinking }}</think>",
            ReasoningMarks(begin="<think>", end="</think>"),
        ),
        # It opens the mark that the model closes.
        ("{{ x }}<think>\n", ReasoningMarks(begin="<think>", end="</think>")),
        ("{{ '[THINK]' + x + '[/THINK]' }}", ReasoningMarks(begin="[THINK]", end="[/THINK]")),
    ],
)
def test_reasoning(source: str, marks: ReasoningMarks | None) -> None:
    assert detect_reasoning({"default": source}, make_environment()) == marks


def test_a_template_may_be_told_the_format(make_byte_level: Any) -> None:
    tokenizer = make_byte_level()
    told = ChatTemplate(Path("x"), tokenizer, {"default": "{{ messages[0].content }}"}, "llama3")
    function = {"name": "f", "parameters": {}}
    text = told.render(
        [ChatMessage(role="user", content="x")], tools=[{"type": "function", "function": function}]
    ).text
    assert text.endswith('{"name": "function name", "parameters": {}}')
    seen = ChatTemplate(Path("x"), tokenizer, {"default": QWEN})
    assert (seen.tool_format, seen.reasoning is not None) == ("hermes", True)
    thought = ChatMessage(role="assistant", content="b", reasoning_content="a")
    text = seen.render([ChatMessage(role="user", content="x"), thought]).text
    assert "<think>\na\n</think>\n\nb" in text


@pytest.mark.parametrize(
    ("pieces", "opened", "counts"),
    [
        (["<think>", "a", "b", "</think>", "c"], False, [1, 2, 3, 4, 4]),
        (["\n", "<th", "ink>", "a", "</", "think>", "c"], False, [0, 0, 3, 4, 5, 6, 6]),
        (["a", "</think>x", "c"], True, [1, 2, 2]),
        (["Hello", "<think>", "a"], False, [0, 0, 0]),
        (["<", "b", "<think>"], False, [0, 0, 0]),
        (["<think>a</think>", "b"], False, [1, 1]),
    ],
)
def test_tokens_of_reasoning(pieces: list[str], opened: bool, counts: list[int]) -> None:
    counter = ThoughtCounter(Thoughts("<think>", "</think>", opened))
    told = []
    for piece in pieces:
        counter.add(piece)
        told.append(counter.count)
    assert told == counts


def test_the_count_does_not_depend_on_how_tokens_arrive(make_byte_level: Any) -> None:
    tokenizer = make_byte_level(added=("</think>",))
    text = "<think>hm, é</think>Yes"
    ids = tokenizer.encode(text, False)
    thoughts = Thoughts("<think>", "</think>")
    rng = random.Random(0)
    for _ in range(20):
        request = GenerateRequest(prompt=[0], thoughts=thoughts)
        builder = AnswerBuilder(tokenizer, request, "r", 1)
        rest, said = list(ids), ""
        while rest:
            size = rng.randrange(1, 6)
            part, rest = rest[:size], rest[size:]
            finish = None if rest else FinishReason.LENGTH
            chunk = builder.add(Tokens("r", part, finish=finish))
            said += chunk.text
        assert said == text
        assert chunk.reasoning_tokens == len(tokenizer.encode(text[:-3], False))


def test_marks_are_text_of_the_answer_but_never_of_the_user(make_byte_level: Any) -> None:
    controls = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "[ARGS]")
    tokenizer = make_byte_level(controls=controls)
    mark = controls.index("[TOOL_CALLS]")
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode([1, mark, 2], skip_special=True) == "[TOOL_CALLS]"
    assert mark not in tokenizer.encode("[TOOL_CALLS]", False)
    text = "a[TOOL_CALLS]f[ARGS]{}"
    ids = tokenizer.encode_answer(text)
    assert [i for i in ids if i < len(controls)] == [3, 4]
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_answer("<|im_end|>") == tokenizer.encode_inside("<|im_end|>")
    template = ChatTemplate(
        Path("x"), tokenizer, {"default": "[TOOL_CALLS]{{ messages[0].content }}"}
    )
    ids = template.encode_chat([ChatMessage(role="user", content="[TOOL_CALLS]")])
    assert ids.count(mark) == 1
