"""What docs/engines.md shows is run: an engine of one's own, and a restart by torchrun."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from launchers import ROOT, launch

RESTARTABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else the restarted ranks of gloo find the addresses of those that have ended (torch 2.13)."""
PROGRAMS = ROOT / "tests" / "distributed" / "programs"

LOOP = """
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(2 + rank)
for _ in range(13):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
optimizer.flush()
mine = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
everyone = [torch.empty_like(mine) for _ in range(size)]
dist.all_gather(everyone, mine)
assert all(torch.equal(theirs, mine) for theirs in everyone)
assert optimizer.stats().delay.sync_points >= 3
print(f"trained alike on {size}\\n", end="")
optimizer.close()
dist.destroy_process_group()
"""

pytestmark = [pytest.mark.launcher("torchrun", 2), pytest.mark.timeout(200)]


def test_engine_of_ones_own_trains(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "engines.md").read_text()
    (code,) = re.findall(r"<!-- run by tests/.*? -->\n```python\n(.*?)```", text, re.DOTALL)
    program = tmp_path / "engine.py"
    program.write_text(code + LOOP)
    result = launch("torchrun", 2, [sys.executable, program], timeout=90).check()
    assert result.stdout.count("trained alike on 2") == 2


def test_restart_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    for when, restarts in (("never", "0"), ("once", "1")):
        command = [sys.executable, PROGRAMS / "restarted.py", tmp_path, when]
        launch("torchrun", 2, command, env={**RESTARTABLE, "PET_MAX_RESTARTS": restarts}, timeout=90).check()

    assert (tmp_path / "never.first_epoch").read_text() == "0"
    assert (tmp_path / "once.first_epoch").read_text() == "2"
    whole, resumed = (torch.load(tmp_path / f"{when}.weights") for when in ("never", "once"))
    assert all(map(torch.equal, whole, resumed))
