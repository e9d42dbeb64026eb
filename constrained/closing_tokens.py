"""A vocabulary as closing needs it: tokens by their bytes, and as a trie in arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from phloem.constrained.bitmask import pack_mask
from phloem.constrained.vocab import Vocabulary

MANY_BYTES = 64
"""From so many possible next bytes on, most tokens are possible and all are looked at."""

_INTS = NDArray[np.int32]


class ClosingVocabulary:
    """Made once for a vocabulary and shared by all its grammars.

    `ids` gives the token of a text; `usable` are the bytes that are tokens of their own: of these
    any text can be made. `longest` is the length in bytes of the longest token; `stops` is the
    packed mask of the end tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        no_text = vocabulary.special_ids.union(vocabulary.stop_ids)
        texts = [i for i, data in enumerate(vocabulary.tokens) if data and i not in no_text]
        self.tokens = [b"" if i in no_text else data for i, data in enumerate(vocabulary.tokens)]
        self.size = vocabulary.size
        self.ids: dict[bytes, int] = {}
        for i in reversed(texts):
            self.ids[self.tokens[i]] = i
        self.usable = frozenset(b for b in range(256) if bytes([b]) in self.ids)
        self.longest = max((len(data) for data in self.ids), default=0)
        self.stops = pack_mask(vocabulary.stop_ids, vocabulary.size)
        self._build_trie(sorted(texts, key=self.tokens.__getitem__))

    def _build_trie(self, ordered: list[int]) -> None:
        """Nodes are numbered level by level, the root 0; children of a node are neighbours."""
        data = np.frombuffer(b"".join(self.tokens[i] for i in ordered), np.uint8)
        lengths = np.array([len(self.tokens[i]) for i in ordered], np.int64)
        starts = np.cumsum(lengths) - lengths
        node = np.zeros(len(ordered), np.int64)  # of each token, at the level reached
        bytes_ = [np.zeros(1, np.int32)]
        parents = [np.full(1, -1, np.int32)]
        total = 1
        rest = np.arange(len(ordered))
        depth = 0
        while len(rest):
            key = node[rest] * 256 + data[starts[rest] + depth]
            first = np.append(True, key[1:] != key[:-1])
            bytes_.append((key[first] % 256).astype(np.int32))
            parents.append((key[first] // 256).astype(np.int32))
            node[rest] = total + np.cumsum(first) - 1
            total += int(first.sum())
            depth += 1
            rest = rest[lengths[rest] > depth]
        parent = np.concatenate(parents)
        self._levels = list(zip(parents[1:], bytes_[1:], strict=True))
        self._bytes = np.concatenate(bytes_)
        self._first_child = np.searchsorted(parent, np.arange(total)).astype(np.int32)
        self._children = np.bincount(parent[1:], minlength=total).astype(np.int32)
        self._node_of: _INTS = np.full(self.size, total, np.int32)
        self._node_of[ordered] = node

    def walk(self, state: int, table_for: Callable[[_INTS], _INTS]) -> tuple[_INTS, _INTS]:
        """The tokens that can be read from a state, and the state after each.

        States are numbers above 0; `table_for(states)` gives a table [state, byte] of next states,
        0 for none, whose rows for `states` are filled.
        """
        after = np.zeros(len(self._bytes) + 1, np.int32)
        after[0] = state
        first = table_for(after[:1])[state]
        if np.count_nonzero(first) >= MANY_BYTES:
            self._walk_all(after, table_for)
        else:
            self._walk_alive(after, table_for)
        found = after[self._node_of]
        tokens = np.flatnonzero(found)
        return tokens.astype(np.int32), found[tokens]

    def _walk_all(self, after: _INTS, table_for: Callable[[_INTS], _INTS]) -> None:
        """Fill in the states of all nodes, level by level; state 0 stays in 0."""
        at = 1
        for parents, bytes_ in self._levels:
            states = after[parents]
            table = table_for(states)
            after[at : at + len(parents)] = table.ravel()[states * 256 + bytes_]
            at += len(parents)

    def _walk_alive(self, after: _INTS, table_for: Callable[[_INTS], _INTS]) -> None:
        """The same, looking only at nodes below such as are reached."""
        nodes = np.zeros(1, np.int32)
        while len(nodes := nodes[self._children[nodes] > 0]):
            counts = self._children[nodes]
            ends = np.cumsum(counts)
            offsets = np.repeat(self._first_child[nodes] - (ends - counts), counts)
            children = np.arange(ends[-1]) + offsets
            states = after[nodes]
            table = table_for(states)
            reached = table[np.repeat(states, counts), self._bytes[children]]
            nodes = children[reached > 0]
            after[nodes] = reached[reached > 0]
