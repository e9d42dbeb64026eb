"""The runner on a tiny random model, by torch and by the CPU kernels: plans in, the same bits out
however the work is cut."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray

from phloem.srt.checkpoint.config import ModelConfig, RopeConfig
from phloem.srt.checkpoint.quant_types import F32
from phloem.srt.checkpoint.shapes import expected_tensors
from phloem.srt.checkpoint.tensors import Tensor
from phloem.srt.messages import (
    Draft,
    RowPlan,
    RowStart,
    SamplingParams,
    StepPlan,
    TokenLogprob,
)
from phloem.srt.models.base import Model
from phloem.srt.models.cpu_model import CpuModel
from phloem.srt.models.torch_model import TorchModel
from phloem.srt.wire import pack
from phloem.srt.worker.inputs import PlanError
from phloem.srt.worker.runner import LOGITS_CHUNK, ModelRunner

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0),
    context_length=400,
    tie_embeddings=True,
)
SLOTS = 4096
ROWS = 8


@dataclass(frozen=True)
class RandomCheckpoint:
    config: ModelConfig = CONFIG

    def tensors(self) -> Iterator[Tensor]:
        for name, shape in expected_tensors(self.config).items():
            rng = np.random.default_rng(sum(name.encode()))
            scale = 1.0 if "norm" in name else 0.2
            values = (rng.standard_normal(shape) * scale).astype(np.float32)
            yield Tensor(name, shape, F32, values.view(np.uint8))


@dataclass(frozen=True)
class Step:
    """Both phases of a step, no masks."""

    rows: list[int]
    logits: NDArray[np.float32]
    prompt_logprobs: dict[int, list[TokenLogprob]]


class Driver:
    """Makes plans as the scheduler does: fresh slots in random order, deltas only."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._free = random.Random(0).sample(range(1, SLOTS), SLOTS - 1)
        self._step = 0
        self._epoch = 0
        self.slots: dict[int, list[int]] = {}
        self.epochs: dict[int, int] = {}

    def row(
        self,
        row: int,
        tokens: list[int] | None,
        *,
        sample: bool = True,
        prefix: list[int] | None = None,
        prompt_len: int = 0,
        logprobs_from: int | None = None,
        logprobs: int | None = None,
    ) -> RowPlan:
        """One row's part of a step; `prefix` (slots) starts it anew, `tokens` None decodes."""
        start = None
        if prefix is not None:
            self._epoch += 1
            self.epochs[row] = self._epoch
            self.slots[row] = list(prefix)
            start = RowStart(
                prompt_len=prompt_len,
                prefix_slots=pack(prefix),
                sampling=SamplingParams(logprobs=logprobs),
                seed=0,
                stop_ids=[],
                prompt_logprobs_from=logprobs_from,
            )
        new = [self._free.pop() for _ in range(1 if tokens is None else len(tokens))]
        self.slots[row] += new
        packed = b"" if tokens is None else pack(tokens)
        return RowPlan(row, self.epochs[row], packed, pack(new), sample=sample, start=start)

    def step(self, *rows: RowPlan) -> Step:
        self._step += 1
        hidden = self.runner.forward(StepPlan(self._step, list(rows)))
        logits = self.runner.logits(hidden, {})
        assert logits.flags.c_contiguous and logits.flags.writeable
        return Step(hidden.rows, logits.copy(), hidden.prompt_logprobs)  # its own until the next

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], NDArray[np.float32]]:
        """Alone, whole prompt first: greedy tokens, and the logits of each."""
        logits = [self.step(self.row(0, prompt, prefix=[], prompt_len=len(prompt))).logits[0]]
        tokens = [int(logits[0].argmax())]
        while len(tokens) < count:
            self.runner.commit(0, tokens[-1])
            logits.append(self.step(self.row(0, None)).logits[0])
            tokens.append(int(logits[-1].argmax()))
        return tokens, np.stack(logits)


