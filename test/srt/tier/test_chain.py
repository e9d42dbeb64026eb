"""Names of blocks."""

from __future__ import annotations

import random
from array import array

import pytest

from phloem.srt.tier.chain import BLOCK_TOKENS, KEY_BYTES, block_keys


def ids(*tokens: int) -> array[int]:
    return array("i", tokens)


def test_only_whole_blocks_have_keys() -> None:
    for length in (0, 1, 3, 4, 5, 7, 8, 9):
        keys = block_keys(array("i", range(length)), "m", block_tokens=4)
        assert len(keys) == length // 4
        assert all(len(key) == KEY_BYTES for key in keys)


def test_a_limit_cuts_the_chain_and_changes_no_key() -> None:
    tokens = array("i", range(10 * BLOCK_TOKENS))
    keys = block_keys(tokens, "m")
    for limit in (0, 1, 9, 10, 11):
        assert block_keys(tokens, "m", limit=limit) == keys[:limit]


def test_keys_agree_exactly_as_far_as_whole_blocks_do() -> None:
    rng = random.Random(5)
    for _ in range(300):
        length = rng.randrange(1, 40)
        one = array("i", (rng.randrange(1 << 31) for _ in range(length)))
        other = one[:]
        at = rng.randrange(length)
        other[at] ^= 1 << rng.randrange(31)
        other.extend(rng.randrange(1 << 31) for _ in range(rng.randrange(9)))
        a, b = (block_keys(tokens, "m", block_tokens=4) for tokens in (one, other))
        equal = [x == y for x, y in zip(a, b, strict=False)]
        assert equal == [i < at // 4 for i in range(len(equal))]


def test_a_block_is_named_by_what_came_before_it() -> None:
    first = block_keys(ids(1, 2, 3, 4, 3, 4), "m", block_tokens=2)
    assert len(set(first)) == 3


@pytest.mark.parametrize(("one", "other"), [("", "m"), ("a", "b"), ("ä", "a"), ("a" * 200, "a")])
def test_namespaces_share_nothing(one: str, other: str) -> None:
    tokens = array("i", range(64))
    assert not set(block_keys(tokens, one)) & set(block_keys(tokens, other))


def test_the_keys_stay_what_they_were() -> None:
    """A change here makes every stored block unreachable: raise `LAYOUT_VERSION` with it."""
    assert [key.hex() for key in block_keys(ids(1, 2, 3, 4), "model", block_tokens=2)] == [
        "1a7eeb1a217fccea330e3019ea233af2",
        "d2a225560fd21c17ea49f239bed243c9",
    ]
