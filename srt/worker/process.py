"""The worker's process: takes step plans, gives step results, asleep in between.

    scheduler ──StepPlan──▶ forward ─▶ wait for masks ─▶ logits ─▶ sample ──StepResult──▶ scheduler
                                             ▲
    grammar ─────────────StepMasks───────────┘   (the masks themselves are in shared memory)

Whatever goes wrong in a step is told in its result: for the whole step if the forward pass failed,
for the rows that got no token if their KV stands. The worker lives on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Never, Protocol

import numpy as np
import zmq
from numpy.typing import NDArray

from phloem.constrained.bitmask import MaskBuffer
from phloem.srt.checkpoint.opening import open_checkpoint
from phloem.srt.ipc import Channel
from phloem.srt.kernels.cpu.library import library_path
from phloem.srt.messages import (
    FromWorker,
    RowPlan,
    RowResult,
    StepMasks,
    StepPlan,
    StepResult,
    ToWorker,
    WorkerReady,
)
from phloem.srt.models.base import Model
from phloem.srt.models.loading import load
from phloem.srt.tier.fingerprint import FileState, compute_facts, look_at
from phloem.srt.tier.options import TierOptions
from phloem.srt.timing import timed
from phloem.srt.worker.drafts import DrawMasks, follow
from phloem.srt.worker.masks import MaskInbox
from phloem.srt.worker.options import WorkerProcessOptions
from phloem.srt.worker.runner import ModelRunner, StepHidden
from phloem.srt.worker.sampler import Draw, RowError, SamplerRow, sample

if TYPE_CHECKING:
    from phloem.srt.tier.thread import TierThread

log = logging.getLogger(__name__)

MASK_TIMEOUT_SECONDS = 60.0
"""How long a step waits for its masks. The grammar process is watched and replaced by others;
this only keeps a lost message from stopping the worker for ever."""

TIER_SECONDS = 0.5
"""How long the worker waits for its lower tier before it is ready itself, so that the first request
finds what an earlier process kept. Longer takes a model that was never hashed before."""


class Runner(Protocol):
    """The model as this process sees it."""

    def forward(self, plan: StepPlan) -> StepHidden:
        """Compute the plan's tokens. Raises if the step as a whole failed."""
        ...

    def logits(
        self, step: StepHidden, masks: Mapping[int, NDArray[np.int32]]
    ) -> NDArray[np.float32]:
        """[len(step.rows), vocab]. `masks`, by index into `step.rows`, say what need not be
        computed; it may be -inf."""
        ...

    def commit(self, row: int, token: int, rejected: int = 0) -> None:
        """`token` was drawn for the request in `row`: it is the row's last sampled token. The last
        `rejected` tokens computed for it are not of its sequence."""
        ...


