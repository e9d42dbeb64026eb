"""Extraction: each text file of a folder becomes a record that satisfies a schema.

The constraint is enforced token by token, so there is nothing to repair afterwards; names, quotes
and brackets that the schema forces are not even asked of the model.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
from demo import Workload, demo

import phloem

LETTERS = Path(__file__).with_name("letters")
ITEM = {
    "type": "object",
    "properties": {
        "plant": {"type": "string", "maxLength": 30},
        "quantity": {"type": "integer", "minimum": 1, "maximum": 999},
    },
    "required": ["plant", "quantity"],
    "additionalProperties": False,
}
ORDER = {
    "type": "object",
    "properties": {
        "customer": {"type": "string", "maxLength": 40},
        "town": {"type": "string", "maxLength": 30},
        "items": {"type": "array", "items": ITEM, "minItems": 1, "maxItems": 3},
        "month": {"enum": ["March", "April", "May", "September", "October", None]},
        "collected": {"type": "boolean"},
    },
    "required": ["customer", "town", "items", "month", "collected"],
    "additionalProperties": False,
}


@phloem.function
def extract(s: phloem.State, letter: str) -> dict[str, Any]:
    s += phloem.system("You read letters to a plant nursery and write each order down as JSON.")
    s += phloem.user(letter)
    s += phloem.assistant(phloem.gen("order", json_schema=ORDER, max_tokens=300, temperature=0.0))
    order: dict[str, Any] = json.loads(s["order"])
    return order


def programs(n: int, seed: int) -> Workload:
    """The letters of the folder, over and over, each under a number of its own."""
    letters = [path.read_text(encoding="utf-8") for path in sorted(LETTERS.glob("*.txt"))]
    random.Random(seed).shuffle(letters)
    return extract, [
        {"letter": f"Letter {seed}-{i + 1}\n\n{letters[i % len(letters)]}"} for i in range(n)
    ]


def check(state: phloem.State) -> None:
    jsonschema_rs.validate(ORDER, json.loads(state["order"]))


if __name__ == "__main__":
    demo(programs, check)
