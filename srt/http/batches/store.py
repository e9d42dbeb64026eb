"""The tables of files and batches. Everything is a tenant's own: another's does not exist."""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from msgspec import UNSET

from phloem.srt.database import Database
from phloem.srt.errors import Conflict, InvalidRequest, NotFound
from phloem.srt.http.batches.protocol import (
    BATCH_PURPOSE,
    OUTPUT_PURPOSE,
    UNFINISHED,
    Batch,
    BatchProblem,
    BatchProblems,
    FileObject,
    RequestCounts,
    Status,
)

_NAMES: Final = ", ".join(f"'{status}'" for status in UNFINISHED)
_UNFINISHED: Final = f"status IN ({_NAMES})"

_SCHEMA: Final = f"""
CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
    purpose TEXT NOT NULL, filename TEXT NOT NULL, bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER
);
CREATE INDEX IF NOT EXISTS files_of_tenant ON files (tenant, seq);
CREATE INDEX IF NOT EXISTS files_that_expire ON files (expires_at) WHERE expires_at IS NOT NULL;
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
    owner TEXT NOT NULL, model TEXT NOT NULL, status TEXT NOT NULL, endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, metadata TEXT,
    output_lifetime INTEGER, errors TEXT,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    output_file_id TEXT, error_file_id TEXT,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, in_progress_at INTEGER,
    finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER, expired_at INTEGER,
    cancelling_at INTEGER, cancelled_at INTEGER
);
CREATE INDEX IF NOT EXISTS batches_of_tenant ON batches (tenant, seq);
CREATE INDEX IF NOT EXISTS unfinished_batches ON batches (owner, seq)
    WHERE {_UNFINISHED};
"""

_THERE: Final = "(expires_at IS NULL OR expires_at > ?)"


@dataclass(frozen=True, kw_only=True)
class Page:
    """A part of a list: at most `limit` entries behind the one with the id `after`."""

    limit: int
    after: str | None
    newest_first: bool = True


class Task(NamedTuple):
    """What whoever runs a batch has to know of it."""

    id: str
    tenant: str
    status: Status
    endpoint: str
    input_file_id: str
    expires_at: int
    total: int


