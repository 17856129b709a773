"""Images from IDX and npz files; what is wrong is told with file and place."""

from __future__ import annotations

import pytest

from tests.support.pictures import idx, mnist
from trainer.config import TrainerError, parse
from trainer.data import images

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")


@pytest.mark.parametrize(("prefix", "ending"), [("", ""), ("mnist-", ".gz")])
def test_both_splits_are_read(tmp_path, ending, prefix):
    pictures = mnist(tmp_path, "train", 30, ending, prefix)
    mnist(tmp_path, "t10k", 12, ending, prefix)
    found = images.read_mnist(tmp_path)
    assert (len(found[0]), len(found[1])) == (30, 12)
    assert found[0].inputs.numpy().tolist() == pictures.tolist()
    assert found[0].labels.tolist() == [number % 10 for number in range(30)]


def test_of_one_split_the_last_images_are_held_out(tmp_path):
    mnist(tmp_path, "t10k", 21)
    found = images.read_mnist(tmp_path)
    assert len(found) == 1
    by_default = images.choose_images(found, parse(["mnist", "--data", str(tmp_path)]))
    assert (len(by_default[0]), len(by_default[1])) == (18, 3)
    asked = images.choose_images(found, parse(["mnist", "--held-out", "5", "--subset", "10"]))
    assert asked[1].labels.tolist() == [6, 7, 8, 9, 0]
    assert len(asked[0]) == 10
    with pytest.raises(TrainerError, match="--held-out 21 leaves none of the 21 images"):
        images.choose_images(found, parse(["mnist", "--held-out", "21"]))


def test_pixels_come_out_around_zero(tmp_path):
    mnist(tmp_path, "t10k", 8)
    rows = images.normalize_images(images.read_mnist(tmp_path)[0], mean=0.5, spread=0.25)
    assert tuple(rows.inputs.shape) == (8, 1, 28, 28)
    assert float(rows.inputs[0, 0, 0, 0]) == -2
    assert float(rows.inputs[0, 0, 0, 2]) == pytest.approx((2 / 255 - 0.5) / 0.25)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:-1], "byte 3151: its header says 4 x 28 x 28, which is 3152 bytes"),
        (lambda data: data + b"x", "byte 3152: its header says 4 x 28 x 28"),
        (lambda data: b"\x1f\x8b" + data[2:], "byte 0: not an IDX file .* begins with 1f 8b 08"),
        (lambda _: b"", "byte 0: not an IDX file of bytes with 3 axes .*begins with nothing"),
    ],
)
def test_a_damaged_idx_file_is_named_with_the_place(tmp_path, change, said):
    mnist(tmp_path, "t10k", 4, ending="")
    path = tmp_path / "t10k-images-idx3-ubyte"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(TrainerError, match=said) as caught:
        images.read_mnist(tmp_path)
    assert str(path) in caught.value.message


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("images", np.zeros((4, 20, 28)), "an image has to be 28 x 28"),
        ("images", np.zeros((0, 28, 28)), "has 4 labels"),
        ("labels", [1, 2, 3], "has 3 labels"),
        ("labels", [1, 2, 10, 77], "label 2 is 10, and 2 of 4 are not from 0 to 9"),
        ("labels", None, r"t10k-labels-idx1-ubyte\.gz cannot be read"),  # cut short
    ],
)
def test_files_that_do_not_belong_together(tmp_path, name, data, said):
    mnist(tmp_path, "t10k", 4)
    path = tmp_path / f"t10k-{name}-idx{3 if name == 'images' else 1}-ubyte.gz"
    if data is None:
        path.write_bytes(path.read_bytes()[:-9])
    else:
        idx(path, data)
    with pytest.raises(TrainerError, match=said):
        images.read_mnist(tmp_path)


def test_files_that_are_missing(tmp_path):
    with pytest.raises(TrainerError, match="has no IDX files of MNIST"):
        images.read_mnist(tmp_path)
    mnist(tmp_path, "train", 4)
    (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(TrainerError, match="the labels that belong to it are not"):
        images.read_mnist(tmp_path)
    for argv in (["mnist"], ["mnist", "--data", __file__]):
        with pytest.raises(TrainerError, match="mnist needs --data, a folder"):
            images.find_mnist_folder(parse(argv))


def npz(path, **more):
    arrays = {
        "x_train": np.zeros((6, 3, 32, 32), dtype=np.uint8), "y_train": np.arange(6),
        "x_test": np.zeros((3, 3, 32, 32), dtype=np.uint8), "y_test": np.arange(3),
    }  # fmt: skip
    np.savez_compressed(path, **{**arrays, **more})
    return path


def test_npz(tmp_path):
    found = images.read_npz(npz(tmp_path / "cifar10.npz"))
    assert (tuple(found[0].inputs.shape), len(found[1])) == ((6, 3, 32, 32), 3)
    options = parse(["cifar10", "--data", str(tmp_path)])
    assert images.find_data_file(options, "cifar10*.npz").name == "cifar10.npz"
    npz(tmp_path / "cifar10-b.npz")
    with pytest.raises(TrainerError, match=r"cifar10-b\.npz, cifar10\.npz"):
        images.find_data_file(options, "cifar10*.npz")
    with pytest.raises(TrainerError, match="--data is missing"):
        images.find_data_file(parse(["cifar10"]), "cifar10*.npz")


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda path: path.write_bytes(b"PK\x03\x04nonsense"), "cannot be read as npz"),
        (lambda path: np.savez(path, x_train=np.zeros(1)), "has no y_train, x_test, y_test"),
        *(
            (lambda path, name=name, array=array: npz(path, **{name: array}), said)
            for name, array, said in (
                # Objects may be anything that pickle can make.
                ("y_train", np.array([{}] * 6, dtype=object), "read as npz: Object arrays"),
                ("x_train", np.zeros((6, 32, 32, 3), dtype=np.uint8), "has to be 3 x 32 x 32"),
                ("x_train", np.zeros((6, 3, 32, 32), dtype=np.float32), "of type torch.float32"),
                ("y_test", np.array([0.5, 1.5, 2.5]), "of type torch.float64"),
                ("y_test", np.array([0, 1]), "has 2 labels"),
                ("y_test", np.array([0, 1, 10]), "label 2 is 10, and 1 of 3"),
            )
        ),
    ],
)
def test_an_npz_file_that_is_none_or_another_or_dangerous(tmp_path, write, said):
    write(tmp_path / "x.npz")
    with pytest.raises(TrainerError, match=said):
        images.read_npz(tmp_path / "x.npz")
