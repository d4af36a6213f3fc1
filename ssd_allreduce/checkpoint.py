"""What a checkpoint holds beside the base optimizer's state, and how it is taken back.

The entry lies in ``state_dict()["state"]`` under one key that is no parameter, where torch's loaders
carry it along. Everything here is rank-local.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssd_allreduce.parameters import Parameters
from ssd_allreduce.schedule import Schedule, Stage

if TYPE_CHECKING:
    from ssd_allreduce.coordinator import Coordinator

FORMAT = 2
_SAME_STATE = frozenset({"Adam", "AdamW"})
"""Classes that go on from each other's state, as torch lets them."""


def global_entry(
    names: Sequence[str], weights: Sequence[Tensor], schedule: Schedule, rank: int, size: int
) -> dict[str, Any]:
    """The part of an entry that serves any rank and world size; without settings, no rank's own."""
    return {
        "format": FORMAT,
        "rank": rank,
        "size": size,
        "names": list(names),
        "global_weights": [weight.detach() for weight in weights],
        "schedule": schedule.state_dict(),
        "settings": None,
        "tuning": {"next_event": None, "measurements": 0},
        "local": None,
    }


def export(coordinator: Coordinator) -> dict[str, Any]:
    """The entry of one of several ranks. Waits for what this rank has in flight.

    After an error, what is in flight may never arrive, and the period cannot be ended as it began: the
    entry holds the global part alone then, and training begins a new period from it on any rank.
    """
    if coordinator.failed:
        return _export_global_part(coordinator)
    coordinator.delay.settle()
    entry = _export_progress(coordinator)
    entry["settings"] = dict(coordinator.training.settings.describe())
    if coordinator.training.global_model.weights is not None:
        entry["local"] = {
            "weights": coordinator.local_weights(),
            "rule": coordinator.training.rule.export_state(),
            "period_steps": coordinator.delay.known_steps(),
            "rows_since_sync": coordinator.delay.contributed_since_sync(),
            "control": coordinator.training.control.arrived,
            **coordinator.training.reducer.buffers.export_state(),
            **coordinator.training.buffers.export_state(),
        }
    else:
        entry["local"] = {"rule": coordinator.training.rule.export_state()}
    return entry


def _export_progress(coordinator: Coordinator) -> dict[str, Any]:
    entry = global_entry(
        coordinator.training.parameters.names,
        coordinator.training.global_model.current(),
        coordinator.training.schedule,
        coordinator.training.rank,
        coordinator.training.size,
    )
    entry["tuning"] = coordinator.delay.tuner.export_state()
    return entry


def _export_global_part(coordinator: Coordinator) -> dict[str, Any]:
    """An entry that no rank takes for its own: without settings, and in no period."""
    entry = _export_progress(coordinator)
    entry["schedule"] = {**entry["schedule"], "position": 0, "steps_since_sync": None}
    corrections = coordinator.training.rule.corrections
    entry["local"] = None if corrections is None else {"rule": {"corrections": corrections}}
    return entry


def check(entry: dict[str, Any], parameters: Parameters, optimizer: str) -> None:
    """Refuse an entry that was saved for other parameters, or by an optimizer with other state.

    Args:
        entry: what was saved.
        parameters: those that it is loaded for.
        optimizer: name of the base optimizer's class.

    Raises:
        ValueError: the format, the class, a name, a shape or a dtype differs.
    """
    if entry.get("format") != FORMAT:
        raise ValueError(
            f"The checkpoint's ssd_allreduce entry has format {entry.get('format')!r}; this version "
            f"reads format {FORMAT}."
        )
    # Older entries do not say it.
    saved_by = entry.get("optimizer", optimizer)
    if saved_by != optimizer and not {saved_by, optimizer} <= _SAME_STATE:
        raise ValueError(
            f"The checkpoint holds the state of {saved_by}, and the optimizer is {optimizer}. Load it into "
            f"{saved_by}, or load the model's weights alone and begin with a new state."
        )
    if entry["names"] != parameters.names:
        odd = sorted(set(entry["names"]) ^ set(parameters.names)) or ["the same names in another order"]
        raise ValueError(
            f"The checkpoint holds {len(entry['names'])} parameters and the optimizer "
            f"{len(parameters)}; they differ in {', '.join(odd[:5])}. Load it into the model and "
            "optimizer that it was saved from."
            + (
                " Parameters were unfrozen, frozen or added here: flush() first."
                if parameters.have_changed()
                else ""
            )
        )
    triples = zip(parameters.names, parameters.tensors, entry["global_weights"], strict=True)
    for name, parameter, saved in triples:
        here = (tuple(parameter.shape), parameter.dtype)
        there = (tuple(saved.shape), saved.dtype)
        if here != there:
            raise ValueError(
                f"Parameter {name!r} is {here[0]} {here[1]} in the model and {there[0]} {there[1]} in "
                "the checkpoint."
            )


