"""ReAct: thought, action, observation, step by step. The tool is a choice, and its input a
schema that depends on the tool, so every action can be carried out."""

from __future__ import annotations

import json
import operator
import random
import re

from demo import Workload, demo

import phloem

STEPS = 4
PRICES = {"apple": 35, "pear": 40, "melon": 280, "lemon": 25, "cabbage": 160, "leek": 90}  # cents
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
INPUTS: dict[str, dict[str, object]] = {
    "lookup": {"enum": list(PRICES)},
    "calculate": {"type": "string", "pattern": "^[0-9]{1,3} [-+*] [0-9]{1,3}$"},
    "finish": {"type": "string", "pattern": "^[0-9]{1,5} cents$"},
}
RULES = """\
Answer questions about a greengrocer's. Take one action at a time:
lookup THING: what it costs
calculate SUM: plus, minus or times
finish ANSWER: the answer

Question: What do 3 pears cost?
Thought: I need the price of a pear.
Action: lookup
Input: "pear"
Observation: one pear costs 40 cents
Thought: Three of them cost three times as much.
Action: calculate
Input: "3 * 40"
Observation: 120
Thought: That is the answer.
Action: finish
Input: "120 cents"

"""


def observe(tool: str, text: str) -> str:
    if tool == "lookup":
        return f"one {text} costs {PRICES[text]} cents"
    left, sign, right = text.split()
    return str(OPERATORS[sign](int(left), int(right)))


@phloem.function
def shop(s: phloem.State, question: str) -> str:
    s += RULES + f"Question: {question}\n"
    for step in range(STEPS):
        tools = list(INPUTS) if step < STEPS - 1 else ["finish"]
        thought = phloem.gen(f"thought_{step}", stop="\n", max_tokens=24, temperature=0.0)
        s += "Thought: " + thought + "\nAction: " + phloem.select(f"tool_{step}", tools)
        tool = s[f"tool_{step}"]
        s += "\nInput: " + phloem.gen(
            f"input_{step}", json_schema=INPUTS[tool], max_tokens=24, temperature=0.0
        )
        text = json.loads(s[f"input_{step}"])
        if tool == "finish":
            break
        s += f"\nObservation: {observe(tool, text)}\n"
    return str(text)


def programs(n: int, seed: int) -> Workload:
    """`n` questions about prices."""
    rng = random.Random(seed)
    items = []
    for _ in range(n):
        first, second = rng.sample(list(PRICES), 2)
        items.append({"question": f"What do {rng.randint(2, 9)} {first}s and one {second} cost?"})
    return shop, items


def check(state: phloem.State) -> None:
    tools = re.findall(r"^Action: (.*)$", state.text().removeprefix(RULES), re.MULTILINE)
    assert 1 <= len(tools) <= STEPS and tools[-1] == "finish" and "finish" not in tools[:-1]
    assert re.fullmatch("[0-9]{1,5} cents", state.returned)


if __name__ == "__main__":
    demo(programs, check)
