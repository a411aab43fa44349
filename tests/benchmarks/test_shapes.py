import pytest

from benchmarks.shapes import count, named, resnet50


def test_resnet50_is_the_published_one():
    shapes = resnet50()
    assert len(shapes) == 161
    assert count(shapes) == 25_557_032
    assert sum(len(shape) == 4 for shape in shapes) == 53  # convolutions
    assert (shapes[0], shapes[-2:]) == ((7, 7, 3, 64), [(2048, 1000), (1000,)])
    assert named("resnet50") == shapes


@pytest.mark.parametrize(("name", "size"), [("1e6", 1_000_000), ("2e5", 200_000), ("1", 1), ("1500", 1500)])
def test_a_number_is_one_vector(name, size):
    assert named(name) == [(size,)]


@pytest.mark.parametrize("name", ["", "resnet", "0", "0.5", "-3", "nan", "inf", "1e400"])
def test_other_shapes_are_refused(name):
    with pytest.raises(ValueError, match=r"shapes is 'resnet50' or a number .* got .*: try --shapes 1e6"):
        named(name)