@pytest.fixture(scope="module", params=["torch", "cpu"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    if request.param == "cpu":
        yield CpuModel(RandomCheckpoint(), kv_slots=SLOTS, threads=2)
        return
    before = torch.get_num_threads()
    yield TorchModel.load(RandomCheckpoint(), kv_slots=SLOTS, threads=1)
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def runner(model: Model) -> ModelRunner:
    return ModelRunner(model, kv_slots=SLOTS, max_rows=ROWS)


@pytest.fixture
def driver(runner: ModelRunner) -> Driver:
    return Driver(runner)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_drafts_change_no_bit_whatever_is_rejected(runner: ModelRunner, seed: int) -> None:
    """A row that is computed along drafts, right ones and wrong ones, has the logits of each token
    that it would have without."""
    rng = random.Random(seed)
    driver = Driver(runner)
    prompt, other = prompt_of(30, seed), prompt_of(50, seed + 1)
    tokens, expected = driver.generate(prompt, 16)
    driver.step(
        driver.row(0, prompt, prefix=[], prompt_len=30),
        driver.row(1, other, prefix=[], prompt_len=50),
    )
    runner.commit(0, tokens[0])
    runner.commit(1, 5)
    produced = 1
    while produced < 10:
        right = rng.randint(0, 4)
        guess = tokens[produced : produced + right] + prompt_of(rng.randint(0, 3), seed + 2)
        draws = sorted({0, len(guess), *(d for d in range(len(guess)) if rng.random() < 0.6)})
        row = replace(driver.row(0, [tokens[produced - 1], *guess]), tokens=b"")
        row = replace(row, draft=Draft(guess, draws))
        step = driver.step(driver.row(1, [7]), row)
        assert step.rows == [0] + [1] * len(draws)
        good = [d for d in draws if guess[:d] == tokens[produced : produced + d]]
        for place, drafted in enumerate(good, start=1):
            assert np.array_equal(step.logits[place], expected[produced + drafted])
        accepted = good[-1]
        rejected = len(guess) - accepted
        del driver.slots[0][len(driver.slots[0]) - rejected :]
        produced += accepted + 1
        runner.commit(0, tokens[produced - 1], rejected)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(CONFIG.vocab_size), k=length)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_chunks_prefixes_and_neighbours_change_no_bit(runner: ModelRunner, seed: int) -> None:
    """Rows whose prompts are cut anywhere, begin with another's cached KV, and run beside each
    other give what each gives alone."""
    rng = random.Random(seed)
    driver = Driver(runner)
    base = prompt_of(200)
    prompts, outputs, logits = [], [], []
    for i in range(rng.randint(1, 4)):
        prompts.append(base[: rng.randint(0, 150)] + prompt_of(rng.randint(1, 40), i + 1))
        tokens, values = driver.generate(prompts[i], 6)
        outputs.append(tokens)
        logits.append(values)
    driver.step(driver.row(7, base, prefix=[], prompt_len=200))
    cached = driver.slots[7]

    done = [0] * len(prompts)  # tokens computed of each row
    produced: list[list[int]] = [[] for _ in prompts]

    def next_work(i: int) -> RowPlan:
        if done[i] >= len(prompts[i]):
            return driver.row(i, None)
        prefix = None
        if done[i] == 0:
            done[i] = rng.randint(0, shared_length(prompts[i], base))
            prefix = cached[: done[i]]
        chunk = prompts[i][done[i] :][: rng.randint(1, len(prompts[i]))]
        done[i] += len(chunk)
        length = len(prompts[i])
        return driver.row(i, chunk, prefix=prefix, prompt_len=length, sample=done[i] == length)

    while unfinished := [i for i, tokens in enumerate(produced) if len(tokens) < 6]:
        members = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        result = driver.step(*(next_work(i) for i in members))
        for index, values in zip(result.rows, result.logits, strict=True):
            i = members[index]
            assert np.array_equal(values, logits[i][len(produced[i])])
            produced[i].append(int(values.argmax()))
            runner.commit(i, produced[i][-1])
    assert produced == outputs


def shared_length(prompt: list[int], base: list[int]) -> int:
    """Tokens of `prompt` that may come from `base`'s KV; never the last one."""
    last = min(len(prompt), len(base)) - 1
    return next((i for i in range(last) if prompt[i] != base[i]), last)


def test_a_row_may_begin_with_what_another_computes_in_the_same_step(driver: Driver) -> None:
    prompt = prompt_of(60)
    alone = driver.step(driver.row(0, prompt, prefix=[], prompt_len=60)).logits[0]
    first = driver.row(1, prompt[:50], sample=False, prefix=[], prompt_len=50)
    second = driver.row(2, prompt[40:], prefix=driver.slots[1][:40], prompt_len=60)
    result = driver.step(first, second)
    assert result.rows == [1]
    assert np.array_equal(result.logits[0], alone)


def test_only_rows_that_sample_have_logits(driver: Driver) -> None:
    rows = [
        driver.row(i, prompt_of(4, i), prefix=[], prompt_len=9, sample=i in {1, 3})
        for i in range(5)
    ]
    result = driver.step(*rows)
    assert result.rows == [1, 3]
    assert result.logits.shape == (2, CONFIG.vocab_size)
    assert result.logits.dtype == np.float32
    assert result.prompt_logprobs == {}
    assert driver.step(driver.row(0, [5], sample=False)).logits.shape == (0, CONFIG.vocab_size)


@pytest.fixture(scope="module")
def scores(runner: ModelRunner) -> torch.Tensor:
    """Log probabilities after each token of `prompt_of(150)`, one step a token."""
    driver = Driver(runner)
    steps = [
        driver.step(driver.row(0, [token], prefix=None if at else [], prompt_len=150)).logits[0]
        for at, token in enumerate(prompt_of(150))
    ]
    return torch.from_numpy(np.stack(steps)).log_softmax(-1)


@pytest.mark.parametrize("chunks", [[150], [1, 1, 148], [64, 65, 21], [80, 1, 1, 68]])
@pytest.mark.parametrize("wanted", [0, 1, 60, 149, 150])
def test_prompt_logprobs(
    driver: Driver, scores: torch.Tensor, chunks: list[int], wanted: int
) -> None:
    prompt = prompt_of(150)
    expected = [
        (prompt[at], scores[at - 1, prompt[at]].item(), scores[at - 1].topk(2).indices.tolist())
        for at in range(max(wanted, 1), 150)
    ]
    found: list[TokenLogprob] = []
    begin = 0
    for size in chunks:
        row = driver.row(
            3,
            prompt[begin : begin + size],
            prefix=[] if begin == 0 else None,
            prompt_len=150,
            logprobs_from=wanted,
            logprobs=2,
        )
        neighbour = driver.row(4, prompt_of(30), prefix=[], prompt_len=30)
        result = driver.step(neighbour, row)
        assert set(result.prompt_logprobs) == {1}
        found += result.prompt_logprobs[1]
        begin += size
    assert [(entry.token, entry.top_tokens) for entry in found] == [
        (token, top) for token, _, top in expected
    ]
    assert [entry.logprob for entry in found] == pytest.approx([value for _, value, _ in expected])
    driver.runner.commit(3, 1)
    assert driver.step(driver.row(3, None)).prompt_logprobs == {}


def test_prompt_logprobs_of_a_cached_prompt_begin_behind_it(driver: Driver) -> None:
    prompt = prompt_of(50)
    driver.step(driver.row(0, prompt, prefix=[], prompt_len=50))
    cached = driver.slots[0]
    row = driver.row(1, prompt[19:], prefix=cached[:19], prompt_len=50, logprobs_from=20)
    found = driver.step(row).prompt_logprobs[0]
    assert [entry.token for entry in found] == prompt[20:]
    row = driver.row(1, prompt[20:], prefix=cached[:20], prompt_len=50, logprobs_from=20)
    with pytest.raises(PlanError, match="first 20 tokens are cached"):
        driver.step(row)


def test_prompt_logprobs_of_many_rows_at_once_are_each_rows_own(driver: Driver) -> None:
    """More of them in all than there are logits at a time."""
    prompts = [prompt_of(10 + 17 * i, i) for i in range(5)]

    def row(i: int) -> RowPlan:
        size = len(prompts[i])
        return driver.row(i, prompts[i], prefix=[], prompt_len=size, logprobs_from=3 * i)

    alone = [driver.step(row(i)).prompt_logprobs[0] for i in range(5)]
    together = driver.step(*(row(i) for i in range(5))).prompt_logprobs
    assert sum(map(len, alone)) > 2 * LOGITS_CHUNK
    assert [together[i] for i in range(5)] == alone


def test_a_preempted_row_resumes_with_prompt_and_output(driver: Driver) -> None:
    prompt = prompt_of(30)
    tokens, logits = driver.generate(prompt, 5)
    row = driver.row(2, prompt + tokens[:4], prefix=[], prompt_len=30, logprobs_from=None)
    assert np.array_equal(driver.step(row).logits[0], logits[4])


def test_plans_that_do_not_fit(driver: Driver, model: Model) -> None:
    good = driver.row(0, [1, 2], prefix=[], prompt_len=2)
    with pytest.raises(PlanError, match="no rows"):
        driver.step()
    with pytest.raises(PlanError, match="row 0 is in the plan twice"):
        driver.step(good, good)
    fresh = Driver(ModelRunner(model, kv_slots=64, max_rows=2, context_length=8))
    for row, reason in [
        (RowPlan(1, 5, pack([1]), pack([1]), sample=True), "row 1 was never started"),
        (replace(good, row=2), "row 2 is not one of the 2 rows"),
        (replace(good, slots=pack([1])), "row 0 has 2 tokens for 1 slots"),
        (replace(good, tokens=b"12345", slots=b"12345"), r"row 0 has 1.25 tokens for 1.25 slots"),
        (
            replace(good, slots=pack([0, 1])),
            r"slots in \[0, 1\], the pool's are 1 to 63",
        ),
        (replace(good, slots=pack([1, 64])), r"slots in \[1, 64\]"),
        (replace(good, tokens=b"", slots=pack([1])), "row 0 has sampled no token"),
        (
            replace(good, tokens=pack([1] * 9), slots=pack(range(1, 10))),
            "row 0 would be 9 tokens long, the context has 8",
        ),
    ]:
        with pytest.raises(PlanError, match=reason):
            fresh.step(row)
    good = replace(good, slots=pack([1, 2]))
    fresh.step(good)
    with pytest.raises(PlanError, match="row 0 is in epoch"):
        fresh.step(RowPlan(0, 77, pack([1]), pack([3]), sample=True))
    with pytest.raises(PlanError, match="token id"):
        fresh.step(replace(good, tokens=pack([97, 0])))


def test_context_length_is_within_the_models(model: Model) -> None:
    with pytest.raises(ValueError, match="context_length is 401"):
        ModelRunner(model, kv_slots=64, max_rows=2, context_length=401)


def test_bytes_of_a_slot() -> None:
    assert CONFIG.kv_slot_bytes("float32") == 2 * 2 * 2 * 16 * 4
    assert CONFIG.kv_slot_bytes("int8") == 2 * 2 * 2 * (16 + 4)
