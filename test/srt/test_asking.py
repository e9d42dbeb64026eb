"""Questions and their answers: each asker gets its own, or the error, exactly once."""

from __future__ import annotations

import asyncio
import random

import pytest

from phloem.srt.asking import Questions
from phloem.srt.errors import Conflict, InvalidRequest, Unavailable
from phloem.srt.messages import Question
from phloem.srt.questions import AskPolicy, Policy, Refused


async def test_answers_find_their_askers_in_any_order() -> None:
    rng = random.Random(5)
    questions, sent = Questions(), list[Question]()
    asked = [
        asyncio.create_task(questions.ask(AskPolicy(0, policy=str(i)), sent.append))
        for i in range(50)
    ]
    await asyncio.sleep(0)
    assert len({question.id for question in sent}) == len(questions) == 50
    given_up = rng.sample(range(50), 10)
    for i in given_up:
        asked[i].cancel()
    await asyncio.sleep(0)
    assert len(questions) == 40
    for question in rng.sample(sent, 50):
        assert isinstance(question, AskPolicy)
        name = question.policy or ""
        if int(name) % 3:
            questions.settle(Policy(question.id, name, []))
        else:
            questions.settle(Refused(question.id, Conflict(name, code="busy").to_info()))
        questions.settle(Policy(question.id, "a second answer", []))
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    for i, outcome in enumerate(outcomes):
        if i in given_up:
            assert isinstance(outcome, asyncio.CancelledError)
        elif i % 3:
            assert isinstance(outcome, Policy)
            assert outcome.policy == str(i)
        else:
            assert isinstance(outcome, Conflict)
            assert (outcome.message, outcome.code) == (str(i), "busy")
    assert len(questions) == 0


async def test_all_that_wait_fail_together() -> None:
    questions, sent = Questions(), list[Question]()
    asked = [asyncio.create_task(questions.ask(AskPolicy(0), sent.append)) for _ in range(3)]
    await asyncio.sleep(0)
    questions.fail(Unavailable("gone"))
    for outcome in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(outcome, Unavailable)
    assert len(questions) == 0
    later = asyncio.create_task(questions.ask(AskPolicy(0), sent.append))
    await asyncio.sleep(0)
    questions.settle(Policy(sent[0].id, "of an earlier life", []))
    assert not later.done()
    questions.settle(Policy(sent[-1].id, "fair", []))
    assert (await later).id == sent[-1].id


async def test_what_cannot_be_sent_is_not_waited_for() -> None:
    def refuse(question: Question) -> None:
        raise InvalidRequest("no")

    questions = Questions()
    with pytest.raises(InvalidRequest):
        await questions.ask(AskPolicy(0), refuse)
    assert len(questions) == 0
