"""From an open checkpoint to a GGUF file of another type."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from phloem.srt.checkpoint import Checkpoint
from phloem.srt.hub import SILENT, Progress
from phloem.srt.quantize.errors import QuantizeError
from phloem.srt.quantize.from_folder import from_folder
from phloem.srt.quantize.from_gguf import from_gguf
from phloem.srt.quantize.plan import notices, plan
from phloem.srt.quantize.writing import write


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What was written: tensors and their bytes by type, the most first; the bytes of all tensors
    before and after; how many weights there are; what the user should know."""

    by_type: dict[str, tuple[int, int]]
    bytes_before: int
    bytes_after: int
    weights: int
    notices: tuple[str, ...]


def check_target(source: Path, target: Path, *, force: bool) -> None:
    """Raise `QuantizeError` unless `target` may be written, cheaply and before any work."""
    if target.suffix != ".gguf":
        raise QuantizeError(f"{target} is no name for a GGUF file: it must end in .gguf")
    if not target.parent.is_dir():
        raise QuantizeError(f"cannot write {target}: there is no folder {target.parent}")
    if not target.exists():
        return
    if target.samefile(source):
        raise QuantizeError(f"{target} is the source itself")
    if not target.is_file():
        raise QuantizeError(f"cannot write {target}: it is no file")
    if not force:
        raise QuantizeError(f"{target} exists; --force replaces it")


def convert(
    checkpoint: Checkpoint,
    target: Path,
    kind: str,
    *,
    embedding_kind: str | None = None,
    force: bool = False,
    progress: Progress = SILENT,
) -> Summary:
    """Write the model to `target` with its matrices in type `kind` (see `encode.TYPES`), token
    embedding and output in `embedding_kind` if that is given.

    Raises:
        QuantizeError: it cannot be done; the message says why. `target` is then as it was.
        CheckpointError: the source is damaged.
    """
    check_target(checkpoint.path, target, force=force)
    source = from_folder(checkpoint) if checkpoint.path.is_dir() else from_gguf(checkpoint)
    embedding = embedding_kind or kind
    targets = plan(source.tensors, kind, embedding)
    said = notices(targets, kind, embedding)
    total = sum(t.nbytes for t in targets)
    with progress.bar(f"writing {target.name}", total) as done:
        said += write(source, targets, kind, target, on_bytes=done)
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for t in targets:
        sizes[t.block.name] += t.nbytes
        counts[t.block.name] += 1
    return Summary(
        by_type={name: (counts[name], size) for name, size in sizes.most_common()},
        bytes_before=sum(t.tensor.data.nbytes for t in targets),
        bytes_after=total,
        weights=sum(t.tensor.elements for t in targets),
        notices=tuple(said),
    )
