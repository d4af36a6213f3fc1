"""The examples run in several ranks, write what they promise, resume, and say what they are missing."""

from __future__ import annotations

import csv
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import char_lm
import cifar10_resnet20
import imagenet_resnet50
import numpy as np
import pytest
import torch
from launchers import ROOT, LaunchResult, launch
from PIL import Image

# Half of the first epoch, which has 2 or 4 steps, is synchronous; then come periods of 2 steps.
SHORT = ["--delay-steps", "2", "--overlap-steps", "1", "--warmup-epochs", "0.5", "--max-steps", "4"]
CIFAR10_BINARY = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
Example = Callable[[Path], list[str]]


# -- data of the published formats ---------------------------------------------------------------


def records(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, 3072), np.uint8), random.integers(0, 10, count)


def write_cifar10_binary(folder: Path) -> None:
    folder.mkdir()
    for seed, name in enumerate(CIFAR10_BINARY):
        pixels, labels = records(4, seed)
        (folder / name).write_bytes(np.hstack([labels[:, None].astype(np.uint8), pixels]).tobytes())


def write_cifar10_pickles(folder: Path) -> None:
    folder.mkdir()
    for seed, name in enumerate(CIFAR10_BINARY):
        pixels, labels = records(4, seed)
        batch = {b"batch_label": b"a few", b"labels": labels.tolist(), b"data": pixels}
        (folder / name.removesuffix(".bin")).write_bytes(pickle.dumps(batch, protocol=2))


def write_pictures(folder: Path) -> None:
    random = np.random.default_rng(1)
    for part, count in (("train", 8), ("val", 2)):
        for name, suffix in (("cat", "jpg"), ("dog", "png")):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (40, 48, 3), np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.{suffix}")


def write_text(path: Path) -> None:
    path.write_text("The quick brown fox jumps over the lazy dög. " * 20, encoding="utf-8")


# -- running -------------------------------------------------------------------------------------


def cifar10(folder: Path) -> list[str]:
    if not (folder / "data").exists():
        write_cifar10_binary(folder / "data")
    return ["cifar10_resnet20.py", "--data-dir", str(folder / "data"), "--batch-size", "2"]


def cifar10_pickled(folder: Path) -> list[str]:
    write_cifar10_pickles(folder / "data")
    return ["cifar10_resnet20.py", "--data-dir", str(folder / "data"), "--batch-size", "2"]


def imagenet(folder: Path) -> list[str]:
    if not (folder / "data").exists():
        write_pictures(folder / "data")
    small = ["--batch-size", "2", "--image-size", "32", "--workers", "1", "--max-steps", "2"]
    return ["imagenet_resnet50.py", "--data-dir", str(folder / "data"), *small]


def imagenet_scaled(folder: Path) -> list[str]:
    return [*imagenet(folder), "--precision", "fp16", "--workers", "0"]


def text(folder: Path) -> list[str]:
    write_text(folder / "text.txt")
    small = ["--batch-size", "2", "--context", "32", "--width", "16", "--layers", "1", "--heads", "2"]
    return ["char_lm.py", "--text", str(folder / "text.txt"), *small]


def run(example: Example, folder: Path, *options: str) -> LaunchResult:
    script, *arguments = example(folder)
    outputs = ["--csv", str(folder / "log.csv"), "--checkpoints", str(folder / "checkpoints")]
    command = ["python", str(ROOT / "examples" / script), *SHORT, *arguments, *outputs, *options]
    return launch("mpirun", 2, command, env={"PYTHONPATH": str(ROOT)}, timeout=240).check()


