"""What SGLang's tests of its language have programs do, done by programs of ours: with the import
changed and nothing else, on a scripted model and on a server whose model is too small for answers
to be looked at (their kind is)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import phloem as sglang

SERVER = pytest.param("server", marks=[pytest.mark.e2e, pytest.mark.model])

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["mock", SERVER])
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A function that makes a backend of a script the default one: scripted, or the server, which
    needs none."""
    server = request.getfixturevalue("server") if request.param == "server" else None

    def use(script: dict[str, Any], scores: dict[str, float] | None = None) -> bool:
        mock = sglang.MockBackend(script, scores=scores, piece_chars=3)
        endpoint = mock if server is None else sglang.RuntimeEndpoint(server.url)
        sglang.set_default_backend(endpoint)
        return server is None

    yield use
    sglang.set_default_backend(None)


def test_few_shots(backend: Any) -> None:
    @sglang.function
    def ask(s, question):  # type: ignore[no-untyped-def]
        s += "These are questions, with their answers.\n\n"
        s += "Q: Of which country is Oslo the capital?\nA: Norway\n"
        s += "Q: " + question + "\n"
        s += "A:" + sglang.gen("answer", stop="\n", temperature=0)

    backend({"answer": " Peru"})
    state = ask.run(question="Of which country is Lima the capital?", max_new_tokens=8)
    assert isinstance(state["answer"], str)
    assert "\n" not in state["answer"]
    assert state.text().endswith("A:" + state["answer"])
    states = ask.run_batch(
        [
            {"question": "Of which country is Lima the capital?"},
            {"question": "Of which country is Rome the capital?"},
        ],
        temperature=0,
        max_new_tokens=8,
        num_threads="auto",
        progress_bar=False,
    )
    assert states[0]["answer"] == state["answer"]
    assert [state.error() for state in states] == [None, None]


def test_a_chat_of_two_turns(backend: Any) -> None:
    @sglang.function
    def chat(s, first, second):  # type: ignore[no-untyped-def]
        s += sglang.system("You are helpful.")
        s += sglang.user(first)
        s += sglang.assistant(sglang.gen("one"))
        with s.user():
            s += second
        s += sglang.assistant_begin()
        s += sglang.gen("two", temperature=0.0, max_tokens=12)
        s += sglang.assistant_end()

    backend({"one": "Oslo is cold.", "two": "And dark."})
    state = chat.run("Is Oslo cold?", "And dark?", temperature=0.7, max_new_tokens=12)
    roles = [message["role"] for message in state.messages()]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in state.messages()[2::2]] == [state["one"], state["two"]]


def test_select(backend: Any) -> None:
    @sglang.function
    def judge(s, statement):  # type: ignore[no-untyped-def]
        s += "Is this so? " + statement + "\n"
        s += "It is " + sglang.select("answer", ["true", "false"]) + ".\n"
        s += "Sure: " + sglang.gen("sure", choices=["yes", "no"])

    scripted = backend({}, {"true": -0.5, "false": -2.0, "yes": -3.0, "no": -1.0})
    state = judge.run(statement="Snow is white.")
    assert state["answer"] in ("true", "false")
    assert state["sure"] in ("yes", "no")
    if scripted:
        assert (state["answer"], state["sure"]) == ("true", "no")
    scores = state.get_meta_info("answer")["normalized_prompt_logprobs"]
    assert len(scores) == 2
    assert max(scores) == scores[["true", "false"].index(state["answer"])]


@pytest.mark.parametrize(
    "method",
    [
        sglang.token_length_normalized,
        sglang.greedy_token_selection,
        sglang.unconditional_likelihood_normalized,
    ],
)
def test_every_method_of_choosing(backend: Any, method: str) -> None:
    @sglang.function
    def colour(s):  # type: ignore[no-untyped-def]
        s += "Grass is" + sglang.select(
            "colour", choices=[" green", " a colour", " red"], choices_method=method
        )

    backend({})
    assert colour.run()["colour"] in (" green", " a colour", " red")


