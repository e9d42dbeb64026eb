"""What stands for users' words in a recording: keyed hashes that keep what the scheduler goes by.

A token is replaced by a hash of the whole sequence up to it, so that two prompts have equal labels
exactly as far as they agree, and a label tells nothing else: neither its token nor that the token
was seen elsewhere. Names (request ids, tenants, namespaces, programs, pins) and constraints become
hashes, too. The key is drawn for each recording and never written.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable
from hashlib import blake2b

from msgspec.structs import replace

from phloem.constrained.spec import Constraint, Regex, constraint_key
from phloem.srt.errors import ErrorInfo
from phloem.srt.messages import (
    Abort,
    CallPlan,
    Drain,
    EndProgram,
    Flush,
    FromGrammar,
    GrammarCompiled,
    GrammarJumped,
    GrammarReady,
    GrammarReplay,
    RowResult,
    SamplingParams,
    StepResult,
    Submit,
    ToScheduler,
    Watch,
)
from phloem.srt.questions import AskExplain, AskPolicy, AskStats, AskTree, Pin, Unpin
from phloem.srt.tier_messages import FromTier, KvDropped, KvLoaded, KvSaved, TierOff, TierReady

LABELS = (1 << 31) - 1
"""Labels are smaller than this: what a replay takes for the vocabulary's size."""
FIRST_LABEL = 1 << 20
"""Smaller ids are stop tokens, which stay themselves where they end a request."""

_HIDDEN = "(not recorded)"


class LabelChain:
    """Labels of one sequence, which grows. `labels` is in step with the sequence's tokens."""

    __slots__ = ("_hash", "_last", "_maker", "labels")

    def __init__(self, maker: Labels, namespace: str, tokens: Iterable[int]) -> None:
        self._maker = maker
        self._hash = blake2b(namespace.encode() + b"\0", digest_size=8, key=maker.token_secret)
        self.labels = array("i")
        low, span, size = maker.first_label, LABELS - maker.first_label, maker.vocab_size
        update, digest, append = self._hash.update, self._hash.digest, self.labels.append
        for token in tokens:
            if 0 <= token < size:
                update(token.to_bytes(4, "little"))
                append(low + int.from_bytes(digest(), "little") % span)
            else:
                append(-1)  # the scheduler refuses what is outside the vocabulary
        self._last = self._hash

    def label(self, token: int) -> int:
        """The label of `token` (not negative) if it is what comes next."""
        return self.ahead([token])[0]

    def append(self, written: int) -> None:
        """The token asked about last has come; `written` is what stands for it."""
        self._hash = self._last
        self.labels.append(written)

    def ahead(self, tokens: Iterable[int]) -> list[int]:
        """The labels of `tokens` (not negative) if they are what comes next."""
        low, span = self._maker.first_label, LABELS - self._maker.first_label
        self._last, found = self._hash.copy(), []
        for token in tokens:
            self._last.update(token.to_bytes(4, "little"))
            found.append(low + int.from_bytes(self._last.digest(), "little") % span)
        return found


