"""The sampler against a slow, obvious reference, and the promises that a caller relies on."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from phloem.srt.messages import LogprobsMode, RowPlan, RowStart, SamplingParams
from phloem.srt.wire import pack
from phloem.srt.worker.noise import NoiseField
from phloem.srt.worker.sampler import Draw, RowError, SamplerRow, sample

VOCAB = 200
STOP = [3, 190]


def make_row(
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (1, 2, 5),
    output: Sequence[int] = (),
    seed: int = 1,
    vocab: int = VOCAB,
    stop: Sequence[int] = STOP,
) -> SamplerRow:
    """A row whose prompt and output are computed, all of them as a cached prefix."""
    history = [*prompt, *output]
    return SamplerRow(
        RowStart(
            prompt_len=len(prompt),
            prefix_slots=pack(range(1, len(history) + 1)),
            sampling=params,
            seed=seed,
            stop_ids=list(stop),
            history=pack(history),
        ),
        vocab,
    )


def pack_mask(legal: NDArray[np.bool_]) -> NDArray[np.int32]:
    padded = np.zeros(-(-len(legal) // 32) * 32, dtype=bool)
    padded[: len(legal)] = legal
    return np.packbits(padded, bitorder="little").view(np.int32)


def one(
    logits: NDArray[np.float32], row: SamplerRow, mask: NDArray[np.int32] | None = None
) -> Draw:
    return sample(logits[None], [row], [mask])[0]


# ------------------------------------------------------------------------------- the reference


def reference_adjusted(
    logits: NDArray[np.float32],
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    legal: set[int],
) -> list[float]:
    """Bias, penalties, mask and ban, token by token, in single precision as the model's."""
    f32 = np.float32
    values = [f32(v) for v in logits]
    for token, bias in params.logit_bias.items():
        values[token] += f32(bias)
    counts = Counter(output)
    for token in range(len(values)):
        v = values[token]
        if token in prompt or token in output:
            r = f32(params.repetition_penalty)
            v = v / r if v > 0 else v * r
        if counts[token]:
            v = v - f32(params.frequency_penalty) * f32(counts[token])
            v = v - f32(params.presence_penalty)
        values[token] = v if token in legal else f32(-math.inf)
    if len(output) < params.min_tokens:
        banned = [f32(-math.inf) if t in STOP else v for t, v in enumerate(values)]
        if max(banned) > -math.inf:
            values = banned
    return [float(v) for v in values]


def reference_token(values: list[float], params: SamplingParams, seed: int, position: int) -> int:
    """Sort everything, filter step by step, then score what is left."""
    ranked = sorted((t for t, v in enumerate(values) if v > -math.inf), key=lambda t: -values[t])
    if params.temperature == 0:
        return ranked[0]
    if params.top_k:
        ranked = ranked[: params.top_k]
    weights = [math.exp((values[t] - values[ranked[0]]) / params.temperature) for t in ranked]
    total, before = math.fsum(weights), 0.0
    kept: list[int] = []
    for token, weight in zip(ranked, weights, strict=True):
        if params.top_p == 1.0 or before < params.top_p * total or not kept:
            kept.append(token)
        before += weight
    floor = math.log(params.min_p) * params.temperature if params.min_p else -math.inf
    kept = [t for t in kept if values[t] >= values[ranked[0]] + floor]
    field = NoiseField(seed, position)
    noise = dict(zip(kept, field.gumbel(np.array(kept)).tolist(), strict=True))
    return max(sorted(kept), key=lambda t: values[t] / params.temperature + noise[t])


@st.composite
def cases(
    draw: st.DrawFn,
) -> tuple[NDArray[np.float32], SamplingParams, list[int], list[int], set[int], int]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.5, 3.0, 12.0]))
    logits = rng.normal(0, spread, VOCAB)
    if draw(st.booleans()):  # many equal values
        logits = np.round(logits)
    token = st.integers(0, VOCAB - 1)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 50, VOCAB, 1000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.912345, 0.54321, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.0123, 0.345])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.25, 0.75])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5, -0.25])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5])),
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-100.0, -2.0, 5.5]), max_size=4)),
        min_tokens=draw(st.integers(0, 3)),
    )
    legal = set(range(VOCAB))
    if draw(st.booleans()):
        legal = set(draw(st.lists(token, min_size=1, max_size=20)))
    history = st.lists(token, min_size=1, max_size=8)
    return logits.astype(np.float32), params, draw(history), draw(history), legal, draw(token)