def test_numbers(backend: Any) -> None:
    @sglang.function
    def count(s):  # type: ignore[no-untyped-def]
        s += "A week has " + sglang.gen_int("days") + " days.\n"
        s += "A year has " + sglang.gen("months", dtype=int, max_tokens=6) + " months.\n"

    backend({"days": "7", "months": "12"})
    state = count.run(temperature=0.1, max_new_tokens=8)
    for name in ("days", "months"):
        assert isinstance(state[name], str)
        assert isinstance(int(state[name]), int)


def test_json_by_parts(backend: Any) -> None:
    @sglang.function
    def city(s):  # type: ignore[no-untyped-def]
        s += "A city as JSON.\n"
        with s.var_scope("json"):
            s += "{\n"
            s += '  "name": ' + sglang.gen_string("name", max_length=8) + ",\n"
            s += '  "people": ' + sglang.gen_int("people", minimum=0, maximum=10**6) + ",\n"
            s += '  "by_the_sea": ' + sglang.gen_bool("sea") + "\n"
            s += "}"

    backend({"name": '"Oslo"', "people": "700000", "sea": "true"})
    state = city.run(temperature=0, max_new_tokens=32)
    assert json.loads(state["json"]).keys() == {"name", "people", "by_the_sea"}


def test_json_by_regex(backend: Any) -> None:
    whole = r'\{"name": "[a-z]{1,8}", "people": [0-9]{1,7}\}'

    @sglang.function
    def city(s):  # type: ignore[no-untyped-def]
        s += "A city as JSON: " + sglang.gen("json", temperature=0, regex=whole)

    backend({"json": '{"name": "oslo", "people": 700000}'})
    state = city.run(max_new_tokens=64)
    assert re.fullmatch(whole, state["json"])
    assert json.loads(state["json"]).keys() == {"name", "people"}


def test_what_one_variable_says_goes_into_the_next_prompt(backend: Any) -> None:
    @sglang.function
    def expert(s, question):  # type: ignore[no-untyped-def]
        s += "Question: " + question + "\n"
        s += "Who could answer that? " + sglang.gen("expert", stop=[".", "\n"]) + ".\n"
        s += f"What would {s['expert']} say? " + sglang.gen("answer", stop=".") + "."

    backend({"expert": "A sailor", "answer": "Aye"})
    state = expert.run(question="How deep is the sea?", temperature=0.1, max_new_tokens=8)
    assert f"What would {state['expert']} say? {state['answer']}." in state.text()


def test_tools(backend: Any) -> None:
    def calculate(text: str) -> str:
        return str(sum(int(part) for part in re.findall("[0-9]+", text)))

    @sglang.function
    def answer(s, question):  # type: ignore[no-untyped-def]
        s += "To answer the question, I use " + sglang.gen(
            "tool", choices=["a calculator", "a search engine"]
        )
        s += ". " + question + " "
        if s["tool"] == "a calculator":
            s += "I type " + sglang.gen("expression", regex="[0-9]+[+][0-9]+", max_tokens=8)
            s += " = " + calculate(s["expression"])
        else:
            s += "I look for " + sglang.gen("query", max_tokens=8)

    scripted = backend({"expression": "2+2", "query": "sum"}, {"a calculator": -0.1})
    state = answer.run(question="What is 2 and 2?")
    if scripted:
        assert state.text().endswith("I type 2+2 = 4")
    assert ("expression" in state) is (state["tool"] == "a calculator")


def test_steps_that_bind_the_same_names(backend: Any) -> None:
    @sglang.function
    def react(s, question):  # type: ignore[no-untyped-def]
        s += "Question: " + question + "\n"
        for i in range(1, 4):
            s += f"Thought {i}:" + sglang.gen("thought", stop=[".", "\n"], max_tokens=6) + ".\n"
            s += f"Act {i}: " + sglang.select("act", choices=["Search", "Finish"]) + "\n"
            if s["act"] == "Finish":
                s += "Answer:" + sglang.gen("answer", stop="\n", max_tokens=6)
                break
            s += f"Seen {i}: nothing.\n"

    scripted = backend({"thought": ["a", "b", "c"], "answer": "none"}, {"Finish": -9.0})
    state = react.run(question="Who?")
    assert state["act"] in ("Search", "Finish")
    if scripted:
        assert (state["thought"], state.text().count("Act")) == ("c", 3)


