"""Synthetic traces: the workloads of the RadixAttention paper (Zheng et al. 2024, section 6), and a
heavy tail of cold requests. Pure: a kind and a seed give the same requests on any machine.

    few-shot          5-shot questions of 24 subjects, one token answered (MMLU)
    select            20-shot header, question, four continuations to score (HellaSwag)
    chat, chat-long   four turns each, with short and with long answers
    agents            ReAct: a tool header, then thought and observation, step by step
    tree-of-thought   each problem branches three ways, three levels deep
    judge             branch, solve, merge: an essay judged in parallel, then summed up
    self-consistency  eight samples of each prompt at once (n = 8)
    system-prompt     one long system prompt, many short questions
    rag               one instruction, three passages out of a popular few, a question
    mixed             some of each of these together
    heavy-tail        shared-prefix groups of unequal popularity, and now and then a cold request
                      whose length has a heavy tail (Pareto, exponent 1.1)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from phloem.srt.scheduler.trace import Segments, TraceRequest


@dataclass
class Builder:
    """Requests of one trace so far, in groups (programs) that arrive on their own."""

    rng: random.Random
    programs: list[list[TraceRequest]] = field(default_factory=list)

    def program(self) -> None:
        """What is asked from now on belongs to a new program."""
        self.programs.append([])

    def ask(
        self, prompt: Segments, output: int, after: Sequence[TraceRequest] = ()
    ) -> TraceRequest:
        """One more call of the program."""
        number = len(self.programs) - 1
        calls = self.programs[-1]
        request = TraceRequest(
            id=f"{number}.{len(calls)}",
            after=[other.id for other in after],
            prompt=prompt,
            output=output,
            program=str(number),
        )
        calls.append(request)
        return request

    def part(self, name: str, low: int, high: int) -> tuple[str, int]:
        """A segment of its own in this program, of `low` to `high` tokens."""
        return f"{name} {len(self.programs) - 1}", self.rng.randint(low, high)

    def requests(self) -> list[TraceRequest]:
        """All, programs in a random order."""
        self.rng.shuffle(self.programs)
        return [request for program in self.programs for request in program]


def _answer(request: TraceRequest) -> tuple[str, int]:
    assert isinstance(request.output, int)
    return f"output of {request.id}", request.output


def few_shot(b: Builder, scale: float = 1.0) -> None:
    headers = [(f"subject {i}", b.rng.randint(350, 700)) for i in range(24)]
    for header in headers:
        for _ in range(round(16 * scale)):
            b.program()
            b.ask([header, b.part("question", 40, 110)], 1)


def select(b: Builder, scale: float = 1.0) -> None:
    for _ in range(round(120 * scale)):
        b.program()
        question: Segments = [("twenty shots", 1500), b.part("question", 50, 100)]
        for choice in range(4):
            b.ask([*question, b.part(f"choice {choice}", 8, 24)], 0)


def chat(b: Builder, scale: float = 1.0, answer: tuple[int, int] = (4, 8)) -> None:
    for _ in range(round(64 * scale)):
        b.program()
        prompt: Segments = []
        last: list[TraceRequest] = []
        for turn in range(4):
            prompt = [*prompt, b.part(f"turn {turn}", 256, 512)]
            last = [b.ask(prompt, b.rng.randint(*answer), last)]
            prompt = [*prompt, _answer(last[0])]


def chat_long(b: Builder, scale: float = 1.0) -> None:
    chat(b, scale / 2, (256, 512))


def agents(b: Builder, scale: float = 1.0) -> None:
    for _ in range(round(48 * scale)):
        b.program()
        prompt: Segments = [("tools", 900), b.part("task", 30, 80)]
        last: list[TraceRequest] = []
        for step in range(b.rng.randint(3, 7)):
            last = [b.ask(prompt, b.rng.randint(20, 60), last)]
            prompt = [*prompt, _answer(last[0]), b.part(f"observation {step}", 40, 200)]


def tree_of_thought(b: Builder, scale: float = 1.0) -> None:
    for _ in range(round(12 * scale)):
        b.program()
        _grow(b, [("how to think", 400), b.part("problem", 80, 160)], [], 3)


def _grow(b: Builder, prompt: Segments, after: list[TraceRequest], levels: int) -> None:
    if levels == 0:
        b.ask([*prompt, ("is this right?", 12)], 4, after)
        return
    for branch in range(3):
        proposal = b.ask([*prompt, b.part(f"branch {branch}", 4, 4)], b.rng.randint(30, 60), after)
        longer = [*proposal.prompt, _answer(proposal)]
        _grow(b, longer, [proposal], levels - 1)


def judge(b: Builder, scale: float = 1.0) -> None:
    for _ in range(round(32 * scale)):
        b.program()
        essay: Segments = [("judge's rules", 250), b.part("essay", 400, 1200)]
        opinions = [
            b.ask([*essay, (f"dimension {i}", 30)], b.rng.randint(60, 120)) for i in range(6)
        ]
        b.ask([*essay, *map(_answer, opinions), ("sum up", 20)], 80, opinions)


def self_consistency(b: Builder, scale: float = 1.0) -> None:
    for _ in range(round(48 * scale)):
        b.program()
        prompt: Segments = [("eight shots", 700), b.part("problem", 50, 150)]
        for _ in range(8):
            b.ask(prompt, b.rng.randint(60, 140))


def system_prompt(b: Builder, scale: float = 1.0) -> None:
    for _ in range(round(400 * scale)):
        b.program()
        b.ask([("system", 2000), b.part("question", 10, 60)], b.rng.randint(10, 40))


def rag(b: Builder, scale: float = 1.0) -> None:
    passages = [(f"passage {i}", b.rng.randint(100, 250)) for i in range(40)]
    popularity = [1 / (rank + 1) for rank in range(40)]
    for _ in range(round(250 * scale)):
        b.program()
        chosen = list(dict.fromkeys(b.rng.choices(passages, popularity, k=3)))
        b.ask([("instruction", 150), *chosen, b.part("question", 15, 50)], b.rng.randint(20, 60))


def mixed(b: Builder, scale: float = 1.0) -> None:
    parts = (few_shot, select, chat, agents, tree_of_thought, judge, self_consistency, rag)
    for part in parts:
        part(b, scale / len(parts))


def heavy_tail(b: Builder, scale: float = 1.0) -> None:
    headers = [(f"group {i}", b.rng.randint(400, 1400)) for i in range(40)]
    popularity = [1 / (rank + 1) for rank in range(40)]
    for _ in range(round(1500 * scale)):
        b.program()
        if b.rng.random() < 0.05:
            length = min(6000, int(250 * b.rng.paretovariate(1.1)))
            b.ask([b.part("cold", length, length)], b.rng.randint(8, 64))
        else:
            header = b.rng.choices(headers, popularity)[0]
            b.ask([header, b.part("question", 20, 90)], b.rng.randint(8, 64))


@dataclass(frozen=True)
class Kind:
    """A workload. `kv_slots`: a pool that holds what runs, and of all the trace only a part."""

    build: Callable[[Builder], None]
    kv_slots: int = 16384
    online: bool = False
    """It is about arrivals: there is no sense in all at once."""


KINDS: dict[str, Kind] = {
    "few-shot": Kind(few_shot, 8192),
    "select": Kind(select, 8192),
    "chat": Kind(chat, 24576),
    "chat-long": Kind(chat_long, 65536),
    "agents": Kind(agents),
    "tree-of-thought": Kind(tree_of_thought),
    "judge": Kind(judge),
    "self-consistency": Kind(self_consistency),
    "system-prompt": Kind(system_prompt, 8192),
    "rag": Kind(rag),
    "mixed": Kind(mixed, 24576),
    "heavy-tail": Kind(heavy_tail, 24576, online=True),
}


def make(kind: str, seed: int = 0) -> list[TraceRequest]:
    """The requests of a kind, all at 0 but for those that come after others."""
    builder = Builder(random.Random(f"{kind} {seed}"))
    KINDS[kind].build(builder)
    return builder.requests()


def spread(requests: Sequence[TraceRequest], seed: int, seconds: float) -> list[TraceRequest]:
    """The same, with programs that start at the times of a Poisson process over `seconds`."""
    rng = random.Random(f"arrivals {seed}")
    programs = list(dict.fromkeys(request.program for request in requests))
    starts = sorted(rng.uniform(0.0, seconds) for _ in programs)
    start = dict(zip(programs, starts, strict=True))
    placed = [
        request
        if request.after
        else msgspec.structs.replace(request, arrival=start[request.program])
        for request in requests
    ]
    return placed
