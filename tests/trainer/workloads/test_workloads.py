"""The workloads on real data, and what they say to data that are no good."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.launching import REAL, SHARED, losses, metrics, train, variables
from tests.support.ports import held_port
from trainer.workloads import cifar10
from trainer.workloads import mnist as digits

torch = pytest.importorskip("torch")


@pytest.mark.full
@REAL
@pytest.mark.slow
def test_mnist_learns(tmp_path):
    """8,000 images to train on and 2,000 held out, of the published test split."""
    data = ("--data", str(SHARED.resolve()), "--held-out", "2000")
    train(4, tmp_path, "mnist", *data, "--batch-size", "16", "--epochs", "3")
    found = metrics(tmp_path / "mnist_out")
    assert found["accuracy"] >= 0.95
    assert (found["train_rows"], found["held_out_rows"], found["world_size"]) == (8000, 2000, 4)


@REAL
@pytest.mark.slow
def test_the_files_of_a_run_and_what_it_says(tmp_path):
    data = ("--data", str(SHARED.resolve()), "--subset", "512", "--held-out", "200")
    done = train(2, tmp_path, "mnist", *data, "--batch-size", "16", "--epochs", "3")
    out = tmp_path / "mnist_out"
    found = metrics(out)
    assert (found["train_rows"], found["held_out_rows"], found["world_size"]) == (512, 200, 2)
    lines = re.findall(
        r"^Epoch (\d) - Avg Loss: \d\.\d{6}, Accuracy: \d\d\.\d\d%$", done.stdout, re.M
    )
    assert lines == ["1", "2", "3"]
    names = {path.name for path in out.glob("*.pt")}
    assert names == {"best.pt", "model.pt"} | {f"checkpoint_epoch_{n}.pt" for n in (1, 2, 3)}
    best = torch.load(out / "best.pt", weights_only=True)
    assert best["best"] == pytest.approx(max(found["accuracy"], best["best"]))


@pytest.mark.full
@REAL
@pytest.mark.slow
def test_cifar10_learns(tmp_path):
    """The narrowest network, so that it takes half a minute on two CPUs; chance is one in ten."""
    data = ("--data", str(SHARED.resolve() / "cifar10_subset.npz"), "--width", "8")
    train(2, tmp_path, "cifar10", *data, "--epochs", "12", "--batch-size", "16")
    out = tmp_path / "cifar10_out"
    curve = losses(out)
    first, last = (
        [curve[step] for step in sorted(curve)][part] for part in (slice(20), slice(-20, None))
    )
    assert sum(last) < 0.8 * sum(first)
    assert metrics(out)["accuracy"] > 0.3


def test_the_networks_have_their_published_sizes():
    """ResNet-18 for small images and ten classes; either normalisation has as many weights."""
    whole = cifar10.make_model(1, [64, 128, 256, 512])
    assert sum(one.numel() for one in whole.parameters()) == 11_173_962
    assert whole(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert digits.make_model(1)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_the_first_weights_are_the_seeds():
    one, same, other = (digits.make_model(seed).state_dict() for seed in (1, 1, 2))
    assert all(bool((one[key] == same[key]).all()) for key in one)
    assert any(bool((one[key] != other[key]).any()) for key in one)


def test_an_image_is_changed_by_its_row_and_not_by_its_rank():
    pictures = torch.rand(6, 3, 32, 32)
    numbers = torch.arange(6)
    all_at_once = cifar10.shift_and_mirror(pictures, numbers, 6, seed=3)
    apart = [cifar10.shift_and_mirror(pictures[n::2], numbers[n::2], 6, seed=3) for n in (0, 1)]
    assert bool((all_at_once[0::2] == apart[0]).all())
    assert bool((all_at_once[1::2] == apart[1]).all())
    assert bool((all_at_once != cifar10.shift_and_mirror(pictures, numbers, 6, seed=4)).any())


@pytest.mark.full
@pytest.mark.slow
def test_nccl_without_gpus_names_the_nodes(tmp_path):
    """Before any of them waits for the others in NCCL; one torchrun on each, started by hand."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    port, terminals = str(held_port()), []
    for number, node in enumerate(("hpc01", "hpc02")):
        launch = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(number)]
        launch += ["--master-addr", "127.0.0.1", "--master-port", port]
        launch += ["--log-dir", str(tmp_path / node)]
        argv = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "trainer", "mlp"]
        env = variables(STAGER_NODE=node, PYTORCH_DIST_BACKEND="nccl")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        terminals.append(subprocess.Popen(argv, cwd=tmp_path, env=env, **pipes))
    said = [terminal.communicate(timeout=300)[0] for terminal in terminals]
    assert 0 not in [terminal.returncode for terminal in terminals]
    for node in ("hpc01", "hpc02"):
        wanted = f"{node} has 0 GPUs for 1 rank, and PYTORCH_DIST_BACKEND is nccl"
        assert wanted in said[0], said
    assert "leave these nodes out, or use gloo" in said[0]


@pytest.mark.slow
def test_a_step_of_all_ranks_may_be_larger_than_the_data_but_not_that_of_one(tmp_path):
    train(2, tmp_path, "mlp", "--subset", "10", "--batch-size", "8", "--epochs", "2")
    assert sorted(losses(tmp_path / "mlp_out")) == [1, 2]
    (tmp_path / "file").touch()
    for more, said in [
        (("--batch-size", "11"), "--batch-size 11: only 10 rows to train on"),
        (
            ("--batch-size", "8", "--out", "file/out"),
            "--out file/out cannot be used: Not a directory",
        ),
    ]:
        done = train(2, tmp_path, "mlp", "--subset", "10", *more, code=1)
        assert done.stderr.count(said) == 1


@pytest.mark.slow
def test_a_checkpoint_of_another_run(tmp_path):
    train(0, tmp_path, "mlp", "--epochs", "1", "--subset", "320")
    for more, why in [
        (("mlp", "--subset", "640"), "rows 320, not 640"),
        (("mlp", "--subset", "320", "--seed", "1"), "seed 42, not 1"),
    ]:
        done = train(0, tmp_path, *more, "--resume", "--out", "mlp_out", code=1)
        assert "checkpoint_epoch_1.pt belongs to another run" in done.stderr
        assert why in done.stderr