def test_parallel_decoding(backend: Any) -> None:
    number = 3

    @sglang.function
    def tips(s, topic):  # type: ignore[no-untyped-def]
        s += f"Here are {number} short tips about {topic}.\n"
        forks = s.fork(number)
        for i in range(number):
            forks[i] += f"Tip {i + 1}:" + sglang.gen("tip", max_tokens=8, stop=["\n"]) + "\n"
        forks.join()
        for i, tip in enumerate(s["tip"]):
            s += f"Tip {i + 1}:" + tip + "\n"
        s += "In short:" + sglang.gen("summary", max_tokens=8)

    backend({"tip": ["a", "b", "c"], "summary": "abc"})
    state = tips.run(topic="sleep", temperature=0.3)
    assert len(state["tip"]) == number
    for i, tip in enumerate(state["tip"]):
        assert f"Tip {i + 1}:{tip}\n" in state.text()


def test_parallel_encoding(backend: Any) -> None:
    facts = ["Ada lives in Oslo.", "Ben lives in Rome.", "Ada likes snow."]

    @sglang.function
    def ask(s, question):  # type: ignore[no-untyped-def]
        s += "These are the facts.\n"
        forks = s.fork(len(facts))
        forks += lambda i: f"{i + 1}. " + facts[i] + "\n"
        forks.join(mode="concate_and_append")
        s += question + "\n" + sglang.gen("answer", max_tokens=8)

    backend({"answer": "Rome"})
    state = ask.run(question="Where does Ben live?", temperature=0)
    assert state.text().startswith(
        "These are the facts.\n1. Ada lives in Oslo.\n2. Ben lives in Rome.\n3. Ada likes snow.\n"
    )


def test_streams(backend: Any) -> None:
    @sglang.function
    def tell(s, question):  # type: ignore[no-untyped-def]
        s += sglang.system("You are helpful.")
        s += sglang.user(question)
        s += sglang.assistant(sglang.gen("answer"))

    backend({"answer": "a long answer"})
    state = tell.run(question="Why?", stream=True, max_new_tokens=12, temperature=0)
    pieces = list(state.text_iter())
    assert len(pieces) > 3
    assert "".join(pieces) == state.text()
    state = tell.run(question="Why?", stream=True, max_new_tokens=12, temperature=0)
    assert "".join(state.text_iter("answer")) == state["answer"]
    assert state.messages()[-1]["content"] == state.get_var("answer")
    assert state.error() is None


async def test_streams_on_an_event_loop(backend: Any) -> None:
    @sglang.function
    def tell(s):  # type: ignore[no-untyped-def]
        s += "Once" + sglang.gen("answer", max_tokens=8)

    backend({"answer": " upon a time"})
    state = tell.run(stream=True)
    seen = [pair async for pair in state.text_async_iter("answer", return_meta_data=True)]
    assert "".join(piece for piece, _ in seen) == state["answer"]
    assert all(meta == {"finish_reason": None} for _, meta in seen[:-1])
    assert seen[-1][1] == state.get_meta_info("answer")
    assert seen[-1][1]["finish_reason"]["type"] in ("stop", "length")
    assert "".join([piece async for piece in state.text_async_iter()]) == state.text()


def test_regex(backend: Any) -> None:
    address = r"((25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?).){3}(25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"

    @sglang.function
    def server(s):  # type: ignore[no-untyped-def]
        s += "The name server's address is " + sglang.gen("address", temperature=0, regex=address)

    backend({"address": "10.0.0.1"})
    assert re.fullmatch(address, server.run(max_new_tokens=32)["address"])


