"""What a benchmark asks: forests of turns, made of seeded random words.

A turn's prompt is everything on the path to it, answers included. One request is a tree of one
turn; a conversation is a chain; a program that explores alternatives is a real tree. All text
comes from the seed, so a run can be repeated exactly, and two seeds share no prompt prefix that a
cache could profit from. Lengths are words, which common tokenizers make about one token each; the
reported counts are the server's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_COMMON = (
    "about above after again air all almost along also animal answer apple area around ask away "
    "baby back ball bank base bear beautiful bed before began begin behind best better between "
    "big bird black blue boat body book both box boy bring brother brown build business call came "
    "car care carry cat change children city class clean clear close cloud cold color come common "
    "cook cool corner country course cover cross cut dark day deep door down draw dream drive dry "
    "early earth east easy eat egg end enough even evening every eye face fall family far farm "
    "fast father feel feet few field fill find fine fire first fish floor flower fly follow food "
    "foot forest form four free friend front full game garden gave girl give glass gold good "
    "grass great green ground group grow hair half hand happy hard head hear heart heavy help "
    "high hill hold home horse hot hour house idea inside island keep kind king kitchen know lake "
    "land large last late laugh learn leave left letter life light line list little live long "
    "look lost love low machine main make man many map mark market matter mind minute moment "
    "money month moon morning mother mountain mouth move music name near neck new next night "
    "north nothing notice number ocean office often oil old open order other outside page paint "
    "paper part party past people person picture piece place plan plant play point power press "
    "price problem quick quiet rain reach read ready red rest rich ride right river road rock "
    "room round run salt same sand school sea season seat second see send serve set shape ship "
    "shop short show side simple sing sister sit size sky sleep slow small smile snow soft song "
    "soon sound south space speak spring square stand star start stay step stone stop store story "
    "street strong study summer sun sure table take talk tall teach tell ten thing think three "
    "time today together top touch town tree true turn under until valley very village visit "
    "voice wait walk wall want war warm wash watch water wave way week well west wheel white whole "
    "wide wild wind window winter wish wood word work world write yard year yellow young"
)
_WORDS = tuple(_COMMON.split())


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request: `user` is said after all that came before, `max_tokens` bound the answer.

    `system` counts for a first turn only. With `schema` the answer has to satisfy that JSON
    schema, otherwise it runs to `max_tokens` where the server lets it. The turns in `then` go on
    from this one's answer, all at the same time.
    """

    user: str
    max_tokens: int
    system: str = ""
    schema: dict[str, object] | None = None
    then: tuple[Turn, ...] = ()

    def walk(self) -> Iterator[Turn]:
        """This turn and all that follow from it."""
        yield self
        for turn in self.then:
            yield from turn.walk()


@dataclass(frozen=True, kw_only=True)
class Workload:
    """First turns in the order in which they start, at most `concurrency` requests at a time."""

    name: str
    title: str
    concurrency: int
    turns: tuple[Turn, ...]

    @property
    def requests(self) -> int:
        return sum(1 for turn in self.turns for _ in turn.walk())


class TextSource:
    """Random sentences of common words."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def words(self, count: int) -> str:
        """`count` words, with a full stop after every twelve."""
        words = self._random.choices(_WORDS, k=count)
        return " ".join(
            word + "." if i % 12 == 11 or i == count - 1 else word for i, word in enumerate(words)
        )


def single(seed: int) -> Workload:
    text = TextSource(seed)
    turns = tuple(Turn(user=text.words(24), max_tokens=128) for _ in range(4))
    return Workload(name="single", title="one stream, 128 out", concurrency=1, turns=turns)


def batch16(seed: int) -> Workload:
    text = TextSource(seed)
    turns = tuple(Turn(user=text.words(64), max_tokens=64) for _ in range(64))
    title = "64 distinct prompts of 100, 64 out"
    return Workload(name="batch16", title=title, concurrency=16, turns=turns)


def shared(seed: int) -> Workload:
    text = TextSource(seed)
    system = text.words(920)
    turns = tuple(Turn(system=system, user=text.words(24), max_tokens=32) for _ in range(64))
    title = "one system prompt of 1,000 under 64 requests, 32 out"
    return Workload(name="shared", title=title, concurrency=16, turns=turns)


def multiturn(seed: int) -> Workload:
    text = TextSource(seed)

    def chain(turns: int) -> Turn:
        then = (chain(turns - 1),) if turns > 1 else ()
        return Turn(user=text.words(48), max_tokens=32, then=then)

    title = "8 conversations of 5 turns, 32 out"
    turns = tuple(chain(5) for _ in range(8))
    return Workload(name="multiturn", title=title, concurrency=8, turns=turns)


def fork(seed: int) -> Workload:
    text = TextSource(seed)

    def tree(words: int, fans: tuple[int, ...]) -> Turn:
        then = tuple(tree(24, fans[1:]) for _ in range(fans[0])) if fans else ()
        return Turn(user=text.words(words), max_tokens=32, then=then)

    turns = tuple(tree(560, (4, 4)) for _ in range(2))
    title = "2 trees of 1, 4 and 16 branches, 32 out"
    return Workload(name="fork", title=title, concurrency=32, turns=turns)


ORDER_SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "customer": {"type": "string", "minLength": 1, "maxLength": 24},
        "priority": {"enum": ["low", "normal", "high"]},
        "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
        "express": {"type": "boolean"},
        "tags": {
            "type": "array",
            "items": {"type": "string", "maxLength": 12},
            "minItems": 1,
            "maxItems": 3,
        },
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 24},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["customer", "priority", "quantity", "express", "tags", "address"],
    "additionalProperties": False,
}


def json(seed: int) -> Workload:
    text = TextSource(seed)
    system = "Read the note and give the order in it as a JSON object. " + text.words(40)
    turns = tuple(
        Turn(system=system, user=text.words(30), max_tokens=256, schema=ORDER_SCHEMA)
        for _ in range(32)
    )
    return Workload(name="json", title="32 answers under a schema", concurrency=8, turns=turns)


def long(seed: int) -> Workload:
    text = TextSource(seed)
    turns = tuple(Turn(user=text.words(1660), max_tokens=16) for _ in range(8))
    return Workload(name="long", title="8 prompts of 1,800, 16 out", concurrency=8, turns=turns)


WORKLOADS: dict[str, Callable[[int], Workload]] = {
    make.__name__: make for make in (single, batch16, shared, multiturn, fork, json, long)
}
"""Name → workload of a seed."""
