"""Files, batches and the lines of both, as structs.

OpenAI's API reference: Files (`/v1/files`), Batch (`/v1/batches`), and "The request input object",
"The request output object" below the latter.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

MAX_PAGE: Final = 10_000
DEFAULT_BATCH_PAGE: Final = 20

UploadPurpose = Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]
"""What a client may say a file is for. Only `batch` means something to this server."""

BATCH_PURPOSE: Final = "batch"
OUTPUT_PURPOSE: Final = "batch_output"

Lifetime = Annotated[int, Meta(ge=3600, le=2_592_000)]


class ExpiresAfter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`seconds` after its creation a file is deleted."""

    anchor: Literal["created_at"]
    seconds: Lifetime


class UploadForm(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `POST /v1/files`, as `multipart/form-data`."""

    file: bytes
    purpose: UploadPurpose
    expires_after_anchor: Literal["created_at"] | UnsetType = msgspec.field(
        name="expires_after[anchor]", default=UNSET
    )
    expires_after_seconds: Lifetime | UnsetType = msgspec.field(
        name="expires_after[seconds]", default=UNSET
    )


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | UnsetType = UNSET
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class FileQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    purpose: str | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = MAX_PAGE
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"


class Status(StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


UNFINISHED: Final = (
    Status.VALIDATING,
    Status.IN_PROGRESS,
    Status.FINALIZING,
    Status.CANCELLING,
)

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/batches`. `completion_window` is a number of seconds, minutes, hours or days."""

    input_file_id: str
    endpoint: str
    completion_window: Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,6}[smhd]\Z")]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch failed. `line` counts from 1; None when it is the file as a whole."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchProblems(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchProblem]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """`failed` requests are those in the error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str
    errors: BatchProblems | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=100)] = DEFAULT_BATCH_PAGE
    after: str | None = None


class InputLine(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a batch."""

    custom_id: str
    method: str
    url: str
    body: Raw


class LineResponse(msgspec.Struct, frozen=True, kw_only=True):
    status_code: int
    request_id: str
    body: Raw


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str


class OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request. `error` says why there is no `response`."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineError | None = None
