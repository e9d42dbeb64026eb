"""User grammars: what is broken, endless, slow or too large is refused with a reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from phloem.constrained.base import (
    ConstraintError,
    LimitExceeded,
    MalformedConstraint,
    UnsupportedKeyword,
)
from phloem.constrained.ebnf import check_ebnf
from phloem.constrained.lowering import lower
from phloem.constrained.spec import Choice, Constraint, Ebnf

Judge = Callable[[Constraint], Callable[[str], bool]]


@pytest.mark.parametrize(
    ("grammar", "inside", "outside"),
    [
        ('root ::= "yes" | "no"', ["yes", "no"], ["", "yesno"]),
        ('root ::= "a#b \\"q\\" é"  # a comment', ['a#b "q" é'], ["a"]),
        ("root ::= [é日] [é日]", ["é日"], ["é"]),
        (
            'root ::= key "=" num ";"\nkey ::= "x" | "y"\nnum ::= [1-9] [0-9]',
            ["x=12;"],
            ["x=1;", "z=12;"],
        ),
        ('root ::= root "," [a] | [a]', ["a,a,a"], ["a,", ","]),
        ('root ::= ("a"\n  | "b"\n)\n\n# end\nunused ::= "x"', ["a", "b"], ["ab"]),
        ('root ::= "a"{2,3} "b"?', ["aa", "aaab"], ["a", "aaaa"]),
        ('root ::= "" | "a"', ["", "a"], ["aa"]),
        ('root ::= [^"\\\\] "\\x41"', ["zA"], ['"A']),
    ],
)
def test_grammar(grammar: str, inside: list[str], outside: list[str], judge: Judge) -> None:
    accepts = judge(Ebnf(grammar=grammar))
    assert all(accepts(text) for text in inside)
    assert not any(accepts(text) for text in outside)


def test_other_root(judge: Judge) -> None:
    accepts = judge(Ebnf(grammar='root ::= "a"\nother ::= "b"', root="other"))
    assert accepts("b")
    assert not accepts("a")


@pytest.mark.parametrize(
    ("grammar", "error", "named"),
    [
        ("root ::= missing", MalformedConstraint, "'missing', which is not defined"),
        ('a ::= "x"', MalformedConstraint, "no rule 'root'"),
        ('root ::= "x', MalformedConstraint, "unclosed literal"),
        ("root ::= [a", MalformedConstraint, "unclosed class"),
        ('root ::= ("a"', MalformedConstraint, "missing )"),
        ('root ::= "a" )', MalformedConstraint, "expected a rule"),
        ("root ::= *", MalformedConstraint, "nothing to repeat"),
        ('root ::= "a" |', MalformedConstraint, "empty alternative"),
        ('root ::= "a"\nroot ::= "b"', MalformedConstraint, "defined twice"),
        ('root ::= x\nx ::= "a" x', MalformedConstraint, "can never end"),
        ("", MalformedConstraint, "no rule"),
        ('root ::= "a"{3,2}', MalformedConstraint, "out of order"),
        ('root ::= root root | "a" | ""', UnsupportedKeyword, "without reading"),
        ('root ::= (b*)*\nb ::= "x"', UnsupportedKeyword, "may be empty"),
        ("root ::= a\na ::= b\nb ::= a | [x]", UnsupportedKeyword, "without reading"),
        ("root ::= TagDispatch", UnsupportedKeyword, "TagDispatch"),
        ("root ::= " + "(" * 65 + '"a"' + ")" * 65, LimitExceeded, "64"),
        ("root ::= " + "(" * 60000 + '"a"' + ")" * 60000, LimitExceeded, "bytes"),
        ("root ::= [a]{100000}", LimitExceeded, "10000"),
        ("root ::= [a]\n" + "\n".join(f"r{i} ::= [a]" for i in range(2000)), LimitExceeded, "2000"),
    ],
)
def test_refusal(grammar: str, error: type[ConstraintError], named: str) -> None:
    with pytest.raises(error) as caught:
        check_ebnf(grammar)
    assert named in caught.value.message


def test_choice(judge: Judge) -> None:
    choices = ('a"\\b', "日本\n", "a", "ab", "[x]\t")
    accepts = judge(Choice(choices=choices))
    assert all(accepts(c) for c in choices)
    assert not any(accepts(t) for t in ("", "b", "aa", "日本"))


@pytest.mark.parametrize(
    ("choices", "path"), [((), ""), (("a", ""), "/1"), (("a", "b", "a"), "/2"), (("\ud800",), "/0")]
)
def test_bad_choices(choices: tuple[str, ...], path: str) -> None:
    with pytest.raises(MalformedConstraint) as caught:
        lower(Choice(choices=choices))
    assert caught.value.path == path
    with pytest.raises(LimitExceeded):
        lower(Choice(choices=tuple(map(str, range(1001)))))
