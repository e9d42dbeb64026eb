"""The arithmetic between raw calls and figures."""

import io
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from phloem.srt.bench.load import Call, Message, Run
from phloem.srt.bench.prefix import TokenTrie, minimum_prefill
from phloem.srt.bench.report import (
    Summary,
    median_summary,
    percentile,
    ratios,
    render_table,
    summarise,
    verdict,
)
from phloem.srt.bench.workloads import ORDER_SCHEMA, Turn, Workload


def make_call(
    user: str = "a",
    *,
    pieces: Sequence[float] = (),
    start: float = 0.0,
    prompt: int = 10,
    output: int = 3,
    cached: int | None = 4,
    error: str | None = None,
    text: str = "",
    finish: str = "stop",
    schema: dict[str, object] | None = None,
    then: tuple[Turn, ...] = (),
    before: Call | None = None,
) -> Call:
    messages = [*(before.answered if before else []), {"role": "user", "content": user}]
    return Call(
        turn=Turn(user=user, max_tokens=9, schema=schema, then=then),
        messages=messages,
        start=start,
        pieces=list(pieces),
        text=text,
        finish_reason=finish,
        prompt_tokens=prompt,
        completion_tokens=output,
        cached_tokens=cached,
        error=error,
    )


def make_run(*calls: Call, seconds: float = 2.0) -> Run:
    workload = Workload(name="w", title="", concurrency=1, turns=())
    return Run(workload=workload, seconds=seconds, calls=list(calls))


def test_percentiles() -> None:
    assert percentile([], 50) is None
    assert percentile([7.0], 99) == 7.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([float(i) for i in range(101)], 99) == 99.0


def test_figures_of_a_run() -> None:
    summary = summarise(
        make_run(
            make_call(start=1.0, pieces=[1.5, 1.6, 1.8]),
            make_call(start=2.0, pieces=[2.1, 2.4], prompt=20, output=2, cached=0),
            make_call(start=3.0, pieces=[9.0], error="HTTP 500: no"),
        ),
        server="s",
        minimum_tokens=25,
    )
    assert (summary.requests, summary.errors, summary.first_error) == (3, 1, "HTTP 500: no")
    assert (summary.prompt_tokens, summary.cached_tokens, summary.computed_tokens) == (30, 4, 26)
    assert summary.minimum_tokens == 25
    assert summary.requests_per_s == 1.0
    assert summary.output_tokens_per_s == 2.5
    assert summary.total_tokens_per_s == 17.5
    assert summary.ttft_p50_ms == pytest.approx(300)
    assert summary.itl_p50_ms == pytest.approx(200)
    assert summary.itl_p99_ms == pytest.approx(298)


def test_cached_tokens_are_unknown_when_one_call_does_not_say() -> None:
    summary = summarise(make_run(make_call(), make_call(cached=None)), server="s")
    assert summary.cached_tokens is None
    assert summary.computed_tokens is None


def test_a_run_of_failures_has_no_latencies() -> None:
    summary = summarise(make_run(make_call(error="gone")), server="s")
    assert (summary.errors, summary.ttft_p50_ms, summary.output_tokens_per_s) == (1, None, 0.0)


VALID = (
    '{"customer": "Ann", "priority": "low", "quantity": 3, "express": true, "tags": ["a"], '
    '"address": {"street": "Elm", "zip": "12345"}}'
)


@pytest.mark.parametrize(
    ("text", "finish", "expected"),
    [
        (VALID, "stop", "valid"),
        (VALID, "length", "valid"),
        (VALID.replace("12345", "1234"), "stop", "invalid"),
        (VALID.replace("3", "300"), "stop", "invalid"),
        (VALID[:-5], "length", "cut"),
        (VALID[:-5], "stop", "invalid"),
        ("", "stop", "invalid"),
    ],
)
def test_verdicts(text: str, finish: str, expected: str) -> None:
    assert verdict(make_call(text=text, finish=finish, schema=ORDER_SCHEMA)) == expected


def test_free_text_is_always_valid() -> None:
    assert verdict(make_call(text="{")) == "valid"


# ------------------------------------------------------------------------------- the minimum


@given(st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=12))
def test_the_trie_counts_distinct_prefixes(sequences: list[list[int]]) -> None:
    trie = TokenTrie()
    total = sum(trie.insert(sequence) for sequence in sequences)
    assert total == len({tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)})


async def characters(messages: list[Message], opening: bool) -> list[int]:
    """One token a character: `<content>` for each message, `<` to open the next."""
    text = "".join(f"<{message['content']}>" for message in messages)
    return [ord(c) for c in text + "<" * opening]


async def test_minimum_of_distinct_and_shared_prompts() -> None:
    calls = [make_call("abc"), make_call("abd"), make_call("xyz")]
    # <abc><   then d><   then xyz><
    assert await minimum_prefill(calls, characters) == 6 + 3 + 5


async def test_a_repeated_prompt_computes_one_token() -> None:
    assert await minimum_prefill([make_call("abc"), make_call("abc")], characters) == 6 + 1


async def test_answers_are_not_prefilled_again() -> None:
    first = make_call("abc", text="answer", then=(Turn(user="go", max_tokens=1),))
    second = make_call("go", before=first)
    # <abc><   and of   <abc><answer><go><   only   <go><
    assert await minimum_prefill([first, second], characters) == 6 + 5


async def test_failed_calls_compute_nothing() -> None:
    assert await minimum_prefill([make_call("abc", error="x")], characters) == 0


# ------------------------------------------------------------------------------- comparing


def make_summary(server: str, rate: float, workload: str = "w") -> Summary:
    call = make_call(output=int(rate))
    run = Run(
        workload=Workload(name=workload, title="", concurrency=1, turns=()),
        seconds=1.0,
        calls=[call],
    )
    return summarise(run, server=server)


def test_ratios_pair_runs_that_took_turns() -> None:
    summaries = [
        make_summary("ours", 100),
        make_summary("theirs", 50),
        make_summary("ours", 30),
        make_summary("theirs", 10),
        make_summary("ours", 90),
        make_summary("theirs", 60),
        make_summary("theirs", 60, workload="only theirs"),
    ]
    assert ratios(summaries, "ours") == {"w": {"theirs": 2.0}}


def test_a_server_that_gave_nothing_has_no_ratio() -> None:
    assert ratios([make_summary("ours", 9), make_summary("dead", 0)], "ours") == {"w": {}}


def test_the_median_run_is_a_real_one() -> None:
    runs = [make_summary("s", rate) for rate in (50, 10, 30, 20)]
    assert median_summary(runs).output_tokens_per_s == 20


def test_the_table_shows_what_is_unknown_as_a_dash() -> None:
    output = io.StringIO()
    summary = summarise(make_run(make_call(cached=None)), server="server-name")
    Console(file=output, width=200).print(render_table([summary]))
    assert "server-name" in output.getvalue()
    assert "–" in output.getvalue()
