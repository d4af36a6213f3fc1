"""One process that stands for several ranks."""

from __future__ import annotations

from ssd_allreduce.communicators.loopback import Loopback


def test_no_engine_has_the_key_of_another_also_when_that_one_is_gone() -> None:
    # By the key an optimizer counts itself as the engine's first: its trace is then named without a number.
    assert len({Loopback(2).key for _ in range(10)}) == 10
