"""`phloem quantize`"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cyclopts import Parameter

from phloem.srt.cli.outcome import CommandError, ExitCode, start_errors_told
from phloem.srt.cli.terminal import TerminalProgress, columns, megabytes, set_up_logging
from phloem.srt.hub import resolve_model

ElementType = Literal["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """What is written, and how it is judged."""

    type: ElementType
    """Element type of the weights. Norms and biases stay F32; matrices whose rows the type's blocks
    do not divide get the nearest type whose blocks do."""
    embedding_type: ElementType | None = None
    """Element type of the token embedding and the output; by default the same."""
    force: bool = False
    """Replace TARGET if it exists."""
    perplexity: Path | None = None
    """Text file to measure perplexity on, before and after; by default one that comes with
    phloem."""
    no_perplexity: bool = False
    """Measure nothing."""


def quantize(source: str, target: Path, /, *, options: QuantizeOptions) -> int:
    """Write a model as a GGUF file of another element type, and tell what it costs.

    SOURCE is a name that `phloem list` shows, a GGUF file or a checkpoint folder; TARGET is the
    file to write.
    """
    from phloem.srt.checkpoint import CheckpointError, open_checkpoint
    from phloem.srt.quantize import QuantizeError, check_target, convert

    text = _text(options)
    progress = TerminalProgress()
    set_up_logging("warning")
    model = resolve_model(source, progress)
    try:
        check_target(model.path, target, force=options.force)
        summary = convert(
            open_checkpoint(model.path),
            target,
            options.type,
            embedding_kind=options.embedding_type,
            force=options.force,
            progress=progress,
        )
    except (CheckpointError, QuantizeError) as error:
        raise CommandError(str(error)) from error
    for notice in summary.notices:
        progress.say(f"phloem: {notice}")
    rows = [(name, str(count), megabytes(size)) for name, (count, size) in summary.by_type.items()]
    print(columns([("TYPE", "TENSORS", "SIZE"), *rows]))
    bits = 8 * summary.bytes_after / summary.weights
    print(
        f"size {megabytes(summary.bytes_before)} → {megabytes(summary.bytes_after)} "
        f"({_change(summary.bytes_before, summary.bytes_after)}), {bits:.2f} bits a weight",
        flush=True,
    )
    if text is not None:
        _judge(model.path, target, text, progress)
    return ExitCode.OK


def _text(options: QuantizeOptions) -> str | None:
    """What to measure on, read before any work is done."""
    from phloem.srt.quantize import sample_text

    if options.no_perplexity:
        if options.perplexity is not None:
            raise CommandError(
                "--perplexity and --no-perplexity exclude each other", ExitCode.USAGE
            )
        return None
    if options.perplexity is None:
        return sample_text()
    try:
        return options.perplexity.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror
    except UnicodeDecodeError:
        reason = "it is not UTF-8"
    raise CommandError(f"cannot read {options.perplexity}: {reason}", ExitCode.USAGE)


def _judge(source: Path, target: Path, text: str, progress: TerminalProgress) -> None:
    from phloem.srt.quantize import QuantizeError, perplexity

    with start_errors_told():
        try:
            before, after = (
                asyncio.run(perplexity(path, text, progress)) for path in (source, target)
            )
        except QuantizeError as error:
            raise CommandError(f"perplexity: {error}") from error
    print(f"perplexity {before:.2f} → {after:.2f} ({_change(before, after)})")


def _change(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.1f} %"
