"""Random calls of the kernel operations, and what they must give, written down in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from torch import Tensor

PARAMETER, STATE = "parameter", "state"
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
LAYOUTS = ("contiguous", "reversed", "channels_last", "gaps", "offset", "sliced")

Arrays = dict[str, np.ndarray]
Options = dict[str, Any]


# What an operation's arrays must become, for the tensors of one parameter, in float64.


def local_momentum(x: Arrays, o: Options) -> Arrays:
    g = x["gradients"] * o["gradient_scale"]
    if o["maximize"]:
        g = -g
    d = g + o["weight_decay"] * x["weights"]
    v = o["momentum"] * x["momenta"] + (1 - o["dampening"]) * d
    u = d + o["momentum"] * v if o["nesterov"] else v
    return {"weights": x["weights"] - o["lr"] * u, "momenta": v} | accumulators(x, o)


def local_corrected(x: Arrays, o: Options) -> Arrays:
    d = (
        o["gradient_weight"] * x["gradients"]
        + o["correction_weight"] * x["corrections"]
        + o["weight_decay"] * x["weights"]
    )
    return {"weights": x["weights"] - o["step_size"] * d} | accumulators(x, o)


def local_plain(x: Arrays, o: Options) -> Arrays:
    d = o["gradient_weight"] * x["gradients"] + o["weight_decay"] * x["weights"]
    return {"weights": x["weights"] - o["step_size"] * d} | accumulators(x, o)


def accumulators(x: Arrays, o: Options) -> Arrays:
    if o["accumulation"] == 1:
        return {"accumulators": x["accumulators"] + x["gradients"]}
    if o["accumulation"] == 2:
        return {"accumulators": x["gradients"]}
    return {}


def accumulate(x: Arrays, o: Options) -> Arrays:
    return accumulators(x, {"accumulation": 2 if o["overwrite"] else 1})


def replay_sgd(x: Arrays, o: Options) -> Arrays:
    mean = x["sums"] / o["divisor"]
    sign = -1.0 if o["maximize"] else 1.0
    w, v = x["weights"], x.get("momenta")
    known = o["momentum_initialised"]
    for lr, mu, damp, wd in zip(
        o["lrs"], o["momentum_factors"], o["dampenings"], o["weight_decays"], strict=True
    ):
        u = d = sign * mean + wd * w
        if mu != 0:
            v = mu * v + (1 - damp) * d if known else d
            known = True
            u = d + mu * v if o["nesterov"] else v
        w = w - lr * u
    result = {"weights": w}
    if any(o["momentum_factors"]):
        result["momenta"] = v
    if o["correction"] == 1:
        result["corrections"] = mean
    elif o["correction"] == 2 and sum(o["lrs"]) != 0:
        result["corrections"] = (x["weights"] - w) / sum(o["lrs"])
    return result


def adam_step(x: Arrays, o: Options, gradient: np.ndarray, extra: Any, step: int) -> Arrays:
    """One step of Adam or AdamW, as torch's documentation gives it, with extra noise."""
    w, d = x["weights"], gradient
    if o["decoupled"]:
        w = w - o["lr"] * o["weight_decay"] * w
    else:
        d = d + o["weight_decay"] * w
    m = o["beta1"] * x["firsts"] + (1 - o["beta1"]) * d
    u = o["beta2"] * x["seconds"] + (1 - o["beta2"]) * (d**2 + extra)
    m_hat, u_hat = m / (1 - o["beta1"] ** step), u / (1 - o["beta2"] ** step)
    return {"weights": w - o["lr"] * m_hat / (np.sqrt(u_hat) + o["eps"]), "firsts": m, "seconds": u}


def local_adam(x: Arrays, o: Options) -> Arrays:
    g = x["gradients"] * o["gradient_scale"]
    result = adam_step(x, o, -g if o["maximize"] else g, 0.0, o["step"])
    return result | accumulators(x, o) | squares(x, o)


def squares(x: Arrays, o: Options) -> Arrays:
    squared = x["gradients"] ** 2
    if o["accumulation"] == 1:
        return {"squares": x["squares"] + squared}
    return {"squares": squared} if o["accumulation"] == 2 else {}


def accumulate_squares(x: Arrays, o: Options) -> Arrays:
    return squares(x, {"accumulation": 2 if o["overwrite"] else 1})


