"""From logits to tokens.

Order: logit bias, penalties, ban of end tokens until `min_tokens`, vocabulary mask and allowed
tokens, temperature, top-k, top-p, min-p, draw. Rows are sampled one by one, each vectorised over
the vocabulary: what a row gets never depends on its neighbours. Every tie goes to the lowest id.

The draw is argmax(logit / temperature + noise), where the noise is a function of the request's
seed, the token's position in the sequence and its id alone (`phloem.srt.worker.noise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phloem.srt.messages import LogprobsMode, RowPlan, RowStart, SamplingParams, TokenLogprob
from phloem.srt.wire import unpack
from phloem.srt.worker.logprobs import token_logprob
from phloem.srt.worker.masks import apply_mask, best_of_few, is_legal
from phloem.srt.worker.noise import BLOCK, NoiseField
from phloem.srt.worker.ranking import rank, top_ids

SLOT_BYTES = 4
_LOWEST = np.finfo(np.float32).min


class RowError(Exception):
    """No token can be drawn for this row; its neighbours do not notice."""


class Draw(NamedTuple):
    """What sampling gave a row: a token, or the reason why there is none (see `RowResult`)."""

    token: int = -1
    logprob: TokenLogprob | None = None
    error: str | None = None
    fault: str = ""
    closing: bool = False
    accepted: int = 0


class TokenCounts:
    """Which tokens a sequence has, and how often each was produced: what penalties look at."""

    def __init__(self, prompt_len: int) -> None:
        self._prompt_len = prompt_len
        self._length = 0
        self._seen: set[int] = set()
        self._produced: dict[int, int] = {}

    def add(self, tokens: Sequence[int]) -> None:
        """The sequence grew by `tokens`."""
        self._seen.update(tokens)
        for token in tokens[max(0, self._prompt_len - self._length) :]:
            self._produced[token] = self._produced.get(token, 0) + 1
        self._length += len(tokens)

    def penalise(self, logits: NDArray[np.float32], params: SamplingParams) -> None:
        """Apply `params`' penalties to `logits` [vocab] in place.

        Repetition (over prompt and output) divides a positive logit and multiplies a negative one
        (Keskar et al., "CTRL", 2019); frequency and presence (over the output) subtract, as in
        OpenAI's definition.
        """
        if params.repetition_penalty != 1.0:
            seen = np.fromiter(self._seen, np.int64, len(self._seen))
            values = logits[seen]
            penalty = np.float32(params.repetition_penalty)
            logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        if params.frequency_penalty or params.presence_penalty:
            size = len(self._produced)
            produced = np.fromiter(self._produced.keys(), np.int64, size)
            counts = np.fromiter(self._produced.values(), np.float32, size)
            logits[produced] -= np.float32(params.frequency_penalty) * counts
            logits[produced] -= np.float32(params.presence_penalty)


class SamplerRow:
    """What sampling must know of one row: its parameters, its length, its tokens so far.

    Made from the row's `RowStart`, so that a row which was preempted and comes back, in whatever
    batch, is in the state it would have had. `advance` follows each step's plan, `sample` leaves
    the drawn token in `last`. Raises `RowError` for parameters that do not fit the vocabulary or a
    history that does not fit the prefix.
    """

    def __init__(self, start: RowStart, vocab_size: int) -> None:
        self.params = params = start.sampling
        self.seed = start.seed
        self.prompt_len = start.prompt_len
        self.length = len(start.prefix_slots) // SLOT_BYTES
        """Tokens computed so far: the position of the next token that is drawn."""
        self.last: int | None = None
        # An id past the vocabulary is never drawn, so there is nothing to ban.
        self._stop_ids = np.array([i for i in start.stop_ids if 0 <= i < vocab_size], np.int64)
        self._bias_ids = np.array(list(params.logit_bias), np.int64)
        self._bias = np.array(list(params.logit_bias.values()), np.float32)
        for token in params.logit_bias:
            if not 0 <= token < vocab_size:
                raise RowError(f"logit_bias: token {token} is not in a vocabulary of {vocab_size}")
        self._allowed = np.array(params.allowed_token_ids, np.int64)
        for token in (*params.allowed_token_ids, *params.logprob_token_ids):
            if not 0 <= token < vocab_size:
                raise RowError(f"token {token} is not in a vocabulary of {vocab_size}")
        self._counts: TokenCounts | None = None
        if params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty:
            history = unpack(start.history)
            if len(history) != self.length:
                raise RowError(f"history: {len(history)} tokens for a prefix of {self.length}")
            self._counts = TokenCounts(start.prompt_len)
            self._counts.add(history)

    def advance(self, plan: RowPlan) -> None:
        """The step computes the plan's tokens; without any, it computes the last one drawn."""
        if self._counts is not None:
            tokens = unpack(plan.tokens)
            if not tokens:
                if self.last is None:
                    raise RowError("the plan wants the last sampled token, and there is none")
                tokens = [self.last]
            self._counts.add(tokens)
        self.length += len(plan.slots) // SLOT_BYTES - plan.drafted

    def follow(self, tokens: Sequence[int]) -> None:
        """These tokens of the row's draft, which the step computes, are of its sequence."""
        if self._counts is not None:
            self._counts.add(tokens)
        self.length += len(tokens)

    @property
    def needs_all_logits(self) -> bool:
        """Whether even the logits that a mask forbids must be there: raw logprobs are the model's
        own, normalised over the whole vocabulary. For all else a forbidden token is one of
        probability zero, so -inf in the place of its logit is as good."""
        return self.params.logprobs is not None and self.params.logprobs_mode is LogprobsMode.RAW

    @property
    def adjusts(self) -> bool:
        """Whether the logits are changed at all before the draw, the mask aside."""
        changes = len(self._bias_ids) > 0 or len(self._allowed) > 0 or self._counts is not None
        return changes or self._bans_stop

    @property
    def is_argmax(self) -> bool:
        """Whether the best logit that the mask allows is drawn, and nothing else is asked for."""
        return self.params.temperature == 0 and self.params.logprobs is None and not self.adjusts

    @property
    def _bans_stop(self) -> bool:
        produced = self.length - self.prompt_len
        return produced < self.params.min_tokens and len(self._stop_ids) > 0

    def adjust(
        self, logits: NDArray[np.float32], mask: NDArray[np.int32] | None
    ) -> NDArray[np.float32]:
        """Bias, penalties, mask, allowed tokens and ban, on a copy of `logits` [vocab]. If mask and
        allowed tokens leave nothing but end tokens, they win over `min_tokens`."""
        values = logits
        if mask is None or len(self._bias_ids) or self._counts is not None:
            values = logits.copy()
        if len(self._bias_ids):
            values[self._bias_ids] += self._bias
        if self._counts is not None:
            self._counts.penalise(values, self.params)
        if mask is not None:
            values = apply_mask(values, mask)
        if len(self._allowed):
            allowed = values[self._allowed]
            values = np.full_like(values, -np.inf)
            values[self._allowed] = allowed
        if self._bans_stop:
            banned = values[self._stop_ids]
            values[self._stop_ids] = -np.inf
            if values.max() == -np.inf:
                values[self._stop_ids] = banned
        return values


