"""Few-shot classification: worked examples, then the label that the model prefers.

Every run begins with the same examples, which the server computes once. `select` scores all labels
at once; the answer is one of them, whatever the model would rather say.
"""

from __future__ import annotations

import random

from demo import Workload, demo

import phloem

LABELS = ["billing", "delivery", "account", "praise"]
EXAMPLES = """\
Sort each message to a shop by its topic: billing, delivery, account or praise.

Message: I was charged twice for one order.
Topic: billing

Message: The parcel has been in the same depot for nine days.
Topic: delivery

Message: I cannot log in since I changed my phone.
Topic: account

Message: The lamp is lovely, thank you!
Topic: praise

Message: Please close my profile and delete my data.
Topic: account

Message: Your courier left the box in the rain.
Topic: delivery

Message: My invoice shows the wrong rate of tax.
Topic: billing

Message: Never has anyone answered me so kindly.
Topic: praise

"""


@phloem.function
def classify(s: phloem.State, message: str) -> str:
    s += EXAMPLES
    s += f"Message: {message}\nTopic: " + phloem.select("topic", LABELS)
    return str(s["topic"])


THINGS = ["kettle", "desk", "carpet", "bicycle", "mirror", "pair of boots", "tent", "radio"]
COMPLAINTS = [
    "I returned the {} in {}, but my money has not come back.",
    "The {} that I ordered in {} has still not arrived.",
    "I bought a {} in {} and cannot find it among my orders.",
    "The {} I bought in {} is the best that I ever had.",
    "Why does the {} cost more on the bill than it did on the page in {}?",
    "The {} went to my old address in {}, two streets away.",
]
MONTHS = ["January", "March", "April", "June", "August", "October", "November"]


def programs(n: int, seed: int) -> Workload:
    """`n` messages to classify."""
    rng = random.Random(seed)
    return classify, [
        {"message": rng.choice(COMPLAINTS).format(rng.choice(THINGS), rng.choice(MONTHS))}
        for _ in range(n)
    ]


def check(state: phloem.State) -> None:
    assert state["topic"] in LABELS
    assert state.text().endswith(f"Topic: {state['topic']}")


if __name__ == "__main__":
    demo(programs, check)
