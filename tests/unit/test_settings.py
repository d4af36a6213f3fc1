"""Options are checked at construction: each bad value, and what its message says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ssd_allreduce.settings import Settings, check_backward_passes, check_settings

GOOD: dict[str, Any] = {
    "delay_steps": 4,
    "overlap_steps": None,
    "warmup_steps": 0,
    "glu": "momentum",
    "alpha": None,
    "beta": None,
    "local_lr_scale": None,
    "issue": "backward",
    "timeout": 600.0,
}


def check(**options: Any) -> Settings:
    return check_settings(**{**GOOD, **options})


def test_what_is_left_out_gets_its_default() -> None:
    assert check() == Settings(
        delay_steps=4,
        overlap_steps=2,
        warmup_steps=0,
        glu="momentum",
        alpha=1.0,
        beta=0.5,
        local_lr_scale=1.0,
        issue="backward",
        timeout=600.0,
        max_grad_norm=None,
    )


@pytest.mark.parametrize(("k", "d"), [(1, 0), (2, 1), (3, 1), (4, 2), (9, 4)])
def test_half_of_the_period_overlaps_by_default(k: int, d: int) -> None:
    assert check(delay_steps=k).overlap_steps == d


@pytest.mark.parametrize("value", [np.int64(3), torch.tensor(3)])
def test_integers_of_other_libraries_are_integers(value: Any) -> None:
    delay_steps = check(delay_steps=value).delay_steps
    assert delay_steps == 3
    assert type(delay_steps) is int


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"delay_steps": 0}, ValueError, r"delay_steps=0 must be an integer of at least 1"),
        ({"delay_steps": -3}, ValueError, r"delay_steps=-3 must be an integer of at least 1"),
        ({"delay_steps": 4.0}, TypeError, r"delay_steps=4\.0 must be an integer of at least 1"),
        ({"delay_steps": True}, TypeError, r"delay_steps=True must be an integer"),
        ({"delay_steps": "4"}, TypeError, r"delay_steps='4' must be an integer of at least 1, or 'auto'"),
        ({"delay_steps": None}, TypeError, r"delay_steps=None must be an integer"),
        ({"overlap_steps": -1}, ValueError, r"overlap_steps=-1 must be an integer of at least 0"),
        ({"overlap_steps": 1.5}, TypeError, r"overlap_steps=1\.5 must be an integer of at least 0"),
        (
            {"overlap_steps": 4},
            ValueError,
            r"overlap_steps=4 must be smaller than delay_steps=4.*Allowed: 0 to 3",
        ),
        ({"delay_steps": 1, "overlap_steps": 1}, ValueError, r"smaller than delay_steps=1.*Allowed: 0 to 0"),
        ({"warmup_steps": -1}, ValueError, r"warmup_steps=-1 must be an integer of at least 0"),
        ({"warmup_steps": False}, TypeError, r"warmup_steps=False must be an integer of at least 0"),
        (
            {"glu": "adam"},
            ValueError,
            r"glu='adam' is not known. Allowed: 'momentum', 'gradient', 'displacement', 'none'",
        ),
        ({"glu": None}, ValueError, r"glu=None is not known"),
        ({"issue": "hook"}, ValueError, r"issue='hook' is not known. Allowed: 'backward', 'step'"),
        ({"timeout": 0}, ValueError, r"timeout=0.* greater than 0"),
        ({"timeout": -1.0}, ValueError, r"timeout=-1\.0 must be a number of seconds greater than 0"),
        ({"timeout": float("inf")}, ValueError, r"timeout=inf must be a finite number"),
        ({"timeout": None}, TypeError, r"timeout=None must be a finite number"),
        ({"max_grad_norm": 0}, ValueError, r"max_grad_norm=0 must be greater than 0, or None"),
        ({"max_grad_norm": float("nan")}, ValueError, r"max_grad_norm=nan must be a finite number"),
        ({"max_grad_norm": True}, TypeError, r"max_grad_norm=True must be a finite number"),
        ({"glu": "gradient", "alpha": -0.1}, ValueError, r"alpha=-0\.1 must be at least 0"),
        ({"glu": "gradient", "alpha": "1"}, TypeError, r"alpha='1' must be a finite number"),
        ({"glu": "gradient", "alpha": float("nan")}, ValueError, r"alpha=nan must be a finite number"),
        ({"glu": "gradient", "beta": -1}, ValueError, r"beta=-1 must be at least 0"),
        ({"glu": "gradient", "beta": float("inf")}, ValueError, r"beta=inf must be a finite number"),
        ({"glu": "displacement", "beta": True}, TypeError, r"beta=True must be a finite number"),
        (
            {"glu": "displacement", "local_lr_scale": 0},
            ValueError,
            r"local_lr_scale=0 must be greater than 0",
        ),
        ({"glu": "gradient", "local_lr_scale": -2}, ValueError, r"local_lr_scale=-2 must be greater than 0"),
        (
            {"glu": "momentum", "alpha": 0.5},
            ValueError,
            r"alpha given with glu='momentum', which does not use it.*'gradient', 'displacement'",
        ),
        (
            {"glu": "none", "beta": 0.5, "local_lr_scale": 2.0},
            ValueError,
            r"beta, local_lr_scale given with glu='none'",
        ),
    ],
    ids=lambda value: repr(value) if isinstance(value, dict) else "",
)
def test_a_bad_value_is_refused_by_name(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check(**options)


@pytest.mark.parametrize("glu", ["gradient", "displacement"])
def test_the_weights_of_a_corrected_rule_may_be_zero(glu: str) -> None:
    settings = check(glu=glu, alpha=0, beta=0.0, local_lr_scale=3)
    assert (settings.alpha, settings.beta, settings.local_lr_scale) == (0.0, 0.0, 3.0)


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)]
)
def test_a_bad_number_of_backward_passes_is_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"backward_passes_per_step={value!r} must be an integer of at least 1"):
        check_backward_passes(value)


def test_clipping_makes_gradients_final_at_step() -> None:
    assert check(max_grad_norm=2, issue="backward").issue == "step"
    assert check(max_grad_norm=2).max_grad_norm == 2.0
    assert check().max_grad_norm is None


def test_every_option_that_changes_the_result_is_described_to_the_other_ranks() -> None:
    """Options that only concern the own rank may differ between ranks."""
    changed: dict[str, Any] = {
        "delay_steps": 5,
        "overlap_steps": 1,
        "warmup_steps": 7,
        "glu": "displacement",
        "alpha": 0.25,
        "beta": 0.75,
        "local_lr_scale": 2.0,
        "max_grad_norm": 1.5,
    }
    settings = {"glu": "gradient"}
    before = check(**settings).describe()
    for name, value in changed.items():
        after = check(**{**settings, name: value}).describe()
        assert (name, repr(value)) in after
        assert after != before
    assert check(**settings, issue="step", timeout=1.0).describe() == before


def test_automatic_periods_have_defaults_and_limits() -> None:
    settings = check(delay_steps="auto", overlap_steps=None)
    assert (settings.delay_steps, settings.overlap_steps) == (4, 2)
    assert settings.automatic is not None
    assert (settings.automatic.limits.longest, settings.automatic.periods) == (16, 100)
    small = check(delay_steps="auto", overlap_steps=3, max_delay_steps=2, retune_periods=0)
    assert (small.delay_steps, small.overlap_steps) == (2, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"delay_steps": "auto", "max_delay_steps": 1},
            r"max_delay_steps=1 must be an integer of at least 2",
        ),
        (
            {"delay_steps": "auto", "retune_periods": -1},
            r"retune_periods=-1 must be an integer of at least 0",
        ),
        ({"delay_steps": 8, "max_delay_steps": 9}, r"max_delay_steps given with delay_steps=8.*'auto'"),
        ({"delay_steps": 8, "retune_periods": 9}, r"retune_periods given with delay_steps=8.*'auto'"),
    ],
)
def test_wrong_automatic_periods_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(**{"overlap_steps": None, **options})
