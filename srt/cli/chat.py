"""`phloem chat`"""

from __future__ import annotations

import importlib
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from phloem.srt.cli.options import ConfigFile, EngineOptions, ModelName, with_model
from phloem.srt.cli.outcome import ExitCode, start_errors_told
from phloem.srt.cli.run import AnswerOptions
from phloem.srt.cli.terminal import TerminalProgress, set_up_logging
from phloem.srt.errors import PhloemError
from phloem.srt.generation import ChatMessage, GenerateRequest
from phloem.srt.messages import FinishReason, SamplingParams

if TYPE_CHECKING:
    from phloem.srt.blocking import BlockingEngine

HELP = """\
/clear    forget the conversation
/exit     leave (Ctrl-D does, too)
Ctrl-C    stop the answer that is being written"""


class Conversation:
    """One chat: what was said, and the engine that answers.

    `write` gets the pieces of answers, `tell` the remarks about them.
    """

    def __init__(
        self,
        engine: BlockingEngine,
        answer: AnswerOptions,
        write: Callable[[str], object],
        tell: Callable[[str], object],
    ) -> None:
        self._engine = engine
        self._answer = answer
        self._write = write
        self._tell = tell
        self.messages: list[ChatMessage] = []
        self.clear()

    def clear(self) -> None:
        system = self._answer.system
        self.messages = [] if system is None else [ChatMessage(role="system", content=system)]

    def handle(self, line: str) -> bool:
        """Act on one line of the user's; False when it asks to leave."""
        match line.strip():
            case "":
                return True
            case "/exit" | "/quit" | "/bye":
                return False
            case "/clear":
                self.clear()
                self._tell("The conversation is forgotten.")
            case "/help" | "/?":
                self._tell(HELP)
            case command if command.startswith("/"):
                self._tell(f"There is no command {command.split()[0]}.\n{HELP}")
            case text:
                self._say(text)
        return True

    def _say(self, text: str) -> None:
        """Take the user's turn and write the answer; an error takes the turn back."""
        self.messages.append(ChatMessage(role="user", content=text))
        said: list[str] = []
        try:
            whole = self._stream(said)
        except KeyboardInterrupt:
            whole = False
        except PhloemError as error:
            if said:
                self._write("\n")
            self._tell(f"error: {error.message}")
            self.messages.pop()
            return
        if not whole:
            self._write("\n")
            self._tell("(interrupted)")
        self.messages.append(ChatMessage(role="assistant", content="".join(said)))

    def _stream(self, said: list[str]) -> bool:
        """Write the answer as it comes, and into `said`; False if Ctrl-C ended it."""
        rid = uuid.uuid4().hex
        stopped = False

        def stop() -> None:
            nonlocal stopped
            stopped = True
            # Ends the wait for the next chunk, which a long prompt may keep away for long.
            self._engine.loop.call_soon_threadsafe(self._engine.engine.abort, rid)

        with on_interrupt(stop):
            request = GenerateRequest(
                prompt=self._engine.render_chat(self.messages),
                rid=rid,
                sampling=SamplingParams(
                    max_tokens=self._answer.max_tokens,
                    temperature=self._answer.temperature,
                    seed=self._answer.seed,
                ),
            )
            for chunk in self._engine.stream(request):
                if stopped:
                    return False  # leaving the loop aborts a request that `stop` came too early for
                said.append(chunk.text)
                self._write(chunk.text)
                if chunk.finish is not None:
                    self._write("\n")
                    if chunk.finish.reason is FinishReason.LENGTH:
                        self._tell("(cut at its greatest length)")
        return True


@contextmanager
def on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C in the block calls `stop`; a second raises `KeyboardInterrupt`, as outside.

    The exception would land wherever the main thread is, also between handing work to the engine's
    loop and waiting for it: the work would go on and the request could not be closed. `stop` lets
    all that end in order. The second one is for an engine that does not answer.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def chat(
    model: ModelName = None,
    /,
    *,
    answer: AnswerOptions | None = None,
    options: EngineOptions | None = None,
    config: ConfigFile = None,
) -> int:
    """Talk with a model in the terminal.

    Ctrl-C stops an answer, /exit or Ctrl-D ends the chat, /clear begins anew.
    """
    from phloem.srt.blocking import BlockingEngine

    asked = with_model((options or EngineOptions()).config(), model)
    set_up_logging(asked.log.log_level)
    if sys.stdin.isatty():
        importlib.import_module("readline")  # gives `input` line editing and history
    with start_errors_told(), BlockingEngine(asked, progress=TerminalProgress()) as engine:
        _tell(f"{engine.engine.card.name}. /help tells the commands.")
        conversation = Conversation(engine, answer or AnswerOptions(), _write, _tell)
        while (line := _next_line()) is not None:
            if not conversation.handle(line):
                break
    return ExitCode.OK


def _next_line() -> str | None:
    """A line from the user; None at the end of input."""
    while True:
        try:
            return input(">>> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            _tell("\nCtrl-D or /exit leaves.")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
