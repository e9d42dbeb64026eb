"""What must hold at any size: deep chains, many namespaces, and work that does not grow."""

from __future__ import annotations

import gc
import sys
from array import array
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from phloem.radix import POLICIES, EvictionPolicy, Lease, RadixTree, SlotPool


def make(size: int) -> tuple[SlotPool, RadixTree]:
    pool = SlotPool(size)
    return pool, RadixTree(pool)


def insert(pool: SlotPool, tree: RadixTree, tokens: array[int], namespace: str = "") -> None:
    lease = tree.acquire(tokens, namespace)
    rest = tokens[lease.length :]
    slots = pool.allocate(len(rest))
    pool.release(slots[: tree.extend(lease, rest, slots)])
    tree.release(lease)


def test_a_chain_of_ten_thousand_nodes() -> None:
    depth = 10_000
    pool, tree = make(depth + 1)
    tokens = array("i", range(depth))
    slots = pool.allocate(depth)
    leases: list[Lease] = []
    lease = tree.acquire([0, 0])
    for at in range(depth):  # a second lease at each end keeps the nodes apart
        tree.extend(lease, tokens[at : at + 1], slots[at : at + 1])
        if at % 100 == 0:
            leases.append(tree.acquire(tokens[: at + 2]))
    tree.check()
    for end in range(1, depth, 7):
        tree.release(tree.acquire(tokens[: end + 1]))
    assert tree.nodes > 1000
    tree.check()
    assert lease.slots() == slots
    assert max(view.depth for view in tree.dump()) == tree.nodes - 1
    tree.release(lease)
    for other in leases:
        tree.release(other)
    assert tree.evict(10) == 10
    assert tree.match(tokens) == depth - 10
    assert tree.flush() == depth - 10
    tree.check()
    assert pool.free == depth


def test_a_deep_chain_is_evicted_from_its_end() -> None:
    pool, tree = make(20_001)
    tokens = array("i", range(10_000))
    for end in range(50, 10_001, 50):
        insert(pool, tree, tokens[:end])
    assert tree.nodes >= 200
    assert tree.evict(9_990) == 9_990
    tree.check()
    assert tree.match(tokens) == 10


def test_namespaces_leave_nothing_behind() -> None:
    pool, tree = make(64)
    for salt in range(500):
        tree.evict(max(0, 8 - pool.free))
        insert(pool, tree, array("i", range(8)), f"tenant-{salt}")
        assert tree.stats().namespaces == tree.nodes <= 8
    tree.evict(64)
    assert tree.stats().namespaces == 0


def lines_run(operation: Callable[[], object]) -> int:
    """Source lines that `operation` executes: its work, measured without a clock.

    The garbage collector is off meanwhile: it may come at any allocation, and the finalizers and
    callbacks it runs (those of hypothesis, say) are not work of the operation.
    """
    lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before, collecting = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        operation()
    finally:
        sys.settrace(before)
        if collecting:
            gc.enable()
    return lines


def prompt(number: int) -> array[int]:
    """60 tokens: 20 shared by all, 10 shared by every second one, 30 of its own."""
    return array("i", [*range(20), *([number % 2 + 100] * 10), *([number + 1000] * 30)])


def work(policy: EvictionPolicy, cached: int) -> dict[str, int]:
    """Lines run by each operation on a full pool that caches `cached` prompts."""
    pool = SlotPool(1 + 40 + 30 * cached + 1)
    tree = RadixTree(pool, policy=policy)
    for number in range(cached):
        insert(pool, tree, prompt(number))
    assert pool.free == 1
    hit, miss = prompt(cached // 2), prompt(cached)

    def turnover() -> None:
        tree.evict(30)
        insert(pool, tree, miss)

    result = {
        "match hit": lines_run(lambda: tree.match(hit)),
        "match miss": lines_run(lambda: tree.match(miss)),
        "acquire and release": lines_run(lambda: tree.release(tree.acquire(miss))),
        "turnover": lines_run(turnover),
        "explain hit": lines_run(lambda: tree.explain(hit)),
        "explain evicted": lines_run(lambda: tree.explain(prompt(0))),
    }
    lease = tree.acquire(miss)
    tree.extend(lease, miss[lease.length :], pool.allocate(1))
    tree.evict(1)
    result["decode step"] = lines_run(lambda: tree.extend(lease, [5], pool.allocate(1)))
    result["end of request"] = lines_run(lambda: tree.release(lease))
    for number in (1, 2, 3):
        tree.release(tree.acquire(prompt(number), program="p"))
    result["end of program"] = lines_run(lambda: tree.end_program("p"))
    return result


def test_a_survey_of_a_deep_chain() -> None:
    pool, tree = make(2001)
    tokens = array("i", range(2000))
    for end in range(1, 2001):
        insert(pool, tree, tokens[:end])
    nodes, more = tree.survey(limit=3000)
    assert not more
    assert [node.depth for node in nodes] == list(range(tree.nodes))
    assert [node.total for node in nodes] == [2000 - node.start for node in nodes]
    assert tree.flush() == 2000
    told = tree.explain(array("i", [*range(2000), 0]))
    assert told.evicted_tokens == 2000


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_no_operation_does_more_work_in_a_larger_tree(policy: EvictionPolicy) -> None:
    assert work(policy, 10) == work(policy, 1000)