def sample(
    logits: NDArray[np.float32],
    rows: Sequence[SamplerRow],
    masks: Sequence[NDArray[np.int32] | None],
) -> list[Draw]:
    """Draw one token for each of `rows` from `logits` [rows, vocab].

    `masks` has each row's packed vocabulary mask [ceil(vocab / 32)], None where all is legal.
    `logits` stay as they are.
    """
    draws = []
    with np.errstate(all="ignore"):  # what overflows is found, row by row, by its value
        for values, row, mask in zip(logits, rows, masks, strict=True):
            try:
                draw = _sample_row(values, row, mask)
            except RowError as error:
                draw = Draw(error=str(error))
            else:
                row.last = draw.token
            draws.append(draw)
    return draws


def _sample_row(
    logits: NDArray[np.float32], row: SamplerRow, mask: NDArray[np.int32] | None
) -> Draw:
    best = int(logits.argmax())  # of the first NaN, if there is one
    # With a mask, -inf may stand for whatever it forbids: what is left then is checked below.
    if not (np.isfinite(logits[best]) or (mask is not None and logits[best] == -np.inf)):
        raise RowError(f"the model gave {logits[best]} as the logit of token {best}")
    values = logits
    if mask is not None and row.is_argmax:
        first = best if is_legal(mask, best) else best_of_few(logits, mask)
        if first is not None and np.isfinite(logits[first]):
            return Draw(first)
    if mask is not None or row.adjusts:
        values = row.adjust(logits, mask)
        best = int(values.argmax())
        if not np.isfinite(values[best]):
            raise RowError(_nothing_to_draw(best, values[best], mask))
    params = row.params
    token = best
    if params.temperature > 0:
        token = _draw(values, best, params, NoiseField(row.seed, row.length))
    if params.logprobs is None:
        return Draw(token)
    raw = params.logprobs_mode is LogprobsMode.RAW
    base = logits if raw else values
    return Draw(token, token_logprob(base, token, params.logprobs, params.logprob_token_ids))