class Worker:
    """Steps of one `runner`. `masks` is the buffer that `inbox`'s messages speak of."""

    def __init__(
        self,
        runner: Runner,
        vocab_size: int,
        masks: MaskBuffer,
        inbox: MaskInbox,
        *,
        mask_timeout_s: float = MASK_TIMEOUT_SECONDS,
    ) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._masks = masks
        self._inbox = inbox
        self._mask_timeout_s = mask_timeout_s
        self._rows: dict[int, tuple[int, SamplerRow]] = {}  # row → epoch and state

    def serve(self, scheduler: Channel[FromWorker, ToWorker]) -> None:
        """Answer plans until told to stop."""
        while True:
            message = scheduler.recv()
            if not isinstance(message, StepPlan):
                return
            scheduler.send(self.step(message))

    def step(self, plan: StepPlan) -> StepResult:
        """Compute and sample one step; never raises."""
        seconds: dict[str, float] = {}
        try:
            with timed(seconds, "forward"):
                hidden = self._runner.forward(plan)
        except Exception as error:
            log.exception("step %d: the forward pass failed", plan.step_id)
            rows = [RowResult(row.epoch) for row in plan.rows]
            return StepResult(plan.step_id, rows, error=f"{type(error).__name__}: {error}")
        draws: dict[int, Draw] = {}
        try:
            self._sample(plan, hidden, draws, seconds)
        except Exception as error:
            log.exception("step %d: sampling failed", plan.step_id)
            reason = f"sampling failed: {type(error).__name__}: {error}"
            draws |= {i: Draw(error=reason) for i in hidden.rows if i not in draws}
        return StepResult(
            plan.step_id,
            [_row_result(row, draws.get(i, Draw()), hidden, i) for i, row in enumerate(plan.rows)],
            forward_seconds=seconds["forward"],
            mask_wait_seconds=seconds.get("mask_wait", 0.0),
            sample_seconds=seconds.get("sample", 0.0),
        )

    def _sample(
        self,
        plan: StepPlan,
        hidden: StepHidden,
        draws: dict[int, Draw],
        seconds: dict[str, float],
    ) -> None:
        """From hidden states to tokens; results go to `draws`, by index in the plan, times to
        `seconds`. What is raised leaves the KV valid, so it is an error of the rows that have
        nothing in `draws`, not of the step."""
        with timed(seconds, "sample"):
            self._follow(plan, draws)
        with timed(seconds, "mask_wait"):
            masks = self._wait_for_masks(plan, hidden.rows, draws)
        with timed(seconds, "forward"):
            narrowing = self._narrowing(plan, hidden.rows, masks, draws)
            logits = self._runner.logits(hidden, narrowing)
        with timed(seconds, "sample"):
            self._draw(plan, hidden.rows, logits, masks, draws)

    def _follow(self, plan: StepPlan, draws: dict[int, Draw]) -> None:
        """Bring the sampler's rows to the end of this step's tokens. A row that cannot be brought
        there gets its error in `draws`, by its index in the plan."""
        for i, row in enumerate(plan.rows):
            try:
                if row.start is not None:
                    self._rows.pop(row.row, None)
                    self._rows[row.row] = (row.epoch, SamplerRow(row.start, self._vocab_size))
                self._state(row).advance(row)
            except (RowError, ValueError) as error:
                draws[i] = Draw(error=str(error))

    def _state(self, row: RowPlan) -> SamplerRow:
        epoch, state = self._rows.get(row.row, (-1, None))
        if state is None or epoch != row.epoch:
            raise RowError(f"row {row.row} was never started in epoch {row.epoch}")
        return state

    def _wait_for_masks(
        self, plan: StepPlan, rows: Sequence[int], draws: dict[int, Draw]
    ) -> DrawMasks:
        """The masks of the draws of `rows`. A row that gets none for its first draw gets its error
        in `draws`, by its index in the plan."""
        places = {
            mask_row: place
            for i, first in _first_places(rows).items()
            if plan.rows[i].masked
            for place, mask_row in enumerate(_mask_rows(plan.rows[i]), start=first)
        }
        if not places:
            return DrawMasks({}, frozenset())
        found = self._inbox.wait(plan.step_id, places.keys(), self._mask_timeout_s)
        firsts = {plan.rows[i].row: i for i in rows}
        for row, why in found.failed.items():
            if row in firsts:
                draws.setdefault(firsts[row], Draw(error=why.reason, fault=why.fault))
        return DrawMasks(
            {places[row]: self._masks.row(plan.step_id, row) for row in found.ready},
            frozenset(places[row] for row in found.closing),
        )

    def _narrowing(
        self,
        plan: StepPlan,
        rows: Sequence[int],
        masks: DrawMasks,
        draws: Mapping[int, Draw],
    ) -> dict[int, NDArray[np.int32]]:
        """The masks of draws for which what is forbidden need not be computed; not of rows that
        have an error already, whose state may be anything."""
        return {
            place: mask
            for place, mask in masks.ready.items()
            if rows[place] not in draws and not self._state(plan.rows[rows[place]]).needs_all_logits
        }

    def _draw(
        self,
        plan: StepPlan,
        rows: Sequence[int],
        logits: NDArray[np.float32],
        masks: DrawMasks,
        draws: dict[int, Draw],
    ) -> None:
        """Draw from `logits` [len(rows), vocab] for each of `rows` that has no error yet."""
        firsts = {i: place for i, place in _first_places(rows).items() if i not in draws}
        places = list(firsts.values())
        values = logits if len(places) == len(rows) else logits[places]
        states = [self._state(plan.rows[i]) for i in firsts]
        drawn = sample(values, states, [masks.ready.get(place) for place in places])
        for (i, place), state, first in zip(firsts.items(), states, drawn, strict=True):
            row = plan.rows[i]
            draw = first._replace(closing=place in masks.closing)
            if row.draft is not None:
                draw = follow(row.draft, state, draw, logits, masks, place)
            draws[i] = draw
            if draw.error is None:
                rejected = max(0, row.drafted - draw.accepted)
                self._runner.commit(row.row, draw.token, rejected)