def rows(folder: Path) -> list[dict[str, float]]:
    with (folder / "log.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def epochs_saved(folder: Path) -> int:
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["checkpoint.pt"]
    saved = torch.load(folder / "checkpoints" / "checkpoint.pt", weights_only=True)
    assert all(tensor.isfinite().all() for tensor in saved["model"].values())
    return saved["epochs_done"]


@pytest.fixture(autouse=True)
def no_large_files_left(tmp_path: Path) -> Iterator[None]:
    """pytest keeps the folders of its last runs, and ResNet-50's checkpoint has 650 MB."""
    yield
    for path in tmp_path.rglob("checkpoint.*"):
        path.unlink()


@pytest.mark.launcher("mpirun", 2)
@pytest.mark.parametrize("example", [imagenet, text])
def test_runs_and_resumes(example: Example, tmp_path: Path) -> None:
    run(example, tmp_path, "--epochs", "1")
    assert [row["epoch"] for row in rows(tmp_path)] == [1]
    assert epochs_saved(tmp_path) == 1

    resumed = run(example, tmp_path, "--epochs", "2", "--resume")
    assert resumed.stdout.count("after epoch 1") == 1
    assert [row["epoch"] for row in rows(tmp_path)] == [1, 2]
    assert np.isfinite([list(row.values()) for row in rows(tmp_path)]).all()
    assert epochs_saved(tmp_path) == 2


@pytest.mark.launcher("mpirun", 2)
@pytest.mark.parametrize("example", [cifar10_pickled, imagenet_scaled, text])
def test_runs_with_plain_horovod(example: Example, tmp_path: Path) -> None:
    """And with ``--resume`` where nothing has been saved yet, as a job that restarts itself has it."""
    result = run(example, tmp_path, "--epochs", "1", "--optimizer", "horovod", "--resume")
    assert "starting at the beginning" in result.stdout
    assert [row["epoch"] for row in rows(tmp_path)] == [1]
    assert epochs_saved(tmp_path) == 1


@pytest.mark.launcher("mpirun", 2)
def test_scaled_losses_with_ssd(tmp_path: Path) -> None:
    run(imagenet_scaled, tmp_path, "--epochs", "1")
    assert len(rows(tmp_path)) == 1
    assert epochs_saved(tmp_path) == 1


@pytest.mark.launcher("mpirun", 2)
def test_resumed_run_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    stopped, straight = tmp_path / "stopped", tmp_path / "straight"
    for folder in (stopped, straight):
        folder.mkdir()
    options = ["--milestones", "1"]
    run(cifar10, stopped, "--epochs", "1", *options)
    assert len(rows(stopped)) == epochs_saved(stopped) == 1
    run(cifar10, stopped, "--epochs", "2", "--resume", *options)
    run(cifar10, straight, "--epochs", "2", *options)
    assert len(rows(stopped)) == epochs_saved(stopped) == 2
    for ours, theirs in zip(rows(stopped), rows(straight), strict=True):
        assert {**ours, "seconds": 0.0} == pytest.approx({**theirs, "seconds": 0.0}, rel=1e-4)


# -- refusals, which all ranks make alike before Horovod starts ----------------------------------


def refusal(monkeypatch: pytest.MonkeyPatch, main: Callable[[], None], *arguments: str | Path) -> str:
    monkeypatch.setattr(sys, "argv", ["example", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    return str(caught.value)


def test_missing_cifar10_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(monkeypatch, cifar10_resnet20.main, "--data-dir", tmp_path / "nowhere")
    assert "nowhere does not hold data_batch_1" in message
    assert "cifar-10-binary.tar.gz" in message


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"\0" * 3072, "not a multiple of 3073"),
        (b"", "not a multiple of 3073"),
        (b"\x0a" + b"\0" * 3072, "labels outside 0 to 9"),
    ],
)
def test_damaged_cifar10_is_refused(
    content: bytes, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar10_binary(tmp_path / "data")
    (tmp_path / "data" / "data_batch_3.bin").write_bytes(content)
    message = refusal(monkeypatch, cifar10_resnet20.main, "--data-dir", tmp_path / "data")
    assert "data_batch_3.bin" in message
    assert complaint in message
    assert "Download" in message


@pytest.mark.parametrize(
    "content",
    [
        b"no pickle",
        pickle.dumps({b"labels": [1]}, protocol=2),
        pickle.dumps({b"labels": [1], b"data": Path("code")}, protocol=2),
        pickle.dumps({b"labels": [1], b"data": np.zeros((1, 3), np.uint8)}, protocol=2),
    ],
)
def test_damaged_pickles_are_refused(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10_pickles(tmp_path / "data")
    (tmp_path / "data" / "test_batch").write_bytes(content)
    message = refusal(monkeypatch, cifar10_resnet20.main, "--data-dir", tmp_path / "data")
    assert "test_batch" in message
    assert "Download" in message


def test_missing_pictures_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = imagenet_resnet50.main
    assert "train/CLASS/" in refusal(monkeypatch, main, "--data-dir", tmp_path)
    write_pictures(tmp_path / "data")
    (tmp_path / "data" / "val" / "dog").rename(tmp_path / "data" / "val" / "bird")
    assert "different classes" in refusal(monkeypatch, main, "--data-dir", tmp_path / "data")


def test_damaged_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "broken.png").write_bytes(b"no picture")
    with pytest.raises(RuntimeError, match=r"broken\.png cannot be read"):
        imagenet_resnet50.Pictures(tmp_path, 32, training=False)[0]


def test_missing_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main, path = char_lm.main, tmp_path / "text.txt"
    assert "Pass any text file" in refusal(monkeypatch, main, "--text", path)
    path.write_bytes(b"\xff\xfe\xff")
    assert "Pass any text file" in refusal(monkeypatch, main, "--text", path)
    path.write_text("short")
    assert "Pass a longer text" in refusal(monkeypatch, main, "--text", path)


# -- without Horovod -----------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.parametrize("launched", ["mpirun-mpi4py-2", "torchrun-2"])
def test_mnist_learns_without_horovod(launched: str, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    command = [sys.executable, ROOT / "examples" / "mnist.py", "--epochs", "2", "--csv", log]
    launch(launched.removesuffix("-2"), 2, command, timeout=200).check()
    with log.open(newline="") as file:
        first, last = csv.DictReader(file)
    assert float(last["test_loss"]) < float(first["test_loss"])
    assert float(last["test_accuracy"]) > 0.85
