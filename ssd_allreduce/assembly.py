"""Makes the parts of one optimizer's training and puts them together."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from ssd_allreduce import ops
from ssd_allreduce.agreement import text_digest
from ssd_allreduce.buffers import BufferAverager
from ssd_allreduce.communicators.horovod import EVERY_PROCESS
from ssd_allreduce.communicators.ordered import matched_by_name
from ssd_allreduce.communicators.protocol import Communicator, ReduceOp
from ssd_allreduce.communicators.through_host import ThroughHost
from ssd_allreduce.compensation import make_rule
from ssd_allreduce.control_channel import ControlChannel
from ssd_allreduce.global_model import GlobalModel
from ssd_allreduce.group_options import GroupOptions
from ssd_allreduce.reducer import Reducer
from ssd_allreduce.request import Request
from ssd_allreduce.schedule import Schedule
from ssd_allreduce.settings import Settings
from ssd_allreduce.statistics import StatsRecorder
from ssd_allreduce.tracing import FileTracer, Tracer
from ssd_allreduce.training import Training
from ssd_allreduce.transport import Transport
from ssd_allreduce.update_family import Family

_instances: Counter[str] = Counter()
"""Optimizers made so far on each engine: part of every tensor's name, equal on all ranks."""

_LONGEST_LABEL = 64


def make_transport(
    communicator: Communicator, settings: Settings, stats: StatsRecorder, trace: Path | None
) -> Transport:
    _instances[communicator.key] += 1
    number = _instances[communicator.key]
    prefix = f"ssd.{number}"
    tracer = Tracer() if trace is None else FileTracer(trace, _trace_label(communicator.key, number))
    engine = matched_by_name(communicator, settings.bucket_bytes, settings.timeout)
    if torch.cuda.is_available() and "cuda" not in engine.capabilities.devices:
        engine = ThroughHost(engine)
    return Transport(engine, prefix, settings.timeout, stats, tracer)


def _trace_label(key: str, number: int) -> str:
    """What tells this optimizer's trace from others on the same rank, or of the same rank in another set."""
    in_a_set = key.startswith(f"{EVERY_PROCESS}-")
    # A file's name may not be as long as the list of many ranks.
    name = key if len(key) <= _LONGEST_LABEL else f"{EVERY_PROCESS}-{text_digest(key):x}"
    return (f".{name}" if in_a_set else "") + (f".optimizer{number}" if number > 1 else "")


def reassemble(old: Training, family: Family, request: Request, buffers: BufferAverager) -> Training:
    """Make the parts anew for other parameters, when nothing is in flight and all ranks are equal."""
    new = assemble(old.transport, family, old.settings, request, buffers, old.stats)
    new.schedule.load_progress(old.schedule.state_dict())
    new.set_period(old.schedule.delay_steps, old.schedule.overlap_steps)
    if new.rule.corrections is not None and old.rule.corrections is not None:
        for correction, parameter in zip(new.rule.corrections, new.parameters.tensors, strict=True):
            index = old.parameters.index_of.get(parameter)
            if index is not None:
                correction.copy_(old.rule.corrections[index])
    return new


def assemble(
    transport: Transport,
    family: Family,
    settings: Settings,
    request: Request,
    buffers: BufferAverager,
    stats: StatsRecorder,
) -> Training:
    """Make the parts and put them together."""
    parameters, base, communicator = family.parameters, family.base, transport.communicator
    ops.check_kernels(parameter.device.type for parameter in parameters.tensors)
    reducer = Reducer(
        parameters,
        transport,
        request.wire,
        request.group_indices(parameters),
        request.backward_passes_per_step,
        request.sparse_as_dense,
        settings.delay_steps,
        family.needs_squares,
    )
    options = GroupOptions(base.groups, base.option_names)
    gradient_scale = float(communicator.size) if request.wire.op is ReduceOp.SUM else 1.0
    return Training(
        parameters=parameters,
        base=base,
        settings=settings,
        schedule=Schedule(settings.warmup_steps, settings.delay_steps, settings.overlap_steps),
        transport=transport,
        wire=request.wire,
        reducer=reducer,
        control=ControlChannel(reducer, options, communicator.rank, buffers),
        options=options,
        family=family,
        global_model=GlobalModel(parameters, base, family),
        rule=make_rule(settings, family, gradient_scale),
        stats=stats,
        buffers=buffers,
    )
