"""State that is made for Adam where torch has not made it yet."""

from __future__ import annotations

import pytest
import torch
from loops import small_model
from torch import Tensor

from ssd_allreduce.base_optimizer import BaseOptimizer
from ssd_allreduce.families import choose_family
from ssd_allreduce.parameters import Parameters

every_kind = pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])


def made_for(parameter: Tensor, base: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = {p: str(index) for index, p in enumerate(base.param_groups[0]["params"])}
    family = choose_family(BaseOptimizer(base), Parameters(base.param_groups, names))
    return family.initial_state(parameter, base.param_groups[0])


@every_kind
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_it_is_what_torch_makes(kind: type[torch.optim.Adam], options: dict[str, bool]) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 2).t())
    base = kind([parameter], lr=0.1, **options)
    ours = made_for(parameter, base)
    # The first step of all gradients zero leaves zeros, and a count of one.
    parameter.grad = torch.zeros_like(parameter)
    base.step()
    theirs = base.state[parameter]
    assert ours.keys() == theirs.keys()
    theirs["step"] -= 1
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), key
        assert (ours[key].dtype, ours[key].stride()) == (value.dtype, value.stride()), key


@every_kind
@pytest.mark.parametrize(
    ("options", "place"),
    [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")],
    ids=str,
)
def test_count_of_steps_is_where_torchs_own_step_reads_it(
    kind: type[torch.optim.Adam], options: dict[str, bool], place: str
) -> None:
    model = small_model()
    base = kind(model.parameters(), lr=0.1)
    base.param_groups[0].update(options)
    assert made_for(torch.empty(2, device="meta"), base)["step"].device.type == place