def test_dtypes(backend: Any) -> None:
    @sglang.function
    def facts(s):  # type: ignore[no-untyped-def]
        s += "The full name is " + sglang.gen("text", dtype=str, stop="\n", max_tokens=200) + "\n"
        s += "The year is " + sglang.gen("year", dtype=int, max_tokens=8) + "\n"
        s += "Pi is " + sglang.gen("pi", dtype=float, max_tokens=8) + "\n"
        s += "The sky is blue: " + sglang.gen("blue", dtype=bool, max_tokens=8) + "\n"

    backend({"text": '"x"', "year": "1983", "pi": "3.14", "blue": "True"})
    state = facts.run(temperature=0, ignore_eos=False)
    state["year"] = int(state["year"])
    state["pi"] = float(state["pi"])
    assert state["text"][0] == '"'
    assert isinstance(state["year"], int) and isinstance(state["pi"], float)
    assert state["blue"] in ("True", "False")


def test_the_shortest_answer(backend: Any) -> None:
    @sglang.function
    def convince(s):  # type: ignore[no-untyped-def]
        s += sglang.user("Say something.")
        s += sglang.assistant(sglang.gen("answer", max_tokens=20, min_tokens=15))

    scripted = backend({"answer": "word " * 15})
    state = convince.run(temperature=0)
    assert state.get_meta_info("answer")["completion_tokens"] >= 15
    assert scripted or state["answer"]


def test_programs_inside_programs(backend: Any) -> None:
    @sglang.function
    def expand(s, tip):  # type: ignore[no-untyped-def]
        s += "Say more about this tip: " + tip + "\n" + sglang.gen("more", max_tokens=6)

    @sglang.function
    def suggest(s, topic):  # type: ignore[no-untyped-def]
        s += "A tip about " + topic + ":" + sglang.gen("tip", stop=["\n"], max_tokens=6) + "\n"
        branch = expand(tip=s["tip"])
        s += "More: " + branch["more"] + "\n"

    backend({"tip": " Sleep", "more": "At night."})
    state = suggest.run(topic="health")
    assert state.text().startswith("A tip about health:" + state["tip"] + "\nMore: ")


def test_what_is_bound_and_cached(backend: Any) -> None:
    @sglang.function
    def ask(s, prompt, question):  # type: ignore[no-untyped-def]
        s += prompt
        s += "Q: Of which country is Oslo the capital?\nA: Norway\n"
        s += "Q: " + question + "\nA:" + sglang.gen("answer", stop="\n", max_tokens=6)

    scripted = backend({"answer": " Peru"})
    bound = ask.bind(prompt="These are questions, with their answers.\n\n" * 4)
    graph = bound.trace().last_node.print_graph_dfs()
    assert "{question}" in graph and "{prompt}" not in graph
    if not scripted:
        sglang.flush_cache()
        bound.cache()
        state = bound.run(question="Of which country is Lima the capital?")
        assert state.get_meta_info("answer")["cached_tokens"] > 30
    assert bound.run("Of which country is Lima the capital?").error() is None


# ---------------------------------------------------------------------- programs sent whole


@sglang.function
def report(s: sglang.State, city: str) -> object:
    s += "A note on " + city + ":" + sglang.gen("start", max_tokens=8, stop=".") + ".\n"
    forks = s.fork(3)
    forks += lambda i: f"Fact {i}:" + sglang.gen("fact", max_tokens=8, stop="\n")
    forks.join()
    for fact in s["fact"]:
        s += "- " + fact + "\n"
    s += "It is a" + sglang.select("kind", choices=[" city", " river"])
    with s.var_scope("people"):
        s += " of " + sglang.gen("count", regex="[1-9][0-9]{3,6}", max_tokens=12) + " people."
    s += sglang.gen("data", schema=list[int], max_tokens=40)
    s += sglang.gen("ends", n=2, max_tokens=4)
    return s["kind"], s["ends"][1]


@sglang.function
def talk(s: sglang.State, question: str) -> None:
    s += sglang.system("Be brief.") + sglang.user(question)
    s += sglang.assistant("Well," + sglang.gen("one", max_tokens=8))
    s += sglang.user("So you say: " + s["one"])
    forks = s.fork(2)
    forks += sglang.assistant(sglang.gen("two", max_tokens=6))
    forks.join("append")
    with s.user():
        s += "And now?"
    s += sglang.assistant(sglang.gen("one", max_tokens=6))


