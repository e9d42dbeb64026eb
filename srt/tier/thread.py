"""The tier's thread, beside the worker's: a socket to the scheduler, a store, and the model's KV.

    scheduler ──KvSave, KvLoad──▶ tier ──▶ disk         its own socket, its own thread: no step
    scheduler ◀─KvSaved, KvLoaded, KvDropped── tier     waits for it

Nothing that goes wrong here ends the worker: without a tier
everything is computed.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import zmq

from phloem.srt.ipc import Channel
from phloem.srt.models.base import KvAccess
from phloem.srt.tier.chain import BLOCK_TOKENS, KEY_BYTES
from phloem.srt.tier.errors import TierError
from phloem.srt.tier.fingerprint import FileState, fingerprint
from phloem.srt.tier.mover import Mover
from phloem.srt.tier.options import TierOptions
from phloem.srt.tier.segment import BlockFormat
from phloem.srt.tier.store import DiskStore
from phloem.srt.tier_messages import FromTier, StopTier, TierOff, TierReady, ToTier

log = logging.getLogger(__name__)


class TierThread:
    """One thread, started by `start`. `files` and `facts` are what the bits of `kv` depend on: see
    `phloem.srt.tier.fingerprint`. The scheduler binds `address`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        options: TierOptions,
        kv: KvAccess,
        files: Sequence[FileState],
        facts: Mapping[str, str | int],
    ) -> None:
        self._context = context
        self._address = address
        self._options = options
        self._kv = kv
        self._files = files
        self._facts = facts
        self._thread = threading.Thread(target=self._run, name="tier", daemon=True)
        self._opened = threading.Event()
        self._end = context.socket(zmq.PAIR)
        self._end_address = f"inproc://tier-end-{id(self):x}"
        self._end.bind(self._end_address)

    def start(self) -> None:
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Until the scheduler was told what there is, or `seconds` have passed."""
        self._opened.wait(seconds)

    def stop(self) -> None:
        """Let it write what was ordered, and wait for its end."""
        with suppress(zmq.Again):  # it ended by itself
            self._end.send(b"", zmq.NOBLOCK)
        self._thread.join()
        self._end.close(linger=0)

    def _run(self) -> None:
        channel: Channel[FromTier, ToTier] = Channel(self._context, self._address, ToTier)
        end = self._context.socket(zmq.PAIR)
        end.connect(self._end_address)
        with closing(channel), closing(end):
            try:
                self._keep(channel, end)
            except (TierError, OSError) as error:
                log.warning("no KV is kept on disk: %s", error)
                channel.send(TierOff(str(error)))
            except Exception as error:
                log.exception("no KV is kept on disk any more")
                channel.send(TierOff(f"{type(error).__name__}: {error}"))
            self._opened.set()

    def _keep(self, channel: Channel[FromTier, ToTier], end: zmq.Socket[bytes]) -> None:
        """Open the store and serve from it. Raises what makes that impossible."""
        root, limit = Path(self._options.folder), self._options.limit_bytes
        form = BlockFormat(
            fingerprint(self._files, self._facts, root), BLOCK_TOKENS * self._kv.kv_slot_bytes
        )
        with closing(DiskStore.open(root, form, limit)) as store:
            channel.send(
                TierReady(
                    block_tokens=BLOCK_TOKENS,
                    block_bytes=form.block_bytes,
                    limit_bytes=limit,
                    key_bytes=KEY_BYTES,
                    keys=b"".join(store.oldest_first()),
                )
            )
            self._opened.set()
            serve(channel, end, Mover(store, self._kv, channel.send))


def serve(channel: Channel[FromTier, ToTier], end: zmq.Socket[Any], mover: Mover) -> None:
    """Have orders done until `StopTier` or a message at `end`, and then those that are left."""
    poller = zmq.Poller()
    poller.register(channel.socket, zmq.POLLIN)
    poller.register(end, zmq.POLLIN)
    ending = False
    while not (ending and mover.idle):
        wait = None if mover.idle else math.ceil(mover.wait_seconds() * 1000)
        ready = dict(poller.poll(0 if ending else wait))
        if end in ready:
            end.recv()
            ending = True
        while (order := channel.recv(0)) is not None:
            if isinstance(order, StopTier):
                ending = True
            else:
                mover.take(order)
        mover.step(hurry=ending)
