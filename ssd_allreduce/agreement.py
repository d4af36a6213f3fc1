"""The comparison of all ranks before anything is trained: same settings, tensors and weights.

Each rank describes itself in sections of (label, value) lines. Digests of the sections travel first;
only when they differ are the texts exchanged, so that every rank can name both values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ssd_allreduce.communicators.protocol import ReduceOp
from ssd_allreduce.errors import RankMismatchError

Lines: TypeAlias = list[tuple[str, str]]
Sections: TypeAlias = Sequence[tuple[str, Lines]]
Allreduce: TypeAlias = Callable[[Tensor, str, ReduceOp], Tensor]
"""Reduce a float64 vector under a name and wait for it."""

_DIGEST_BYTES = 6  # exact in a float64


def text_digest(text: str) -> int:
    """A digest that survives travelling as a float64."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest(), "big")


def tensor_digest(tensor: Tensor) -> str:
    """Digest of a tensor's bits in logical order."""
    data = tensor.detach().cpu().contiguous()
    flat = data.reshape(-1).view(torch.uint8) if data.numel() else torch.empty(0)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()


def compare_ranks(sections: Sections, rank: int, size: int, allreduce: Allreduce, advice: str) -> int:
    """Make sure that all ranks describe themselves alike. Collective.

    Args:
        sections: name and lines of each section, the same names on every rank.
        rank: this rank.
        size: world size.
        allreduce: how to reduce a vector.
        advice: what the user can do, for the end of the error message.

    Returns:
        A digest of everything compared.

    Raises:
        RankMismatchError: on every rank, naming the first difference and both values.
    """
    digests = [text_digest(json.dumps(lines)) for _, lines in sections]
    own = torch.tensor(digests, dtype=torch.float64)
    extremes = allreduce(torch.cat([own, -own]), "digests", ReduceOp.MAX)
    differs = (extremes[: len(digests)] != -extremes[len(digests) :]).tolist()
    for (title, lines), different in zip(sections, differs, strict=True):
        if different:
            everyone = _gather_text(json.dumps(lines), rank, size, allreduce)
            raise RankMismatchError(_describe(title, [json.loads(t) for t in everyone], advice))
    return text_digest(json.dumps(digests))


def _gather_text(text: str, rank: int, size: int, allreduce: Allreduce) -> list[str]:
    """Every rank's text: each fills a slot of its own in a vector of zeros that is summed."""
    data = text.encode()
    length = torch.tensor([len(data)], dtype=torch.float64)
    longest = int(allreduce(length, "length", ReduceOp.MAX).item())
    slots = torch.zeros(size, longest, dtype=torch.float64)
    slots[rank, : len(data)] = torch.tensor(list(data), dtype=torch.float64)
    gathered = allreduce(slots.reshape(-1), "texts", ReduceOp.SUM).reshape(size, longest)
    return [bytes(int(value) for value in row if value != 0).decode() for row in gathered.tolist()]


def _describe(title: str, everyone: list[list[list[str]]], advice: str) -> str:
    reference = everyone[0]
    for rank, lines in enumerate(everyone[1:], start=1):
        difference = _first_difference(reference, lines)
        if difference is not None:
            label, here, there = difference
            return (
                f"Ranks differ in {title}: {label} is {here} on rank 0 and {there} on rank {rank}. {advice}"
            )
    return f"Ranks differ in {title}. {advice}"


def _first_difference(reference: list[list[str]], lines: list[list[str]]) -> tuple[str, str, str] | None:
    for index in range(max(len(reference), len(lines))):
        here = reference[index] if index < len(reference) else None
        there = lines[index] if index < len(lines) else None
        if here == there:
            continue
        if here is not None and there is not None and here[0] == there[0]:
            return here[0], here[1], there[1]
        label = f"entry {index + 1}"
        return label, _entry(here), _entry(there)
    return None


def _entry(line: list[str] | None) -> str:
    return "missing" if line is None else f"{line[0]} = {line[1]}"