@settings(max_examples=400, deadline=None)
@given(cases())
def test_it_is_the_reference(
    case: tuple[NDArray[np.float32], SamplingParams, list[int], list[int], set[int], int],
) -> None:
    logits, params, prompt, output, legal, seed = case
    row = make_row(params, prompt=prompt, output=output, seed=seed)
    mask = pack_mask(np.isin(np.arange(VOCAB), list(legal))) if len(legal) < VOCAB else None
    values = reference_adjusted(logits, params, prompt, output, legal)
    expected = reference_token(values, params, seed, len(prompt) + len(output))
    assert one(logits, row, mask).token == expected


@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("vocab", [1, 63, 64, 1000, 49152])
def test_skipping_tokens_changes_nothing(vocab: int, temperature: float) -> None:
    """The pruned draw over a whole vocabulary is the argmax over all of it."""
    rng = np.random.default_rng(vocab)
    for position in range(20):
        logits = rng.normal(0, 3, vocab).astype(np.float32)
        noise = NoiseField(77, position).gumbel(np.arange(vocab))
        expected = int((logits.astype(np.float64) / temperature + noise).argmax())
        row = make_row(
            SamplingParams(temperature=temperature),
            prompt=[1] * position,
            seed=77,
            vocab=vocab,
        )
        assert one(logits, row).token == expected


# ------------------------------------------------------------------------------- distribution


def chi_square(params: SamplingParams, probabilities: NDArray[np.float64], draws: int) -> float:
    """Statistic of `draws` tokens, each of another seed, against `probabilities`; zero where the
    token must never come."""
    logits = np.log(np.maximum(PROBABILITIES, 1e-30)).astype(np.float32)
    tokens = [
        one(logits, make_row(params, seed=seed, vocab=len(logits), stop=[])).token
        for seed in range(draws)
    ]
    observed = np.bincount(tokens, minlength=len(logits))
    assert observed[probabilities == 0].sum() == 0
    expected = probabilities * draws
    support = expected > 0
    return float(((observed - expected)[support] ** 2 / expected[support]).sum())


PROBABILITIES = np.array([0.3, 0.05, 0.2, 0.02, 0.15, 0.08, 0.1, 0.1])


def test_tokens_come_with_their_probabilities() -> None:
    assert chi_square(SamplingParams(), PROBABILITIES, 4000) < 24.3  # 7 degrees, p = 0.001


def test_temperature_sharpens_the_distribution() -> None:
    sharper = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    assert chi_square(SamplingParams(temperature=0.5), sharper, 4000) < 24.3


def test_top_k_renormalises() -> None:
    kept = np.where(PROBABILITIES >= 0.15, PROBABILITIES, 0)
    assert chi_square(SamplingParams(top_k=3), kept / kept.sum(), 3000) < 13.8  # 2 degrees


def test_top_p_renormalises() -> None:
    kept = np.where(PROBABILITIES >= 0.15, PROBABILITIES, 0)  # 0.3 + 0.2 + 0.15 ≥ 0.6
    assert chi_square(SamplingParams(top_p=0.6), kept / kept.sum(), 3000) < 13.8


def test_min_p_renormalises() -> None:
    kept = np.where(PROBABILITIES >= 0.1 - 1e-9, PROBABILITIES, 0)  # 0.1 ≥ 0.3 · 0.3
    assert chi_square(SamplingParams(min_p=0.3), kept / kept.sum(), 3000) < 18.5  # 4 degrees


# ------------------------------------------------------------------------------- ties


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[7, 50, 120]] = 2.5
    assert one(logits, make_row(SamplingParams(temperature=0))).token == 7


@pytest.mark.parametrize("count", [1, 3, 40, 2_500, 4_999])
def test_greedy_takes_the_best_that_the_mask_allows(count: int) -> None:
    """Among few legal tokens and many, whether or not the best of all is one of them."""
    rng = np.random.default_rng(count)
    row = make_row(SamplingParams(temperature=0), vocab=5_000)
    for _ in range(20):
        logits = np.round(rng.normal(0, 2, 5_000), 1).astype(np.float32)  # many are equal
        legal = np.zeros(5_000, bool)
        legal[rng.permutation(5_000)[:count]] = True
        mask = pack_mask(legal)
        mask[-1] |= np.int32(1) << 20  # a bit behind the vocabulary
        expected = int(np.where(legal, logits, -np.inf).argmax())
        assert one(logits, row, mask).token == expected


