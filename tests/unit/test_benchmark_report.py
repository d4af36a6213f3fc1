"""The report on the benchmarks holds what their files hold, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def report(folder: Path) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / "report.py"), "--folder", str(folder)]
    subprocess.run(command, check=True, timeout=60)
    return (folder / "benchmarks.md").read_text()


def test_tables_hold_the_figures_of_the_files(tmp_path: Path) -> None:
    row = {"method": "ssd d=0", "bytes_per_element": 29.71, "counted": 24, "rank": 1}
    content = {"date": "2030-01-02", "machine": "a machine", "elements": 77, "results": [row]}
    (tmp_path / "memory.json").write_text(json.dumps(content))
    text = report(tmp_path)
    assert "| ssd d=0 | 29.7 | 24 |" in text
    assert "2030-01-02; machine a machine; elements 77." in text
    assert "Throughput" not in text


def test_the_page_in_the_documentation_is_what_the_files_give(tmp_path: Path) -> None:
    for path in (ROOT / "docs").glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    assert report(tmp_path) == (ROOT / "docs" / "benchmarks.md").read_text()
