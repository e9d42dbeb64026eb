"""The `phloem` command: its commands, and how what they raise becomes an exit code.

Only light modules are imported here; what computes is imported by the command that needs it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from cyclopts import App, Parameter

from phloem.srt.cli.batch import batch
from phloem.srt.cli.bench import bench
from phloem.srt.cli.chat import chat
from phloem.srt.cli.doctor import doctor
from phloem.srt.cli.models import list_, pull, rm, show
from phloem.srt.cli.outcome import CommandError, ExitCode
from phloem.srt.cli.quantize import quantize
from phloem.srt.cli.replay import replay
from phloem.srt.cli.run import run
from phloem.srt.cli.serve import serve
from phloem.srt.cli.settings import Settings
from phloem.srt.cli.trace import trace
from phloem.srt.errors import InvalidConstraint, PhloemError


def make_app() -> App:
    """The parser with every command, in the order of the help."""
    app = App(
        name="phloem",
        help="Serve language models whose output keeps to a schema.",
        version=lambda: version("phloem"),
        config=(Settings(),),
        default_parameter=Parameter(negative="", allow_repeating=True),
        result_action="return_value",
    )
    commands: dict[str, Callable[..., int]] = {
        "serve": serve,
        "run": run,
        "chat": chat,
        "batch": batch,
        "pull": pull,
        "list": list_,
        "show": show,
        "rm": rm,
        "quantize": quantize,
        "bench": bench,
        "trace": trace,
        "replay": replay,
        "doctor": doctor,
    }
    for position, (name, command) in enumerate(commands.items(), 1):
        app.command(command, name=name, sort_key=position)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. A usage error ends in `SystemExit(2)`."""
    try:
        code = make_app()(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except CommandError as error:
        return _fail(str(error), error.code)
    except PhloemError as error:
        usage = isinstance(error, InvalidConstraint)
        return _fail(error.message, ExitCode.USAGE if usage else ExitCode.FAILED)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader left. Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    return int(code or ExitCode.OK)


def _fail(message: str, code: ExitCode) -> int:
    print(f"phloem: {message}", file=sys.stderr)
    return code
