"""Numeric options of param groups as rows of numbers: read by value, written for a moment, restored."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_allreduce.group_options import GroupOptions, StepOptions

GROUP: dict[str, Any] = {
    "params": [],
    "lr": 0.1,
    "momentum": torch.tensor(0.5),
    "betas": (0.9, torch.tensor(0.75, dtype=torch.float64)),
    "steps": 3,
    "nesterov": True,
    "foreach": None,
    "name": "first",
    "initial_lr": 0.4,
}
OPTIONS = ("lr", "momentum", "betas", "steps", "nesterov", "foreach", "name")
NAMES = ["'lr'", "'momentum'", "'betas'][0", "'betas'][1", "'steps'", "'nesterov'"]


def group(**changes: Any) -> dict[str, Any]:
    return {**GROUP, **changes}


def test_every_kind_of_number_is_read_by_value() -> None:
    groups = [group()]
    assert GroupOptions(groups, OPTIONS).read(groups) == (0.1, 0.5, 0.9, 0.75, 3.0, 1.0)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (np.float32(0.5), 0.5),
        (np.float64(0.25), 0.25),
        (np.float16(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (Fraction(1, 4), 0.25),
        (Decimal("0.25"), 0.25),
    ],
    ids=repr,
)
def test_numbers_of_other_libraries_are_numbers(value: Any, number: float) -> None:
    groups = [group(lr=value)]
    options = GroupOptions(groups, ["lr"])
    assert options.read(groups) == (number,)
    options.write(groups, (number / 2,))
    assert options.read(groups) == (number / 2,)


@pytest.mark.parametrize("value", ["0.1", None, 1j, torch.ones(2), np.ones(1), torch.tensor(1j)], ids=repr)
def test_what_is_no_real_number_is_no_column(value: Any) -> None:
    assert len(GroupOptions([group(lr=value)], ["lr"])) == 0


def test_what_changes_while_options_are_written_stays_changed() -> None:
    groups = [group(lr=0.1, steps=3)]
    options = GroupOptions(groups, ["lr", "steps"])
    with options.written(groups, (0.5, 4.0)):
        groups[0]["steps"] += 1
        assert options.changed(groups, (0.5, 4.0)) == {(0, "steps")}
    assert (groups[0]["lr"], groups[0]["steps"]) == (0.1, 5)


def test_options_can_be_left_out_of_writing() -> None:
    groups = [group(lr=0.1, steps=3)]
    options = GroupOptions(groups, ["lr", "steps"])
    options.write(groups, (0.5, 4.0), but={(0, "steps")})
    assert (groups[0]["lr"], groups[0]["steps"]) == (0.5, 3)


def test_a_tensor_changed_in_place_does_not_change_what_was_read() -> None:
    groups = [group(lr=torch.tensor(0.25))]
    options = GroupOptions(groups, OPTIONS)
    row = options.read(groups)
    groups[0]["lr"].mul_(0.5)
    assert row[0] == 0.25
    assert options.read(groups)[0] == 0.125


def test_messages_name_group_option_and_element() -> None:
    groups = [group(), group()]
    options = GroupOptions(groups, OPTIONS)
    expected = [f"param_groups[{index}][{name}]" for index in (0, 1) for name in NAMES]
    assert len(options) == len(expected)
    assert [options.name(column) for column in range(len(options))] == expected


def test_what_schedulers_store_beside_the_options_stays_out() -> None:
    groups = [group()]
    options = GroupOptions(groups, ["lr"])
    assert [options.name(column) for column in range(len(options))] == ["param_groups[0]['lr']"]


def test_a_value_is_found_by_group_and_option_and_is_zero_where_there_is_none() -> None:
    groups = [group(lr=0.1), group(lr=0.2)]
    options = GroupOptions(groups, OPTIONS)
    row = options.read(groups)
    in_force = StepOptions(options, row)
    assert [in_force(g, "lr") for g in (0, 1)] == [0.1, 0.2]
    assert in_force(1, "nesterov") == 1.0
    assert in_force(0, "weight_decay") == 0.0
    assert in_force(2, "lr") == 0.0


def test_written_values_have_the_type_of_what_they_stand_in_for() -> None:
    groups = [group()]
    options = GroupOptions(groups, OPTIONS)
    with options.written(groups, (0.3, 0.25, 0.8, 0.5, 7.0, 0.0)):
        inside = groups[0]
        assert inside["lr"] == 0.3
        assert isinstance(inside["momentum"], torch.Tensor)
        assert inside["momentum"].item() == 0.25
        assert inside["betas"] == (0.8, torch.tensor(0.5))
        assert isinstance(inside["betas"], tuple)
        assert inside["betas"][1].dtype == torch.float64
        assert inside["steps"] == 7
        assert isinstance(inside["steps"], int)
        assert inside["nesterov"] is False
        assert inside["name"] == "first"


def test_an_int_makes_way_for_a_fraction_and_is_back_afterwards() -> None:
    groups: list[dict[str, Any]] = [{"params": [], "lr": 1, "betas": (0, 0.9)}]
    options = GroupOptions(groups, ("lr", "betas"))
    with options.written(groups, (0.7, 0.25, 0.5)):
        assert options.read(groups) == (0.7, 0.25, 0.5)
    assert groups[0] == {"params": [], "lr": 1, "betas": (0, 0.9)}
    assert isinstance(groups[0]["lr"], int)


def test_the_own_values_are_back_afterwards_as_the_same_objects() -> None:
    groups = [group(lr=torch.tensor(0.25))]
    options = GroupOptions(groups, OPTIONS)
    before = dict(groups[0])
    with options.written(groups, (1.0, 2.0, 3.0, 4.0, 5.0, 0.0)):
        pass
    assert groups[0].keys() == before.keys()
    assert all(groups[0][key] is value for key, value in before.items())
    assert groups[0]["lr"].item() == 0.25


def test_the_own_values_are_back_after_an_error_too() -> None:
    groups = [group()]
    options = GroupOptions(groups, OPTIONS)
    with pytest.raises(KeyError), options.written(groups, (9.0,) * 6):
        raise KeyError
    assert options.read(groups) == (0.1, 0.5, 0.9, 0.75, 3.0, 1.0)


def test_equal_values_are_not_written_so_that_tensors_stay_the_ones_that_are_there() -> None:
    groups = [group()]
    options = GroupOptions(groups, OPTIONS)
    momentum = groups[0]["momentum"]
    with options.written(groups, options.read(groups)):
        assert groups[0]["momentum"] is momentum


@settings(deadline=None, max_examples=100)
@given(
    lr=st.floats(0, 10),
    betas=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    other=st.tuples(st.floats(0, 10), st.floats(0, 1), st.floats(0, 1)),
)
def test_what_is_written_is_what_is_read_inside(
    lr: float, betas: tuple[float, float], other: tuple[float, float, float]
) -> None:
    groups = [{"params": [], "lr": lr, "betas": betas}]
    options = GroupOptions(groups, ("lr", "betas"))
    assert options.read(groups) == (lr, *betas)
    with options.written(groups, other):
        assert options.read(groups) == other
    assert options.read(groups) == (lr, *betas)
