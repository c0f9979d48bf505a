"""A document is found again by its text: the same text before one that begins alike, and never one of several."""

from __future__ import annotations

from tasks.data.lineage import recognized

LONG = "a sentence that is longer than the key by which documents are looked up"


def test_the_same_text_is_found_before_one_that_begins_alike() -> None:
    places = [("a:1", LONG[:50]), ("a:2", LONG), ("a:3", LONG + " and more")]
    assert recognized(places, {7: LONG}) == {7: "a:2"}


def test_a_text_that_begins_alike_is_taken_only_if_it_is_the_only_one() -> None:
    cut = {7: LONG[:-5]}
    assert recognized([("a:1", "another"), ("a:2", LONG)], cut) == {7: "a:2"}
    assert recognized([("a:2", LONG), ("a:3", LONG + " and more")], cut) == {}


def test_an_empty_text_is_nowhere() -> None:
    assert recognized([("a:1", " "), ("a:2", LONG)], {7: " "}) == {7: "not known: the document has only white space"}
