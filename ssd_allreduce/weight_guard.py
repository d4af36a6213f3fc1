"""Notices weights that something other than the optimizer has changed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ssd_allreduce.errors import WeightsChangedError


class WeightGuard:
    """Compares the version counters of the weights with those after the optimizer's last change.

    Writes through ``.data`` do not count versions and go unnoticed.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[Tensor]) -> None:
        self._names = names
        self._weights = weights
        self._versions: list[int] | None = None

    @property
    def active(self) -> bool:
        """Whether the optimizer has taken the weights over; before, anyone may change them."""
        return self._versions is not None

    def versions(self) -> list[int]:
        """The present version counters."""
        return [weight._version for weight in self._weights]

    def accept(self) -> None:
        """The present weights are the optimizer's own."""
        self._versions = self.versions()

    def release(self) -> None:
        """Anyone may change the weights until they are accepted again."""
        self._versions = None

    def find_change(self, call: str) -> WeightsChangedError | None:
        """An error that names the weights changed by others, if any."""
        if self._versions is None or self.versions() == self._versions:
            return None
        pairs = zip(self._names, self._weights, self._versions, strict=True)
        changed = [name for name, weight, version in pairs if weight._version != version]
        return WeightsChangedError(
            f"{call}: the weights {some_names(changed)} were changed since the last step() by something "
            "other than this optimizer (load_state_dict, a broadcast, clamp_, ...), so that they no "
            "longer belong to the global weights. Change them on all ranks alike and call "
            "adopt_weights() on all ranks. From a checkpoint, load the model before the optimizer."
        )


def some_names(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