def replay_adam(x: Arrays, o: Options) -> Arrays:
    n, mean = o["count"], x["sums"] / o["divisor"]
    variance: Any = 0.0
    if n > 1:
        biased = np.maximum(0.0, x["squares"] / n - (x["sums"] / n) ** 2)
        variance = biased * n / (n - 1) * (n / o["divisor"]) ** 2
    now = {name: x[name] for name in ("weights", "firsts", "seconds")}
    for index in range(len(o["lrs"])):
        step = {single: o[plural][index] for plural, single in ADAM_STEP_OPTIONS.items()}
        step["decoupled"] = o["decoupled"]
        gradient = -mean if o["maximize"] else mean
        extra = o["missing_noises"][index] * variance
        now = adam_step(now, step, gradient, extra, o["steps_before"] + index + 1)
    if o["correction"] == 1:
        now["corrections"] = mean
    elif o["correction"] == 2 and sum(o["lrs"]) != 0:
        now["corrections"] = (x["weights"] - now["weights"]) / sum(o["lrs"])
    return now


def rebase_adam(x: Arrays, o: Options) -> Arrays:
    dm = x["global_firsts"] - x["first_snapshots"]
    du = x["global_seconds"] - x["second_snapshots"]
    dw = x["global_weights"] - x["weight_snapshots"]
    denominator = np.sqrt(x["seconds"] / (1 - o["beta2"] ** o["step"])) + o["eps"]
    return {
        "weights": x["weights"] + dw - o["displacement_factor"] * dm / denominator,
        "firsts": x["firsts"] + o["first_decay"] * dm,
        "seconds": np.maximum(0.0, x["seconds"] + o["second_decay"] * du),
    }


def rebase_momentum(x: Arrays, o: Options) -> Arrays:
    dv = x["global_momenta"] - x["momentum_snapshots"]
    dw = x["global_weights"] - x["weight_snapshots"]
    return {
        "weights": x["weights"] + dw - o["displacement_factor"] * dv,
        "momenta": x["momenta"] + o["momentum_decay"] * dv,
    }


def rebase_shift(x: Arrays, o: Options) -> Arrays:
    return {"weights": x["weights"] + x["global_weights"] - x["weight_snapshots"]}


# How each operation is called.


@dataclass(frozen=True)
class Operation:
    name: str
    lists: dict[str, str]
    options: dict[str, st.SearchStrategy[Any]]
    expected: Callable[[Arrays, Options], Arrays]

    @property
    def is_gated(self) -> bool:
        """Whether it takes ``found_inf``."""
        return self.name.startswith(("local_", "accumulate_"))


factor = st.floats(-1, 1).map(lambda value: round(value, 3))
fraction = st.floats(0, 1).map(lambda value: round(value, 3))
# A displacement is divided by their sum, which would magnify the weights' rounding if it were tiny.
rate = st.just(0.0) | st.floats(0.05, 1).map(lambda value: round(value, 3))
boolean = st.booleans()
# Away from 1, where bias corrections vanish, and second moments away from 0, where square roots
# magnify rounding.
first_decay = st.floats(0, 0.9).map(lambda value: round(value, 3))
second_decay = st.floats(0.5, 0.99).map(lambda value: round(value, 3))
epsilon = st.floats(0.1, 1).map(lambda value: round(value, 3))
accumulation = st.sampled_from((0, 1, 2))