def test_top_k_one_is_greedy() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[7, 50, 120]] = 2.5
    for seed in range(20):
        assert one(logits, make_row(SamplingParams(top_k=1), seed=seed)).token == 7


def test_top_p_cuts_among_equals_by_id() -> None:
    """Of eight equal tokens, the first three are the shortest run that reaches 0.375."""
    logits = np.zeros(8, np.float32)
    params = SamplingParams(top_p=0.375)
    drawn = {one(logits, make_row(params, seed=s, vocab=8, stop=[])).token for s in range(100)}
    assert drawn == {0, 1, 2}


def test_top_p_zero_leaves_the_best() -> None:
    logits = np.arange(VOCAB, dtype=np.float32)
    assert one(logits, make_row(SamplingParams(top_p=0.0))).token == VOCAB - 1


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-4])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_a_tiny_temperature_is_greedy(temperature: float, top_p: float) -> None:
    logits = np.linspace(-3, 3, VOCAB).astype(np.float32)
    row = make_row(SamplingParams(temperature=temperature, top_p=top_p))
    assert one(logits, row).token == VOCAB - 1


# ------------------------------------------------------------------------------- independence


def test_a_seeded_token_does_not_depend_on_the_batch() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (6, VOCAB)).astype(np.float32)
    params = [
        SamplingParams(),
        SamplingParams(top_p=0.9),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7, top_k=20),
        SamplingParams(frequency_penalty=1.0),
        SamplingParams(logprobs=3),
    ]
    alone = [one(logits[i], make_row(p, seed=i, output=[4, 4])) for i, p in enumerate(params)]
    order = [5, 2, 0, 3, 1, 4]
    rows = [make_row(params[i], seed=i, output=[4, 4]) for i in order]
    together = sample(logits[order], rows, [None] * 6)
    assert together == [alone[i] for i in order]


def test_resuming_from_history_gives_the_same_tokens() -> None:
    """Preempted after any number of tokens and started anew, a row goes on as if nothing was."""
    params = SamplingParams(
        temperature=1.2, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2
    )
    prompt = [9, 10, 11]
    logits = np.random.default_rng(5).normal(0, 2, (12, VOCAB)).astype(np.float32)

    def run(row: SamplerRow, steps: range, resumed: bool) -> list[int]:
        tokens = []
        for step in steps:
            if step > steps.start or not resumed:
                plan_tokens = b"" if step else pack(prompt)
                slots = pack([1]) if step else pack([1, 2, 3])
                row.advance(RowPlan(0, 1, plan_tokens, slots, True))
            tokens.append(one(logits[step], row).token)
        return tokens

    start = RowStart(len(prompt), b"", params, 8, STOP)
    whole = run(SamplerRow(start, VOCAB), range(12), resumed=False)
    for cut in (1, 5, 11):
        row = make_row(params, prompt=prompt, output=whole[:cut], seed=8)
        assert run(row, range(cut, 12), resumed=True) == whole[cut:]


def test_chunked_prefill_counts_what_one_chunk_counts() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=5.0, frequency_penalty=3.0)
    logits = np.random.default_rng(1).normal(3, 1, VOCAB).astype(np.float32)
    chunked = SamplerRow(RowStart(4, b"", params, 0, []), VOCAB)
    for piece in ([5, 6], [7, 8, 150], [150]):  # the last two are output
        chunked.advance(RowPlan(0, 1, pack(piece), pack(piece), True))
    whole = make_row(params, prompt=[5, 6, 7, 8], output=[150, 150], stop=[])
    assert chunked.length == whole.length == 6
    assert (chunked.adjust(logits, None) == whole.adjust(logits, None)).all()


def test_logits_are_left_alone() -> None:
    logits = np.random.default_rng(1).normal(0, 1, VOCAB).astype(np.float32)
    before = logits.copy()
    params = SamplingParams(logit_bias={4: 3.0}, frequency_penalty=1.0, min_tokens=5)
    one(logits, make_row(params, output=[5]), pack_mask(np.arange(VOCAB) < 50))
    assert (logits == before).all()


# ------------------------------------------------------------------------------- masks and errors


def test_the_mask_wins_over_min_tokens() -> None:
    """When only end tokens are legal, ending early beats breaking the constraint."""
    logits = np.zeros(VOCAB, np.float32)
    params = SamplingParams(temperature=0, min_tokens=5)
    only_stops = pack_mask(np.isin(np.arange(VOCAB), STOP))
    assert one(logits, make_row(params), only_stops).token == 3
    with_another = pack_mask(np.isin(np.arange(VOCAB), [*STOP, 77]))
    assert one(logits, make_row(params), with_another).token == 77


