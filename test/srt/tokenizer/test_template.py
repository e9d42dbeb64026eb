"""Chat templates: rendering, markup in user text, continuation, tools, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from phloem.srt.checkpoint import CheckpointError
from phloem.srt.errors import InvalidRequest
from phloem.srt.generation import ChatMessage
from phloem.srt.tokenizer import ChatTemplate, Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
STRICT = """\
{%- if messages[0].role == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant') }}
    {%- endif %}
    {{- '[' ~ message.role ~ ']' ~ message.content | trim }}
{%- endfor %}
"""
TOOLS = """\
{%- if tools %}{{ '<tools>' ~ (tools | tojson) ~ '</tools>' }}{% endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- call.function.name ~ '(' ~ (call.function.arguments | tojson) ~ ')' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- message.tool_call_id ~ '=' ~ message.content }}
    {%- endif %}
{%- endfor %}
"""

shared = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def said(role: str, content: str | None, **more: Any) -> ChatMessage:
    return ChatMessage(role=role, content=content, **more)


@pytest.fixture
def template(byte_level: Tokenizer) -> Callable[[str], ChatTemplate]:
    return lambda source: ChatTemplate(Path("tiny.gguf"), byte_level, {"default": source})


Template = Callable[[str], ChatTemplate]

HI = said("user", "Hi")


def test_conversation_is_the_hand_rendered_prompt(
    template: Template, byte_level: Tokenizer
) -> None:
    chat = template(CHATML)
    messages = [said("system", "Be brief."), said("user", "Why?"), said("assistant", "So.")]
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
        "<|im_start|>assistant\nSo.<|im_end|>\n"
    )
    assert chat.render(messages, add_generation_prompt=False).text == text
    opened = chat.encode_chat(messages)
    assert opened == byte_level.encode(text + "<|im_start|>assistant\n")
    assert chat.encode_chat(messages, add_generation_prompt=False) == byte_level.encode(text)


MARKUP = st.lists(
    st.sampled_from(
        [
            "<|im_end|>",
            "<|im_start|>",
            "<|endoftext|>",
            "<|im_",
            "end|>",
            "<|",
            "ab",
            "\n",
            "é",
            " ",
        ]
    )
    | st.characters(min_codepoint=0xF0000, max_codepoint=0xF0004),
    max_size=8,
).map("".join)


@shared
@given(first=MARKUP, second=MARKUP, name=MARKUP)
@example(name="<|im_", first="end|>", second="")
@example(name="<", first="|im_end|", second=">")
@example(first="<|im_<|im_end|>end|>", second="\U000f0000", name="<|im_start|>")
def test_markup_in_user_text_never_becomes_control_tokens(
    template: Template, byte_level: Tokenizer, first: str, second: str, name: str
) -> None:
    chat = template(CHATML.replace("'\\n' + message['content']", "message.name + message.content"))
    messages = [said("user", first, name=name), said("assistant", second, name=first)]
    ids = chat.encode_chat(messages)
    assert [i for i in ids if i in byte_level.special_ids] == [1, 2, 1, 2, 1]
    text = (
        f"<|im_start|>user{name}{first}<|im_end|>\n<|im_start|>assistant{first}{second}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert byte_level.decode(ids) == text
    assert chat.render(messages).text == text


def test_escaped_pieces_encode_like_the_whole(template: Template, byte_level: Tokenizer) -> None:
    """Where markup is typed, the rest is still encoded as it would be without."""
    chat = template(CHATML)
    plain = chat.encode_chat([said("user", "abc 12 ab"), said("user", "x")])
    marked = chat.encode_chat([said("user", "abc 12 ab"), said("user", "x<|im_end|>")])
    x = byte_level.encode("x")
    end = next(i for i in range(len(plain)) if plain[i : i + 1] == x)
    assert marked[: end + 1] == plain[: end + 1]
    added = byte_level.encode("<|im_end|>", special=False)
    assert marked == plain[: end + 1] + added + plain[end + 1 :]


def test_markup_completed_by_the_template_stays_text(
    template: Template, byte_level: Tokenizer
) -> None:
    chat = template("{{ '<|im_' ~ messages[0].content ~ 'im_start|>' }}")
    ids = chat.encode_chat([said("user", "end|><|")])
    assert byte_level.special_ids.isdisjoint(ids)
    assert byte_level.decode(ids) == "<|im_end|><|im_start|>"


def test_markup_in_tools_and_variables_stays_text(
    template: Template, byte_level: Tokenizer
) -> None:
    chat = template("{{ tools | tojson }}{{ style }}{{ eos_token }}")
    tools: list[dict[str, object]] = [
        {
            "type": "function",
            "function": {"name": "<|im_start|>", "<|im_end|>": [{"a": "<|im_end|>"}]},
        }
    ]
    ids = chat.encode_chat([HI], tools=tools, template_kwargs={"style": "<|endoftext|>"})
    assert [i for i in ids if i in byte_level.special_ids] == [2]
    assert byte_level.decode(ids) == (
        '[{"type": "function", "function": {"name": "<|im_start|>", "<|im_end|>": '
        '[{"a": "<|im_end|>"}]}}]<|endoftext|><|im_end|>'
    )


@pytest.mark.parametrize(
    "content", ["1, 2, 3,", "ends in blanks \n ", "", "<|im_end|>", "é\U000f0000"]
)
def test_continuing_ends_with_the_content(
    template: Template, byte_level: Tokenizer, content: str
) -> None:
    chat = template(CHATML)
    messages = [said("user", "Count."), said("assistant", content)]
    ids = chat.encode_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert byte_level.decode(ids) == (
        f"<|im_start|>user\nCount.<|im_end|>\n<|im_start|>assistant\n{content}"
    )
    assert ids.count(2) == 1
    trimming = template(STRICT)
    text = trimming.render(messages, add_generation_prompt=False, continue_final_message=True).text
    assert text == "[user]Count.[assistant]" + content.lstrip()


@pytest.mark.parametrize(
    ("messages", "opens", "message"),
    [
        ([said("user", "x"), said("assistant", "y")], True, "both"),
        ([said("user", "x")], False, "needs the last message to be the assistant's"),
        (
            [said("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])],
            False,
            "after tool calls",
        ),
    ],
)
def test_continuing_refused(
    template: Template, messages: list[ChatMessage], opens: bool, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        template(CHATML).encode_chat(
            messages, add_generation_prompt=opens, continue_final_message=True
        )
    assert caught.value.param == "continue_final_message"


def test_continuing_a_message_that_the_template_leaves_out(template: Template) -> None:
    with pytest.raises(InvalidRequest, match="does not show the last message"):
        template("{{ messages[0].content }}").render(
            [HI, said("assistant", "x")], add_generation_prompt=False, continue_final_message=True
        )


def test_roles(template: Template) -> None:
    chat = template(CHATML)
    text = chat.render(
        [said("developer", "D"), said("tool", "T")], add_generation_prompt=False
    ).text
    assert text == "<|im_start|>system\nD<|im_end|>\n<|im_start|>tool\nT<|im_end|>\n"
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.role 'bot'") as caught:
        chat.render([HI, said("bot", "hello")])
    assert caught.value.param == "messages[1].role"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ([said("user", None)], r"messages\[0\]\.content is missing"),
        ([said("assistant", None)], r"messages\[0\]\.content is missing"),
        ([said("assistant", None, tool_calls=[{}])], r"tool_calls\[0\]\.function\.name"),
        (
            [said("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}])],
            "arguments is not a JSON object",
        ),
        (
            [said("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": "{"}}])],
            "arguments is not a JSON object",
        ),
    ],
)
def test_malformed_messages(template: Template, messages: list[ChatMessage], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        template(CHATML).render(messages)


def test_the_templates_own_reason_reaches_the_user(template: Template) -> None:
    chat = template(STRICT)
    with pytest.raises(InvalidRequest, match="System role not supported"):
        chat.render([said("system", "A."), HI])
    with pytest.raises(InvalidRequest, match="Roles must alternate"):
        chat.render([HI, HI])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content.x }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ undefined_thing | tojson }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{% for i in range(90000) %}{{ filler }}{% endfor %}",
    ],
)
def test_template_failures_show_no_internals(template: Template, source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        template(source).render([HI], template_kwargs={"filler": "x" * 1000})
    for internal in ("<class", "Traceback", "object at", "jinja2", "__globals__", "os.environ"):
        assert internal not in str(caught.value)


def test_no_template_and_broken_template(byte_level: Tokenizer, template: Template) -> None:
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        ChatTemplate(Path("tiny.gguf"), byte_level, {}).render([HI])
    assert caught.value.code == "no_chat_template"
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: chat template 'default', line 2"):
        template("\n{% for %}")


def test_environment_is_the_one_templates_are_written_for(template: Template) -> None:
    chat = template(
        "{% for m in messages %}\n"
        "  {% if loop.index0 > 0 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}\n"
        "{% endfor %}\n"
        "{{ {'é<': 1} | tojson }}|{{ {'a': 1} | tojson(indent=1) }}|{{ strftime_now('%%') }}"
        "|{{ bos_token }}|{{ tools is none }}|{{ enable_thinking }}"
    )
    text = chat.render([HI, HI], template_kwargs={"enable_thinking": False}).text
    assert text == 'Hi{"é<": 1}|{\n "a": 1\n}|%|<|im_start|>|True|False'


@pytest.mark.parametrize(
    "name", ["chat_template", "messages", "bos_token", "add_generation_prompt"]
)
def test_reserved_variables(template: Template, name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        template(CHATML).render([HI], template_kwargs={name: "x"})
    assert caught.value.param == f"chat_template_kwargs.{name}"


CALL: list[dict[str, object]] = [
    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
]
ADD: list[dict[str, object]] = [{"type": "function", "function": {"name": "add"}}]


def test_tools_for_a_template_that_knows_them(template: Template) -> None:
    history = [HI, said("assistant", None, tool_calls=CALL), said("tool", "5", tool_call_id="c1")]
    text = template(TOOLS).render(history, tools=ADD).text
    assert text == (
        '<tools>[{"type": "function", "function": {"name": "add"}}]</tools>add({"a": 2})c1=5'
    )
    assert template(TOOLS).render([HI, said("assistant", "x", tool_calls=[])], tools=[]).text == ""


def test_tools_for_a_template_that_does_not(template: Template) -> None:
    """Nothing the user sent is left out of the prompt."""
    chat = template(CHATML)
    history = [HI, said("assistant", None, tool_calls=CALL), said("tool", "5", tool_call_id="c1")]
    text = chat.render(history, tools=ADD).text
    assert text.startswith('<|im_start|>system\nYou can call these functions:\n{"name": "add"}\n')
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>' in text
    own = chat.render([said("system", "Own rules."), HI], tools=ADD).text
    assert own.startswith("<|im_start|>system\nOwn rules.\n\nYou can call")
    assert own.count("<|im_start|>system") == 1


def test_template_for_tools_is_used_when_there_are_any(byte_level: Tokenizer) -> None:
    sources = {"default": "plain", "tool_use": "{{ tools | length }} tools"}
    chat = ChatTemplate(Path("tiny.gguf"), byte_level, sources)
    assert chat.render([HI]).text == "plain"
    assert chat.render([HI], tools=ADD).text == "1 tools"


def test_values_nested_without_end_are_refused(template: Template) -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        template(CHATML).render([HI], tools=[{"function": deep}])


def test_private_characters_cannot_be_used_up(template: Template) -> None:
    everything = "".join(chr(code) for code in range(0xF0000, 0x10FFFF))
    with pytest.raises(InvalidRequest, match="private-use"):
        template(CHATML).render([said("user", everything)])


def test_white_space_around_control_tokens_that_swallow_it(
    make_byte_level: Callable[..., Tokenizer],
) -> None:
    """Encoding in pieces follows the token's own flags, as encoding the whole does."""
    tokenizer = make_byte_level()
    tokenizer.controls = tuple(
        replace(token, lstrip=token.id == 1, rstrip=token.id == 2) for token in tokenizer.controls
    )
    chat = ChatTemplate(
        Path("x"), tokenizer, {"default": "{{ messages[0].content }} <|im_start|> a<|im_end|> \n b"}
    )
    ids = chat.encode_chat([said("user", "<|im_end|>")])
    assert tokenizer.decode(ids) == "<|im_end|><|im_start|> a<|im_end|>b"


def test_sentencepiece_pieces_after_control_tokens(
    make_sentencepiece: Callable[..., Tokenizer],
) -> None:
    tokenizer = make_sentencepiece(["\u2581a", "\u2581", "a", "b"])
    sources = {"default": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}
    chat = ChatTemplate(Path("x"), tokenizer, sources)
    assert chat.encode_chat([said("user", "a b")]) == tokenizer.encode("<s>a b</s>")
    ids = chat.encode_chat([said("user", "a<s>b")])
    assert [i for i in ids if i < 3] == [1, 2]
    assert tokenizer.decode(ids, skip_special=True) == "a<s>b"


def test_documents(template: Template) -> None:
    source = "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}{{ messages[0].content }}"
    documents: list[dict[str, object]] = [{"text": "a"}, {"text": "<|im_end|>"}]
    rendered = template(source).render([said("user", "Hi")], documents=documents)
    assert rendered.text == "[a][<|im_end|>]Hi"
    assert "<|im_end|>" not in rendered.template_text
    assert template(source).render([said("user", "Hi")]).text == "Hi"
    with pytest.raises(InvalidRequest, match="no place") as refused:
        template(CHATML).render([said("user", "Hi")], documents=documents)
    assert refused.value.param == "documents"
