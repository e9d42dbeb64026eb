"""How a command ends: its exit code, and the one line on stderr when it failed."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager


class ExitCode(enum.IntEnum):
    """Exit codes of every command. The parser itself ends with `USAGE`, too."""

    OK = 0
    FAILED = 1
    USAGE = 2
    """The command line, the configuration, or a constraint is at fault."""
    CUT = 3
    """The answer reached `--max-tokens` or the end of the context."""
    INTERRUPTED = 130
    """Ctrl-C, as shells count it."""


class CommandError(Exception):
    """A command cannot go on; the message is for the user."""

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def start_errors_told() -> Iterator[None]:
    """Turn what a start of the engine raises, beyond `PhloemError`, into `CommandError`."""
    from phloem.srt.checkpoint.errors import CheckpointError
    from phloem.srt.engine import StartupError

    try:
        yield
    except (CheckpointError, StartupError) as error:
        raise CommandError(str(error)) from error
