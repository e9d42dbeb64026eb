"""Names, orders and defaults that programs written for SGLang use."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import phloem as sglang
from phloem.constrained.spec import Regex
from phloem.lang import ir
from phloem.lang.backend.base import TextPrompt
from phloem.lang.choices import ChoicesMethod
from phloem.lang.options import GEN_ORDER, SCALAR_ORDER
from phloem.lang.sampling import Sampling
from phloem.lang.state import State

pytestmark = pytest.mark.timeout(30)


def run(body: Any, backend: sglang.MockBackend, **options: Any) -> State:
    return sglang.function(body).run(backend=backend, **options)


def test_order_of_gen() -> None:
    assert " ".join(GEN_ORDER) == (
        "max_tokens min_tokens n stop stop_token_ids stop_regex temperature top_p top_k min_p "
        "frequency_penalty presence_penalty ignore_eos return_logprob logprob_start_len "
        "top_logprobs_num return_text_in_logprobs dtype choices choices_method regex json_schema"
    )
    made = sglang.gen(
        "x", 9, 2, 1, ["."], [7], "[0-9]+x", 0.5, 0.9, 40, 0.1, 0.2, 0.3, True, True, -1, 2, True
    )
    assert made == ir.Gen(
        "x",
        Sampling(
            max_tokens=9,
            min_tokens=2,
            n=1,
            stop=(".",),
            stop_token_ids=(7,),
            stop_regex=("[0-9]+x",),
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.1,
            frequency_penalty=0.2,
            presence_penalty=0.3,
            ignore_eos=True,
            logprobs=2,
        ),
    )
    nothing = [None] * len(GEN_ORDER)
    assert sglang.gen("x", *nothing) == ir.Gen("x", Sampling())
    with pytest.raises(TypeError, match="up to 23 positional arguments, not 24"):
        sglang.gen("x", *nothing, None)
    with pytest.raises(TypeError, match="two values for 'max_tokens'"):
        sglang.gen("x", 3, max_tokens=4)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "function", [sglang.gen_int, sglang.gen_float, sglang.gen_bool, sglang.gen_string]
)
def test_order_of_scalars(function: Any) -> None:
    assert (*GEN_ORDER[:1], *GEN_ORDER[2:17]) == SCALAR_ORDER
    made = function("x", 9, 1, "\n", None, None, 0.0)
    assert made.sampling == Sampling(max_tokens=9, n=1, stop=("\n",), temperature=0.0)
    with pytest.raises(TypeError, match=function.__name__):
        function("x", *[None] * 17)


def test_signature_of_select() -> None:
    assert list(inspect.signature(sglang.select).parameters) == [
        "name",
        "choices",
        "temperature",
        "choices_method",
    ]
    made = sglang.select("x", ["a", "b"], 0.0, sglang.greedy_token_selection)
    assert made == ir.Select("x", ("a", "b"), ChoicesMethod.GREEDY_TOKEN_SELECTION)
    assert sglang.gen("x", choices=["a", "b"], temperature=0.0, return_logprob=True) == (
        sglang.select("x", ["a", "b"], choices_method=sglang.token_length_normalized)
    )


def test_a_choice_may_be_there_twice() -> None:
    def body(s: State) -> None:
        s += "Q" + sglang.select("x", ["a", "b", "a"])

    backend = sglang.MockBackend(scores={"a": -2.0, "b": -1.0})
    state = run(body, backend)
    assert state["x"] == "b"
    assert backend.scored == [(TextPrompt("Q"), ("a", "b"))]
    assert state.get_meta_info("x")["normalized_prompt_logprobs"] == [-2.0, -1.0, -2.0]
    assert state.get_meta_info("x")["input_token_logprobs"][1] == [(-1.0, None, "b")]


@pytest.mark.parametrize(
    ("dtype", "matches", "differs", "stop"),
    [
        (int, ["7", "-12", "3\n"], ["", "x", "1.5", "3\n\n"], (".", " ", "\n")),
        (float, ["7", "-1.5", ".5", "2. "], ["", ".", "1.5.2"], (".", " ", "\n")),
        (bool, ["True", "False"], ["true", ""], (".",)),
        (str, ['"a"', '"a\\"b"', '""'], ["a", '"a', '"a"b"', '"\n"'], (".",)),
    ],
)
def test_dtypes_are_as_python_writes_them(
    dtype: type, matches: list[str], differs: list[str], stop: tuple[str, ...]
) -> None:
    import re

    node = sglang.gen("x", dtype=dtype, stop=".")
    assert isinstance(node.constraint, Regex)
    assert node.sampling.stop == stop
    assert node.decode is None
    for text in matches:
        assert re.fullmatch(node.constraint.pattern, text)
    for text in differs:
        assert not re.fullmatch(node.constraint.pattern, text)


@pytest.mark.parametrize("function", [sglang.image, sglang.video])
def test_what_models_cannot_see_is_refused_by_name(function: Any) -> None:
    with pytest.raises(sglang.UsageError, match=function.__name__):
        function("picture.png")
    with pytest.raises(sglang.UsageError, match=function.__name__):
        function("picture.png", num_frames=3)


def test_roles_in_every_way() -> None:
    def body(s: State) -> None:
        s += sglang.system("Be brief.")
        s += sglang.user_begin() + "Q" + sglang.user_end()
        s += sglang.assistant_begin()
        s += sglang.gen("a")
        forks = s.fork(1)
        forks += "!"
        forks.join("concate_and_append")
        s += sglang.assistant_end()
        s.user()
        with s.user():
            s.user("in")  # of the same role: a part of it
            s += sglang.user("side")
        s += sglang.assistant()

    state = run(body, sglang.MockBackend({"a": "A"}))
    assert [(m["role"], m["content"]) for m in state.messages()] == [
        ("system", "Be brief."),
        ("user", "Q"),
        ("assistant", "A!"),
        ("user", "inside"),
        ("assistant", ""),
    ]


@pytest.mark.parametrize(
    "node", [sglang.user_end(), sglang.user_begin() + sglang.system_end()], ids=["none", "other"]
)
def test_a_message_ends_where_one_is_open(node: ir.Node) -> None:
    def body(s: State) -> None:
        s += node

    with pytest.raises(sglang.UsageError, match="message is open"):
        run(body, sglang.MockBackend())


def test_state() -> None:
    def body(s: State, x: str) -> str:
        s += "a"
        with s.var_scope("outer"):
            s += "b" + sglang.gen("x")
            with s.var_scope("inner"):
                s += "c"
        assert s.get_var("x") == "1"
        s.set_var("own", [1])
        with s.copy() as copy:
            copy += "d" + sglang.gen("y")
        return str(s["outer"] + s["inner"])

    state = run(body, sglang.MockBackend({"x": "1", "y": "2"}), x="an argument")
    assert (state.returned, state.ret_value) == ("b1cc", "b1cc")
    assert (state["y"], state["own"], state.text()) == (["2"], [1], "ab1c")
    state["late"] = 3
    assert state["late"] == 3
    with pytest.raises(sglang.UsageError, match="only a copy"), state:
        pass


def test_a_scope_that_is_left_by_an_error_binds_nothing() -> None:
    def body(s: State) -> None:
        try:
            with s.var_scope("x"):
                s += "a"
                raise LookupError
        except LookupError:
            assert "x" not in s
            s["y"] = 1

    assert "y" in run(body, sglang.MockBackend())


async def test_text_on_an_event_loop() -> None:
    def body(s: State) -> None:
        s += "a" + sglang.gen("x")

    state = run(body, sglang.MockBackend({"x": "1"}))
    assert [piece async for piece in state.text_async_iter()] == ["a", "1"]
    assert [piece async for piece in state.text_async_iter("x")] == ["1"]
    pairs = [pair async for pair in state.text_async_iter("x", return_meta_data=True)]
    assert pairs == [("1", {"finish_reason": None}), ("", state.get_meta_info("x"))]
    assert pairs[1][1]["finish_reason"] == {"type": "stop", "matched": None}


def test_options_of_a_run() -> None:
    def body(s: State) -> None:
        s += "a" + sglang.gen("x")

    backend = sglang.MockBackend({"x": "1"})
    run(
        body,
        backend,
        max_new_tokens=9,
        n=1,
        stop=["."],
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        ignore_eos=False,
        return_logprob=True,
        logprob_start_len=None,
        top_logprobs_num=1,
        return_text_in_logprobs=True,
        stop_regex=None,
        use_thread=True,
        stream=False,
    )
    assert backend.calls[0].sampling == Sampling(
        max_tokens=9,
        n=1,
        stop=(".",),
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        ignore_eos=False,
        logprobs=1,
    )
    with pytest.raises(TypeError, match="max_new_tokens and max_tokens"):
        run(body, backend, max_new_tokens=9, max_tokens=9)
    with pytest.raises(ValueError, match="logprob_start_len=0"):
        run(body, backend, logprob_start_len=0)


def test_without_a_thread_each_call_is_waited_for() -> None:
    def body(s: State) -> int:
        fork = s.copy()
        fork += "a" + sglang.gen("x")
        seen = len(backend.calls)
        s += "b" + sglang.gen("x")
        return seen

    backend = sglang.MockBackend({"x": "1"}, latency_s=0.02)
    assert run(body, backend, use_thread=False).returned == 1


def test_the_decorator_in_every_way() -> None:
    @sglang.function()
    def a(s: State, x: str) -> None:
        s += x

    @sglang.function(num_api_spec_tokens=None)
    def b(s: State, x: str) -> None:
        s += x

    backend = sglang.MockBackend()
    assert [f.run("t", backend=backend).text() for f in (a, b)] == ["t", "t"]
    with pytest.raises(ValueError, match="num_api_spec_tokens"):
        sglang.function(num_api_spec_tokens=64)  # type: ignore[call-overload]


def test_a_program_called_without_a_state_runs_on_the_backend_around() -> None:
    @sglang.function
    def inner(s: State, x: str) -> None:
        s += x + sglang.gen("y")

    @sglang.function
    def outer(s: State) -> None:
        s += "a" + inner(x="b")["y"] + inner("c").text()

    backend = sglang.MockBackend({"y": "1"})
    assert outer.run(backend=backend).text() == "a1c1"
    with pytest.raises(sglang.UsageError, match="no model"):
        inner(x="b")


def test_batches() -> None:
    @sglang.function
    def ask(s: State, a: str, b: str = "!") -> None:
        s += a + b + sglang.gen("x")

    backend = sglang.MockBackend({"x": "1"})
    options: Any = {"backend": backend, "progress_bar": False, "max_new_tokens": 3}
    items: list[Any] = [{"a": "1"}, ("2",), ["3", "?"]]
    states = ask.run_batch(items, num_threads="auto", **options)
    assert [state.text() for state in states] == ["1!1", "2!1", "3?1"]
    assert {call.sampling.max_tokens for call in backend.calls} == {3}
    assert ask.run_batch([], **options) == []
    generator = ask.run_batch(items, num_threads=2, generator_style=True, **options)
    assert next(generator).text() == "1!1"
    assert len(list(generator)) == 2
    (bad,) = ask.run_batch(["text"], **options)
    assert isinstance(bad.error(), TypeError)
    with pytest.raises(TypeError, match="num_threads and concurrency"):
        ask.run_batch(items, num_threads=2, concurrency=2, **options)


def test_a_running_program_reads_like_a_state() -> None:
    @sglang.function
    def chat(s: State) -> str:
        s += sglang.user("Q") + sglang.assistant(sglang.gen("x"))
        return "r"

    stream = chat.run(backend=sglang.MockBackend({"x": "1"}), stream=True)
    stream.sync()
    assert "x" in stream
    assert stream.get_var("x") == "1"
    stream.set_var("y", 2)
    assert (stream["y"], stream.ret_value, stream.error()) == (2, "r", None)
    assert stream.text() == "user: Q\nassistant: 1"
    assert stream.messages()[1] == {"role": "assistant", "content": "1"}
    assert stream.get_meta_info("x")["finish_reason"]["type"] == "stop"
    assert stream.meta("x").usage.completion_tokens == 1
    failing = chat.run(backend=sglang.MockBackend(), stream=True)
    assert isinstance(failing.error(), sglang.GenerationError)


def test_backends_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("ANTHROPIC_BASE_URL", raising=False)
    assert sglang.OpenAI("gpt-4o").base_url == "https://api.openai.com/v1"
    assert "example" in sglang.OpenAI("m", base_url="https://example.com/v1").base_url
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "https://example.com")
    assert sglang.Anthropic("claude").base_url == "https://example.com"
    mock = sglang.MockBackend()
    assert sglang.flush_cache(mock) is False
    with pytest.raises(sglang.UsageError, match="tells nothing"):
        sglang.get_server_info(mock)
    with pytest.raises(ValueError, match="chat_template_name"):
        sglang.RuntimeEndpoint("http://127.0.0.1:9", chat_template_name="chatml")
    with pytest.raises(ValueError, match="verify"):
        sglang.RuntimeEndpoint("http://127.0.0.1:9", verify=False)
