"""User grammars: what is broken, endless, slow or too large is refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from phloem.constrained.backends import load_backend
from phloem.constrained.base import (
    ConstraintError,
    LimitExceeded,
    MalformedConstraint,
    UnsupportedKeyword,
)
from phloem.constrained.ebnf import check_ebnf
from phloem.constrained.lowering import lower
from phloem.constrained.spec import Choice, Constraint, Ebnf, StructuralTag
from phloem.constrained.vocab import Vocabulary

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
        ('root ::= "\\x41B" [\\x30-\\x39]', ["AB7"], ["\u041b7", "ABx"]),
        ('root ::= "\\u00e9\\U0001F600" . # any', ["é😀\n", "é😀日"], ["é😀", "é😀ab"]),
        (
            "root ::= [^\\n\\]-]{2} [\\-\\^\\\\] [a^-]",
            ["ab-a", "[[\\^"],
            ["a]-a", "ab-b", "a\n-a"],
        ),
        ('# head\nroot ::= ( # one\n "a" |\n\n "b"\n)+ tail-1\ntail-1 ::= ";"', ["ab;"], [";"]),
        ('root ::= "a"{2} "b"{1,} "c"{0,2}', ["aab", "aabbcc"], ["ab", "aac", "aabccc"]),
        ('root ::= "a" | "b" never\nnever ::= "c" never', ["a"], ["b", "bc"]),
        ("root ::= 1st\n1st ::= [x]", ["x"], [""]),
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
        ('start: "a"', MalformedConstraint, "::= (line 1)"),
        ('root ::= "a"\nother = "b"', MalformedConstraint, "::= (line 2)"),
        ("root ::= /a+/", MalformedConstraint, "not GBNF"),
        ("root ::= 'a'", MalformedConstraint, "quoted by"),
        ('root ::= "\\d"', MalformedConstraint, "unknown escape \\d (line 1)"),
        ("root ::=\n[\\q]", MalformedConstraint, "(line 2)"),
        ("root ::= [z-a]", MalformedConstraint, "out of order"),
        ("root ::= []", MalformedConstraint, "no character"),
        ('root ::= "\\ud800"', MalformedConstraint, "no character"),
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


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('root ::= root root | "a" | ""', "without reading"),
        ('root ::= (b*)*\nb ::= "x"', "may be empty"),
        ("root ::= a\na ::= b\nb ::= a | [x]", "without reading"),
        ('root ::= "a"*', ""),
    ],
)
def test_ambiguity_is_told(byte_vocabulary: Vocabulary, grammar: str, why: str) -> None:
    assert bool(why) == bool(check_ebnf(grammar).ambiguous)
    if why:
        with pytest.raises(UnsupportedKeyword, match=why):
            load_backend("xgrammar", byte_vocabulary).compile(Ebnf(grammar=grammar))
        with pytest.raises(UnsupportedKeyword, match=why):
            lower(StructuralTag(format=json.dumps({"type": "grammar", "grammar": grammar})))


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
        lower(Choice(choices=tuple(map(str, range(10_001)))))
