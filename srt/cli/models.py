"""`phloem pull`, `list`, `show` and `rm`"""

from __future__ import annotations

import sys

from phloem.srt.cli.outcome import ExitCode
from phloem.srt.cli.terminal import TerminalProgress, columns, megabytes
from phloem.srt.hub import CATALOGUE, LocalModel, list_models
from phloem.srt.hub import pull as pull_model
from phloem.srt.hub import remove as remove_model
from phloem.srt.hub import show as show_model


def pull(model: str, /) -> int:
    """Fetch a model into the local store, or mend it there.

    MODEL is a name that `phloem list` shows, or ORG/NAME[:FILE.gguf] on Hugging Face.
    """
    found = pull_model(model, TerminalProgress())
    print(f"{found.name}: {megabytes(found.size)}, licence {found.license}, from {found.source}")
    _tell_if_blocked(found)
    return ExitCode.OK


def list_() -> int:
    """List the models on this machine, and the names that can be pulled."""
    stored = list_models()
    rows = [(m.name, megabytes(m.size), m.license, _note(m.blocked)) for m in stored]
    here = {model.name for model in stored}
    rows += [
        (
            entry.name,
            megabytes(entry.size),
            entry.license,
            "not pulled" + _note(entry.blocked, "; "),
        )
        for entry in CATALOGUE.values()
        if entry.name not in here
    ]
    print(columns([("NAME", "SIZE", "LICENCE", "NOTE"), *rows]))
    return ExitCode.OK


def show(model: str, /) -> int:
    """Show a model's files, source and licence, and check their hashes.

    MODEL is a name that `phloem list` shows, or a path. Exit code 1 if a file is damaged.
    """
    details = show_model(model, TerminalProgress())
    found = details.model
    rows = [
        ("name", found.name),
        ("path", str(found.path)),
        ("source", found.source),
        ("licence", found.license),
        ("size", f"{found.size:,} bytes"),
    ]
    rows += [("file", f"{name}  {size:,} bytes  sha256 {sha}") for name, size, sha in details.files]
    rows += _inside(found) if not details.problems else []
    print(columns(rows))
    _tell_if_blocked(found)
    for problem in details.problems:
        print(f"phloem: damaged: {problem}", file=sys.stderr)
    if details.problems:
        print(f"`phloem pull {found.name}` fetches it again", file=sys.stderr)
        return ExitCode.FAILED
    return ExitCode.OK


def rm(model: str, /) -> int:
    """Remove a model from the local store."""
    freed = remove_model(model)
    print(f"{model} is removed: {megabytes(freed)} freed")
    return ExitCode.OK


def _inside(model: LocalModel) -> list[tuple[str, str]]:
    """What the checkpoint says of itself, or why it cannot be opened."""
    from phloem.srt.checkpoint import CheckpointError, open_checkpoint

    try:
        checkpoint = open_checkpoint(model.path)
    except CheckpointError as error:
        return [("servable", f"no: {error.reason}")]
    config = checkpoint.config
    return [
        ("format", checkpoint.format),
        ("model", f"{config.architecture}, {config.num_layers} layers, {config.hidden_size} wide"),
        ("context", f"{config.context_length:,} tokens"),
    ]


def _tell_if_blocked(model: LocalModel) -> None:
    if model.blocked is not None:
        print(f"phloem: {model.name}: {model.blocked}", file=sys.stderr)


def _note(blocked: str | None, lead: str = "") -> str:
    return f"{lead}{blocked}" if blocked is not None else ""
