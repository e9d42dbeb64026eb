"""The responses that clients come back for: who asked what, what came of it, and what it continued.

Each has the items of its own input and output, and the id of the response that it continues; a
conversation is read along these ids. Everything is a tenant's own. What was used longest ago goes
first when there is too much; reading a conversation counts as use of all of it. Several servers may
have one store: `server` names the one that a response is running on.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from phloem.srt.database import Database
from phloem.srt.errors import InvalidRequest, NotFound
from phloem.srt.http.claim import Claim
from phloem.srt.http.responses.items import Item, OutputItem
from phloem.srt.http.responses.replies import UNFINISHED, Response, ResponseError

MAX_RESPONSES: Final = 10_000
MAX_BYTES: Final = 256 << 20
"""Bounds of one store. What is running is never dropped."""

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    previous TEXT,
    used INTEGER NOT NULL,
    server TEXT,
    size INTEGER NOT NULL,
    body BLOB NOT NULL,
    events BLOB,
    UNIQUE (tenant, id)
);
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used);
CREATE TABLE IF NOT EXISTS items (
    response INTEGER NOT NULL,
    output INTEGER NOT NULL,
    position INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (response, output, position)
);
CREATE INDEX IF NOT EXISTS items_by_id ON items (tenant, id);
"""
_CHAIN: Final = """
WITH RECURSIVE chain (number, previous, server, depth) AS (
    SELECT number, previous, server, 0 FROM responses WHERE tenant = :tenant AND id = :id
    UNION ALL
    SELECT r.number, r.previous, r.server, depth + 1 FROM responses r JOIN chain c
    ON r.tenant = :tenant AND r.id = c.previous
)
SELECT number, previous, server FROM chain ORDER BY depth DESC
"""
_NEXT_USE: Final = "(SELECT coalesce(max(used), 0) + 1 FROM responses)"

_encoder = msgspec.json.Encoder()
_response_decoder = msgspec.json.Decoder(Response)
_item_decoder: msgspec.json.Decoder[Item] = msgspec.json.Decoder(Item)
_output_decoder: msgspec.json.Decoder[OutputItem] = msgspec.json.Decoder(OutputItem)
_events_decoder = msgspec.json.Decoder(list[msgspec.Raw])


class ResponseStore:
    """Opened with its first use. `path` None keeps all in memory."""

    def __init__(
        self, path: Path | None, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES
    ) -> None:
        self._path = path
        self._limits = max_responses, max_bytes
        self._database: Database | None = None
        self._claim = None if path is None else Claim(path.with_suffix(".servers"))
        self._opening = asyncio.Lock()

    async def close(self) -> None:
        if self._database is not None:
            await self._database.close()
            if self._claim is not None:
                await asyncio.to_thread(self._claim.close)

    async def save(
        self,
        tenant: str,
        response: Response,
        sent: Sequence[Item],
        *,
        events: Sequence[bytes] | None = None,
    ) -> None:
        """Write a response, whose own input is `sent`, or write it again. `events`, as JSON, are
        those of its stream, where it may be streamed once more."""
        database = await self._opened()
        own = "" if self._claim is None else self._claim.id
        server = own if response.status in UNFINISHED else None

        def write(connection: sqlite3.Connection) -> None:
            _save(connection, tenant, response, sent, events, server)
            _bound(connection, *self._limits)

        await database.run(write)

    async def get(self, tenant: str, id_: str) -> Response:
        """Raises `NotFound`."""
        database = await self._opened()
        return await database.run(lambda c: _get(c, tenant, id_))

    async def events(self, tenant: str, id_: str) -> list[bytes] | None:
        """The events of its stream; None where they were not kept. Raises `NotFound`."""
        database = await self._opened()
        data: bytes | None = await database.run(lambda c: _row(c, tenant, id_)["events"])
        return None if data is None else [bytes(event) for event in _events_decoder.decode(data)]

    async def delete(self, tenant: str, id_: str) -> None:
        """Raises `NotFound`."""
        database = await self._opened()
        await database.run(lambda c: _drop(c, [_row(c, tenant, id_)["number"]]))

    async def conversation(self, tenant: str, id_: str) -> list[Item]:
        """All that was said up to the end of a response: the input to go on with. Raises
        `InvalidRequest` when it, or one that it continues, is not there, or is still running."""
        database = await self._opened()
        return await database.run(lambda c: _conversation(c, tenant, id_))

    async def input_items(self, tenant: str, id_: str) -> list[Item]:
        """All that a response was given: what was said before, and its own input. Raises as
        `conversation` does, and `NotFound`."""
        database = await self._opened()

        def read(connection: sqlite3.Connection) -> list[Item]:
            row = _row(connection, tenant, id_)
            before = (
                []
                if row["previous"] is None
                else _conversation(connection, tenant, row["previous"])
            )
            return [*before, *_items(connection, row["number"], outputs=(0,))]

        return await database.run(read)

    async def item(self, tenant: str, id_: str) -> Item | None:
        """The newest item with an id, if there is one."""
        database = await self._opened()
        select = "SELECT body FROM items WHERE tenant = ? AND id = ? ORDER BY response DESC LIMIT 1"
        row = await database.run(lambda c: c.execute(select, (tenant, id_)).fetchone())
        return None if row is None else _item_decoder.decode(row["body"])

    async def _opened(self) -> Database:
        async with self._opening:
            if self._database is None:
                living: set[str] = set()
                if self._claim is not None:
                    await asyncio.to_thread(self._claim.open, _nothing)
                    living = await asyncio.to_thread(self._claim.others)
                database = Database(self._path, _SCHEMA)
                await database.__aenter__()
                await database.run(lambda c: _fail_interrupted(c, living))
                self._database = database
        return self._database


