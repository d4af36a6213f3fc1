"""The numeric options of param groups (learning rate, momentum, ...) as flat rows of numbers.

Schedulers change more than the learning rate, so every numeric option is remembered by value for each
step, sent with the control row, and written back for the replay.
"""

from __future__ import annotations

import numbers
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

Row: TypeAlias = tuple[float, ...]
Groups: TypeAlias = list[dict[str, Any]]
Option: TypeAlias = tuple[int, str]
"""A group's index, and the name of one of its options."""


_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that say how torch computes, not what. They may be None, and change with a checkpoint."""


@dataclass(frozen=True)
class _Slot:
    """Place of one number: a group, an option, and for options that are tuples an element."""

    group: int
    option: str
    element: int | None

    @property
    def name(self) -> str:
        """The option's name; with the element's index where it is a tuple."""
        return self.option if self.element is None else f"{self.option}[{self.element}]"


def is_number(value: object) -> bool:
    """Whether an option can be a column: any real number, numpy's and tensors of one element among them."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    # numpy's booleans are no numbers to Python, and its arrays would be converted if they had one element.
    return isinstance(value, numbers.Real) or (
        hasattr(type(value), "__float__") and getattr(value, "ndim", 0) == 0
    )


class GroupOptions:
    """Reads, writes and names the numeric options of param groups in one fixed order.

    Args:
        groups: the optimizer's param groups.
        option_names: options that the optimizer's own code reads; what schedulers store beside them
            stays out.
    """

    def __init__(self, groups: Groups, option_names: Sequence[str]) -> None:
        self._slots: list[_Slot] = []
        for group_index, group in enumerate(groups):
            for option in (name for name in option_names if name not in _IMPLEMENTATION):
                value = group.get(option)
                if is_number(value):
                    self._slots.append(_Slot(group_index, option, None))
                elif isinstance(value, tuple | list) and all(map(is_number, value)):
                    self._slots += [_Slot(group_index, option, i) for i in range(len(value))]
        self.columns = {(slot.group, slot.name): column for column, slot in enumerate(self._slots)}
        """Place in a row of each option, by group and name."""

    @property
    def options(self) -> set[Option]:
        """All options of which there are columns."""
        return {(slot.group, slot.option) for slot in self._slots}

    def __len__(self) -> int:
        return len(self._slots)

    def name(self, column: int) -> str:
        """How messages call the option in a column."""
        slot = self._slots[column]
        element = "" if slot.element is None else f"[{slot.element}]"
        return f"param_groups[{slot.group}][{slot.option!r}]{element}"

    def read(self, groups: Groups) -> Row:
        """The options' present values."""
        values = []
        for slot in self._slots:
            value = groups[slot.group][slot.option]
            values.append(float(value if slot.element is None else value[slot.element]))
        return tuple(values)

    def write(self, groups: Groups, row: Row, but: Container[Option] = ()) -> None:
        """Put a row's values into groups, each in the type of what it replaces where that can hold it.

        Args:
            groups: what to write to.
            row: the values.
            but: options to leave alone.
        """
        for slot, number in zip(self._slots, row, strict=True):
            if (slot.group, slot.option) not in but:
                _write(groups[slot.group], slot, number)

    def changed(self, groups: Groups, before: Row) -> set[Option]:
        """The options that have other values than they had."""
        values = zip(self._slots, self.read(groups), before, strict=True)
        return {(slot.group, slot.option) for slot, now, then in values if now != then}

    @contextmanager
    def written(self, groups: Groups, row: Row) -> Iterator[None]:
        """The groups hold the row's values inside the context, and their own after it.

        What is changed inside keeps its change: some optimizers keep count, or adapt, in their groups.
        """
        if row == self.read(groups):
            yield
            return
        before = [dict(group) for group in groups]
        self.write(groups, row)
        written = self.read(groups)
        try:
            yield
        finally:
            changed = self.changed(groups, written)
            for index, name in self.options - changed:
                groups[index][name] = before[index][name]


class StepOptions(NamedTuple):
    """The options in force in one step.

    ``options(group, "lr")`` is a value, 0 where the group has no such number; elements of options that
    are tuples have names of their own: ``"betas[0]"``.
    """

    layout: GroupOptions
    row: Row

    def __call__(self, group: int, option: str) -> float:
        column = self.layout.columns.get((group, option))
        return 0.0 if column is None else self.row[column]

    def write(self, groups: Groups, but: Container[Option] = ()) -> None:
        """Put the values into groups, those of some options excepted."""
        self.layout.write(groups, self.row, but)


def _write(group: dict[str, Any], slot: _Slot, number: float) -> None:
    old = group[slot.option]
    if slot.element is None:
        group[slot.option] = _like(old, number)
        return
    elements = list(old)
    elements[slot.element] = _like(elements[slot.element], number)
    group[slot.option] = type(old)(elements)


def _like(old: Any, number: float) -> Any:
    """The number in the type of the value that it stands in for, or as a float where that cannot hold it.

    Groups hold ints where users write ``lr=1``, and torch itself ``momentum=0``: an int says nothing of
    the values that a scheduler puts there. numpy's booleans and arrays of one number become floats.
    """
    if isinstance(old, torch.Tensor):
        return torch.full_like(old, number)
    if isinstance(old, bool):
        return bool(number)
    cannot_hold_it = isinstance(old, numbers.Integral) and not number.is_integer()
    if cannot_hold_it or not isinstance(old, numbers.Number):
        return number
    kind: Any = type(old)
    return kind(number)
