"""Datasets that the user prepares: found and read in TFDS's layout, or an error that helps."""

import io
import itertools
import json
import shutil

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from tests.refusals import refused
from train.data import dataset_info, eval_batches, sources, train_batches


def random_image(rng, shape):
    pixels = rng.integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(pixels[..., 0] if shape[-1] == 1 else pixels)


def jpeg(rng, index):
    """A smooth JPEG file, one of four sizes; the second is grey, the third 8 times as wide."""
    width, height = [(300, 260), (240, 320), (640, 80), (224, 224)][index % 4]
    pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.convert("L" if index % 4 == 1 else "RGB").save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


class Mnist(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Features, splits and version of TFDS's MNIST, with a few random images."""

    name = "mnist"
    VERSION = tfds.core.Version("3.0.1")
    SIZES = {"train": 24, "test": 10}  # noqa: RUF012

    def _info(self):
        features = {
            "image": tfds.features.Image(shape=(28, 28, 1)),
            "label": tfds.features.ClassLabel(num_classes=10),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(size) for split, size in self.SIZES.items()}

    def _generate_examples(self, size):
        rng = np.random.default_rng(size)
        for i in range(size):
            yield i, self._example(rng, i)

    def _example(self, rng, i):
        return {"image": random_image(rng, (28, 28, 1)), "label": i % 10}


class Cifar10(Mnist, skip_registration=True):
    name = "cifar10"
    VERSION = tfds.core.Version("3.0.2")

    def _info(self):
        features = {
            "id": tfds.features.Text(),
            "image": tfds.features.Image(shape=(32, 32, 3)),
            "label": tfds.features.ClassLabel(num_classes=10),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _example(self, rng, i):
        return {"id": f"train_{i}", "image": random_image(rng, (32, 32, 3)), "label": i % 10}


class Imagenet2012(Mnist, skip_registration=True):
    name = "imagenet2012"
    VERSION = tfds.core.Version("5.1.0")
    SIZES = {"train": 8, "validation": 5, "test": 3}  # noqa: RUF012

    def _info(self):
        features = {
            "image": tfds.features.Image(encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(num_classes=1000),
            "file_name": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _example(self, rng, i):
        return {"image": jpeg(rng, i), "label": 100 * i, "file_name": f"n0_{i}.JPEG"}


BUILDERS = {"mnist": Mnist, "cifar10": Cifar10, "imagenet2012": Imagenet2012}
MEAN_AND_STD = {
    "mnist": ([0.1307], [0.3081]),
    "cifar10": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "imagenet2012": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
}
SMALL = pytest.mark.filterwarnings("ignore:the .* split of .* has:UserWarning")


def prepare(name, data_dir, **kwargs):
    builder = BUILDERS[name](data_dir=data_dir, file_format="array_record", **kwargs)
    builder.download_and_prepare()
    return builder


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("tfds")
    for name in BUILDERS:
        prepare(name, path)
    return path


def take_train(name, data_dir, steps, start=0, **kwargs):
    batches = train_batches(name, global_batch=8, data_dir=data_dir, **({"seed": 0} | kwargs))
    batches.restore({**batches.state(), "step": start})
    samples = list(itertools.islice(batches, steps))
    batches.close()
    return {key: np.stack([batch[key] for batch in samples]) for key in samples[0]}  # (steps, rows, ...)


def pixels_of(name, images):
    """Undoes the standardisation."""
    mean, std = map(np.array, MEAN_AND_STD[name])
    return (images * std + mean) * 255


@SMALL
@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_standardised_evaluation(name, data_dir):
    stored = tfds.builder_from_directory(next((data_dir / name).iterdir())).as_data_source("test")
    batches = list(eval_batches(name, global_batch=4, data_dir=data_dir))
    assert len(batches) == 3
    images = np.concatenate([batch["image"] for batch in batches])[:10]
    labels = np.concatenate([batch["label"] for batch in batches])[:10]
    assert images.dtype == np.float32
    assert images.shape == (10, *dataset_info(name).image_shape)
    expected = np.stack([example["image"] for example in stored])
    np.testing.assert_allclose(pixels_of(name, images), expected, atol=1e-3)
    np.testing.assert_array_equal(labels, [example["label"] for example in stored])


@SMALL
@pytest.mark.parametrize("name", BUILDERS)
def test_any_number_of_processes(name, data_dir):
    """Also after a restore, augmentation included."""
    whole = take_train(name, data_dir, 6)
    assert whole["image"].shape == (6, 8, *dataset_info(name).image_shape)
    for start in (1, 4):
        parts = [take_train(name, data_dir, 6 - start, start, process_index=p, process_count=4) for p in range(4)]
        for key in whole:
            np.testing.assert_array_equal(np.concatenate([p[key] for p in parts], axis=1), whole[key][start:])


@SMALL
def test_shifts_and_flips_of_cifar10(data_dir):
    batches = eval_batches("cifar10", "train", global_batch=24, data_dir=data_dir)
    stored = next(iter(batches))
    padding = np.pad(pixels_of("cifar10", stored["image"]).round().astype(int), ((0, 0), (4, 4), (4, 4), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padding, (32, 32), axis=(1, 2))
    windows = np.moveaxis(windows, 3, -1)  # (24, 9, 9, 32, 32, 3)
    epochs = pixels_of("cifar10", take_train("cifar10", data_dir, 6)["image"]).round().astype(int)
    images = []
    for image in epochs.reshape(-1, 32, 32, 3):
        for flip, candidate in enumerate((image, image[:, ::-1])):
            places = np.argwhere((windows == candidate).all((-3, -2, -1))).tolist()
            images += [(flip, *place) for place in places]
    assert len(images) == 48  # each image is one window of one stored image, flipped or not
    assert sorted(number for _, number, _, _ in images) == sorted([*range(24), *range(24)])
    assert {flip for flip, *_ in images} == {0, 1}
    assert len({(top, left) for *_, top, left in images}) > 20  # of 81 places
    first, second = ({n: (f, y, x) for f, n, y, x in part} for part in (images[:24], images[24:]))
    assert first != second  # drawn anew each epoch


@SMALL
def test_evaluation_of_imagenet(data_dir):
    stored = tfds.builder_from_directory(data_dir / "imagenet2012" / "5.1.0").as_data_source(
        "validation", decoders={"image": tfds.decode.SkipDecoding()}
    )
    (batch,) = eval_batches("imagenet2012", global_batch=8, data_dir=data_dir)
    assert batch["mask"].tolist() == [1] * 5 + [0] * 3
    np.testing.assert_array_equal(batch["label"][:5], [example["label"] for example in stored])
    for image, example in zip(pixels_of("imagenet2012", batch["image"]), stored, strict=False):
        original = Image.open(io.BytesIO(example["image"])).convert("RGB")
        scale = 256 / min(original.size)
        width, height = (round(side * scale) for side in original.size)
        left, top = (width - 224) // 2, (height - 224) // 2
        resized = np.asarray(original.resize((width, height), Image.Resampling.BILINEAR))
        expected = resized[top : top + 224, left : left + 224].astype(float)
        assert np.abs(image - expected).mean() < 2


@SMALL
def test_crops_of_imagenet(data_dir):
    epochs = take_train("imagenet2012", data_dir, 2)
    orders = np.argsort(epochs["label"])
    assert (np.sort(epochs["label"]) == np.arange(0, 800, 100)).all()
    for first, second in zip(epochs["image"][0][orders[0]], epochs["image"][1][orders[1]], strict=True):
        assert np.abs(first - second).max() > 0.1
    pixels = pixels_of("imagenet2012", epochs["image"])
    assert pixels.min() > -0.01
    assert pixels.max() < 255.01


@SMALL
@pytest.mark.parametrize("name", BUILDERS)
def test_without_augmentation(name, data_dir):
    stored = next(iter(eval_batches(name, "train", global_batch=24, data_dir=data_dir)))
    images = {image.tobytes() for image, real in zip(stored["image"], stored["mask"], strict=True) if real}
    plain = take_train(name, data_dir, 6 if name != "imagenet2012" else 2, augment=False)
    offsets = [image.tobytes() for image in plain["image"].reshape(-1, *dataset_info(name).image_shape)]
    assert set(offsets) == images
    assert len(np.unique(plain["seed"])) == plain["seed"].size  # dropout still draws from them
    if name != "mnist":
        assert not images & {image.tobytes() for image in take_train(name, data_dir, 1)["image"][0]}


@SMALL
@pytest.mark.parametrize("name", BUILDERS)
def test_mean_of_pixels(name, data_dir):
    """Of both splits; in units of the channels' deviation."""
    scale = np.array(MEAN_AND_STD[name][1]) * 255
    stored, tested = (
        {
            mean: next(iter(eval_batches(name, split, global_batch=24, data_dir=data_dir, mean=mean)))
            for mean in ("channel", "pixel")
        }
        for split in ("train", "test")
    )
    real = stored["channel"]["mask"] > 0
    expected = pixels_of(name, stored["channel"]["image"][real]).mean(axis=0)
    assert expected.std(axis=(0, 1)).min() > 5  # pixels differ from their channel's mean
    for split in (stored, tested):
        pixels = pixels_of(name, split["channel"]["image"])
        np.testing.assert_allclose(split["pixel"]["image"] * scale, pixels - expected, atol=1e-3)
    np.testing.assert_allclose(stored["pixel"]["image"][real].mean(axis=0), 0, atol=1e-5)
    augmented = take_train(name, data_dir, 1, mean="pixel")["image"][0] * scale + expected
    assert augmented.min() > -1e-3
    assert augmented.max() < 255 + 1e-3


@SMALL
def test_mean_of_many_files(data_dir, monkeypatch):
    monkeypatch.setattr(sources, "MEAN_SAMPLE", 3)
    sources.pixel_mean.cache_clear()
    result = sources.pixel_mean("imagenet2012", data_dir)
    sources.pixel_mean.cache_clear()
    np.testing.assert_array_equal(result, sources.pixel_mean("imagenet2012", data_dir))
    sources.pixel_mean.cache_clear()
    stored = next(iter(eval_batches("imagenet2012", "train", global_batch=8, data_dir=data_dir)))
    images = pixels_of("imagenet2012", stored["image"])
    means = [images[list(three)].mean(axis=0) for three in itertools.combinations(range(8), 3)]
    assert min(np.abs(result - mean).max() for mean in means) < 1e-3
    assert np.abs(result - images.mean(axis=0)).max() > 1


def test_no_mean(tmp_path):
    refused(
        lambda: eval_batches("criteo", global_batch=4, data_dir=tmp_path, mean="pixel"), "--mean pixel", "got 'criteo'"
    )


def test_a_partial_split_warns(data_dir):
    with pytest.warns(UserWarning, match=r"train split of mnist has 60000 examples, but .* holds 24"):
        sources.open_source("mnist", "train", data_dir)


@SMALL
def test_the_newest_version(tmp_path):
    class NewMnist(Mnist, skip_registration=True):
        name = "mnist"
        VERSION = tfds.core.Version("3.0.10")  # as text it sorts before 3.0.2
        SIZES = {"train": 30, "test": 2}  # noqa: RUF012

    class OldMnist(Mnist, skip_registration=True):
        name = "mnist"
        VERSION = tfds.core.Version("3.0.2")

    for cls in (NewMnist, OldMnist):
        cls(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    assert len(sources.open_source("mnist", "train", tmp_path)) == 30


@SMALL
def test_decoding_once(tmp_path, monkeypatch):
    decoded, decode = [], sources.images.decode

    def counting(encoded):
        decoded.append(encoded)
        return decode(encoded)

    monkeypatch.setattr(sources.images, "decode", counting)
    builder = prepare("mnist", tmp_path)
    for _ in range(2):  # two runs of a comparison
        source = sources.open_source("mnist", "test", tmp_path)
        read = [source[index]["image"].copy() for index in range(10)]
    assert len(decoded) == 10
    shutil.rmtree(builder.data_path)
    monkeypatch.setattr(Mnist, "SIZES", {"train": 25, "test": 11})  # other random images
    prepare("mnist", tmp_path)
    reader = sources.open_source("mnist", "test", tmp_path)
    assert len(reader) == 11
    assert any([(reader[index]["image"] != read[index]).any() for index in range(10)])  # reads all ten
    assert len(decoded) == 20


@pytest.mark.parametrize("name", BUILDERS)
def test_no_preparation(name, tmp_path):
    path = tmp_path / "my data"
    (path / name / "incomplete.ABC123_1.0.0").mkdir(parents=True)  # a build of TFDS that was killed
    (path / name / "incomplete.ABC123_1.0.0" / "dataset_info.json").write_text("{}")
    with pytest.raises(FileNotFoundError) as error:
        eval_batches(name, global_batch=4, data_dir=path)
    message = str(error.value)
    assert f"\n  tfds build {name} --file_format=array_record --data_dir='{path}'\n" in message
    assert "needs TensorFlow" in message
    assert f"got no {path}/{name}/<version>" in message
    assert ("ILSVRC2012_img_train.tar" in message) == (name == "imagenet2012")


def test_another_format(tmp_path):
    info = prepare("mnist", tmp_path).data_path / "dataset_info.json"
    info.write_text(json.dumps({**json.loads(info.read_text()), "fileFormat": "tfrecord"}))
    with pytest.raises(ValueError, match=r"stored as tfrecord. Move it away .*\n  tfds build mnist"):
        sources.open_source("mnist", "train", tmp_path)


def test_a_missing_shard(tmp_path):
    shard = next(prepare("mnist", tmp_path).data_path.glob("mnist-test*"))
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"1 of the test split missing, such as {shard}"):
        sources.open_source("mnist", "test", tmp_path)


@SMALL
def test_another_shape(tmp_path):
    class Odd(Cifar10, skip_registration=True):
        name = "mnist"

    Odd(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    with pytest.raises(ValueError, match=r"shape \(28, 28, 1\); got \(32, 32, 3\) in"):
        sources.open_source("mnist", "train", tmp_path)


@SMALL
def test_data_dir_of_the_environment(data_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    assert len(sources.open_source("mnist", "test")) == 10
    assert sources.resolve_data_dir(tmp_path) == tmp_path
    monkeypatch.delenv("TFDS_DATA_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.resolve_data_dir() == tmp_path / "tensorflow_datasets"


def test_sizes():
    for name, info in sources.IMAGES.items():
        assert info.name == name
    assert dataset_info("digits").num_examples("train") == 1347
    assert dataset_info("digits").num_examples("test") == 450
