"""Programs: clients of many requests, whose paths are worth keeping while they live."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phloem.radix.node import Node


class Program:
    """A live program and the `nodes` that it was the last program to use."""

    __slots__ = ("live", "name", "nodes")

    def __init__(self, name: str) -> None:
        self.name = name
        self.live = True
        self.nodes: dict[Node, None] = {}  # an ordered set: what follows from it is repeatable

    def mark(self, node: Node) -> None:
        """This program is the last to have used `node`."""
        before = node.program
        if before is not self:
            if before is not None:
                del before.nodes[node]
            node.program = self
            self.nodes[node] = None


class Programs:
    """The live programs, at most `limit`: each from its first use until `end`, or until `limit`
    others were used after its last use."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"program_limit must be at least 1, not {limit}")
        self._limit = limit
        self._live: OrderedDict[str, Program] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def use(self, name: str) -> tuple[Program, Program | None]:
        """The program called `name`, and the one that had to end for it, which the caller buries
        as after `end`."""
        program = self._live.get(name)
        if program is not None:
            self._live.move_to_end(name)
            return program, None
        program = self._live[name] = Program(name)
        ended = self._live.popitem(last=False)[1] if len(self._live) > self._limit else None
        if ended is not None:
            ended.live = False
        return program, ended

    def end(self, name: str) -> Program | None:
        """End the program called `name`, if it lives. Its nodes are the caller's to unmark."""
        program = self._live.pop(name, None)
        if program is not None:
            program.live = False
        return program

    def all(self) -> list[Program]:
        """The live programs; for `check`."""
        return list(self._live.values())