class Labels:
    """Makes labels and names, and rewrites messages with them."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.first_label = vocab_size if FIRST_LABEL < vocab_size < LABELS // 2 else FIRST_LABEL
        self.token_secret = secrets.token_bytes(32)
        self._name_secret = secrets.token_bytes(32)

    # ------------------------------------------------------------------ parts

    def chain(self, prompt: bytes, namespace: str) -> LabelChain:
        """Labels of a packed prompt."""
        tokens = array("i")
        tokens.frombytes(prompt)
        return LabelChain(self, namespace, tokens)

    def name(self, text: str) -> str:
        """What stands for a name; the empty name is no secret."""
        return self._hashed(text.encode(), 8).hex() if text else ""

    def key(self, key: bytes) -> bytes:
        """What stands for a KV block's key."""
        return self._hashed(key, len(key))

    def _hashed(self, data: bytes, size: int) -> bytes:
        return blake2b(data, digest_size=size, key=self._name_secret).digest()

    def constraint(self, constraint: Constraint) -> Regex:
        """A constraint that stands for this one: equal ones stay equal."""
        return self._stand_in(constraint_key(constraint))

    def _stand_in(self, key: str) -> Regex:
        return Regex(pattern=self.name(key))

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        """What the scheduler reads of these: lengths, stop ids, and whether all ids are known."""
        known = range(self.vocab_size)
        others = (sampling.logit_bias, sampling.allowed_token_ids, sampling.logprob_token_ids)
        unknown = any(token not in known for ids in others for token in ids)
        return SamplingParams(
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=tuple(t if t in known else -1 for t in sampling.stop_token_ids),
            logit_bias={-1: 0.0} if unknown else {},
            seed=0,
        )

    # ------------------------------------------------------------------ messages

    def submit(self, message: Submit, chain: LabelChain) -> Submit:
        constraint = message.constraint
        return replace(
            message,
            rid=self.name(message.rid),
            prompt=chain.labels.tobytes(),
            sampling=self.sampling(message.sampling),
            constraint=None if constraint is None else self.constraint(constraint),
            namespace=self.name(message.namespace),
            tenant=self.name(message.tenant),
            program=self.name(message.program),
            plan=None if message.plan is None else self._plan(message.plan),
        )

    def _plan(self, plan: CallPlan) -> CallPlan:
        constraints: list[Constraint] = [self.constraint(one) for one in plan.next_constraints]
        return replace(plan, group=self.name(plan.group), next_constraints=constraints)

    def received(self, message: ToScheduler) -> ToScheduler:
        """Any message but `Submit`."""
        match message:
            case Submit():
                raise TypeError("a request needs its chain: see `submit`")
            case Abort(rid):
                return Abort(self.name(rid))
            case EndProgram(program):
                return EndProgram(self.name(program))
            case Unpin(_, name):
                return replace(message, name=self.name(name))
            case Flush(_, namespace) | AskTree(_, namespace):
                hidden = None if namespace is None else self.name(namespace)
                if isinstance(message, Flush):
                    return replace(message, namespace=hidden)
                return replace(message, namespace=hidden, prefix=b"")
            case AskExplain(_, prompt, namespace, rid):
                return replace(
                    message,
                    prompt=self.chain(prompt, namespace).labels.tobytes(),
                    namespace=self.name(namespace),
                    rid=None if rid is None else self.name(rid),
                )
            case Pin(_, name, prompt, namespace):
                return replace(
                    message,
                    name=self.name(name),
                    prompt=self.chain(prompt, namespace).labels.tobytes(),
                    namespace=self.name(namespace),
                )
            case Drain() | Watch() | AskStats() | AskPolicy():
                return message

    def grammar(self, message: FromGrammar) -> FromGrammar:
        match message:
            case GrammarCompiled():
                return replace(
                    message,
                    key=constraint_key(self._stand_in(message.key)),
                    error=None if message.error is None else _hidden(message.error),
                )
            case GrammarReady():
                return GrammarReady({})
            case GrammarReplay():
                return message
            case GrammarJumped():
                raise TypeError("forced tokens need their requests' chains: see `LabelChain.ahead`")

    def tier(self, message: FromTier) -> FromTier:
        match message:
            case TierReady():
                size = message.key_bytes
                keys = [message.keys[i : i + size] for i in range(0, len(message.keys), size)]
                return replace(message, keys=b"".join(map(self.key, keys)))
            case KvLoaded():
                return replace(message, corrupt=[self.key(key) for key in message.corrupt])
            case KvDropped(keys):
                return KvDropped([self.key(key) for key in keys])
            case KvSaved():
                return replace(message, error=None if message.error is None else _HIDDEN)
            case TierOff():
                return TierOff(_HIDDEN)

    def result(self, result: StepResult, tokens: list[int]) -> StepResult:
        """A step's result with `tokens`, one a row, in place of what was sampled."""
        rows = [
            RowResult(
                row.epoch,
                token,
                error=None if row.error is None else _HIDDEN,
                accepted=row.accepted,
            )
            for row, token in zip(result.rows, tokens, strict=True)
        ]
        return replace(result, rows=rows, error=None if result.error is None else _HIDDEN)


def _hidden(error: ErrorInfo) -> ErrorInfo:
    """The kind of an error, without what it says of a constraint."""
    return ErrorInfo(kind=error.kind, message=_HIDDEN)