OPERATIONS = (
    Operation(
        "local_momentum_",
        {"weights": PARAMETER, "gradients": PARAMETER, "momenta": STATE, "accumulators": STATE},
        {
            "lr": fraction,
            "momentum": fraction,
            "dampening": fraction,
            "weight_decay": fraction,
            "nesterov": boolean,
            "maximize": boolean,
            "gradient_scale": factor,
            "accumulation": accumulation,
        },
        local_momentum,
    ),
    Operation(
        "local_corrected_",
        {"weights": PARAMETER, "gradients": PARAMETER, "corrections": STATE, "accumulators": STATE},
        {
            "step_size": factor,
            "gradient_weight": factor,
            "correction_weight": factor,
            "weight_decay": factor,
            "accumulation": accumulation,
        },
        local_corrected,
    ),
    Operation(
        "local_plain_",
        {"weights": PARAMETER, "gradients": PARAMETER, "accumulators": STATE},
        {
            "step_size": factor,
            "gradient_weight": factor,
            "weight_decay": factor,
            "accumulation": accumulation,
        },
        local_plain,
    ),
    Operation(
        "local_adam_",
        {
            "weights": PARAMETER,
            "gradients": PARAMETER,
            "firsts": STATE,
            "seconds": STATE,
            "accumulators": STATE,
            "squares": STATE,
        },
        {
            "lr": fraction,
            "beta1": first_decay,
            "beta2": second_decay,
            "eps": epsilon,
            "weight_decay": fraction,
            "decoupled": boolean,
            "maximize": boolean,
            "gradient_scale": factor,
            "step": st.integers(1, 1000),
            "accumulation": accumulation,
        },
        local_adam,
    ),
    Operation(
        "accumulate_",
        {"accumulators": STATE, "gradients": PARAMETER},
        {"overwrite": boolean},
        accumulate,
    ),
    Operation(
        "accumulate_squares_",
        {"squares": STATE, "gradients": PARAMETER},
        {"overwrite": boolean},
        accumulate_squares,
    ),
    Operation(
        "replay_adam_",
        {
            "weights": PARAMETER,
            "firsts": PARAMETER,
            "seconds": PARAMETER,
            "sums": STATE,
            "squares": STATE,
            "corrections": STATE,
        },
        {
            "count": st.integers(1, 64),
            # A variance is a difference, whose rounding grows with the square of count over divisor.
            "divisor": st.integers(16, 64).map(float),
            "steps_before": st.integers(0, 1000),
            "lrs": rate,
            "beta1s": first_decay,
            "beta2s": second_decay,
            "epsilons": epsilon,
            "weight_decays": fraction,
            "missing_noises": fraction,
            "decoupled": boolean,
            "maximize": boolean,
            "correction": st.sampled_from((0, 1, 2)),
        },
        replay_adam,
    ),
    Operation(
        "rebase_adam_",
        {
            "weights": PARAMETER,
            "firsts": STATE,
            "seconds": STATE,
            "global_weights": PARAMETER,
            "global_firsts": PARAMETER,
            "global_seconds": PARAMETER,
            "weight_snapshots": STATE,
            "first_snapshots": STATE,
            "second_snapshots": STATE,
        },
        {
            "first_decay": fraction,
            "second_decay": fraction,
            "displacement_factor": factor,
            "beta2": second_decay,
            "eps": epsilon,
            "step": st.integers(1, 1000),
        },
        rebase_adam,
    ),
    Operation(
        "replay_sgd_",
        {"weights": PARAMETER, "momenta": PARAMETER, "sums": STATE, "corrections": STATE},
        {
            "divisor": st.integers(1, 64).map(float),
            "lrs": rate,
            "momentum_factors": st.just(0.0) | fraction,
            "dampenings": fraction,
            "weight_decays": fraction,
            "nesterov": boolean,
            "maximize": boolean,
            "momentum_initialised": boolean,
            "correction": st.sampled_from((0, 1, 2)),
        },
        replay_sgd,
    ),
    Operation(
        "rebase_momentum_",
        {
            "weights": PARAMETER,
            "momenta": STATE,
            "global_weights": PARAMETER,
            "global_momenta": PARAMETER,
            "weight_snapshots": STATE,
            "momentum_snapshots": STATE,
        },
        {"momentum_decay": fraction, "displacement_factor": factor},
        rebase_momentum,
    ),
    Operation(
        "rebase_shift_",
        {"weights": PARAMETER, "global_weights": PARAMETER, "weight_snapshots": STATE},
        {},
        rebase_shift,
    ),
)
GATED_OPERATIONS = tuple(operation for operation in OPERATIONS if operation.is_gated)
CLOSED_GATES = (1.0, 2.0, -1.0, float("inf"), float("nan"))
ADAM_STEP_OPTIONS = {
    "lrs": "lr",
    "beta1s": "beta1",
    "beta2s": "beta2",
    "epsilons": "eps",
    "weight_decays": "weight_decay",
}
PER_STEP = (*ADAM_STEP_OPTIONS, "missing_noises", "momentum_factors", "dampenings")
POSITIVE = ("seconds", "global_seconds")


