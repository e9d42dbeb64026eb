"""What every backend of the DSL must do alike: scripted, in process, and over HTTP: to a server
written for this suite that has only an older Phloem's routes ("older-server"), to the routes of
Phloem itself, and to those by every dialect of OpenAI's API and by Anthropic's.

What a backend cannot do it refuses before anything is sent: `LACKS` says what, and every test holds
the backends to that, too.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import aclosing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import phloem
from phloem.constrained.spec import Choice, Ebnf, JsonSchema, Regex
from phloem.lang.backend.base import (
    Backend,
    Call,
    ChatPrompt,
    Delta,
    Message,
    Prompt,
    TextPrompt,
)
from phloem.lang.backend.http import HttpBackend
from phloem.lang.backend.selecting import select
from phloem.lang.choices import ChoicesMethod
from phloem.lang.sampling import Sampling

pytestmark = pytest.mark.timeout(30)

LACKS: dict[str, set[str]] = {
    "openai-openai": {"partial", "regex", "choice", "schema of text", "score of chat", "min_p"},
    "openai-vllm": {"stop_regex"},
    "openai-vllm-guided": {"stop_regex"},
    "openai-llama-server": {"regex", "score", "score of chat", "stop_regex", "min_tokens"},
    "anthropic": {
        *("text", "regex", "choice", "score", "score of chat", "logprobs", "seed", "min_p"),
        *("min_tokens", "stop_regex"),
    },
}
LACKS["openai-openai"] |= {"min_tokens", "stop_regex"}

USER = (Message("user", "q"),)


class Subject:
    """The backend under test, and what is to be expected of it."""

    def __init__(self, kind: str, backend: Backend, model: Any) -> None:
        self.kind = kind
        self.backend = backend
        self.model = model

    def lacks(self, what: str) -> bool:
        return what in LACKS.get(self.kind, ())

    def prompt(self, text: str) -> Prompt:
        """A prompt that ends in `text`: plain text, or where there is none, a chat."""
        return ChatPrompt(USER, text) if self.lacks("text") else TextPrompt(text)

    def call(self, text: str | Prompt, *, stream: bool = False, **options: Any) -> Call:
        prompt = self.prompt(text) if isinstance(text, str) else text
        constraint = options.pop("constraint", None)
        options.setdefault("max_tokens", 64)
        return Call(prompt, Sampling(**options), constraint, "x", stream)

    def answer(self, text: str, index: int = 0) -> str:
        """What the model says to the prompt that ends in `text`."""
        rendered = f"user(q)assistant({text}" if self.lacks("text") else text
        return f"{index}:{rendered[-12:]}"

    async def ask(self, call: Call) -> tuple[list[str], list[Delta]]:
        deltas = [delta async for delta in self.backend.generate(call)]
        texts = [""] * call.sampling.samples
        for delta in deltas:
            texts[delta.index] += delta.text
        return texts, deltas

    @contextmanager
    def refused(self, *, when: bool) -> Any:
        """What is done inside is refused, and reaches no server, when `when`."""
        if not when:
            yield
            return
        before = len(self.model.constraints)
        with pytest.raises(phloem.RequestRefused) as caught:
            yield
        assert (caught.value.code, caught.value.status) == ("unsupported", None)
        assert caught.value.param
        assert len(self.model.constraints) == before


@pytest.fixture
def subject(kind: str, backend: Backend, model: Any) -> Subject:
    return Subject(kind, backend, model)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  (the model is not to know that it is watched)
        await asyncio.sleep(0.005)


# ----------------------------------------------------------------------- generating


async def test_info(backend: Backend) -> None:
    assert (await backend.info()).model == "fake"


@pytest.mark.parametrize("stream", [False, True])
async def test_text(subject: Subject, stream: bool) -> None:
    with subject.refused(when=subject.lacks("text")):
        texts, deltas = await subject.ask(subject.call(TextPrompt("Once upon"), stream=stream))
        assert texts == ["0:Once upon"]
        assert [delta.finish for delta in deltas if delta.finish] == ["stop"]
        usage = [delta.usage for delta in deltas if delta.usage]
        assert len(usage) == 1
        assert usage[0].completion_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_gets_a_new_turn_or_continues_the_open_one(
    subject: Subject, stream: bool
) -> None:
    asked = (Message("system", "s"), Message("user", "q"))
    texts, deltas = await subject.ask(subject.call(ChatPrompt(asked), stream=stream))
    assert texts == ["0:q)assistant("]
    usage = [delta.usage for delta in deltas if delta.usage]
    assert len(usage) == 1
    assert usage[0].prompt_tokens > 0
    with subject.refused(when=subject.lacks("partial")):
        texts, _ = await subject.ask(subject.call(ChatPrompt(asked, "So: "), stream=stream))
        assert texts == ["0:sistant(So: "]


async def test_several_answers_and_the_end_of_each(subject: Subject) -> None:
    seeded = not subject.lacks("seed")
    texts, deltas = await subject.ask(subject.call("prompt", n=3, seed=7 if seeded else None))
    assert texts == [subject.answer("prompt", i if seeded else 0) for i in range(3)]
    assert sorted(delta.index for delta in deltas if delta.finish) == [0, 1, 2]
    (usage,) = [delta.usage for delta in deltas if delta.usage]
    assert usage.completion_tokens == sum(map(len, texts)) or subject.kind == "mock"


async def test_stop_and_length(subject: Subject) -> None:
    texts, deltas = await subject.ask(subject.call("ab|cd", stop=("|",)))
    ends = [(delta.finish, delta.matched) for delta in deltas if delta.finish]
    assert (texts, ends) == ([subject.answer("ab|cd").partition("|")[0]], [("stop", "|")])
    texts, deltas = await subject.ask(subject.call("abcd", max_tokens=4))
    ends = [(delta.finish, delta.matched) for delta in deltas if delta.finish]
    assert (texts, ends) == ([subject.answer("abcd")[:4]], [("length", None)])


@pytest.mark.parametrize("prompt", [TextPrompt("ab"), ChatPrompt(USER)])
@pytest.mark.parametrize("top", [0, 1])
async def test_logprobs(subject: Subject, prompt: Prompt, top: int) -> None:
    with subject.refused(when=subject.lacks("logprobs")):
        texts, deltas = await subject.ask(subject.call(prompt, logprobs=top))
        found = [entry for delta in deltas for entry in delta.logprobs]
        for got, char in zip(found, texts[0], strict=True):
            assert (got.token, got.logprob) == (char, subject.model.logprob(ord(char)))
            # completions over HTTP also list the token itself, as OpenAI's do
            allowed = {("#", -2.0), (got.token, got.logprob)}
            assert set(got.top) <= allowed
            asked = subject.kind == "openai-llama-server" and isinstance(prompt, TextPrompt)
            assert ("#", -2.0) in got.top or top == 0 or asked


NAMED: dict[str, Any] = {"min_p": 0.5, "min_tokens": 2, "stop_regex": ("x+",), "seed": 7}
NEUTRAL: dict[str, Any] = {
    "min_p": 0.0,
    "min_tokens": 0,
    "top_k": 0,
    "n": 1,
    "presence_penalty": 0.0,
}


@pytest.mark.parametrize("option", NAMED)
async def test_an_option_that_cannot_be_sent_is_refused(subject: Subject, option: str) -> None:
    call = subject.call("p", **{option: NAMED[option]})
    with subject.refused(when=subject.lacks(option)):
        texts, _ = await subject.ask(call)
        assert texts == [subject.answer("p")]


async def test_an_option_that_asks_for_nothing_is_no_matter(subject: Subject) -> None:
    texts, _ = await subject.ask(subject.call("p", **NEUTRAL))
    assert texts == [subject.answer("p")]


SCHEMA = JsonSchema(schema='{"properties":{"z":{},"a":{}},"type":"object"}')


@pytest.mark.parametrize(
    ("name", "constraint"),
    [
        ("regex", Regex(pattern=r"\{\}")),
        ("schema", SCHEMA),
        ("choice", Choice(choices=("{}", 'a"\\\n'))),
    ],
)
async def test_constraints_arrive_or_are_refused(
    subject: Subject, name: str, constraint: Any
) -> None:
    prompts: dict[str, Prompt] = {
        "text": TextPrompt("JSON"),
        "chat": ChatPrompt((Message("user", "JSON"),)),
    }
    for sort, prompt in prompts.items():
        missing = subject.lacks(name) or subject.lacks(f"{name} of {sort}") or subject.lacks(sort)
        with subject.refused(when=missing):
            call = subject.call(prompt, constraint=constraint)
            texts, _ = await subject.ask(call)
            assert texts == ["{}"]
            arrived = subject.model.constraints[-1]
            if isinstance(arrived, JsonSchema):
                assert list(json.loads(arrived.schema)["properties"]) == ["z", "a"]
            elif isinstance(arrived, Ebnf):
                assert arrived.grammar == r'root ::= "{}" | "a\x22\x5C\x0A"'
            else:
                assert arrived == constraint


async def test_a_refusal_says_what_and_why(subject: Subject) -> None:
    with pytest.raises(phloem.RequestRefused, match="no such thing") as caught:
        await subject.ask(subject.call("REFUSE"))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "regex", "bad")


async def test_a_busy_model_is_asked_again(subject: Subject, model: Any) -> None:
    model.busy = 2
    texts, _ = await subject.ask(subject.call("p"))
    assert texts == [subject.answer("p")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_leaving_early_stops_the_work(
    subject: Subject, model: Any, stream: bool, n: int
) -> None:
    call = subject.call("HANG", stream=stream, n=n)
    task = asyncio.create_task(subject.ask(call))
    await until(lambda: model.hanging > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: model.left == model.hanging)


async def test_closing_an_iterator_half_way(subject: Subject) -> None:
    call = subject.call("abcdefgh", stream=True)
    async with aclosing(subject.backend.generate(call)) as deltas:
        async for delta in deltas:
            if delta.text:
                break
    texts, _ = await subject.ask(subject.call("p"))  # and it still works
    assert texts == [subject.answer("p")]


async def test_many_at_once(subject: Subject) -> None:
    calls = [subject.call(f"p{i}") for i in range(100)]
    results = await asyncio.gather(*map(subject.ask, calls))
    assert [texts for texts, _ in results] == [[subject.answer(f"p{i}")] for i in range(100)]


# ----------------------------------------------------------------------- choosing


PROMPTS = (TextPrompt("Is it"), ChatPrompt(USER, "It is"), ChatPrompt(USER))


def unscored(subject: Subject, prompt: Prompt) -> bool:
    return subject.lacks("score" if isinstance(prompt, TextPrompt) else "score of chat")


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_scores_belong_to_the_choices(subject: Subject, prompt: Prompt) -> None:
    with subject.refused(when=unscored(subject, prompt)):
        scores = await subject.backend.score(prompt, [" yes", " no"])
        assert ["".join(score.tokens) for score in scores] == [" yes", " no"]
        assert all(len(score.logprobs) == len(score.tokens) for score in scores)
        if subject.kind != "mock":
            values = [tuple(map(subject.model.logprob, map(ord, text))) for text in (" yes", " no")]
            assert [score.logprobs for score in scores] == values


async def test_the_choices_begin_where_all_of_them_are_apart(subject: Subject) -> None:
    prompt = subject.prompt("Is it?")
    if subject.kind == "mock":
        pytest.skip("a mock has no tokens")
    with subject.refused(when=unscored(subject, prompt)):
        # "?Y" is one token: both choices are judged from before the question mark
        merged, apart = await subject.backend.score(prompt, ["Y", "N"])
        assert (merged.tokens, apart.tokens) == (("?Y",), ("?", "N"))
        assert merged.logprobs == (subject.model.logprob(subject.model.merged),)


async def test_scoring_without_a_prompt_is_refused(subject: Subject) -> None:
    if subject.kind == "mock" or subject.lacks("score"):
        pytest.skip("it has no tokens, or no scores")
    for choices in (["yes"], ["yes", "no"]):
        with pytest.raises(ValueError, match="first token"):
            await subject.backend.score(TextPrompt(""), choices)


@pytest.mark.parametrize("method", ChoicesMethod)
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_every_method_decides_alike(
    subject: Subject, method: ChoicesMethod, prompt: Prompt
) -> None:
    choices = [" yes", " no", " x"]
    with subject.refused(when=unscored(subject, prompt)):
        selected = await select(subject.backend, prompt, choices, method)
        scores = await subject.backend.score(prompt, choices)
        assert selected.scores == tuple(scores)
        assert len(selected.values) == 3
        if method is ChoicesMethod.UNCONDITIONAL_LIKELIHOOD_NORMALIZED:
            # this model's logprobs do not depend on the prompt
            assert selected.values == pytest.approx((0.0, 0.0, 0.0))
            assert selected.index == 0
        elif method is ChoicesMethod.TOKEN_LENGTH_NORMALIZED:
            means = [score.mean for score in scores]
            assert selected.values == pytest.approx(means)
            assert selected.index == means.index(max(means))


async def test_one_choice_and_many(subject: Subject) -> None:
    if subject.kind == "mock" or subject.lacks("score"):
        pytest.skip("it has no tokens, or no scores")
    (only,) = await subject.backend.score(TextPrompt("Is it"), [" yes"])
    assert "".join(only.tokens) == " yes"
    many = [f" {i}" for i in range(1000)]
    scores = await subject.backend.score(TextPrompt("Is it"), many)
    assert ["".join(score.tokens) for score in scores] == many


@pytest.mark.parametrize("kind", ["openai-llama-server", "openai-vllm"])
async def test_a_choice_may_be_generated_where_the_user_says_so(
    kind: str, model: Any, open_backend: Any
) -> None:
    async with open_backend(kind, model, select_by_generation=True) as backend:
        prompt, choices = TextPrompt("JSON"), ["no", "{}"]
        method = ChoicesMethod.GREEDY_TOKEN_SELECTION
        selected = await select(backend, prompt, choices, method)
        assert (selected.index, selected.scores) == (1, ())
        assert model.constraints[-1] is not None
        method = ChoicesMethod.UNCONDITIONAL_LIKELIHOOD_NORMALIZED
        with pytest.raises(phloem.RequestRefused, match="needs scores"):
            await select(backend, prompt, choices, method)


@pytest.mark.parametrize("kind", ["openai-openai", "anthropic"])
async def test_a_choice_may_be_generated_as_json_where_nothing_else_is_enforced(
    kind: str, model: Any, open_backend: Any
) -> None:
    said = [
        '{"choice": "no"}',
        '{ "choice" : "y\\u00e9s" }',
        '{"choice": "n',
    ]
    asked = []

    async def answer(prompt: str, index: int, most: int, stop: list[str]) -> Any:
        asked.append((prompt, most))
        return said.pop(0), "stop" if said else "length", None

    model.answer = answer
    choices, method = ["yés", "no"], ChoicesMethod.TOKEN_LENGTH_NORMALIZED
    async with open_backend(kind, model, select_by_generation=True) as backend:
        for index in (1, 0):
            selected = await select(backend, ChatPrompt(USER), choices, method)
            assert (selected.index, selected.scores, selected.values) == (index, (), ())
            assert selected.usage.prompt_tokens > 0
        schema = json.loads(model.constraints[-1].schema)
        assert schema["properties"]["choice"]["enum"] == choices
        assert schema["required"] == ["choice"] and not schema["additionalProperties"]
        prompt, most = asked[0]
        assert prompt == "user(q)assistant(", "nothing is added to the prompt"
        assert most >= len(json.dumps({"choice": "yés"}))
        with pytest.raises(phloem.BackendError, match="which is no choice"):
            await select(backend, ChatPrompt(USER), choices, method)
        sent = len(asked)
        for wrong, reason in (
            (TextPrompt("Is it"), "put all text into roles"),
            (ChatPrompt(USER, "It is"), "a message of its own"),
        ):
            with pytest.raises(phloem.RequestRefused, match=reason) as caught:
                await select(backend, wrong, choices, method)
            assert caught.value.code == "unsupported"
        unconditional = ChoicesMethod.UNCONDITIONAL_LIKELIHOOD_NORMALIZED
        with pytest.raises(phloem.RequestRefused, match="needs scores"):
            await select(backend, ChatPrompt(USER), choices, unconditional)
        assert len(asked) == sent


@pytest.mark.parametrize("kind", ["openai-openai", "openai-llama-server", "anthropic"])
async def test_where_nothing_is_scored_the_error_says_what_to_do(
    kind: str, model: Any, open_backend: Any
) -> None:
    async with open_backend(kind, model) as backend:
        with pytest.raises(phloem.RequestRefused, match=r"Backend\(…, select_by_generation=True\)"):
            await select(
                backend, ChatPrompt(USER), ["a", "b"], ChoicesMethod.GREEDY_TOKEN_SELECTION
            )


async def test_a_model_that_stays_busy_is_unavailable(subject: Subject, model: Any) -> None:
    if subject.kind == "mock":
        pytest.skip("a mock asks itself for ever")
    model.busy = 10_000
    with pytest.raises(phloem.BackendUnavailable, match="queue is full"):
        await subject.ask(subject.call("p"))


# ----------------------------------------------------------------------- programs


@phloem.function
def judge(s: phloem.State, topic: str) -> None:
    s += phloem.user(topic)
    forks = s.fork(3)
    forks += phloem.assistant("A" + phloem.gen("idea", max_tokens=100))
    forks.join()
    s += phloem.assistant(" ".join(s["idea"]) + phloem.select("best", ["yes", "no"]))


@pytest.mark.parametrize("kind", ["older-server", "server", "local-other-loop", "openai-vllm"])
async def test_a_program_end_to_end(kind: str, model: Any, open_backend: Any) -> None:
    async with open_backend(kind, model) as backend:
        states = await asyncio.gather(
            *(judge.arun(topic=f"t{i}", backend=backend) for i in range(5))
        )
        for state in states:
            assert state["idea"] == ["0:)assistant(A"] * 3
            assert state["best"] in ("yes", "no")
            assert state.error() is None
        if isinstance(backend, HttpBackend):
            await asyncio.to_thread(backend.close)


async def test_what_is_refused_is_refused_at_its_variable(model: Any, open_backend: Any) -> None:
    async with open_backend("anthropic", model) as backend:
        state = await judge.arun(topic="t", backend=backend)
        assert state["idea"] == ["0:)assistant(A"] * 3
        with pytest.raises(phloem.GenerationError, match=r"'best' failed.*no logprobs") as caught:
            state["best"]
        assert isinstance(caught.value.cause, phloem.RequestRefused)


async def test_an_engine_is_a_backend(engine: Any) -> None:
    state = await judge.arun(topic="t", backend=engine)
    assert state["best"] in ("yes", "no")
    with pytest.raises(phloem.UsageError, match="await arun"):
        judge.run(topic="t", backend=engine)
    with pytest.raises(phloem.UsageError, match="BlockingEngine"):
        await asyncio.to_thread(lambda: judge.run(topic="t", backend=engine))


async def test_an_engine_on_a_loop_of_its_own(engine: Any) -> None:
    """The shape of `phloem.BlockingEngine`; a run after its end is an error, not a wait."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    handle = SimpleNamespace(engine=engine, loop=loop)
    assert judge.run(topic="t", backend=handle)["best"] in ("yes", "no")
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    with pytest.raises(phloem.GenerationError, match="engine is closed"):
        judge.run(topic="t", backend=handle)


