"""The text of a state: an immutable sequence of events, some of which are still being generated.

A prompt is never copied to fork: two states share one and go on separately. A call depends on
exactly the variables in its own prompt, so independent calls of one program run at once, and an
error reaches what builds on it and nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from phloem.lang.backend import base
from phloem.lang.errors import UsageError
from phloem.lang.ir import RoleName
from phloem.lang.variable import Variable


@dataclass(frozen=True, slots=True)
class Begin:
    """A message of `role` opens."""

    role: RoleName


@dataclass(frozen=True, slots=True)
class End:
    """The open message closes."""


Event = str | Variable | Begin | End


@dataclass(frozen=True, slots=True)
class Prompt:
    """Events so far, and the role of the open message. Methods return a new prompt, or raise
    `UsageError` when the event cannot come here. A message of the same role inside of the open one
    is a part of it; `inner` counts those that are open."""

    events: tuple[Event, ...] = ()
    role: RoleName | None = None
    chat: bool = False
    inner: int = 0

    def with_text(self, text: str) -> Prompt:
        if not text:
            return self
        self.check_place("text", text[:40])
        return self._and(text)

    def check_call(self) -> None:
        """Raise unless the model can go on from here."""
        self.check_place("gen or select")
        if self.chat and self.role != "assistant":
            raise UsageError(
                f"the model speaks as the assistant: put gen or select into assistant(…), "
                f"not into {self.role}(…)"
            )

    def check_place(self, what: str, sample: str | None = None) -> None:
        """Raise unless text can come here."""
        if self.chat and self.role is None:
            shown = "" if sample is None else f" {sample!r}"
            raise UsageError(
                f"{what}{shown} outside of any message: in a chat, put it into system(…), user(…) "
                "or assistant(…)"
            )

    def with_variable(self, variable: Variable) -> Prompt:
        return self._and(variable)

    def _and(self, event: Event) -> Prompt:
        return Prompt((*self.events, event), self.role, self.chat, self.inner)

    def begin(self, role: RoleName) -> Prompt:
        if self.role == role:
            return replace(self, inner=self.inner + 1)
        if self.role is not None:
            raise UsageError(f"{role}(…) inside {self.role}(…): messages do not nest")
        if self.events and not self.chat:
            raise UsageError(
                f"{role}(…) after plain text: a program is either a chat, all of whose text is in "
                "system(…), user(…) and assistant(…), or plain text without roles"
            )
        return Prompt((*self.events, Begin(role)), role, chat=True)

    def end(self, role: RoleName | None = None) -> Prompt:
        """The open message ends; with `role`, it must be one of that role."""
        if self.role is None or role not in (None, self.role):
            raise UsageError(f"no {role or ''} message is open".replace("  ", " "))
        if self.inner:
            return replace(self, inner=self.inner - 1)
        return Prompt((*self.events, End()), None, chat=True)

    def extended(self, events: Sequence[Event]) -> Prompt:
        """All of `events` appended, each checked as if it came from the program."""
        prompt = self
        for event in events:
            match event:
                case str():
                    prompt = prompt.with_text(event)
                case Variable():
                    prompt.check_place("a variable")
                    prompt = prompt.with_variable(event)
                case Begin(role):
                    prompt = prompt.begin(role)
                case End():
                    prompt = prompt.end()
        return prompt

    async def resolve(self) -> base.Prompt:
        """What a backend gets. Waits for every variable in it, and raises the first error."""
        for event in self.events:
            if isinstance(event, Variable):
                await event.wait()
        if not self.chat:
            return base.TextPrompt(self.text())
        closed, partial = self._messages()
        return base.ChatPrompt(tuple(closed), partial or "")

    def constant(self) -> base.Prompt | None:
        """What a backend could get before the first variable has a value; None for nothing. Of a
        chat, closed messages and the assistant's open one."""
        known = takewhile(lambda event: not isinstance(event, Variable), self.events)
        prompt = Prompt().extended(list(known))
        if not prompt.chat:
            return base.TextPrompt(prompt.text()) if prompt.events else None
        closed, partial = prompt._messages()
        begun = (partial or "") if prompt.role == "assistant" else ""
        return base.ChatPrompt(tuple(closed), begun) if closed else None

    def messages(self) -> list[base.Message]:
        """The messages of a chat, an open one included as far as it got; [] for plain text."""
        closed, partial = self._messages()
        if self.role is not None and partial is not None:
            closed.append(base.Message(self.role, partial))
        return closed

    def text(self) -> str:
        """All text; of a chat, a transcript for reading. Blocks for what is still generated."""
        return "".join(self.pieces())

    def pieces(self) -> Iterator[str]:
        """`text` piece by piece, as the model makes it."""
        for i, event in enumerate(self.events):
            if isinstance(event, Variable):
                yield from event.text_iter()
            elif shown := transcript(event, first=i == 0):
                yield shown

    async def pieces_async(self) -> AsyncIterator[str]:
        """The same on an event loop."""
        for i, event in enumerate(self.events):
            if isinstance(event, Variable):
                async for piece in event.text_async_iter():
                    yield piece
            elif shown := transcript(event, first=i == 0):
                yield shown

    def _messages(self) -> tuple[list[base.Message], str | None]:
        closed: list[base.Message] = []
        role = ""
        content: list[str] = []
        is_open = False
        for event in self.events:
            match event:
                case Begin(begun):
                    role, content, is_open = begun, [], True
                case End():
                    closed.append(base.Message(role, "".join(content)))
                    is_open = False
                case Variable():
                    content.append(event.text())
                case str():
                    content.append(event)
        return closed, "".join(content) if is_open else None


def transcript(event: str | Begin | End, *, first: bool) -> str:
    """How an event reads in a transcript."""
    match event:
        case str():
            return event
        case Begin(role):
            return f"{role}: " if first else f"\n{role}: "
        case End():
            return ""