@dataclass(frozen=True)
class Parameter:
    """One index of the lists: shape and dtype, and the memory layout in each list."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layouts: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """One call of an operation. ``build()`` makes its arguments, the same ones every time."""

    operation: Operation
    parameters: tuple[Parameter, ...]
    options: Options
    omitted: tuple[str, ...]
    seed: int

    def build(self) -> dict[str, Any]:
        generator = np.random.default_rng(self.seed)
        lists: dict[str, list[Tensor]] = {name: [] for name in self.operation.lists}
        for parameter in self.parameters:
            for (name, kind), layout in zip(self.operation.lists.items(), parameter.layouts, strict=True):
                values = torch.from_numpy(np.asarray(generator.standard_normal(parameter.shape)))
                if name in POSITIVE:
                    values = values.abs() + 0.25
                dtype = parameter.dtype if kind == PARAMETER else state_dtype(parameter.dtype)
                lists[name].append(lay_out(values.to(dtype), layout))
        return lists | {name: [] for name in self.omitted} | self.options

    def expected(self, arguments: dict[str, Any]) -> list[Arrays]:
        """For each parameter, the arrays that must have changed."""
        results = []
        for index in range(len(self.parameters)):
            given = {
                name: arguments[name][index].detach().double().numpy().copy()
                for name in self.operation.lists
                if arguments[name]
            }
            results.append(self.operation.expected(given, self.options))
        return results


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def lay_out(values: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout, where the shape allows it, noise between them."""
    if layout == "reversed":
        backwards = tuple(reversed(range(values.dim())))
        return values.permute(backwards).contiguous().permute(backwards)
    if layout == "channels_last" and values.dim() == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if layout == "gaps" and values.dim():
        return torch.stack((values, torch.full_like(values, 77)), dim=-1)[..., 0]
    if layout == "offset":
        padded = torch.cat((values.new_full((1,), 77), values.flatten()))
        return padded[1:].view(values.shape)
    if layout == "sliced" and values.dim():
        return torch.cat((values, torch.full_like(values, 77)), dim=-1)[..., : values.shape[-1]]
    return values.clone(memory_format=torch.contiguous_format)


shapes = (
    st.lists(st.integers(0, 5), max_size=3).map(tuple)
    | st.tuples(*[st.integers(1, 4)] * 4)
    | st.tuples(st.integers(1, 200))
)


@st.composite
def calls(draw: st.DrawFn, operation: Operation) -> Call:
    layouts = st.sampled_from(LAYOUTS)
    one_layout = layouts.map(lambda layout: (layout,) * len(operation.lists))
    mixed_layouts = st.tuples(*[layouts] * len(operation.lists))
    parameter = st.builds(Parameter, shapes, st.sampled_from(DTYPES), st.one_of(one_layout, mixed_layouts))
    options: Options = {}
    step_count = draw(st.integers(0, 5))
    for name, strategy in operation.options.items():
        if name in PER_STEP:
            strategy = st.lists(strategy, min_size=step_count, max_size=step_count)
        options[name] = draw(strategy)
    omissible = [name for name, needed in needs(options).items() if not needed]
    omitted = tuple(name for name in omissible if name in operation.lists and draw(boolean))
    parameters = tuple(draw(st.lists(parameter, max_size=4)))
    return Call(operation, parameters, options, omitted, draw(st.integers(0, 2**32)))


def needs(options: Options) -> dict[str, bool]:
    """Which of the lists that may be empty a call with these options needs."""
    return {
        "accumulators": options.get("accumulation", 1) != 0,
        "squares": options.get("accumulation", 1) != 0,
        "momenta": any(options.get("momentum_factors", [1])),
        "corrections": options.get("correction", 1) != 0,
    }


def plain_call(
    operation: Operation, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (5, 3)
) -> Call:
    """A call with two contiguous parameters and ordinary options that use every list."""
    values = {
        "accumulation": 1,
        "correction": 2,
        "overwrite": False,
        "divisor": 4.0,
        "nesterov": True,
        "maximize": False,
        "momentum_initialised": True,
        "lrs": [0.1, 0.2],
        "momentum_factors": [0.9, 0.8],
        "dampenings": [0.0, 0.1],
        "weight_decays": [0.0, 0.01],
        "beta1s": [0.9, 0.8],
        "beta2s": [0.99, 0.9],
        "epsilons": [0.1, 0.2],
        "missing_noises": [0.2, 0.3],
        "beta2": 0.99,
        "count": 8,
        "step": 3,
        "steps_before": 2,
        "decoupled": True,
    }
    options = {name: values.get(name, 0.3) for name in operation.options}
    parameter = Parameter(shape, dtype, ("contiguous",) * len(operation.lists))
    return Call(operation, (parameter, parameter), options, (), 0)


def tensors_of(arguments: dict[str, Any]) -> dict[str, list[Tensor]]:
    return {
        name: value
        for name, value in arguments.items()
        if isinstance(value, list) and all(isinstance(item, Tensor) for item in value)
    }
