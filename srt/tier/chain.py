"""Names of KV blocks: each is a hash of all tokens up to the block's end, so that equal names mean
equal KV. No torch and no numpy here: the scheduler imports it."""

from __future__ import annotations

from array import array
from hashlib import blake2b

BLOCK_TOKENS = 64
"""Tokens a block holds: a whole number of pages of any page size (1, 16, 64)."""
KEY_BYTES = 16
"""Size of a key. Prompts are chosen by users, so the hash is one that nobody can make collide."""

_SEED = b"phloem kv"


def block_keys(
    tokens: array[int],
    namespace: str,
    block_tokens: int = BLOCK_TOKENS,
    limit: int | None = None,
) -> list[bytes]:
    """Keys of the whole blocks that `tokens` (32-bit ids) begins with, at most `limit` of them.

    Key i names the first (i + 1) · `block_tokens` tokens and the `namespace` they are in: two
    sequences share a key only if they share all of that.
    """
    data = memoryview(tokens).cast("B")
    size = block_tokens * tokens.itemsize
    count = len(data) // size
    if limit is not None:
        count = min(count, limit)
    key = blake2b(namespace.encode(), digest_size=KEY_BYTES, person=_SEED).digest()
    keys = []
    for end in range(size, (count + 1) * size, size):
        digest = blake2b(key, digest_size=KEY_BYTES)
        digest.update(data[end - size : end])
        key = digest.digest()
        keys.append(key)
    return keys