@pytest.mark.e2e
@pytest.mark.model
@pytest.mark.parametrize(("program", "argument"), [(report, "Oslo"), (talk, "Is Oslo cold?")])
def test_a_program_sent_whole_is_what_it_is_call_by_call(
    server: Any, program: Any, argument: str
) -> None:
    """Run twice, so that both find the same in the cache."""
    for _ in range(2):
        state = program.run(argument, backend=server.url, temperature=0)
        whole = program.run_remote(argument, backend=server.url, temperature=0)
    assert (state.error(), whole.error()) == (None, None)
    names = ("start", "fact", "kind", "people", "count", "data", "one", "two")
    for name in filter(state.__contains__, names):
        assert (name, whole[name]) == (name, state[name])
        if state.meta(name).scores:
            assert whole.meta(name).values == pytest.approx(state.meta(name).values, abs=0.01)
        assert whole.meta(name).usage == state.meta(name).usage
        assert whole.meta(name).finish_reasons == state.meta(name).finish_reasons
    assert (whole.text(), whole.messages()) == (state.text(), state.messages())
    assert whole.returned == state.returned
    spans, expected = whole.trace.spans, state.trace.spans
    for span, other in zip(spans, expected, strict=True):
        for field in ("id", "branch", "kind", "name", "answers", "prompt_tokens", "preview"):
            assert getattr(span, field) == getattr(other, field)
        assert span.called <= (span.sent or 0.0) <= (span.ended or 0.0)
    assert whole.trace.branches[1:] and len(whole.trace.branches) == len(state.trace.branches)


@pytest.mark.e2e
@pytest.mark.model
def test_variables_of_a_program_sent_whole_come_as_they_are_made(server: Any) -> None:
    stream = report.run_remote("Rome", backend=server.url, temperature=0, stream=True)
    assert stream["start"] and len(stream["fact"]) == 3
    text = "".join(stream.text_iter())
    assert text == report.run("Rome", backend=server.url, temperature=0).text()


@pytest.mark.e2e
@pytest.mark.model
def test_a_refused_step_is_its_variables_error(server: Any) -> None:
    @sglang.function
    def bad(s: sglang.State) -> None:
        s += "A" + sglang.gen("fine", max_tokens=2)
        s += sglang.gen("bad", json_schema={"unevaluatedProperties": {"$ref": "#/nowhere"}})

    for run in (bad.run, bad.run_remote):
        state = run(backend=server.url)
        error = state.error()
        assert isinstance(error, sglang.GenerationError) and error.variable == "bad"
        assert isinstance(error.cause, sglang.RequestRefused)
        assert (error.cause.param or "").startswith(("json_schema", "response_format"))
        assert state["fine"], "what is queued behind a call does not fail it"


@pytest.mark.e2e
@pytest.mark.model
def test_the_server_knows_what_is_queued(start_server: Any) -> None:
    """It compiles the grammars of two calls that wait for a long one."""
    server = start_server("--kv-tokens", "1024")

    @sglang.function
    def compass(s: sglang.State) -> None:
        s += "Go" + sglang.gen("way", max_tokens=2, ignore_eos=True)
        s += sglang.gen("on", max_tokens=900, ignore_eos=True)
        s += sglang.gen("first", regex="(north|south){2,5}x", max_tokens=40)
        s += sglang.gen("then", regex="(east|west){2,5}x", max_tokens=40)

    stream = compass.stream(backend=server.url)
    server.until(lambda: server.metric("phloem_grammar_compiles_total") == 2)
    stream.cancel()
    error = stream.error()
    assert isinstance(error, sglang.GenerationError), "they have not been sent"
    assert (error.variable, type(error.cause)) == ("on", sglang.Cancelled)


@pytest.mark.e2e
@pytest.mark.model
def test_the_documented_program_is_sent_whole(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).parents[2] / "docs" / "programs.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    sglang.set_default_backend(server.url)
    try:
        exec(compile(code, str(page), "exec"), {"phloem": sglang})
    finally:
        sglang.set_default_backend(None)
    verdict, _, transcript = capsys.readouterr().out.partition("\n")
    assert verdict in ("good", "bad")
    assert transcript.startswith("user: Is this review good or bad? I slept through it.\n")
    assert f"\nassistant: {verdict}, because" in transcript
