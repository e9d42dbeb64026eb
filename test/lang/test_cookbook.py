"""The programs of benchmark/programs, and every Python snippet of docs/cookbook, on the scripted
model: snippets are the programs' own code, and run."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

import phloem
from phloem.constrained.spec import JsonSchema
from phloem.lang.backend.base import Call
from phloem.lang.backend.mock import Answer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmark" / "programs"
PAGE = (ROOT / "docs" / "cookbook" / "README.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "demo")

ADD = {"action": {"tool": "add", "title": "lunch", "day": "Friday", "hour": 12}}
FINISH = {"action": {"tool": "finish", "reply": "Done."}}
ANSWERS: dict[str, Answer | list[str]] = {
    "order": json.dumps(
        {"customer": "A", "town": "B", "month": "May", "collected": True}
        | {"items": [{"plant": "sedum", "quantity": 300}]}
    ),
    "input_3": '"120 cents"',
    "skeleton": json.dumps(["one tip", "two tips", "three tips", "four tips"]),
    "verdict": '{"summary": "Good.", "grade": "good"}',
    "work": "3 and 4 are 7.",
    "answer": "7",
    "action_0_0": json.dumps(ADD),
    "action_1_0": json.dumps(ADD),
    "action_2_0": json.dumps(FINISH),
}
PATTERNS: dict[str, Answer] = {
    r"input_[0-2]": '"pear"',
    r"rating_\d|points": "5",
    r"(thought|step|answer)_\d|opinion|tip": "Some words",
}


def reply(call: Call) -> Answer | list[str]:
    """What the model says; of a citation the first document that may be cited."""
    name = call.name or ""
    if name == "reply":
        assert isinstance(call.constraint, JsonSchema)
        schema = json.loads(call.constraint.schema)
        ids = schema["properties"]["citations"]["items"]["enum"]
        return json.dumps({"answer": "Yes.", "citations": ids[:1]})
    if name in ANSWERS:
        return ANSWERS[name]
    return next(answer for pattern, answer in PATTERNS.items() if re.fullmatch(pattern, name))


@pytest.fixture
def model() -> phloem.MockBackend:
    return phloem.MockBackend(reply)


@pytest.fixture(autouse=True)
def beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)


def test_every_program_has_its_section() -> None:
    assert sorted(SECTIONS) == NAMES
    assert all(f"[{name}](#{name})" in PAGE for name in NAMES)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", NAMES)
def test_snippets_are_the_program_and_run(name: str, model: phloem.MockBackend) -> None:
    workload: Any = importlib.import_module(name)
    program, (item,) = workload.programs(1, 0)
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    scope = dict(vars(workload))
    snippets = re.findall(r"```python\n(.*?)```", SECTIONS[name], re.DOTALL)
    for snippet in snippets:
        if "phloem.function" in snippet:
            assert snippet in source
        phloem.set_default_backend(model)
        try:
            exec(compile(snippet, f"{PAGE}#{name}", "exec"), scope)
        finally:
            phloem.set_default_backend(None)
    shown = scope[program.__name__]
    assert shown is not program, "the page shows the program itself"
    workload.check(shown.run(**item, backend=model))


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_the_same_arguments(name: str) -> None:
    workload: Any = importlib.import_module(name)
    (_, first), (_, again), (_, other) = (workload.programs(5, seed) for seed in (1, 1, 2))
    assert len(first) == 5 and first == again != other
    assert len({json.dumps(item) for item in first}) > 1


def test_the_agent_asks_again_and_its_check_tells() -> None:
    agent: Any = importlib.import_module("agent")
    program, (item,) = agent.programs(1, 0)
    answers = {"action_0_0": "Certainly! Here it is:", "action_0_1": json.dumps(FINISH)}
    state = program.run(**item, backend=phloem.MockBackend(answers))
    assert state.returned == "Done." and state["retries"] == 1
    with pytest.raises(AssertionError):
        agent.check(state)


def test_only_found_documents_can_be_cited(model: phloem.MockBackend) -> None:
    rag: Any = importlib.import_module("rag")
    state = rag.answer.run(question="What does a lost card cost a visitor?", backend=model)
    assert "cards" in state["documents"] and len(state["documents"]) == rag.FOUND
    constraint = model.calls[0].constraint
    assert isinstance(constraint, JsonSchema)
    cited = json.loads(constraint.schema)["properties"]["citations"]
    assert cited["items"]["enum"] == state["documents"]
