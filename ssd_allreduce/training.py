"""The parts of one optimizer's training on one rank, put together for the two stages."""

from __future__ import annotations

from dataclasses import dataclass

from ssd_allreduce.base_optimizer import BaseOptimizer
from ssd_allreduce.buffers import BufferAverager
from ssd_allreduce.communicators.protocol import ReduceOp
from ssd_allreduce.compensation import LocalRule
from ssd_allreduce.control_channel import ControlChannel
from ssd_allreduce.global_model import GlobalModel
from ssd_allreduce.group_options import GroupOptions, Row, StepOptions
from ssd_allreduce.parameters import Parameters
from ssd_allreduce.reducer import Reducer
from ssd_allreduce.schedule import Schedule
from ssd_allreduce.settings import Settings
from ssd_allreduce.statistics import StatsRecorder
from ssd_allreduce.transport import Transport
from ssd_allreduce.update_family import Family
from ssd_allreduce.wire import WireFormat


@dataclass
class Training:
    """What both stages work with. Each part documents itself."""

    parameters: Parameters
    base: BaseOptimizer
    settings: Settings
    schedule: Schedule
    transport: Transport
    wire: WireFormat
    reducer: Reducer
    control: ControlChannel
    options: GroupOptions
    family: Family
    global_model: GlobalModel
    rule: LocalRule
    stats: StatsRecorder
    buffers: BufferAverager

    @property
    def rank(self) -> int:
        """This rank."""
        return self.transport.communicator.rank

    @property
    def size(self) -> int:
        """World size."""
        return self.transport.communicator.size

    @property
    def sums_gradients(self) -> bool:
        """Whether the user wants gradients summed over the ranks instead of averaged."""
        return self.wire.op is ReduceOp.SUM

    def set_period(self, delay_steps: int, overlap_steps: int) -> None:
        """Change k and d, on all ranks at once, while nothing is in flight and a period begins."""
        self.schedule.set_period(delay_steps, overlap_steps)
        self.reducer.set_period(delay_steps)

    def own_options(self) -> Row:
        """The numeric options in force on this rank."""
        return self.options.read(self.base.groups)

    def view(self, row: Row) -> StepOptions:
        """A row of options by group and name."""
        return StepOptions(self.options, row)
