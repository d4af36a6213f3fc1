"""What is trained, under which name, and which tensors one kernel call can serve."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from ssd_allreduce import UsageError
from ssd_allreduce.parameters import Parameters, name_parameters


def parameter(*shape: int, dtype: torch.dtype = torch.float32, trained: bool = True) -> Parameter:
    return Parameter(torch.zeros(shape, dtype=dtype), requires_grad=trained)


def groups_of(*groups: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": group} for group in groups]


def make(groups: list[dict[str, Any]]) -> Parameters:
    everything = [p for group in groups for p in group["params"]]
    return Parameters(groups, {p: f"p{index}" for index, p in enumerate(everything)})


# -- names ---------------------------------------------------------------------------------------


def test_names_come_from_the_pairs_given() -> None:
    model = torch.nn.Linear(2, 1)
    names = name_parameters(groups_of(list(model.parameters())), model.named_parameters())
    assert names == {model.weight: "weight", model.bias: "bias"}


def test_names_come_from_the_groups_where_torch_keeps_them() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    assert name_parameters(optimizer.param_groups, None) == {model.weight: "weight", model.bias: "bias"}


def test_pairs_may_name_more_than_is_trained() -> None:
    model = torch.nn.Linear(2, 1)
    names = name_parameters(groups_of([model.weight]), model.named_parameters())
    assert names[model.weight] == "weight"


@pytest.mark.parametrize("pairs", [None, []])
def test_parameters_without_names_are_refused_with_their_places(pairs: Any) -> None:
    groups = groups_of([parameter(2), parameter(3, 4)], [parameter(5)])
    message = (
        r"3 parameters of the optimizer have no name: param_groups\[0\]\['params'\]\[0\] of shape "
        r"\(2,\), param_groups\[0\]\['params'\]\[1\] of shape \(3, 4\), "
        r"param_groups\[1\]\['params'\]\[0\] of shape \(5,\).*named_parameters=model.named_parameters\(\)"
    )
    with pytest.raises(ValueError, match=message):
        name_parameters(groups, pairs)


def test_a_single_missing_name_is_found() -> None:
    first, second = parameter(2), parameter(7)
    with pytest.raises(ValueError, match=r"1 parameters .*\['params'\]\[1\] of shape \(7,\)"):
        name_parameters(groups_of([first, second]), [("first", first)])


def test_many_missing_names_are_cut_short() -> None:
    with pytest.raises(ValueError, match=r"^9 parameters") as caught:
        name_parameters(groups_of([parameter(i + 1) for i in range(9)]), None)
    assert str(caught.value).count("of shape") == 5


def test_a_name_used_twice_is_refused() -> None:
    one, other = parameter(1), parameter(2)
    with pytest.raises(ValueError, match=r"unique; used more than once: weight\..*prefix the names"):
        name_parameters(groups_of([one, other]), [("weight", one), ("weight", other)])


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param([torch.zeros(1)], id="parameters without names"),
        pytest.param([("weight", torch.zeros(1), 1)], id="triples"),
        pytest.param([(torch.zeros(1), "weight")], id="the wrong way round"),
        pytest.param([("weight", None)], id="no tensor"),
        pytest.param(["ab"], id="a text of two letters"),
    ],
)
def test_anything_but_pairs_is_refused(pairs: Any) -> None:
    with pytest.raises(TypeError, match=r"must yield \(name, parameter\) pairs, got .*Pass model"):
        name_parameters(groups_of([parameter(1)]), pairs)


# -- what is trained -----------------------------------------------------------------------------


def test_parameters_keep_the_order_of_their_groups_and_frozen_ones_are_left_alone() -> None:
    a, frozen, b, c = parameter(1), parameter(2, trained=False), parameter(3), parameter(4)
    parameters = make(groups_of([a, frozen], [b, c]))
    assert parameters.names == ["p0", "p2", "p3"]
    assert all(x is y for x, y in zip(parameters.tensors, [a, b, c], strict=True))
    assert parameters.group_of == [0, 1, 1]
    assert len(parameters) == 3
    assert [parameters.index_of[p] for p in (a, b, c)] == [0, 1, 2]


def test_one_batch_has_one_group_and_one_dtype_and_together_they_have_everything() -> None:
    half = parameter(2, dtype=torch.float16)
    parameters = make(groups_of([parameter(1), half, parameter(3)], [parameter(4)]))
    assert [(batch.group, batch.indices) for batch in parameters.batches] == [
        (0, (0, 2)),
        (0, (1,)),
        (1, (3,)),
    ]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_accumulators_lie_like_the_parameters_in_float32_at_least(
    dtype: torch.dtype, expected: torch.dtype
) -> None:
    weight = Parameter(torch.zeros(2, 3, 4, 4, dtype=dtype).to(memory_format=torch.channels_last))
    (accumulator,) = make(groups_of([weight])).new_accumulators()
    assert accumulator.dtype == expected
    assert accumulator.stride() == weight.stride()
    assert not accumulator.requires_grad


def test_unfreezing_is_found_by_name() -> None:
    frozen = parameter(2, trained=False)
    parameters = make(groups_of([parameter(1), frozen]))
    assert parameters.find_newcomer() is None
    assert not parameters.have_changed()
    frozen.requires_grad_(True)
    assert parameters.have_changed()
    problem = parameters.find_newcomer()
    assert isinstance(problem, UsageError)
    assert "Parameter 'p1' was frozen" in str(problem)


def test_added_groups_are_found() -> None:
    groups = groups_of([parameter(1)])
    parameters = make(groups)
    groups.append({"params": [parameter(2)]})
    assert parameters.have_changed()
    assert "1 param groups were added" in str(parameters.find_newcomer())


def test_freezing_changes_what_is_trained_and_is_no_error() -> None:
    first, second = parameter(1), parameter(2)
    parameters = make(groups_of([first, second]))
    first.requires_grad_(False)
    assert parameters.have_changed()
    assert parameters.find_newcomer() is None


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn])
def test_a_dtype_that_cannot_be_trained_is_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"'p1' has dtype {dtype}. Allowed: float16, bfloat16, float32"):
        make(groups_of([parameter(1), Parameter(torch.zeros(2).to(dtype))]))


def test_a_sparse_parameter_is_refused_by_name() -> None:
    sparse = Parameter(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match=r"'p0' has layout torch.sparse_coo. Only strided.*to_dense\(\)"):
        make(groups_of([sparse]))


def test_what_cannot_be_trained_may_be_there_frozen() -> None:
    parameters = make(groups_of([parameter(1), parameter(2, dtype=torch.complex64, trained=False)]))
    assert parameters.names == ["p0"]


# -- groups whose list of parameters is edited ---------------------------------------------------


def put(groups: list[dict[str, Any]], place: int, *new: Parameter) -> None:
    groups[0]["params"][place : place + 1] = new


EDITS: dict[str, tuple[Callable[[list[dict[str, Any]]], object], str]] = {
    "replaced": (
        lambda groups: put(groups, 1, parameter(7)),
        r"\['params'\] is without 'p1' and has new parameters: one of shape \(7,\) at \[1\]",
    ),
    "appended": (
        lambda groups: groups[0]["params"].append(parameter(8)),
        r"param_groups\[0\]\['params'\] has new parameters: one of shape \(8,\) at \[2\]",
    ),
    "removed": (lambda groups: groups[1]["params"].pop(), r"param_groups\[1\]\['params'\] is without 'p3'"),
    "emptied": (lambda groups: groups[0]["params"].clear(), r"param_groups\[0\].* is without 'p0', 'p1',"),
    "a group dropped": (lambda groups: groups.pop(), "1 param groups were removed"),
    "reversed": (lambda groups: groups[0]["params"].reverse(), "the same parameters in other places"),
    "frozen ones replaced": (
        lambda groups: put(groups[1:], 0, parameter(3, trained=False)),
        r"is without 'p2' and has new parameters: one of shape \(3,\) at \[0\]",
    ),
}
SAME_COUNTS = {"replaced", "reversed", "frozen ones replaced"}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_group_is_found_with_what_was_put_in_and_taken_out(edit: str) -> None:
    groups = groups_of([parameter(1), parameter(2)], [parameter(3, trained=False), parameter(4)])
    parameters = make(groups)
    make_edit, message = EDITS[edit]
    make_edit(groups)
    for problem in (parameters.find_newcomer(), parameters.find_edit()):
        assert isinstance(problem, UsageError)
        assert re.search(message, str(problem)), problem
        assert "add_param_group() and flush() on all ranks, or close()" in str(problem)
    with pytest.raises(UsageError, match=rf"flush\(\): .*{message}"):
        parameters.refuse_edits("flush()")
    assert (parameters.find_newcomer(thoroughly=False) is None) == (edit in SAME_COUNTS)


def test_a_list_of_the_same_parameters_and_an_added_group_are_no_edit() -> None:
    groups = groups_of([parameter(1), parameter(2)])
    parameters = make(groups)
    groups[0]["params"] = list(groups[0]["params"])
    groups.append({"params": [parameter(3)]})
    assert parameters.find_edit() is None


@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_that_is_there_twice_is_refused(trained: bool) -> None:
    twice, other = parameter(2, trained=trained), parameter(3)
    with pytest.raises(ValueError, match=r"Parameter 'p1' is in param_groups\[1\] twice"):
        Parameters(groups_of([other], [twice, twice]), {other: "p0", twice: "p1"})


@pytest.mark.skipif(not hasattr(parameter(1), "grad_dtype"), reason="torch before 2.10 has no grad_dtype")
def test_gradients_of_another_dtype_are_refused() -> None:
    odd = parameter(2, dtype=torch.bfloat16)
    make(groups_of([odd]))
    odd.grad_dtype = torch.float32  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"'p0' has dtype torch.bfloat16 and grad_dtype torch.float32"):
        make(groups_of([odd]))
