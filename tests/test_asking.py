"""Asking silos: totals are sums however they are carried, and what is missing is named or refused."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.asking import Each, Silos, TooFew, settle
from isthmus.errors import PrivacyError, ProtocolError, Refused
from isthmus.private.secure_sum import least_threshold
from masked_sums import Step, masked_sum, respondents

SESSION = b"a session of 16 b"


def holding(vectors: list[list[int]], **needs: object) -> Silos:
    """Silos that answer with a vector, times whatever they are asked."""
    answers = {f"s{at}": lambda times, own=own: times * np.array(own) for at, own in enumerate(vectors)}
    return respondents(answers, **needs)


@settings(max_examples=15, deadline=None)
@given(
    vectors=st.integers(1, 5).flatmap(
        lambda size: st.lists(
            st.lists(st.integers(-(2**40), 2**40), min_size=size, max_size=size), min_size=3, max_size=7
        )
    )
)
def test_the_total_is_the_sum_of_the_answers_plain_or_masked(vectors: list[list[int]]) -> None:
    silos, expected = holding(vectors), 3 * np.sum(vectors, axis=0)
    np.testing.assert_array_equal(silos.sum(3), expected)
    threshold = least_threshold(len(vectors))
    masked = masked_sum(silos, 3, len(vectors[0]), session=SESSION, threshold=threshold)
    np.testing.assert_array_equal(masked, expected)
    by_silo = silos.collect(3, shows="its vector").by_silo
    np.testing.assert_array_equal(sum(by_silo.values()), expected)


def dropping(gone: int, *, at: str, count: int = 7) -> Silos:
    """Silos of which some fail at a step of a masked sum, or at any question that is none."""
    silos = holding([[1, 2]] * count)
    inner = silos.carrier

    def carrier(questions, **how):
        for name, reply in inner(questions, **how):
            step = getattr(questions[name], "step", "")
            yield name, Refused("not today") if step == at and int(name[1:]) < gone else reply

    return Silos(silos.names, carrier)


@pytest.mark.parametrize("step", ["agree", "share", "mask", "confirm", "reveal"])
def test_drop_outs_down_to_the_least_number_are_survived_and_no_further(step: str) -> None:
    total = masked_sum(dropping(2, at=step), 1, 2, session=SESSION, threshold=5)
    answered = 7 if step in ("confirm", "reveal") else 5
    np.testing.assert_array_equal(total, [answered, 2 * answered])
    with pytest.raises(TooFew, match="4 silos answered, 5 are needed") as few:
        masked_sum(dropping(3, at=step), 1, 2, session=SESSION, threshold=5)
    assert few.value.answers.reasons() == dict.fromkeys(["s0", "s1", "s2"], "not today")


def test_a_plain_sum_needs_everybody_unless_told_otherwise() -> None:
    silos = dropping(1, at="", count=3)
    with pytest.raises(TooFew, match="s0: not today"):
        silos.sum(1)
    np.testing.assert_array_equal(Silos(silos.names, silos.carrier, least=2).sum(1), [2, 4])


def test_a_collection_says_what_it_shows_in_its_answers_and_in_the_log(caplog) -> None:
    silos = holding([[1], [2], [3]])
    with pytest.raises(PrivacyError, match="say what it shows"):
        silos.collect(1, shows="")
    with caplog.at_level("DEBUG", "isthmus.asking"):
        silos.sum(1)
        assert not caplog.records, "of a sum no silo's answer is seen"
        assert silos.collect(1, shows="its vector").shows == "its vector"
    (record,) = caplog.records
    assert (record.shows, record.getMessage()) == ("its vector", "3 silos have each shown its vector")


def test_a_silo_takes_part_in_the_session_that_it_began() -> None:
    silos = holding([[1], [2], [3]])
    step = Step("mask", b"another", 3, 1, {})
    with pytest.raises(TooFew, match="no part in that session"):
        silos.ask(Each(dict.fromkeys(silos.names, step)), lambda name, reply: reply)


def test_answers_of_different_lengths_do_not_add_up() -> None:
    with pytest.raises(ProtocolError, match="different lengths"):
        holding([[1], [1, 2]]).sum(1)


def test_who_is_late_has_not_answered() -> None:
    slow = {"a": lambda question: np.ones(1), "b": lambda question: time.sleep(0.2), "c": lambda question: 1}
    silos = Silos.in_memory(slow, deadline=0.1, least=1)
    answers = silos.collect("?", shows="nothing")
    assert list(answers.by_silo) == ["a"]
    assert answers.reasons() == dict.fromkeys(["b", "c"], "no answer within 0.1 s")
    with pytest.raises(TooFew, match=r"b: no answer within 0\.1 s"):
        Silos.in_memory(slow, deadline=0.1).sum("?")


def test_one_bad_answer_costs_that_answer_alone() -> None:
    def read(silo: str, reply: object) -> object:
        return {"good": reply}[reply]

    replies = [("a", "good"), ("b", "bad"), ("a", "good"), ("stranger", "good"), ("c", Refused("no"))]
    answers = settle("abcd", replies, read, deadline=3)
    assert answers.by_silo == {"a": "good"}
    assert answers.reasons() == {
        "b": "sent what cannot be read (KeyError)",
        "c": "no",
        "d": "no answer within 3 s",
    }
    with pytest.raises(ZeroDivisionError):  # nobody's answer: a mistake of ours
        settle("a", [("a", ZeroDivisionError())], read)