class Paths:
    """Where files are kept, below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = root / "files"
        self.uploads = root / "uploads"
        self.claims = root / "servers"
        self.database = root / "state.sqlite"

    def make(self) -> None:
        """Raises `OSError` when they cannot be had."""
        for folder in (self.root, self.files, self.uploads):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def file(self, file_id: str) -> Path:
        return self.files / file_id


def output_file_id(batch: str) -> str:
    return f"file-{batch.removeprefix('batch_')}-output"


def error_file_id(batch: str) -> str:
    return f"file-{batch.removeprefix('batch_')}-error"


def open_database(path: Path) -> Database:
    return Database(path, _SCHEMA)


# ------------------------------------------------------------------------------------------ files


def add_file(c: sqlite3.Connection, tenant: str, file: FileObject) -> None:
    c.execute(
        "INSERT INTO files (id, tenant, purpose, filename, bytes, created_at, expires_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            file.id,
            tenant,
            file.purpose,
            file.filename,
            file.bytes,
            file.created_at,
            None if file.expires_at is UNSET else file.expires_at,
        ),
    )


def get_file(
    c: sqlite3.Connection, tenant: str, file_id: str, *, param: str | None = None
) -> FileObject:
    """Raises `NotFound`."""
    row = c.execute(
        f"SELECT * FROM files WHERE tenant = ? AND id = ? AND {_THERE}",
        (tenant, file_id, int(time.time())),
    ).fetchone()
    if row is None:
        raise NotFound(f"There is no file {file_id!r}.", param=param, code="file_not_found")
    return _file(row)


def list_files(
    c: sqlite3.Connection, tenant: str, purpose: str | None, page: Page
) -> tuple[list[FileObject], bool]:
    """A page, and whether there is more. Raises `InvalidRequest` for an unknown `after`."""
    where, values = f"tenant = ? AND {_THERE}", [tenant, int(time.time())]
    if purpose is not None:
        where, values = f"{where} AND purpose = ?", [*values, purpose]
    rows = _page(c, "files", where, values, tenant, page)
    return [_file(row) for row in rows[: page.limit]], len(rows) > page.limit


def delete_file(c: sqlite3.Connection, tenant: str, file_id: str) -> None:
    """Raises `NotFound`, and `Conflict` while a batch reads it."""
    get_file(c, tenant, file_id)
    batch = c.execute(
        f"SELECT id FROM batches WHERE input_file_id = ? AND {_UNFINISHED}", (file_id,)
    ).fetchone()
    if batch is not None:
        raise Conflict(f"The batch {batch['id']!r} still reads the file.", code="file_in_use")
    c.execute("DELETE FROM files WHERE id = ?", (file_id,))


def delete_expired_files(c: sqlite3.Connection) -> list[str]:
    """The ids of files that are past their time and that no batch reads; they are forgotten."""
    return [
        row["id"]
        for row in c.execute(
            "DELETE FROM files WHERE expires_at <= ? AND id NOT IN"
            f" (SELECT input_file_id FROM batches WHERE {_UNFINISHED}) RETURNING id",
            (int(time.time()),),
        ).fetchall()
    ]


def known_files(c: sqlite3.Connection) -> set[str]:
    """The ids of all files, and of those that unfinished batches may be writing."""
    batches = [row["id"] for row in c.execute(f"SELECT id FROM batches WHERE {_UNFINISHED}")]
    written = [name(batch) for batch in batches for name in (output_file_id, error_file_id)]
    return {row["id"] for row in c.execute("SELECT id FROM files")}.union(written)


# ---------------------------------------------------------------------------------------- batches


@dataclass(frozen=True, kw_only=True)
class NewBatch:
    """`lifetime_s` is that of its output files; None: for ever."""

    tenant: str
    owner: str
    model: str
    endpoint: str
    input_file_id: str
    window: str
    window_s: int
    metadata: dict[str, str] | None
    lifetime_s: int | None


def add_batch(c: sqlite3.Connection, new: NewBatch) -> Batch:
    """Raises `NotFound` for an unknown file, `InvalidRequest` for one of another purpose."""
    file = get_file(c, new.tenant, new.input_file_id, param="input_file_id")
    if file.purpose != BATCH_PURPOSE:
        raise InvalidRequest(
            f"The file is for {file.purpose!r}, not for {BATCH_PURPOSE!r}.",
            param="input_file_id",
            code="invalid_value",
        )
    batch_id = f"batch_{uuid.uuid4().hex}"
    now = int(time.time())
    c.execute(
        "INSERT INTO batches (id, tenant, owner, model, status, endpoint, input_file_id,"
        " completion_window, metadata, output_lifetime, created_at, expires_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            batch_id,
            new.tenant,
            new.owner,
            new.model,
            Status.VALIDATING,
            new.endpoint,
            new.input_file_id,
            new.window,
            None if new.metadata is None else msgspec.json.encode(new.metadata).decode(),
            new.lifetime_s,
            now,
            now + new.window_s,
        ),
    )
    return get_batch(c, new.tenant, batch_id)


def get_batch(c: sqlite3.Connection, tenant: str, batch_id: str) -> Batch:
    """Raises `NotFound`."""
    row = c.execute(
        "SELECT * FROM batches WHERE tenant = ? AND id = ?", (tenant, batch_id)
    ).fetchone()
    if row is None:
        raise NotFound(f"There is no batch {batch_id!r}.", code="batch_not_found")
    return _batch(row)


def list_batches(c: sqlite3.Connection, tenant: str, page: Page) -> tuple[list[Batch], bool]:
    """As `list_files`."""
    rows = _page(c, "batches", "tenant = ?", [tenant], tenant, page)
    return [_batch(row) for row in rows[: page.limit]], len(rows) > page.limit


def cancel_batch(c: sqlite3.Connection, tenant: str, batch_id: str) -> Batch:
    """Raises `NotFound`, and `Conflict` when it is at its end, or as good as."""
    batch = get_batch(c, tenant, batch_id)
    if batch.status not in (Status.VALIDATING, Status.IN_PROGRESS, Status.CANCELLING):
        raise Conflict(
            f"A batch that is {batch.status} cannot be cancelled.", code="batch_not_cancellable"
        )
    _move(c, batch_id, Status.CANCELLING, (Status.VALIDATING, Status.IN_PROGRESS))
    return get_batch(c, tenant, batch_id)


def tasks(c: sqlite3.Connection, owner: str) -> list[Task]:
    """The unfinished batches of `owner`, oldest first."""
    rows = c.execute(
        "SELECT id, tenant, status, endpoint, input_file_id, expires_at, total FROM batches"
        f" WHERE owner = ? AND {_UNFINISHED} ORDER BY seq",
        (owner,),
    )
    return [Task(*row)._replace(status=Status(row["status"])) for row in rows]


def adopt(c: sqlite3.Connection, owner: str, model: str, living: Collection[str]) -> int:
    """Make unfinished batches of servers that are gone `owner`'s: those for `model`, and those
    that are past their time. Returns how many they were."""
    others = [*living, owner]
    marks = ",".join("?" * len(others))
    return c.execute(
        f"UPDATE batches SET owner = ? WHERE owner NOT IN ({marks}) AND {_UNFINISHED}"
        " AND (model = ? OR expires_at <= ?)",
        (owner, *others, model, int(time.time())),
    ).rowcount


def unfinished_of(c: sqlite3.Connection, servers: Collection[str]) -> int:
    """How many batches those servers have to run."""
    marks = ",".join("?" * len(servers))
    (count,) = c.execute(
        f"SELECT count(*) FROM batches WHERE owner IN ({marks}) AND {_UNFINISHED}", (*servers,)
    ).fetchone()
    return int(count)


def begin(c: sqlite3.Connection, batch_id: str, total: int) -> bool:
    """Its file is as it should be. False when it is no longer being validated."""
    c.execute("UPDATE batches SET total = ? WHERE id = ?", (total, batch_id))
    return _move(c, batch_id, Status.IN_PROGRESS, (Status.VALIDATING,))


def fail(c: sqlite3.Connection, batch_id: str, problems: Sequence[BatchProblem]) -> bool:
    """Its file is not as it should be. Returns as `begin`."""
    errors = msgspec.json.encode(problems).decode()
    c.execute("UPDATE batches SET errors = ? WHERE id = ?", (errors, batch_id))
    return _move(c, batch_id, Status.FAILED, (Status.VALIDATING,))


def count(c: sqlite3.Connection, batch_id: str, completed: int, failed: int) -> None:
    c.execute(
        "UPDATE batches SET completed = ?, failed = ? WHERE id = ?", (completed, failed, batch_id)
    )


def finalize(c: sqlite3.Connection, batch_id: str) -> bool:
    """All its requests are done. False when it is being cancelled."""
    return _move(c, batch_id, Status.FINALIZING, (Status.IN_PROGRESS, Status.FINALIZING))


def finish(c: sqlite3.Connection, batch_id: str, status: Status, sizes: tuple[int, int]) -> None:
    """It ended in `status`, with an output and an error file of those sizes; there is no file of
    nothing."""
    row = c.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
    now = int(time.time())
    lifetime = row["output_lifetime"]
    kinds = (("output", output_file_id(batch_id)), ("error", error_file_id(batch_id)))
    for (kind, file_id), size in zip(kinds, sizes, strict=True):
        if not size:
            continue
        file = FileObject(
            id=file_id,
            bytes=size,
            created_at=now,
            expires_at=UNSET if lifetime is None else now + lifetime,
            filename=f"{batch_id}_{kind}.jsonl",
            purpose=OUTPUT_PURPOSE,
        )
        add_file(c, row["tenant"], file)
        c.execute(f"UPDATE batches SET {kind}_file_id = ? WHERE id = ?", (file_id, batch_id))
    _move(c, batch_id, status, UNFINISHED)


def _move(c: sqlite3.Connection, batch_id: str, status: Status, before: Collection[Status]) -> bool:
    """Into `status`, from one of `before`, at this time; False when it was in none of them."""
    marks = ",".join("?" * len(before))
    return bool(
        c.execute(
            f"UPDATE batches SET status = ?, {status}_at = ? WHERE id = ? AND status IN ({marks})",
            (status, int(time.time()), batch_id, *before),
        ).rowcount
    )


# ------------------------------------------------------------------------------------------- rows


def _page(
    c: sqlite3.Connection, table: str, where: str, values: Sequence[object], tenant: str, page: Page
) -> list[sqlite3.Row]:
    """One row more than the page has, if there is one."""
    sign, order = ("<", "DESC") if page.newest_first else (">", "ASC")
    if page.after is not None:
        found = c.execute(
            f"SELECT seq FROM {table} WHERE tenant = ? AND id = ?", (tenant, page.after)
        ).fetchone()
        if found is None:
            raise InvalidRequest(
                f"There is no {page.after!r} in the list.", param="after", code="invalid_value"
            )
        where, values = f"{where} AND seq {sign} ?", [*values, found["seq"]]
    return c.execute(
        f"SELECT * FROM {table} WHERE {where} ORDER BY seq {order} LIMIT ?",
        (*values, page.limit + 1),
    ).fetchall()


def _file(row: sqlite3.Row) -> FileObject:
    return FileObject(
        id=row["id"],
        bytes=row["bytes"],
        created_at=row["created_at"],
        expires_at=UNSET if row["expires_at"] is None else row["expires_at"],
        filename=row["filename"],
        purpose=row["purpose"],
    )


_KEPT: Final = (
    "id",
    "endpoint",
    "model",
    "input_file_id",
    "completion_window",
    "output_file_id",
    "error_file_id",
    *(name for name in Batch.__struct_fields__ if name.endswith("_at")),
)


def _batch(row: sqlite3.Row) -> Batch:
    errors, metadata = row["errors"], row["metadata"]
    return Batch(
        **{name: row[name] for name in _KEPT},
        status=Status(row["status"]),
        request_counts=RequestCounts(
            total=row["total"], completed=row["completed"], failed=row["failed"]
        ),
        errors=None
        if errors is None
        else BatchProblems(data=msgspec.json.decode(errors, type=list[BatchProblem])),
        metadata=None if metadata is None else msgspec.json.decode(metadata, type=dict[str, str]),
    )
