"""`phloem run`: one answer on stdout, the rest on stderr, and what the exit code tells."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from phloem.constrained.spec import Choice, Ebnf, JsonObject, JsonSchema, Regex
from phloem.srt.errors import InvalidConstraint, Unavailable
from phloem.srt.messages import FinishReason


def test_answer_is_all_of_stdout(phloem: Any, engine: Any) -> None:
    result = phloem(
        "run", "Say hello", "--system", "Be brief.", "--seed", "7", "--temperature", "0.5"
    )
    assert (result.code, result.out, result.err) == (0, "Hello\n", "")
    assert [(m.role, m.content) for m in engine.chats[0]] == [
        ("system", "Be brief."),
        ("user", "Say hello"),
    ]
    (request,) = engine.requests
    assert request.prompt == [1, 2, 3]
    assert request.constraint is None
    assert (request.sampling.seed, request.sampling.temperature) == (7, 0.5)
    assert request.sampling.max_tokens == 512
    assert engine.closed


def test_options_reach_the_engine(phloem: Any, engine: Any) -> None:
    phloem("run", "x", "--model", "some/model", "--threads", "3", "--kv-tokens", "99")
    assert engine.config.model.model == "some/model"
    assert engine.config.worker.threads == 3
    assert engine.config.cache.kv_tokens == 99


def test_cut_answer_ends_with_3(phloem: Any, engine: Any) -> None:
    engine.finish = FinishReason.LENGTH
    result = phloem("run", "x", "--max-tokens", "2")
    assert (result.code, result.out) == (3, "Hello\n")
    assert "cut" in result.err
    assert engine.requests[0].sampling.max_tokens == 2


def test_each_constraint_flag_is_its_constraint(phloem: Any, engine: Any, tmp_path: Path) -> None:
    schema = '{"type": "object", "properties": {"b": {}, "a": {}}}'
    (tmp_path / "s.json").write_text(schema)
    (tmp_path / "g.ebnf").write_text('root ::= "a"')
    cases = {
        JsonSchema(schema=schema): ["--json-schema", str(tmp_path / "s.json")],
        JsonObject(): ["--json-object"],
        Regex(pattern="[ab]+"): ["--regex", "[ab]+"],
        Choice(choices=("yes", "no, not")): ["--choice", "yes", "--choice", "no, not"],
        Ebnf(grammar='root ::= "a"'): ["--ebnf", str(tmp_path / "g.ebnf")],
    }
    for constraint, flags in cases.items():
        assert phloem("run", "x", *flags).code == 0
        assert engine.requests[-1].constraint == constraint


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--regex", "a", "--choice", "b"], "one constraint, not several"),
        (["--json-schema", "absent.json"], "cannot read absent.json"),
        (["--json-schema", "bad.json"], "bad.json is not JSON"),
        (["--ebnf", "absent.ebnf"], "cannot read absent.ebnf"),
    ],
)
def test_faulty_constraint_flags_end_with_2_before_an_engine_starts(
    phloem: Any, engine: Any, flags: list[str], said: str
) -> None:
    Path("bad.json").write_text("{")
    result = phloem("run", "x", *flags)
    assert (result.code, result.out) == (2, "")
    assert said in result.err
    assert engine.config is None


def test_refused_constraint_ends_with_2(phloem: Any, engine: Any) -> None:
    engine.pieces, engine.error = [], InvalidConstraint("no such keyword")
    result = phloem("run", "x", "--regex", "a")
    assert (result.code, result.out) == (2, "")
    assert result.err == "phloem: no such keyword\n"
    assert engine.closed


def test_engine_that_fails_ends_with_1(phloem: Any, engine: Any) -> None:
    engine.error = Unavailable("the worker died")
    result = phloem("run", "x")
    assert result.code == 1
    assert result.err == "phloem: the worker died\n"


def test_prompt_comes_from_stdin(phloem: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert phloem("run").code == 0
    assert engine.chats[0][0].content == "from a pipe"


def test_damaged_checkpoint_is_one_line(phloem: Any, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(10))
    result = phloem("run", "x", "--model", str(path))
    assert result.code == 1
    assert result.err.startswith(f"phloem: {path}")
    assert result.err.count("\n") == 1
