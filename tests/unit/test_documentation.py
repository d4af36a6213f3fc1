"""What the documentation promises is shown by tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = re.compile(r"`((?:unit|distributed)/[\w/]+\.py)(?:::(\w+))?`")


def referenced() -> list[tuple[str, str]]:
    text = (ROOT / "docs" / "training-loops.md").read_text()
    return sorted(set(REFERENCE.findall(text)))


@pytest.mark.parametrize(("file", "test"), referenced())
def test_referenced_test_exists(file: str, test: str) -> None:
    source = (ROOT / "tests" / file).read_text()
    assert f"def {test}(" in source if test else "def test_" in source


def test_every_row_of_the_training_loops_names_a_test() -> None:
    assert len(referenced()) > 30
