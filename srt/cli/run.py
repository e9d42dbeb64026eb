"""`phloem run`"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Group, Parameter

from phloem.constrained.spec import Choice, Constraint, Ebnf, JsonObject, JsonSchema, Regex
from phloem.srt.cli.options import ConfigFile, EngineOptions
from phloem.srt.cli.outcome import CommandError, ExitCode, start_errors_told
from phloem.srt.cli.terminal import TerminalProgress, set_up_logging
from phloem.srt.generation import ChatMessage, GenerateRequest
from phloem.srt.messages import FinishReason, SamplingParams


@Parameter(name="*", group=Group("Answer", sort_key=-2))
@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How one answer is drawn."""

    system: str | None = None
    """System message before the prompt."""
    max_tokens: int = 512
    """Longest answer; an answer that reaches it ends with exit code 3."""
    temperature: float = 0.0
    """0 takes the likeliest token each time."""
    seed: int | None = None
    """Makes a drawn answer the same each time."""


@Parameter(name="*", group=Group("Constraint, at most one", sort_key=-1))
@dataclass(frozen=True, kw_only=True)
class ConstraintFlags:
    """What the answer must be."""

    json_schema: Path | None = None
    """File with a JSON schema that the answer satisfies."""
    json_object: bool = False
    """The answer is any JSON object."""
    regex: str | None = None
    """The answer matches this regular expression as a whole."""
    choice: tuple[str, ...] = ()
    """The answer is one of these; give it once for each."""
    ebnf: Path | None = None
    """File with a GBNF-style grammar of the answer; its rule `root` is the start."""

    def constraint(self) -> Constraint | None:
        """The one constraint that was asked for. Raises `CommandError` for two, or for a file
        that cannot be read."""
        given: list[Constraint] = []
        if self.json_schema is not None:
            given.append(JsonSchema(schema=_read_json(self.json_schema)))
        if self.json_object:
            given.append(JsonObject())
        if self.regex is not None:
            given.append(Regex(pattern=self.regex))
        if self.choice:
            given.append(Choice(choices=self.choice))
        if self.ebnf is not None:
            given.append(Ebnf(grammar=_read(self.ebnf)))
        if len(given) > 1:
            raise CommandError("an answer takes one constraint, not several", ExitCode.USAGE)
        return given[0] if given else None


def run(
    prompt: Annotated[str | None, Parameter(help="Read from stdin if absent.")] = None,
    /,
    *,
    answer: AnswerOptions | None = None,
    constraint: ConstraintFlags | None = None,
    options: EngineOptions | None = None,
    config: ConfigFile = None,
) -> int:
    """Answer one prompt: the answer on stdout, all else on stderr.

    Exit code: 0 for a whole answer, 3 for one that was cut at its greatest length, 1 for an error,
    2 if the command line or the constraint is at fault.
    """
    answer = answer or AnswerOptions()
    asked = (options or EngineOptions()).config()
    limit = (constraint or ConstraintFlags()).constraint()
    messages = [ChatMessage(role="user", content=_prompt(prompt))]
    if answer.system is not None:
        messages.insert(0, ChatMessage(role="system", content=answer.system))

    from phloem.srt.blocking import BlockingEngine

    set_up_logging(asked.log.log_level)
    with start_errors_told(), BlockingEngine(asked, progress=TerminalProgress()) as engine:
        request = GenerateRequest(
            prompt=engine.render_chat(messages),
            constraint=limit,
            sampling=SamplingParams(
                max_tokens=answer.max_tokens, temperature=answer.temperature, seed=answer.seed
            ),
        )
        finish = None
        for chunk in engine.stream(request):
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            finish = chunk.finish or finish
        print()
    if finish is not None and finish.reason is FinishReason.LENGTH:
        print(f"phloem: the answer was cut after {answer.max_tokens} tokens", file=sys.stderr)
        return ExitCode.CUT
    return ExitCode.OK


def _prompt(given: str | None) -> str:
    if given is not None:
        return given
    if sys.stdin.isatty():
        raise CommandError("no prompt: give one as an argument or on stdin", ExitCode.USAGE)
    return sys.stdin.read()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read {path}: {error}", ExitCode.USAGE) from error


def _read_json(path: Path) -> str:
    text = _read(path)
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise CommandError(f"{path} is not JSON: {error}", ExitCode.USAGE) from error
    return text
