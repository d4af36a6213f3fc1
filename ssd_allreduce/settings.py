"""The options of the algorithm, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ssd_allreduce.autotune import Limits

Glu = Literal["momentum", "gradient", "displacement", "none"]
Issue = Literal["backward", "step"]

DEFAULT_BUCKET_BYTES = 1 << 20

_FIRST_AUTOMATIC_PERIOD = 4
_LONGEST_AUTOMATIC_PERIOD = 16
_PERIODS_BETWEEN_MEASUREMENTS = 100
_CORRECTED_RULES = ("gradient", "displacement")


@dataclass(frozen=True)
class Automatic:
    """How ``delay_steps="auto"`` chooses.

    Attributes:
        limits: what may be chosen.
        periods: periods between one measurement and the next; 0 for no second one.
    """

    limits: Limits
    periods: int


@dataclass(frozen=True)
class Settings:
    """Checked options; see :class:`ssd_allreduce.DistributedOptimizer` for what each means.

    With ``automatic``, the period here is only the first one.
    """

    delay_steps: int
    overlap_steps: int
    warmup_steps: int
    glu: Glu
    alpha: float
    beta: float
    local_lr_scale: float
    issue: Issue
    timeout: float
    max_grad_norm: float | None
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    automatic: Automatic | None = None

    def describe(self) -> list[tuple[str, str]]:
        """Name and value of every option on which ranks must agree."""
        agreed = (
            "delay_steps",
            "overlap_steps",
            "warmup_steps",
            "glu",
            "alpha",
            "beta",
            "local_lr_scale",
            "max_grad_norm",
            "bucket_bytes",
            "automatic",
        )
        return [(name, repr(getattr(self, name))) for name in agreed]


def check_settings(
    *,
    delay_steps: int | str,
    overlap_steps: int | None,
    warmup_steps: int,
    glu: str,
    alpha: float | None,
    beta: float | None,
    local_lr_scale: float | None,
    issue: str,
    timeout: float,
    max_grad_norm: float | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    max_delay_steps: int | None = None,
    retune_periods: int | None = None,
) -> Settings:
    """Validate user options together and fill in defaults.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option has a value outside its range; the message names the range.
    """
    automatic = None
    if isinstance(delay_steps, str):
        automatic = _automatic(delay_steps, overlap_steps, max_delay_steps, retune_periods)
        delay_steps = min(_FIRST_AUTOMATIC_PERIOD, automatic.limits.longest)
        overlap_steps = automatic.limits.overlap_at(delay_steps)
    else:
        _refuse_unused_tuning(delay_steps, max_delay_steps=max_delay_steps, retune_periods=retune_periods)
        delay_steps, overlap_steps = _fixed_period(delay_steps, overlap_steps)
    _choice("glu", glu, get_args(Glu))
    _choice("issue", issue, get_args(Issue))
    _refuse_unused_correction(glu, alpha=alpha, beta=beta, local_lr_scale=local_lr_scale)
    scale = 1.0 if local_lr_scale is None else _real("local_lr_scale", local_lr_scale)
    if scale <= 0.0:
        raise ValueError(f"local_lr_scale={local_lr_scale} must be greater than 0.")
    timeout = _real("timeout", timeout)
    if timeout <= 0.0:
        raise ValueError(f"timeout={timeout} must be a number of seconds greater than 0.")
    if max_grad_norm is not None and _real("max_grad_norm", max_grad_norm) <= 0.0:
        raise ValueError(f"max_grad_norm={max_grad_norm} must be greater than 0, or None.")
    return Settings(
        delay_steps=delay_steps,
        overlap_steps=overlap_steps,
        warmup_steps=_integer("warmup_steps", warmup_steps, minimum=0),
        glu=glu,  # type: ignore[arg-type]
        alpha=1.0 if alpha is None else _non_negative("alpha", alpha),
        beta=0.5 if beta is None else _non_negative("beta", beta),
        local_lr_scale=scale,
        # The norm is over all gradients, so none is final before the last.
        issue="step" if max_grad_norm is not None else issue,  # type: ignore[arg-type]
        timeout=timeout,
        max_grad_norm=max_grad_norm,
        bucket_bytes=_integer("bucket_bytes", bucket_bytes, minimum=0),
        automatic=automatic,
    )


def _fixed_period(delay_steps: int, overlap_steps: int | None) -> tuple[int, int]:
    delay_steps = _integer("delay_steps", delay_steps, minimum=1)
    if overlap_steps is None:
        overlap_steps = delay_steps // 2
    overlap_steps = _integer("overlap_steps", overlap_steps, minimum=0)
    if overlap_steps >= delay_steps:
        raise ValueError(
            f"overlap_steps={overlap_steps} must be smaller than delay_steps={delay_steps}: the "
            "allreduce of one period has to be complete before the next one is issued. Allowed: "
            f"0 to {delay_steps - 1}; delay_steps // 2 is a good start."
        )
    return delay_steps, overlap_steps


def _automatic(
    delay_steps: str, overlap_steps: int | None, max_delay_steps: int | None, retune_periods: int | None
) -> Automatic:
    if delay_steps != "auto":
        raise TypeError(f"delay_steps={delay_steps!r} must be an integer of at least 1, or 'auto'.")
    longest = _LONGEST_AUTOMATIC_PERIOD if max_delay_steps is None else max_delay_steps
    periods = _PERIODS_BETWEEN_MEASUREMENTS if retune_periods is None else retune_periods
    overlap = None if overlap_steps is None else _integer("overlap_steps", overlap_steps, minimum=0)
    limits = Limits(_integer("max_delay_steps", longest, minimum=2), overlap)
    return Automatic(limits, _integer("retune_periods", periods, minimum=0))


def _refuse_unused_tuning(delay_steps: int, **options: int | None) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)} given with delay_steps={delay_steps!r}, which does not use it. Leave it "
            "out, or choose delay_steps='auto'."
        )


def check_backward_passes(value: int) -> int:
    """``backward_passes_per_step`` as a checked integer of at least 1."""
    return _integer("backward_passes_per_step", value, minimum=1)


def _refuse_unused_correction(glu: str, **options: float | None) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given and glu not in _CORRECTED_RULES:
        raise ValueError(
            f"{', '.join(given)} given with glu={glu!r}, which does not use it. Leave it out, or "
            f"choose glu from {_CORRECTED_RULES}."
        )


def _integer(name: str, value: int, minimum: int) -> int:
    # bool is an int in Python, and True would silently mean 1.
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r} must be an integer of at least {minimum}.")
    number = value.__index__()
    if number < minimum:
        raise ValueError(f"{name}={number} must be an integer of at least {minimum}.")
    return number


def _real(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} must be a finite number.")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value} must be a finite number.")
    return float(value)


def _non_negative(name: str, value: float) -> float:
    number = _real(name, value)
    if number < 0.0:
        raise ValueError(f"{name}={value} must be at least 0.")
    return number


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known. Allowed: {', '.join(map(repr, allowed))}.")
