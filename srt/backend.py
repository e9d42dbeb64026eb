"""The backend as the engine holds it: three processes and the one channel to their scheduler."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import msgspec
import zmq.asyncio

from phloem.constrained.bitmask import MaskBuffer
from phloem.srt.checkpoint import Checkpoint
from phloem.srt.checkpoint.config import ModelConfig
from phloem.srt.config import ServeConfig
from phloem.srt.grammar.options import GrammarOptions
from phloem.srt.hub.store import Store
from phloem.srt.ipc import AsyncChannel
from phloem.srt.messages import ToFrontend, ToScheduler
from phloem.srt.models.options import ComputeOptions
from phloem.srt.resolve import Resolved, choose_disk_tier
from phloem.srt.scheduler.options import SchedulerProcessOptions
from phloem.srt.scheduler.tenants import TenantLimits
from phloem.srt.supervise import Generation
from phloem.srt.tenants import load_tenants
from phloem.srt.tier.chain import BLOCK_TOKENS
from phloem.srt.tier.options import TierOptions
from phloem.srt.worker.options import WorkerProcessOptions


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What every generation of a server's backend is started with. Lengths are in tokens."""

    checkpoint: str
    vocab_size: int
    context_length: int
    kv_slots: int
    compute: ComputeOptions
    tenants: dict[str, TenantLimits] = {}
    tier: TierOptions | None = None


class Backend:
    """One generation and the channel to it."""

    def __init__(self, generation: Generation, channel: AsyncChannel[ToScheduler, ToFrontend]):
        self.generation = generation
        self.channel = channel

    @classmethod
    async def configure(
        cls,
        generation: Generation,
        context: zmq.asyncio.Context,
        run_dir: Path,
        config: ServeConfig,
        plan: Plan,
    ) -> Backend:
        """Tell spawned processes what they are for. `run_dir` is created. They become ready
        later."""
        await asyncio.to_thread(_prepare, run_dir, _mask_rows(config), plan.vocab_size)
        channel: AsyncChannel[ToScheduler, ToFrontend] = AsyncChannel(
            context, f"ipc://{run_dir}/scheduler.sock", ToFrontend
        )
        generation.configure(run_dir, process_options(str(run_dir), config, plan))
        return cls(generation, channel)

    async def stop(self, grace_seconds: float) -> None:
        self.channel.close()
        await self.generation.stop(grace_seconds)


def _prepare(run_dir: Path, rows: int, vocab_size: int) -> None:
    """The private directory, and in it the mask buffer that worker and grammar process share."""
    run_dir.mkdir(mode=0o700)
    MaskBuffer.create(run_dir / "masks", rows, vocab_size)


def _mask_rows(config: ServeConfig) -> int:
    """One for each request, and one for each token of drafts."""
    constraints = config.constraints
    return config.scheduler.max_running + constraints.draft_tokens * constraints.draft_batch


def process_options(run_dir: str, config: ServeConfig, plan: Plan) -> dict[str, msgspec.Struct]:
    """The options of each role's process."""
    limits, constraints = config.scheduler, config.constraints
    level = config.log.log_level
    return {
        "worker": WorkerProcessOptions(
            run_dir=run_dir,
            checkpoint=plan.checkpoint,
            compute=plan.compute,
            max_rows=limits.max_running,
            mask_rows=_mask_rows(config),
            context_length=plan.context_length,
            kv_slots=plan.kv_slots,
            tier=plan.tier,
            log_level=level,
        ),
        "grammar": GrammarOptions(
            run_dir=run_dir,
            checkpoint=plan.checkpoint,
            mask_rows=_mask_rows(config),
            vocab_size=plan.vocab_size,
            compile_timeout_s=constraints.compile_timeout_s,
            compile_threads=constraints.compile_threads,
            memory_bytes=constraints.memory_bytes,
            cache_bytes=constraints.cache_bytes,
            remembered=_remembered(config, plan),
            log_level=level,
        ),
        "scheduler": SchedulerProcessOptions(
            run_dir=run_dir,
            max_running=limits.max_running,
            max_waiting=limits.max_waiting,
            max_step_tokens=limits.max_step_tokens,
            request_timeout_s=limits.request_timeout_s,
            eviction_policy=config.cache.eviction_policy,
            sharing=not config.cache.disable_radix_cache,
            schedule_policy=limits.schedule_policy,
            page_size=config.cache.page_size,
            pin_share=config.cache.pin_share,
            itl_target_s=None if limits.itl_target_ms is None else limits.itl_target_ms / 1000,
            tenants=plan.tenants,
            kv_events=config.cache.kv_events,
            record=limits.record,
            tier=plan.tier is not None,
            draft_tokens=constraints.draft_tokens,
            draft_batch=constraints.draft_batch,
            log_level=level,
        ),
    }


def _remembered(config: ServeConfig, plan: Plan) -> str | None:
    """Where a server keeps what was compiled for a checkpoint; an engine in a program keeps
    nothing."""
    if config.server.data_dir is None:
        return None
    name = hashlib.sha256(plan.checkpoint.encode()).hexdigest()[:16]
    return str(Path(config.server.data_dir) / "constraints" / f"{name}.sqlite")


def make_plan(resolved: Resolved, checkpoint: Checkpoint, kv_tokens: int) -> Plan:
    """What to start. Adds to the reasons of `resolved`. Raises `InvalidRequest` for tenants or for
    tiers that cannot be."""
    config = checkpoint.config
    asked = resolved.config.model.context_length
    tenants = resolved.config.server.tenants
    return Plan(
        checkpoint=str(checkpoint.path),
        vocab_size=config.vocab_size,
        context_length=config.context_length if asked is None else asked,
        kv_slots=kv_tokens + resolved.config.cache.page_size,
        compute=ComputeOptions(
            backend=resolved.backend,
            dtype=resolved.dtype,
            kv_dtype=resolved.kv_dtype,
            quantization=resolved.config.model.quantization,
            isa=resolved.isa,
            threads=resolved.threads,
        ),
        tenants={}
        if tenants is None
        else {
            name: TenantLimits(weight=tenant.weight, kv_quota=tenant.kv_quota)
            for name, tenant in load_tenants(tenants).items()
        },
        tier=_plan_tier(resolved, config),
    )


def _plan_tier(resolved: Resolved, config: ModelConfig) -> TierOptions | None:
    tier, resolved.reasons["kv_tiers"] = choose_disk_tier(
        resolved.config.cache,
        folder=Store.default().root / "kv",
        block_bytes=BLOCK_TOKENS * config.kv_slot_bytes(resolved.kv_dtype),
    )
    if tier is None:
        return None
    return TierOptions(folder=str(tier.folder), limit_bytes=tier.limit_bytes)