def _first_places(rows: Sequence[int]) -> dict[int, int]:
    """Row, by index in the plan → place of its first draw."""
    firsts: dict[int, int] = {}
    for place, i in enumerate(rows):
        firsts.setdefault(i, place)
    return firsts


def _mask_rows(row: RowPlan) -> list[int]:
    """The rows of the mask buffer that have the masks of its draws."""
    further = 0 if row.draft is None else len(row.draft.draws) - 1
    return [row.row, *range(row.draft_row, row.draft_row + further)]


def _row_result(row: RowPlan, draw: Draw, hidden: StepHidden, index: int) -> RowResult:
    """What `row`, at `index` in the plan, gave."""
    embedding, error = hidden.embeddings.get(index), draw.error
    if embedding is not None and not np.isfinite(embedding).all():
        embedding, error = None, error or "the model gave hidden states that are not finite"
    return RowResult(
        row.epoch,
        token=draw.token,
        logprob=draw.logprob,
        prompt_logprobs=hidden.prompt_logprobs.get(index),
        error=error,
        fault=draw.fault,
        closing=draw.closing,
        embedding=None if embedding is None else embedding.astype("<f4").tobytes(),
        accepted=draw.accepted,
    )


def _computing_files(options: WorkerProcessOptions) -> list[FileState]:
    """The files whose contents decide what the model computes, as they are before they are
    opened. Raises `OSError`."""
    files = look_at(Path(options.checkpoint))
    if options.compute.backend == "cpu":
        files.append(FileState.of(Path(library_path())))
    return files


def _start_tier(
    options: WorkerProcessOptions,
    tier_options: TierOptions,
    context: zmq.Context[zmq.Socket[bytes]],
    model: Model,
    files: Sequence[FileState],
) -> TierThread:
    """The thread of the lower tier, up if it comes up soon. `files` decide what `model`
    computes."""
    from phloem.srt.tier.thread import TierThread

    facts = compute_facts(options.compute, model.config, model.kv_slot_bytes)
    address = f"ipc://{options.run_dir}/tier.sock"
    tier = TierThread(context, address, tier_options, model, files, facts)
    tier.start()
    tier.wait(TIER_SECONDS)
    return tier


def _load(options: WorkerProcessOptions, startup: dict[str, float]) -> Model:
    """The model. Of the checkpoint, whose file is mapped, nothing stays that the model does not
    compute with."""
    with timed(startup, "open"):
        checkpoint = open_checkpoint(options.checkpoint)
    with timed(startup, "load_model"):
        return load(
            checkpoint,
            options.compute,
            kv_slots=options.kv_slots,
            context_length=options.context_length,
        )


def main(options: WorkerProcessOptions, startup: dict[str, float]) -> None:
    """Load the model, say `WorkerReady`, then serve until told to stop.

    The launcher made the mask buffer. `startup` is phase → seconds so far. Raises what the
    checkpoint, the options or the memory make impossible.
    """
    files = _computing_files(options) if options.tier is not None else []
    model = _load(options, startup)
    config = model.config
    runner = ModelRunner(
        model,
        kv_slots=options.kv_slots,
        max_rows=options.max_rows,
        context_length=options.context_length,
    )
    run_dir = Path(options.run_dir)
    masks = MaskBuffer.open(run_dir / "masks", options.mask_rows, config.vocab_size)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    tier = None
    if options.tier is not None:
        with timed(startup, "tier"):
            tier = _start_tier(options, options.tier, context, model, files)
    grammar: Channel[Never, StepMasks] = Channel(
        context, f"ipc://{run_dir}/masks.sock", StepMasks, kind=zmq.PULL, bind=True
    )
    scheduler: Channel[FromWorker, ToWorker] = Channel(
        context, f"ipc://{run_dir}/worker.sock", ToWorker
    )
    scheduler.send(
        WorkerReady(
            kv_slots=options.kv_slots,
            context_length=runner.context_length,
            vocab_size=config.vocab_size,
            eos_ids=list(config.eos_ids),
            startup=startup,
        )
    )
    Worker(runner, config.vocab_size, masks, MaskInbox(grammar)).serve(scheduler)
    if tier is not None:
        tier.stop()
    scheduler.close()
    grammar.close()
    context.term()
