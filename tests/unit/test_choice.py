"""Which engine is used, and what is said when the one that is needed is missing."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
from loops import sgd, small_model

import ssd_allreduce as ssd
from ssd_allreduce import UsageError
from ssd_allreduce.communicators import choice

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HOROVOD_SIZE", *choice._MPI_SIZES)


class Named:
    """Stands for an engine; its name is all that matters here."""

    rank, size = 0, 1

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher, no engine that runs, and engines that only have names."""
    for variable in LAUNCHED:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(choice, "_logged", set())
    monkeypatch.setattr(choice, "horovod_is_running", lambda: False)
    monkeypatch.setattr(choice, "torch_distributed_is_running", lambda: False)
    monkeypatch.setattr(choice, "HorovodCommunicator", lambda process_set: Named("horovod"))
    monkeypatch.setattr(choice, "MPICommunicator", lambda: Named("mpi"))
    monkeypatch.setattr(choice, "TorchCommunicator", lambda: Named("torch"))


def launched_by(monkeypatch: pytest.MonkeyPatch, launcher: str, size: int) -> None:
    variables = {
        "torchrun": {"RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        "mpirun": {"OMPI_COMM_WORLD_SIZE": size},
        "mpich": {"PMI_SIZE": size},
        "horovodrun": {"HOROVOD_SIZE": size},
    }
    for name, value in variables[launcher].items():
        monkeypatch.setenv(name, str(value))


def chosen(name: str = "auto") -> Any:
    engine: Any = ssd.choose_communicator(name)
    return engine.name


@pytest.mark.parametrize("name", ["horovod", "mpi", "torch"])
def test_named_engine_is_taken(name: str) -> None:
    assert chosen(name) == name


def test_running_horovod_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "horovod_is_running", lambda: True)
    monkeypatch.setattr(choice, "torch_distributed_is_running", lambda: True)
    launched_by(monkeypatch, "mpirun", 2)
    assert chosen() == "horovod"


def test_running_torch_distributed_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "torch_distributed_is_running", lambda: True)
    launched_by(monkeypatch, "mpirun", 2)
    assert chosen() == "torch"


@pytest.mark.parametrize(("launcher", "engine"), [("torchrun", "torch"), ("mpirun", "mpi"), ("mpich", "mpi")])
def test_launchers_environment_decides(monkeypatch: pytest.MonkeyPatch, launcher: str, engine: str) -> None:
    launched_by(monkeypatch, launcher, 2)
    assert chosen() == engine


@pytest.mark.parametrize("launcher", [None, "torchrun", "mpirun", "mpich", "horovodrun"])
def test_alone_it_is_one_rank(monkeypatch: pytest.MonkeyPatch, launcher: str | None) -> None:
    if launcher is not None:
        launched_by(monkeypatch, launcher, 1)
    assert ssd.choose_communicator().size == 1


def test_mpirun_without_an_engine_names_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    launched_by(monkeypatch, "mpirun", 4)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UsageError, match=r"one of 4 that mpirun.*ssd-allreduce\[mpi\].*\[horovod\]"):
        ssd.choose_communicator()


def test_horovodrun_without_init_is_not_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    launched_by(monkeypatch, "horovodrun", 2)
    with pytest.raises(UsageError, match=r"one of 2 that horovodrun.*Call hvd\.init\(\) first"):
        ssd.choose_communicator()


def test_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"'nccl' is not known. Allowed: 'auto', 'horovod', 'mpi', 'torch'"):
        ssd.choose_communicator("nccl")


def test_process_set_is_horovods(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"process_set was given, which only Horovod knows.*'mpi'"):
        ssd.choose_communicator("mpi", process_set=object())


def test_choice_is_logged_once_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched_by(monkeypatch, "mpirun", 2)
    with caplog.at_level(logging.INFO, logger="ssd_allreduce"):
        chosen()
        chosen()
    (record,) = caplog.records
    assert record.getMessage() == (
        "communication engine: mpi, because the environment is mpirun's; rank 0 of 1"
    )


def test_optimizer_takes_a_name() -> None:
    model = small_model()
    with pytest.raises(ValueError, match="communicator='ring' is not known"):
        ssd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters(), communicator="ring")


WITHOUT = """
import sys
for module in {missing!r}:
    sys.modules[module] = None
import torch, ssd_allreduce as ssd
parameter = torch.nn.Parameter(torch.ones(3))
base = torch.optim.SGD([parameter], lr=0.5)
optimizer = ssd.DistributedOptimizer(base, named_parameters=[("p", parameter)])
parameter.sum().backward()
optimizer.step()
print(parameter.tolist())
for name in {named!r}:
    try:
        ssd.choose_communicator(name)
    except ssd.UsageError as error:
        print(error)
"""


@pytest.mark.timeout(120)
def test_package_works_without_the_extras_and_names_them_when_asked() -> None:
    program = WITHOUT.format(missing=["horovod", "mpi4py"], named=["horovod", "mpi"])
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    weights, horovod, mpi = result.stdout.splitlines()
    assert weights == "[0.5, 0.5, 0.5]"
    assert "pip install 'ssd-allreduce[horovod]'" in horovod
    assert "pip install 'ssd-allreduce[mpi]'" in mpi


def test_bucket_bytes_is_a_size() -> None:
    model = small_model()
    for wrong, error in ((-1, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match=r"bucket_bytes=.* must be an integer of at least 0"):
            ssd.DistributedOptimizer(
                sgd(model),
                named_parameters=model.named_parameters(),
                communicator=ssd.Loopback(2),
                bucket_bytes=wrong,  # type: ignore[arg-type]
            )