def test_min_tokens_counts_the_output() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[3] = 9.0
    params = SamplingParams(temperature=0, min_tokens=2)
    assert one(logits, make_row(params, output=[8])).token != 3
    assert one(logits, make_row(params, output=[8, 8])).token == 3


def test_bad_rows_end_alone() -> None:
    """No legal token, NaN, infinity: an error each; the neighbours get what they get alone."""
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 1, (5, VOCAB)).astype(np.float32)
    logits[1, 17] = np.nan
    logits[3, 60] = np.inf
    rows = [make_row(SamplingParams(), seed=i) for i in range(5)]
    nothing = np.zeros(-(-VOCAB // 32), np.int32)
    draws = sample(logits, rows, [None, None, nothing, None, None])
    assert [d.token >= 0 for d in draws] == [True, False, False, False, True]
    assert draws[1].error == "the model gave nan as the logit of token 17"
    assert draws[2].error == "the vocabulary mask has no legal token"
    assert draws[3].error == "the model gave inf as the logit of token 60"
    for i in (0, 4):
        assert draws[i] == one(logits[i], make_row(SamplingParams(), seed=i))


def test_nan_is_found_even_where_the_mask_forbids() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[100] = np.nan
    draw = one(logits, make_row(SamplingParams(temperature=0)), pack_mask(np.arange(VOCAB) < 50))
    assert draw.error is not None


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_p=0.9)])
def test_a_model_may_leave_out_what_the_mask_forbids(params: SamplingParams) -> None:
    logits = np.random.default_rng(4).normal(0, 2, VOCAB).astype(np.float32)
    legal = np.arange(VOCAB) % 7 == 3
    narrowed = np.where(legal, logits, np.float32(-np.inf))
    mask = pack_mask(legal)
    assert one(narrowed, make_row(params), mask) == one(logits, make_row(params), mask)
    for bad in (np.nan, np.inf):
        narrowed[10] = bad
        draw = one(narrowed, make_row(params), mask)
        assert draw.error == f"the model gave {bad} as the logit of token 10"


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams()])
def test_minus_infinity_everywhere_is_told_by_its_cause(params: SamplingParams) -> None:
    logits = np.full(VOCAB, -np.inf, np.float32)
    row = make_row(params)
    masks = [None, np.zeros(-(-VOCAB // 32), np.int32), pack_mask(np.arange(VOCAB) < 5)]
    assert [one(logits, row, mask).error for mask in masks] == [
        "the model gave -inf as the logit of token 0",
        "the vocabulary mask has no legal token",
        "the logits of all legal tokens are -inf",
    ]


def test_raw_logprobs_need_all_logits() -> None:
    processed = SamplingParams(logprobs=0, logprobs_mode=LogprobsMode.PROCESSED)
    assert make_row(SamplingParams(logprobs=0)).needs_all_logits
    assert not make_row(processed).needs_all_logits
    assert not make_row(SamplingParams()).needs_all_logits


def test_an_overflowing_bias_is_an_error() -> None:
    logits = np.full(VOCAB, 3e38, np.float32)
    draw = one(logits, make_row(SamplingParams(logit_bias={9: 3e38})))
    assert draw.error == "bias or penalties made the logit of token 9 inf"


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RowError, match=r"logit_bias: token 200 is not in a vocabulary of 200"):
        make_row(SamplingParams(logit_bias={VOCAB: 1.0}))


def test_penalties_need_the_whole_history() -> None:
    start = RowStart(3, pack([1, 2, 3]), SamplingParams(frequency_penalty=1.0), 0, [], pack([5]))
    with pytest.raises(RowError, match="1 tokens for a prefix of 3"):
        SamplerRow(start, VOCAB)


# ------------------------------------------------------------------------------- logprobs


def log_softmax(values: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = values.astype(np.float64)
    peak = wide.max()
    result: NDArray[np.float64] = wide - peak - np.log(np.exp(wide - peak).sum())
    return result


def test_raw_logprobs_are_the_models() -> None:
    logits = np.random.default_rng(3).normal(0, 3, VOCAB).astype(np.float32)
    params = SamplingParams(temperature=0.5, logit_bias={9: 50.0}, logprobs=5)
    draw = one(logits, make_row(params), pack_mask(np.arange(VOCAB) < 30))
    logprobs = log_softmax(logits)
    assert draw.token == 9
    assert draw.logprob is not None
    assert draw.logprob.token == 9
    assert draw.logprob.logprob == pytest.approx(logprobs[9], abs=1e-5)
    assert draw.logprob.top_tokens == np.argsort(-logprobs)[:5].tolist()
    assert draw.logprob.top_logprobs == pytest.approx(np.sort(logprobs)[::-1][:5], abs=1e-5)


def test_processed_logprobs_are_those_of_the_masked_logits() -> None:
    logits = np.random.default_rng(3).normal(0, 3, VOCAB).astype(np.float32)
    params = SamplingParams(
        temperature=0.5, logit_bias={9: 2.0}, logprobs=5, logprobs_mode=LogprobsMode.PROCESSED
    )
    legal = np.isin(np.arange(VOCAB), [9, 11, 12])
    draw = one(logits, make_row(params), pack_mask(legal))
    biased = logits.copy()
    biased[9] += 2.0
    biased[~legal] = -np.inf
    logprobs = log_softmax(biased)
    assert draw.logprob is not None
    assert draw.logprob.logprob == pytest.approx(logprobs[draw.token], abs=1e-5)
    # Only three tokens have a logprob at all: no alternatives of probability zero.
    assert draw.logprob.top_tokens == np.argsort(-logprobs)[:3].tolist()
    assert np.exp(draw.logprob.top_logprobs).sum() == pytest.approx(1.0, abs=1e-5)


def test_equal_alternatives_are_sorted_by_id() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[150] = 1.0
    draw = one(logits, make_row(SamplingParams(temperature=0, logprobs=4)))
    assert draw.logprob is not None
    assert draw.logprob.top_tokens == [150, 0, 1, 2]


def test_no_alternatives_unless_asked() -> None:
    logits = np.zeros(VOCAB, np.float32)
    draw = one(logits, make_row(SamplingParams(temperature=0, logprobs=0)))
    assert draw.logprob is not None
    assert draw.logprob.top_tokens == []
    assert one(logits, make_row(SamplingParams(temperature=0))).logprob is None


def test_only_allowed_tokens_are_drawn() -> None:
    logits = np.random.default_rng(1).normal(size=VOCAB).astype(np.float32)
    allowed = (7, 60, 150)
    for temperature, top_k, top_p in ((0.0, 0, 1.0), (3.0, 0, 1.0), (3.0, 50, 0.9)):
        params = SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, allowed_token_ids=allowed
        )
        drawn = {one(logits, make_row(params, seed=seed)).token for seed in range(60)}
        assert drawn <= set(allowed)
        assert len(drawn) == (1 if temperature == 0 else 3)
    best = max(allowed, key=lambda token: logits[token])
    greedy = SamplingParams(temperature=0.0, allowed_token_ids=allowed)
    assert one(logits, make_row(greedy)).token == best


def test_allowed_tokens_win_over_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, allowed_token_ids=tuple(STOP), min_tokens=5)
    assert one(np.zeros(VOCAB, np.float32), make_row(params)).token == STOP[0]
    more = SamplingParams(temperature=0.0, allowed_token_ids=(*STOP, 50), min_tokens=5)
    assert one(np.zeros(VOCAB, np.float32), make_row(more)).token == 50


@pytest.mark.parametrize(
    "params",
    [SamplingParams(allowed_token_ids=(5, 200)), SamplingParams(logprob_token_ids=(5, 200))],
)
def test_tokens_outside_the_vocabulary_are_refused(params: SamplingParams) -> None:
    with pytest.raises(RowError, match="200"):
        make_row(params)


def test_logprobs_of_chosen_tokens() -> None:
    logits = np.random.default_rng(2).normal(size=VOCAB).astype(np.float32)
    params = SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=(9, 3, 9))
    found = one(logits, make_row(params)).logprob
    assert found is not None
    expected = log_softmax(logits)
    assert found.chosen == pytest.approx([expected[9], expected[3], expected[9]])
    masked = SamplingParams(
        temperature=0.0,
        logprobs=0,
        logprob_token_ids=(9, 3),
        allowed_token_ids=(3,),
        logprobs_mode=LogprobsMode.PROCESSED,
    )
    found = one(logits, make_row(masked)).logprob
    assert found is not None
    assert found.chosen == [-math.inf, pytest.approx(0.0)]