def _nothing_to_draw(best: int, value: np.float32, mask: NDArray[np.int32] | None) -> str:
    """Why there is none, when `value` of the best token after bias, penalties and mask is not
    finite."""
    if value != -np.inf:
        return f"bias or penalties made the logit of token {best} {value}"
    if mask is not None and not mask.any():
        return "the vocabulary mask has no legal token"
    return "the logits of all legal tokens are -inf"


def _draw(values: NDArray[np.float32], best: int, params: SamplingParams, noise: NoiseField) -> int:
    """A token of `values` [vocab] at `params.temperature` > 0; `best` is their argmax."""
    filtered = _filter(values, best, params)
    if filtered is None:
        return _race_all(values, best, params.temperature, noise)
    return _race(values, filtered, best, params.temperature, noise)


def _filter(
    values: NDArray[np.float32], best: int, params: SamplingParams
) -> NDArray[np.int64] | None:
    """The ids [n] that top-k, top-p and min-p leave, in ascending order; None if they are off."""
    ids = None
    if 0 < params.top_k < len(values):
        ids = top_ids(values, params.top_k)
    if params.top_p < 1.0:
        ids = _nucleus(values, ids, best, params)
    if params.min_p > 0.0:
        # p >= min_p · max p, in logarithms.
        floor = float(values[best]) + params.temperature * np.log(params.min_p)
        ids = np.flatnonzero(values >= floor) if ids is None else ids[values[ids] >= floor]
    return None if ids is None else np.sort(ids)


def _nucleus(
    values: NDArray[np.float32],
    ids: NDArray[np.int64] | None,
    best: int,
    params: SamplingParams,
) -> NDArray[np.int64]:
    """Top-p over `ids`, sorted best first (all, if None): the shortest run of best tokens whose
    probabilities sum to at least `top_p`, always one token."""
    scale = np.float32(min(1.0 / params.temperature, 1e30))  # finite: 0 · scale must be 0
    if ids is None:
        weights = values - values[best]
        weights *= scale
        np.exp(weights, out=weights)
        total = float(weights.sum(dtype=np.float64))
        # Tokens that weigh less than this sum to less than the 1 - top_p that are to be left out,
        # so all of them are: only the others need sorting.
        floor = min(1.0, 0.5 * (1.0 - params.top_p) * total / len(values))
        ids = rank(values, np.flatnonzero(weights >= floor))
        weights = weights[ids].astype(np.float64)
    else:
        weights = np.exp((values[ids] - values[best]) * scale).astype(np.float64)
        total = float(weights.sum())
    before = np.concatenate(([0.0], np.cumsum(weights[:-1])))
    kept = int(np.searchsorted(before, params.top_p * total))  # those with less before them
    return ids[: max(1, kept)]


def _race(
    values: NDArray[np.float32],
    ids: NDArray[np.int64],
    best: int,
    temperature: float,
    noise: NoiseField,
) -> int:
    """The winner among `ids` [n], ascending."""
    scores = (values[ids].astype(np.float64) - float(values[best])) / temperature
    scores += noise.gumbel(ids)
    return int(ids[scores.argmax()])


def _race_all(values: NDArray[np.float32], best: int, temperature: float, noise: NoiseField) -> int:
    """The winner among all tokens.

    The token with the most noise of its block, one a block, has a score for certain. Only tokens
    that would reach the highest of these with that noise of their block are scored: out of a
    vocabulary of 49,152, some sixty.
    """
    size, peak = len(values), float(values[best])
    tokens, bounds = noise.block_bests(-(-size // BLOCK))
    tokens = tokens[tokens < size]  # the last block may be cut off before its own
    scores = (values[tokens].astype(np.float64) - peak) / temperature + bounds[: len(tokens)]
    # The value that a token of each block must have, less what rounding may come to.
    floors = peak + temperature * (scores.max(initial=-np.inf) - 1e-9 - bounds)
    floors -= 1e-6 * (np.abs(floors) + abs(peak))
    floors = np.maximum(floors, _LOWEST).astype(np.float32)  # -inf never wins
    able = np.empty(size, np.bool_)
    whole = size // BLOCK * BLOCK
    np.greater_equal(
        values[:whole].reshape(-1, BLOCK),
        floors[: whole // BLOCK, None],
        out=able[:whole].reshape(-1, BLOCK),
    )
    np.greater_equal(values[whole:], floors[-1], out=able[whole:])
    return _race(values, np.flatnonzero(able), best, temperature, noise)