def restore(coordinator: Coordinator, entry: dict[str, Any] | None) -> None:
    """Take back what :func:`export` stored.

    With this rank's own entry and the same settings, training goes on as if it had not stopped. With
    another's, global weights and state are taken, and a new period begins.

    Args:
        coordinator: what to restore.
        entry: a checked entry, or None for a checkpoint of plain training.
    """
    _discard_present_state(coordinator)
    with torch.no_grad():
        if entry is not None:
            torch._foreach_copy_(coordinator.training.parameters.tensors, entry["global_weights"])
            coordinator.training.schedule.load_progress(entry["schedule"])
            coordinator.delay.restore_period(entry["schedule"], entry["tuning"])
            _restore_delay_stage(coordinator, entry)
    coordinator.after_load()


def _discard_present_state(coordinator: Coordinator) -> None:
    coordinator.delay.settle()
    coordinator.training.global_model.weights = None
    coordinator.needs_new_period = False
    coordinator.start_new_period()


def _restore_delay_stage(coordinator: Coordinator, entry: dict[str, Any]) -> None:
    local = entry["local"]
    own = (
        entry["rank"] == coordinator.training.rank
        and entry["size"] == coordinator.training.size
        and entry["settings"] == dict(coordinator.training.settings.describe())
    )
    if coordinator.training.schedule.stage is Stage.DELAY and local is not None and "weights" in local:
        coordinator.training.global_model.set_weights(entry["global_weights"])
        coordinator.training.rule.seed(coordinator.training.global_model)
    if own:
        _restore_own(coordinator, local)
        return
    if local is not None and "corrections" in local["rule"] and coordinator.training.rule.corrections:
        torch._foreach_copy_(coordinator.training.rule.corrections, local["rule"]["corrections"])
    mid_period = coordinator.training.schedule.position > 0 or coordinator.training.schedule.in_flight
    if mid_period or entry["size"] != coordinator.training.size:
        warn_of_new_period(entry, coordinator.training.rank, coordinator.training.size)
    # Other ranks may have saved theirs before they heard of the error after which this one was saved.
    coordinator.needs_new_period = mid_period or entry["settings"] is None
    coordinator.training.schedule.restart_period()


def _restore_own(coordinator: Coordinator, local: dict[str, Any]) -> None:
    coordinator.training.rule.import_state(local["rule"])
    if "weights" not in local:
        return
    torch._foreach_copy_(coordinator.training.parameters.tensors, local["weights"])
    coordinator.delay.period_steps = [(tuple(row), flag) for row, flag in local["period_steps"]]
    coordinator.delay.steps_since_sync = [(tuple(row), True) for row in local["rows_since_sync"]]
    control = local["control"]
    coordinator.training.control.arrived = None if control is None else tuple(control)
    coordinator.training.reducer.buffers.import_state(local)
    coordinator.training.buffers.import_state(local)


def warn_of_new_period(entry: dict[str, Any], rank: int, size: int) -> None:
    """Say that what the checkpoint holds of one rank's period is not used."""
    warnings.warn(
        f"The checkpoint was saved by rank {entry['rank']} of {entry['size']} and is loaded by rank "
        f"{rank} of {size} (or with other settings): global weights and optimizer state are taken, and a "
        "new period begins. Call flush() before saving to lose nothing.",
        stacklevel=3,
    )