@phloem.function
def chat(s: phloem.State, topic: str) -> str:
    """As long as it runs, nobody knows that no third call follows."""
    s += phloem.user(topic)
    s += phloem.assistant(phloem.gen("first", max_tokens=100))
    s += phloem.user("Again: " + s["first"])
    s += phloem.assistant(phloem.gen("second", max_tokens=100))
    answer: str = s["second"]
    return answer


async def test_a_server_that_knows_of_programs_hears_of_their_end(
    kind: str, model: Any, open_backend: Any
) -> None:
    knows = kind in ("local", "local-other-loop", "server")
    async with open_backend(kind, model) as backend:
        for topic in ("one", "two"):
            assert (await chat.arun(topic, backend=backend)).error() is None
        if knows:
            await until(lambda: len(set(model.ended)) == 2)
    assert len(model.ended) == (2 if knows else 0)


@phloem.function
def straight(s: phloem.State, topic: str) -> object:
    s += phloem.user(topic)
    forks = s.fork(3)
    forks += phloem.assistant("A" + phloem.gen("idea", max_tokens=100, stop="?"))
    forks.join()
    s += phloem.assistant(s["idea"][0] + "," + s["idea"][1] + "," + s["idea"][2])
    s += phloem.user("Is it good?")
    s += phloem.assistant("It is" + phloem.select("best", [" yes", " no"]) + ".")
    s += phloem.user("And JSON")
    s += phloem.assistant(phloem.gen("two", n=2, max_tokens=100))
    return [s["best"], s["two"][1]]


async def test_a_program_is_sent_whole_or_refused(kind: str, model: Any, open_backend: Any) -> None:
    async with open_backend(kind, model) as backend:
        if kind != "server":
            with pytest.raises(phloem.UsageError, match="Phloem server"):
                await straight.arun_remote(topic="t", backend=backend)
            return
        whole = await straight.arun_remote(topic="t", backend=backend)
        state = await straight.arun(topic="t", backend=backend)
        assert state.error() is None and whole.error() is None
        for name in ("idea", "best", "two"):
            assert (name, whole[name]) == (name, state[name])
        for name in ("best", "two"):
            assert whole.meta(name) == state.meta(name)
        assert (whole.returned, whole.messages()) == (state.returned, state.messages())
        calls = [
            [(span.kind, span.name, span.branch, span.prompt_tokens) for span in one.trace.spans]
            for one in (whole, state)
        ]
        assert calls[0] == calls[1]