def _nothing() -> None:
    """Being the only server changes nothing."""


def _fail_interrupted(connection: sqlite3.Connection, living: set[str]) -> None:
    """What was running when its server ended will never be finished: say so."""
    select = "SELECT number, server, body FROM responses WHERE server IS NOT NULL"
    for row in connection.execute(select).fetchall():
        if row["server"] in living:
            continue
        error = ResponseError(
            code="server_error", message="The server was restarted before this response was ready."
        )
        response = msgspec.structs.replace(
            _response_decoder.decode(row["body"]), status="failed", error=error
        )
        connection.execute(
            "UPDATE responses SET server = NULL, body = ? WHERE number = ?",
            (_encoder.encode(response), row["number"]),
        )


def _save(
    connection: sqlite3.Connection,
    tenant: str,
    response: Response,
    sent: Sequence[Item],
    events: Sequence[bytes] | None,
    server: str | None,
) -> None:
    body = _encoder.encode(msgspec.structs.replace(response, output=[]))
    log = None if events is None else b"[" + b",".join(events) + b"]"
    items = [
        (int(output), position, tenant, item.id, _encoder.encode(item))
        for output, list_ in ((False, sent), (True, response.output))
        for position, item in enumerate(list_)
    ]
    size = len(body) + len(log or b"") + sum(len(item[-1]) for item in items)
    old = connection.execute(
        "SELECT number FROM responses WHERE tenant = ? AND id = ?", (tenant, response.id)
    ).fetchone()
    if old is not None:
        _drop(connection, [old["number"]])
    number = connection.execute(
        "INSERT INTO responses (tenant, id, previous, used, server, size, body, events) "
        f"VALUES (?, ?, ?, {_NEXT_USE}, ?, ?, ?, ?)",
        (
            tenant,
            response.id,
            response.previous_response_id,
            server,
            size,
            body,
            log,
        ),
    ).lastrowid
    connection.executemany(
        "INSERT INTO items (response, output, position, tenant, id, body) "
        "VALUES (?, ?, ?, ?, ?, ?)",
        [(number, *item) for item in items],
    )


def _bound(connection: sqlite3.Connection, max_responses: int, max_bytes: int) -> None:
    count, size = connection.execute(
        "SELECT count(*), coalesce(sum(size), 0) FROM responses"
    ).fetchone()
    gone: list[int] = []
    oldest = connection.execute(
        "SELECT number, size FROM responses WHERE server IS NULL ORDER BY used"
    )
    while count > max_responses or size > max_bytes:
        row = oldest.fetchone()
        if row is None:
            break
        gone.append(row["number"])
        count, size = count - 1, size - row["size"]
    oldest.close()
    _drop(connection, gone)


def _drop(connection: sqlite3.Connection, numbers: Iterable[int]) -> None:
    for number in numbers:
        connection.execute("DELETE FROM items WHERE response = ?", (number,))
        connection.execute("DELETE FROM responses WHERE number = ?", (number,))


def _get(connection: sqlite3.Connection, tenant: str, id_: str) -> Response:
    row = _row(connection, tenant, id_)
    rows = connection.execute(
        "SELECT body FROM items WHERE response = ? AND output ORDER BY position", (row["number"],)
    )
    output = [_output_decoder.decode(one["body"]) for one in rows]
    return msgspec.structs.replace(_response_decoder.decode(row["body"]), output=output)


def _row(connection: sqlite3.Connection, tenant: str, id_: str) -> sqlite3.Row:
    row: sqlite3.Row | None = connection.execute(
        "SELECT * FROM responses WHERE tenant = ? AND id = ?", (tenant, id_)
    ).fetchone()
    if row is None:
        raise not_found(id_)
    return row


def _conversation(connection: sqlite3.Connection, tenant: str, id_: str) -> list[Item]:
    chain = connection.execute(_CHAIN, {"tenant": tenant, "id": id_}).fetchall()
    if not chain or chain[0]["previous"] is not None:
        lost = chain[0]["previous"] if chain else id_
        raise InvalidRequest(
            f"The response {lost!r} is not stored (any more).",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if chain[-1]["server"] is not None:
        raise InvalidRequest(
            f"The response {id_!r} is still running.",
            param="previous_response_id",
            code="previous_response_running",
        )
    numbers = [row["number"] for row in chain]
    connection.executemany(
        f"UPDATE responses SET used = {_NEXT_USE} WHERE number = ?",
        [(number,) for number in numbers],
    )
    return [item for number in numbers for item in _items(connection, number, outputs=(0, 1))]


def _items(connection: sqlite3.Connection, number: int, outputs: tuple[int, ...]) -> list[Item]:
    rows = connection.execute(
        "SELECT output, body FROM items WHERE response = ? ORDER BY output, position", (number,)
    )
    return [_item_decoder.decode(row["body"]) for row in rows if row["output"] in outputs]


def not_found(id_: str) -> NotFound:
    return NotFound(
        f"There is no response {id_!r}.", param="response_id", code="response_not_found"
    )
