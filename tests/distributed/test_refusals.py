"""Wrong use on real ranks: refused on every rank, with what was found and what to do, and without a hang.

A test that fails to hear of an error on some rank ends by its time limit; each of these takes well under
a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from launch_plan import WITHOUT_HOROVOD, on_any_engine
from problems import perceptron, regression_loss
from ranks import hvd
from support import assert_equal_on_all_ranks, bits, on_every_rank, wrap
from torch import nn

import ssd_allreduce as ssd
from ssd_allreduce import (
    BackwardPassesError,
    GradientChangedError,
    PeerFailedError,
    RankMismatchError,
    SSDError,
    UsageError,
    WeightsChangedError,
)

pytestmark = [pytest.mark.ranks("mpirun", 2), *WITHOUT_HOROVOD, pytest.mark.timeout(40)]

Edit: TypeAlias = "Callable[[Training], object]"

DELAY = {"delay_steps": 3, "overlap_steps": 1}
AT_ONCE = {"delay_steps": 3, "overlap_steps": 0}
SYNC_POINT = 2
WARMUP = {"warmup_steps": 99}

with_three_ranks = on_any_engine(2, 3)
only_with_horovod = pytest.mark.ranks("mpirun", 2)
with_gloo = pytest.mark.ranks("horovodrun-gloo", 2)
every_wrapping = pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "horovod"])


class Training:
    """A model of this rank, an optimizer of the user's, Horovod's around it if wanted, and ours."""

    def __init__(
        self,
        wrapped: bool = False,
        model: nn.Module | None = None,
        base: Callable[[Any], torch.optim.Optimizer] | None = None,
        horovod: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.model = perceptron(torch.float32) if model is None else model
        make = base or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
        self.user = make(self.model.parameters())
        self.given = self.user
        names: dict[str, Any] = {"named_parameters": list(self.model.named_parameters())}
        if wrapped:
            self.given = hvd.DistributedOptimizer(self.user, **names, **(horovod or {}))
            names = {}
        self.optimizer = wrap(self.given, **{**names, **settings})

    @property
    def first(self) -> nn.Parameter:
        return next(iter(self.model.parameters()))

    def backward(self, step: int) -> None:
        regression_loss(self.model, hvd.rank(), step).backward()

    def step(self, step: int, edit: Edit | None = None) -> None:
        self.optimizer.zero_grad()
        self.backward(step)
        if edit is not None:
            edit(self)
        self.optimizer.step()

    def run(self, steps: int, first: int = 0) -> None:
        for step in range(first, first + steps):
            self.step(step)

    def backward_again(self) -> None:
        self.backward(77)

    def assert_trains_on(self) -> None:
        """From here it works as ever, and ends with equal weights."""
        self.run(7)
        self.optimizer.flush()
        assert_equal_on_all_ranks(self.model.parameters())

    def make_weights_equal(self) -> None:
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)


def error_of(call: Callable[[], object]) -> SSDError | None:
    try:
        call()
    except SSDError as error:
        return error
    return None


def is_last() -> bool:
    return hvd.rank() == hvd.size() - 1


# -- at construction -----------------------------------------------------------------------------


BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"delay_steps": 0}, ValueError, r"delay_steps=0 must be an integer of at least 1"),
    ({"delay_steps": 2.5}, TypeError, r"delay_steps=2\.5 must be an integer of at least 1"),
    ({"overlap_steps": -1}, ValueError, r"overlap_steps=-1 must be an integer of at least 0"),
    ({"delay_steps": 4, "overlap_steps": 4}, ValueError, r"overlap_steps=4 must be smaller than delay"),
    ({"warmup_steps": -1}, ValueError, r"warmup_steps=-1 must be an integer of at least 0"),
    ({"glu": "paper"}, ValueError, r"glu='paper' is not known. Allowed: 'momentum'"),
    ({"glu": "gradient", "alpha": -1.0}, ValueError, r"alpha=-1\.0 must be at least 0"),
    ({"glu": "gradient", "beta": float("nan")}, ValueError, r"beta=nan must be a finite number"),
    ({"glu": "momentum", "beta": 0.5}, ValueError, r"beta given with glu='momentum'"),
    ({"issue": "later"}, ValueError, r"issue='later' is not known. Allowed: 'backward', 'step'"),
]


@with_gloo
@with_three_ranks
@every_wrapping
def test_bad_options_are_refused_on_every_rank_and_leave_the_optimizer_as_it_was(wrapped: bool) -> None:
    training = Training(wrapped)
    training.optimizer.close()
    names = {} if wrapped else {"named_parameters": list(training.model.named_parameters())}
    for options, error, message in BAD_OPTIONS:
        with pytest.raises(error, match=message):
            wrap(training.given, **options, **names)
    training.optimizer = wrap(training.given, **DELAY, **names)
    training.assert_trains_on()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (lambda model: None, r"4 parameters of the optimizer have no name.*named_parameters="),
        (lambda model: list(model.named_parameters())[1:], r"1 parameters of the optimizer have no name"),
        (lambda model: [("w", p) for p in model.parameters()], r"must be unique; used more than once: w"),
    ],
    ids=["unnamed", "missing", "duplicate"],
)
def test_bad_names_are_refused_on_every_rank(names: Callable[[nn.Module], Any], message: str) -> None:
    model = perceptron(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        wrap(optimizer, named_parameters=names(model))


@pytest.mark.parametrize(
    "option",
    [
        {"named_parameters": []},
        {"backward_passes_per_step": 2},
        {"compression": hvd.Compression.fp16},
        {"process_set": hvd.global_process_set},
    ],
    ids=lambda option: next(iter(option)),
)
@only_with_horovod
def test_what_horovod_was_to_be_told_is_refused_for_its_optimizer(option: dict[str, Any]) -> None:
    training = Training(wrapped=True)
    training.optimizer.close()
    with pytest.raises(ValueError, match=rf"{next(iter(option))} given for an optimizer that Horovod has"):
        wrap(training.given, **option)


@only_with_horovod
@pytest.mark.parametrize("engine", ["mpi", "torch"])
def test_another_engine_is_refused_for_horovods_optimizer(engine: str) -> None:
    training = Training(wrapped=True)
    training.optimizer.close()
    with pytest.raises(ValueError, match=f"communicator='{engine}' was given for an optimizer that Horovod"):
        wrap(training.given, communicator=engine)


@only_with_horovod
def test_adasum_is_refused() -> None:
    model = perceptron(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adasum = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Adasum)
    with pytest.raises(ValueError, match=r"op=hvd\.Adasum.*Allowed: op=hvd\.Average or op=hvd\.Sum"):
        wrap(adasum)


@only_with_horovod
@every_wrapping
def test_wrapping_twice_is_refused_either_way_round(wrapped: bool) -> None:
    training = Training(wrapped, **DELAY)
    with pytest.raises(UsageError, match=r"already an ssd_allreduce\.DistributedOptimizer"):
        wrap(training.optimizer)
    with pytest.raises(UsageError, match=r"already wrapped by an ssd_allreduce.*Call its close\(\) first"):
        wrap(training.given, **({} if wrapped else {"named_parameters": training.model.named_parameters()}))
    with pytest.raises(TypeError, match=r"hvd\.DistributedOptimizer cannot wrap.*the other way round"):
        hvd.DistributedOptimizer(training.optimizer, named_parameters=training.model.named_parameters())
    training.assert_trains_on()


@every_wrapping
def test_an_unsupported_class_is_refused_by_name(wrapped: bool) -> None:
    with pytest.raises(TypeError, match=r"torch\.optim\.lbfgs\.LBFGS is not supported: .*closure"):
        Training(wrapped, base=torch.optim.LBFGS)


@every_wrapping
def test_a_complex_parameter_is_refused_by_name(wrapped: bool) -> None:
    model = perceptron(torch.float32)
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"'phase' has dtype torch\.complex64.*view_as_real"):
        Training(wrapped, model=model)


def test_a_sparse_parameter_is_refused_by_name() -> None:
    model = perceptron(torch.float32)
    model.links = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match=r"'links' has layout torch\.sparse_coo.*to_dense\(\)"):
        Training(model=model)


@pytest.mark.ranks("mpirun", 2, 3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_a_rank_outside_the_process_set_is_told() -> None:
    alone = hvd.ProcessSet([0])
    hvd.add_process_set(alone)
    try:
        if hvd.rank() == 0:
            training = Training(process_set=alone, **DELAY)
            training.run(7)
        else:
            with pytest.raises(UsageError, match=rf"Rank {hvd.rank()} is not in the process set"):
                Training(process_set=alone, **DELAY)
    finally:
        hvd.remove_process_set(alone)


# -- ranks that differ ---------------------------------------------------------------------------


def assert_all_hear(training: Training, *expected: str) -> None:
    """The first step is refused with the same words everywhere, before any gradient has been sent."""
    error = error_of(lambda: training.step(0))
    assert type(error) is RankMismatchError, error
    message = str(error)
    assert message.startswith("Ranks differ in ")
    for part in expected:
        assert part in message, message
    assert on_every_rank(message) == [message] * hvd.size()


@with_three_ranks
@every_wrapping
@pytest.mark.parametrize(
    ("option", "here", "there"),
    [
        ("delay_steps", 4, 8),
        ("overlap_steps", 0, 1),
        ("warmup_steps", 3, 5),
        ("glu", "momentum", "none"),
        ("alpha", 0.5, 1.0),
        ("beta", 0.5, 0.25),
        ("local_lr_scale", 1.0, 2.0),
    ],
)
def test_a_setting_that_differs_is_told_to_every_rank(
    option: str, here: Any, there: Any, wrapped: bool
) -> None:
    rule = {"glu": "gradient"} if option in ("alpha", "beta", "local_lr_scale") else {}
    training = Training(wrapped, **rule, **{option: there if is_last() else here})
    last = hvd.size() - 1
    assert_all_hear(training, f"{option} is {here!r} on rank 0 and {there!r} on rank {last}")


@pytest.mark.ranks("mpirun", 2, 3)
@pytest.mark.parametrize(
    ("option", "here", "there", "told"),
    [
        ("op", hvd.Average, hvd.Sum, "op is average on rank 0 and sum on rank "),
        ("gradient_predivide_factor", 1.0, 2.0, "gradient_predivide_factor is 1.0 on rank 0 and 2.0 on rank"),
        (
            "compression",
            hvd.Compression.none,
            hvd.Compression.fp16,
            "NoneCompressor on rank 0 and FP16Compre",
        ),
    ],
)
def test_an_option_of_horovods_that_differs_is_told_to_every_rank(
    option: str, here: Any, there: Any, told: str
) -> None:
    training = Training(wrapped=True, horovod={option: there if is_last() else here}, **DELAY)
    assert_all_hear(training, told)


@pytest.mark.ranks("mpirun", 2, 3)
def test_groups_of_tensors_that_differ_are_told_to_every_rank() -> None:
    model = perceptron(torch.float32)
    parameters = list(model.parameters())
    groups = [parameters[:2], parameters[2:]] if is_last() else [parameters[:3], parameters[3:]]
    assert_all_hear(Training(wrapped=True, model=model, horovod={"groups": groups}, **DELAY))


def reshaped(model: nn.Module) -> None:
    model[0], model[2] = nn.Linear(5, 7), nn.Linear(7, 3)


def restrided(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data.t().contiguous().t()


def retyped(model: nn.Module) -> None:
    model.double()


def frozen(model: nn.Module) -> None:
    model[2].bias.requires_grad_(False)


def enlarged(model: nn.Module) -> None:
    model.extra = nn.Parameter(torch.zeros(3))


def reweighted(model: nn.Module) -> None:
    with torch.no_grad():
        model[2].bias[1].add_(1e-6)


@with_three_ranks
@every_wrapping
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (reshaped, ["the shape of '0.weight' is (6, 5) on rank 0 and (7, 5) on rank"]),
        (restrided, ["the strides of '0.weight' is (5, 1) on rank 0 and (1, 6) on rank"]),
        (retyped, ["the dtype of '0.weight' is torch.float32 on rank 0 and torch.float64 on rank"]),
        (frozen, ["requires_grad of '2.bias' is True on rank 0 and False on rank"]),
        (enlarged, ["'extra'"]),
        (reweighted, ["the digest of '2.bias' is ", "hvd.broadcast_parameters"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_tensors_that_differ_are_told_to_every_rank(
    change: Callable[[nn.Module], None], expected: list[str], wrapped: bool
) -> None:
    model = perceptron(torch.float32)
    if is_last():
        change(model)
    assert_all_hear(Training(wrapped, model=model, **DELAY), *expected, f"on rank {hvd.size() - 1}")


@with_three_ranks
def test_names_that_differ_are_told_to_every_rank() -> None:
    model = perceptron(torch.float32)
    prefix = "net." if is_last() else ""
    names = [(prefix + name, p) for name, p in model.named_parameters()]
    assert_all_hear(Training(model=model, named_parameters=names, **DELAY), "'0.", "'net.0.")


@with_three_ranks
@every_wrapping
def test_groups_of_parameters_that_differ_are_told_to_every_rank(wrapped: bool) -> None:
    def base(parameters: Any) -> torch.optim.Optimizer:
        everything = list(parameters)
        cut = 3 if is_last() else 2
        return torch.optim.SGD([{"params": everything[:cut]}, {"params": everything[cut:]}], lr=0.1)

    expected = f"the param group of '2.weight' is 1 on rank 0 and 0 on rank {hvd.size() - 1}"
    assert_all_hear(Training(wrapped, base=base, **DELAY), expected)


@with_three_ranks
@every_wrapping
def test_optimizer_classes_that_differ_are_told_to_every_rank(wrapped: bool) -> None:
    base = torch.optim.AdamW if is_last() else torch.optim.Adam
    training = Training(wrapped, base=lambda p: base(p, lr=0.1), warmup_steps=1)
    assert_all_hear(training, "torch.optim.adam.Adam on rank 0 and torch.optim.adamw.AdamW on rank")


@with_three_ranks
@every_wrapping
def test_optimizer_state_that_differs_is_told_to_every_rank(wrapped: bool) -> None:
    training = Training(wrapped, **DELAY)
    training.user.state[training.first]["momentum_buffer"] = torch.full_like(training.first, 1.0 + hvd.rank())
    assert_all_hear(training, "the momentum_buffer of '0.weight' is ")


@with_three_ranks
def test_after_the_ranks_have_been_made_alike_training_begins() -> None:
    training = Training(**DELAY)
    if is_last():
        reweighted(training.model)
    assert_all_hear(training, "'2.bias'")
    training.make_weights_equal()
    training.assert_trains_on()


@with_three_ranks
def test_progress_that_differs_is_told_to_every_rank() -> None:
    training = Training(**WARMUP)
    start = training.optimizer.state_dict()
    training.run(3)
    state = training.optimizer.state_dict()
    training.optimizer.load_state_dict(start if is_last() else state)
    training.make_weights_equal()
    assert_all_hear(training, "the number of sync events is 3 on rank 0 and 0 on rank")


# -- gradients that change after they were sent --------------------------------------------------


def clip(training: Training) -> None:
    nn.utils.clip_grad_norm_(training.model.parameters(), 1e-3)


def unscale(training: Training) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(training.optimizer)


def edit_data(training: Training) -> None:
    training.first.grad.data.mul_(2.0)  # type: ignore[union-attr]


def replace_gradient(training: Training) -> None:
    training.first.grad = training.first.grad.clone()  # type: ignore[union-attr]


def another_backward(training: Training) -> None:
    with pytest.raises(BackwardPassesError):
        training.backward(77)


EDITS: dict[str, Edit] = {
    "clipping": clip,
    "unscale_": unscale,
    "data": edit_data,
    "replacing": replace_gradient,
    "another backward": another_backward,
}
# Version counters are all there is in warm-up, and these two leave them alone.
IN_WARMUP = [name for name in EDITS if name not in ("unscale_", "data")]
EVERYWHERE = [
    *(pytest.param(name, DELAY, SYNC_POINT, id=f"{name}-d1") for name in EDITS),
    *(pytest.param(name, AT_ONCE, SYNC_POINT, id=f"{name}-d0") for name in EDITS),
    *(pytest.param(name, WARMUP, 1, id=f"{name}-warmup") for name in IN_WARMUP),
]


def assert_changed_gradient(error: SSDError | None) -> None:
    assert type(error) is GradientChangedError, error
    assert "The gradient of '" in str(error)
    assert "was changed after its allreduce had been issued" in str(error)
    assert "issue='step'" in str(error)


@every_wrapping
@pytest.mark.parametrize(("edit", "settings", "steps"), EVERYWHERE)
def test_a_gradient_changed_on_all_ranks_is_an_error_on_all(
    edit: str, settings: dict[str, Any], steps: int, wrapped: bool
) -> None:
    training = Training(wrapped, **settings)
    training.run(steps)
    assert_changed_gradient(error_of(lambda: training.step(steps, EDITS[edit])))


def change_on_one_rank(edit: str, settings: dict[str, Any], steps: int, culprit: int) -> None:
    """That rank hears which gradient it was, the others which rank; and then training is mended."""
    culprit %= hvd.size()
    training = Training(wrapped=True, **settings)
    training.run(steps)
    if hvd.rank() == culprit:
        assert_changed_gradient(error_of(lambda: training.step(steps, EDITS[edit])))
    else:
        # With an overlap the others hear of it when they complete the sync point.
        error = error_of(lambda: training.run(4, steps))
        assert type(error) is PeerFailedError, error
        assert f"Rank {culprit} refused to go on at sync event" in str(error)
        assert "a gradient was changed after its allreduce had been issued" in str(error)
    with pytest.raises(UsageError, match=r"after an error that ended training.*adopt_weights\(\)"):
        training.optimizer.step()
    training.make_weights_equal()
    training.optimizer.adopt_weights()
    training.assert_trains_on()


@pytest.mark.parametrize("culprit", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize(("edit", "settings", "steps"), EVERYWHERE)
def test_a_gradient_changed_on_one_rank_is_an_error_on_all_and_training_can_be_mended(
    edit: str, settings: dict[str, Any], steps: int, culprit: int
) -> None:
    change_on_one_rank(edit, settings, steps, culprit)


@pytest.mark.ranks("mpirun", 3)
@with_gloo
@pytest.mark.parametrize(
    ("edit", "settings", "steps"),
    [("clipping", DELAY, SYNC_POINT), ("data", AT_ONCE, SYNC_POINT), ("replacing", WARMUP, 1)],
    ids=["clipping-d1", "data-d0", "replacing-warmup"],
)
def test_with_more_ranks_or_another_engine_it_is_the_same(
    edit: str, settings: dict[str, Any], steps: int
) -> None:
    change_on_one_rank(edit, settings, steps, culprit=-1)


@every_wrapping
def test_with_issue_step_all_of_it_is_allowed(wrapped: bool) -> None:
    training = Training(wrapped, issue="step", **DELAY)
    training.run(2)
    for step, edit in enumerate((clip, edit_data, replace_gradient, Training.backward_again), start=2):
        training.step(step, edit)
    training.assert_trains_on()


# -- weights changed by others -------------------------------------------------------------------


def halve_weights(training: Training) -> None:
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(0.5)


@pytest.mark.parametrize("settings", [WARMUP, DELAY, AT_ONCE], ids=["warmup", "d1", "d0"])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_weights_changed_on_all_ranks_are_refused_until_they_are_adopted(
    settings: dict[str, Any], steps: int
) -> None:
    training = Training(wrapped=True, **settings)
    training.run(steps)
    training.make_weights_equal()
    halve_weights(training)
    given = bits(training.model.parameters())
    with pytest.raises(
        WeightsChangedError, match=r"step\(\): the weights '0\.weight', .* were changed.*adopt_weights\(\)"
    ):
        training.step(steps)
    training.optimizer.adopt_weights()
    assert bits(training.model.parameters()) == given
    with training.optimizer.global_weights():
        assert bits(training.model.parameters()) == given
    training.assert_trains_on()


@with_gloo
@with_three_ranks
@pytest.mark.parametrize(
    ("settings", "steps"),
    [(WARMUP, 1), (DELAY, SYNC_POINT), (AT_ONCE, SYNC_POINT)],
    ids=["warmup", "d1", "d0"],
)
def test_weights_changed_on_one_rank_are_told_to_all_at_the_next_sync_event(
    settings: dict[str, Any], steps: int
) -> None:
    training = Training(wrapped=True, **settings)
    training.run(steps)
    if is_last():
        halve_weights(training)
        assert type(error_of(lambda: training.step(steps))) is WeightsChangedError
    else:
        error = error_of(lambda: training.run(4, steps))
        assert type(error) is PeerFailedError
        assert "weights were changed by something other than this optimizer" in str(error)
    training.make_weights_equal()
    training.optimizer.adopt_weights()
    training.assert_trains_on()


@with_gloo
@with_three_ranks
def test_weights_changed_on_one_rank_are_told_to_all_in_flush() -> None:
    training = Training(**DELAY)
    training.run(4)
    if is_last():
        halve_weights(training)
    error = error_of(training.optimizer.flush)
    assert type(error) is (WeightsChangedError if is_last() else PeerFailedError), error
    training.make_weights_equal()
    training.optimizer.adopt_weights()
    training.assert_trains_on()


@with_gloo
@with_three_ranks
def test_weights_that_differ_between_ranks_cannot_be_adopted() -> None:
    training = Training(**DELAY)
    training.run(4)
    with pytest.raises(
        RankMismatchError, match=r"Ranks differ in the weights.*adopt_weights\(\) needs the same"
    ):
        training.optimizer.adopt_weights()
    training.make_weights_equal()
    training.optimizer.adopt_weights()
    training.assert_trains_on()


# -- calls at the wrong moment -------------------------------------------------------------------


WRONG_MOMENT: dict[str, Callable[[ssd.DistributedOptimizer], object]] = {
    "zero_grad": lambda optimizer: optimizer.zero_grad(),
    "flush": lambda optimizer: optimizer.flush(),
    "adopt_weights": lambda optimizer: optimizer.adopt_weights(),
    "state_dict": lambda optimizer: optimizer.state_dict(),
}


@pytest.mark.parametrize("call", WRONG_MOMENT)
@pytest.mark.parametrize(("settings", "steps"), [(DELAY, SYNC_POINT), (WARMUP, 1)], ids=["d1", "warmup"])
def test_between_backward_and_step_of_a_sync_point_is_the_wrong_moment(
    call: str, settings: dict[str, Any], steps: int
) -> None:
    training = Training(wrapped=True, **settings)
    training.run(steps)
    training.optimizer.zero_grad()
    training.backward(steps)
    with pytest.raises(UsageError, match=rf"{call}\(\) between backward\(\) and step\(\)"):
        WRONG_MOMENT[call](training.optimizer)
    training.optimizer.step()
    training.assert_trains_on()


@pytest.mark.parametrize("settings", [DELAY, WARMUP], ids=["d1", "warmup"])
@pytest.mark.parametrize("steps", range(4))
def test_more_backward_passes_than_announced_are_refused_in_any_step(
    steps: int, settings: dict[str, Any]
) -> None:
    training = Training(wrapped=True, **settings)
    training.run(steps)
    training.optimizer.zero_grad()
    training.backward(steps)
    with pytest.raises(
        BackwardPassesError, match=r"from 2 backward passes.*1 were announced.*backward_passes_per_step="
    ):
        training.backward(steps)


@only_with_horovod
def test_what_horovod_was_announced_counts() -> None:
    training = Training(wrapped=True, horovod={"backward_passes_per_step": 2}, **DELAY)
    for step in range(5):
        training.optimizer.zero_grad()
        training.backward(2 * step)
        training.backward(2 * step + 1)
        if step < 4:
            training.optimizer.step()
    with pytest.raises(BackwardPassesError, match=r"from 3 backward passes.*2 were announced"):
        training.backward(99)


@every_wrapping
@pytest.mark.parametrize("settings", [DELAY, WARMUP], ids=["d1", "warmup"])
def test_training_inside_global_weights_is_refused_on_the_rank_that_tries(
    settings: dict[str, Any], wrapped: bool
) -> None:
    training = Training(wrapped, **settings)
    training.run(4)
    if hvd.rank() == 0:
        with training.optimizer.global_weights():
            calls = (
                lambda: training.backward(4),
                training.optimizer.step,
                training.optimizer.synchronize,
                training.optimizer.flush,
                training.optimizer.adopt_weights,
            )
            for call in calls:
                with pytest.raises(UsageError, match=r"inside global_weights\(\)"):
                    call()
    training.assert_trains_on()


@every_wrapping
def test_calls_after_close_are_refused_and_the_users_optimizer_is_its_own_again(wrapped: bool) -> None:
    training = Training(wrapped, **DELAY)
    training.run(4)
    training.optimizer.flush()
    training.optimizer.close()
    calls: dict[str, Callable[[], object]] = {
        "step": training.optimizer.step,
        "synchronize": training.optimizer.synchronize,
        "flush": training.optimizer.flush,
        "adopt_weights": training.optimizer.adopt_weights,
        "global_weights": training.optimizer.global_weights().__enter__,
    }
    for name, call in calls.items():
        with pytest.raises(UsageError, match=rf"{name}\(\) after close\(\). Wrap the base optimizer anew"):
            call()
    for step in range(3):
        training.given.zero_grad()
        training.backward(step)
        training.given.step()
    if wrapped:
        assert_equal_on_all_ranks(training.model.parameters())
    else:
        assert len({b"".join(b) for b in on_every_rank(bits(training.model.parameters()))}) > 1


@only_with_horovod
def test_the_horovod_optimizer_is_not_stepped_behind_the_wrapper() -> None:
    training = Training(wrapped=True, **DELAY)
    training.run(1)
    training.backward(1)
    for name in ("step", "synchronize"):
        with pytest.raises(UsageError, match=rf"driven by ssd_allreduce.*Call {name}\(\) on that one"):
            getattr(training.given, name)()
    training.optimizer.step()
    training.assert_trains_on()


def test_skipping_what_was_not_done_is_refused_in_warmup() -> None:
    training = Training(wrapped=True, **WARMUP)
    training.backward(0)
    with (
        training.optimizer.skip_synchronize(),
        pytest.raises(UsageError, match=r"Call synchronize\(\) first"),
    ):
        training.optimizer.step()
    training.optimizer.step()
    training.assert_trains_on()


@every_wrapping
def test_a_sparse_gradient_is_refused_by_name(wrapped: bool) -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    for index, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, float(index))
    training = Training(wrapped, model=model, **DELAY)
    loss = model(torch.tensor([1, 2])).sum()
    with pytest.raises(TypeError, match=r"gradient of parameter '0\.weight' is sparse.*sparse_as_dense=True"):
        loss.backward()
    assert training.optimizer.stats().steps == 0


@with_three_ranks
@every_wrapping
@pytest.mark.parametrize("everywhere", [True, False], ids=["all ranks", "one rank"])
@pytest.mark.parametrize(
    ("settings", "steps"), [({"delay_steps": 1}, 1), (AT_ONCE, SYNC_POINT)], ids=["k1", "d0"]
)
def test_a_parameter_unfrozen_without_a_flush_is_an_error_on_all_ranks(
    settings: dict[str, Any], steps: int, everywhere: bool, wrapped: bool
) -> None:
    model = perceptron(torch.float32)
    model[0].weight.requires_grad_(False)
    training = Training(wrapped, model=model, **settings)
    training.run(steps)
    unfreezes = everywhere or is_last()
    if unfreezes:
        model[0].weight.requires_grad_(True)
    error = error_of(lambda: training.run(4, steps))
    if unfreezes:
        assert type(error) is UsageError
        assert "Parameter '0.weight' was frozen" in str(error)
    else:
        assert type(error) is PeerFailedError


@with_three_ranks
@every_wrapping
@pytest.mark.parametrize("everywhere", [True, False], ids=["all ranks", "one rank"])
def test_a_scaler_first_seen_after_hooks_have_sent_is_an_error_on_all_ranks(
    everywhere: bool, wrapped: bool
) -> None:
    training = Training(wrapped, **WARMUP)
    training.run(1)
    scaler = torch.amp.GradScaler("cpu")
    training.optimizer.zero_grad()
    loss = regression_loss(training.model, hvd.rank(), 1)
    if everywhere or is_last():
        scaler.scale(loss).backward()
        error = error_of(lambda: scaler.step(training.optimizer))
        assert type(error) is UsageError
        assert "issue='step'" in str(error)
    else:
        loss.backward()
        error = error_of(training.optimizer.step)
        assert type(error) is PeerFailedError
        assert "GradScaler" in str(error)


@with_three_ranks
@pytest.mark.parametrize("holder", ["given", "user"])
def test_state_loaded_on_one_rank_alone_is_an_error_on_all_ranks(holder: str) -> None:
    training = Training(wrapped=True, **AT_ONCE)
    training.run(3)
    if is_last():
        other = perceptron(torch.float32)
        plain = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
        getattr(training, holder).load_state_dict(plain.state_dict())
    error = error_of(lambda: training.run(4, 3))
    assert isinstance(error, SSDError), error
