"""How gradients travel: the very factors that Horovod passes, and whether they are compressed."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch

from ssd_allreduce.communicators import ReduceOp
from ssd_allreduce.wire import NoCompression, WireFormat


@pytest.mark.parametrize(
    ("wire", "factors"),
    [
        (WireFormat(), (1.0, 1.0)),
        (WireFormat(predivide=4.0), (0.25, 4.0)),
        (WireFormat(predivide=3.0), (1.0 / 3.0, 3.0)),
        # As hvd.DistributedOptimizer: no factor for tensors in groups, nor for a sum.
        (WireFormat(predivide=4.0, grouped=True), (1.0, 1.0)),
        (WireFormat(op=ReduceOp.SUM), (1.0, 1.0)),
    ],
)
def test_factors(wire: WireFormat, factors: tuple[float, float]) -> None:
    assert wire.factors == factors


def test_without_compression_tensors_travel_as_they_are() -> None:
    tensor = torch.ones(2)
    travelling, context = NoCompression.compress(tensor)
    assert travelling is tensor
    assert NoCompression.decompress(travelling, context) is tensor


@pytest.mark.parametrize(
    ("compression", "compresses"),
    [(NoCompression, False), (hvd.Compression.none, False), (hvd.Compression.fp16, True)],
)
def test_what_compresses_is_found_by_trying(compression: object, compresses: bool) -> None:
    assert WireFormat(compression=compression).compresses is compresses


def test_ranks_compare_what_changes_the_numbers_on_the_wire() -> None:
    plain = WireFormat().describe()
    assert WireFormat(op=ReduceOp.SUM).describe() != plain
    assert WireFormat(predivide=2.0).describe() != plain
    assert WireFormat(compression=hvd.Compression.fp16).describe() != plain
    assert ("gradient_predivide_factor", "2.0") in WireFormat(predivide=2.0).describe()


def test_no_compression_is_the_same_whoever_does_not_compress() -> None:
    assert WireFormat(compression=hvd.Compression.none).describe() == WireFormat().describe()
