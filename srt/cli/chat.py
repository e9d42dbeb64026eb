"""`phloem chat`"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
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
            self._stream(said)
        except KeyboardInterrupt:
            self._write("\n")
            self._tell("(interrupted)")
        except PhloemError as error:
            if said:
                self._write("\n")
            self._tell(f"error: {error.message}")
            self.messages.pop()
            return
        self.messages.append(ChatMessage(role="assistant", content="".join(said)))

    def _stream(self, said: list[str]) -> None:
        request = GenerateRequest(
            prompt=self._engine.render_chat(self.messages),
            sampling=SamplingParams(
                max_tokens=self._answer.max_tokens,
                temperature=self._answer.temperature,
                seed=self._answer.seed,
            ),
        )
        for chunk in self._engine.stream(request):
            said.append(chunk.text)
            self._write(chunk.text)
            if chunk.finish is not None:
                self._write("\n")
                if chunk.finish.reason is FinishReason.LENGTH:
                    self._tell("(cut at its greatest length)")


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
