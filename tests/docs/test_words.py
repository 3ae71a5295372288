"""The pages use the field's words: none that only this project would know."""

from __future__ import annotations

import re

import generated_parts
import pytest

from tests.paths import ROOT

PRIVATE = (
    "adders?",
    "contenders?",
    "contests?",
    "copiers?",
    "impostors?",
    "judged?",
    "judges",
    "nobody",
    "rehears\\w+",
    "rivals?",
    "sabotages?",
    "scorers?",
    "verdicts?",
    "whoever",
    "wideners?",
)
WORDS = re.compile(rf"\b(?:{'|'.join(PRIVATE)})\b", flags=re.IGNORECASE)
PAGES = [
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md"),
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_private_words(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert WORDS.findall(text) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", generated_parts.GENERATORS)
def test_a_generated_part_has_no_private_words(part):
    assert WORDS.findall(generated_parts.GENERATORS[part]()) == []


def test_private_words_are_found():
    assert WORDS.findall("The scorer told nobody; a rival's verdict.") == [
        "scorer",
        "nobody",
        "rival",
        "verdict",
    ]
    assert not WORDS.search("QK-softmax warpgroup, baseline, peer, compare, tolerance")
