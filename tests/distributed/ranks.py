"""What tests ask of the ranks that they run in: ``hvd``, by which they call it whatever the engine is.

Where the launcher is one of ``ENGINES``, Horovod cannot be imported, and ``hvd`` is a stand-in that does
the few things that tests need beside training, on the engine under test.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

import torch
from torch import Tensor

from ssd_allreduce.communicators import Communicator, choose_communicator

ENGINES = {"mpirun-mpi4py": "mpi", "torchrun": "torch"}
"""The engine under test, by launcher, where it is not Horovod."""
ENGINE_VARIABLE = "SSD_ALLREDUCE_TEST_ENGINE"
SECONDS = 30.0


class OnlyHorovods:
    """What only Horovod has: tests may name it while they are collected, and not use it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> OnlyHorovods:
        if name.startswith("__"):
            raise AttributeError(name)
        return OnlyHorovods(f"{self._name}.{name}")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError(f"{self._name}() needs Horovod: run this test under Horovod's launchers only")


class WithoutHorovod(OnlyHorovods):
    """The part of ``horovod.torch`` that tests of any engine use."""

    def __init__(self, engine: str) -> None:
        super().__init__("hvd")
        self._engine = engine
        self._communicator: Communicator | None = None

    @property
    def communicator(self) -> Communicator:
        assert self._communicator is not None, "init() has not been called"
        return self._communicator

    def init(self) -> None:
        self._communicator = choose_communicator(self._engine)

    def rank(self) -> int:
        return self.communicator.rank

    def size(self) -> int:
        return self.communicator.size

    def DistributedOptimizer(  # noqa: N802 - Horovod's name for it
        self, optimizer: torch.optim.Optimizer, named_parameters: Any = ()
    ) -> torch.optim.Optimizer:
        """Nothing wraps the optimizer here; it keeps the names, where torch keeps them."""
        names = {parameter: name for name, parameter in named_parameters}
        for group in optimizer.param_groups:
            group["param_names"] = [names[parameter] for parameter in group["params"]]
        return optimizer

    def broadcast_parameters(self, parameters: dict[str, Tensor], root_rank: int) -> None:
        for name, tensor in parameters.items():
            self.communicator.broadcast(tensor.data, root_rank, name, SECONDS)

    def broadcast_object(self, value: Any, root_rank: int = 0, name: str = "object") -> Any:
        return self.allgather_object(value, name)[root_rank]

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        mine = torch.tensor(list(pickle.dumps(value)), dtype=torch.uint8)
        gathered = []
        for rank in range(self.size()):
            length = torch.tensor([mine.numel()])
            self.communicator.broadcast(length, rank, name, SECONDS)
            data = mine if rank == self.rank() else torch.empty(int(length), dtype=torch.uint8)
            self.communicator.broadcast(data, rank, name, SECONDS)
            gathered.append(pickle.loads(bytes(data.tolist())))
        return gathered


ENGINE = os.environ.get(ENGINE_VARIABLE, "horovod")
hvd: Any
if ENGINE == "horovod":
    import horovod.torch as hvd
else:
    hvd = WithoutHorovod(ENGINE)
