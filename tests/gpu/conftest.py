"""Tests that need a GPU. Elsewhere each is skipped, with the reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))


def missing() -> str | None:
    """What keeps the tests of this folder from running, if anything does."""
    if torch.version.cuda is None:
        return f"needs a GPU: torch {torch.__version__} is not a CUDA build"
    if not torch.cuda.is_available():
        return "needs a GPU: torch finds none on this machine"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    if reason is None:
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
