"""The rows of flights and of MovieLens: numbers and categories that were known beforehand, and the outcome.

Rows are in the order of time, so that a model trains on the first ones and is tested on the last ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from train.data.frames import Table

LATE = 15  # minutes beyond which an arrival counts as late, as the US Department of Transportation counts
LIKED = 4.0  # stars of five
WEATHER = ("temp", "humid", "wind_speed", "precip", "pressure", "visib")
YEAR = 365.25 * 24 * 3600  # seconds


@dataclass(frozen=True)
class Rows:
    """Rows in the order of time.

    Attributes:
      time: (n,), non-decreasing.
      dense: (n,) float64 each; NaN where a number is missing.
      categories: (n,) each, of strings or integers.
      label: (n,) bool.
      left_out: the number of rows of the table that were left out, by reason.
    """

    time: np.ndarray
    dense: Mapping[str, np.ndarray]
    categories: Mapping[str, np.ndarray]
    label: np.ndarray
    left_out: Mapping[str, int]


def flight_rows(flights: Table, weather: Table) -> Rows:
    """Makes rows of nycflights13: does a flight arrive more than 15 minutes late?

    A row holds what is known before departure: the schedule, the plane, and the weather at the origin in the hour
    before that of the scheduled departure. It has no month, as those of the last rows occur in no earlier row.
    """
    arrived = ~np.isnan(flights["arr_delay"])
    flights = {name: column[arrived] for name, column in flights.items()}
    hour = _hours(flights["time_hour"])  # (n,) of the scheduled departure, UTC
    order = np.lexsort((flights["minute"], hour))
    flights, hour = {name: column[order] for name, column in flights.items()}, hour[order]
    dates = zip(flights["year"], flights["month"], flights["day"], strict=True)
    days = np.array([f"{year}-{month:02}-{day:02}" for year, month, day in dates], "M8[D]")
    places = {key: row for row, key in enumerate(zip(weather["origin"], _hours(weather["time_hour"]), strict=True))}
    row = np.array([places.get(key, -1) for key in zip(flights["origin"], hour - 1, strict=True)])  # (n,)
    minutes = {
        name: flights[column] // 100 * 60 + flights[column] % 100
        for name, column in (("departure", "sched_dep_time"), ("arrival", "sched_arr_time"))
    }
    texts = {name: flights[name].astype(str) for name in ("carrier", "origin", "dest", "tailnum")}
    return Rows(
        time=hour * 60 + flights["minute"],
        dense={
            **{name: values.astype(float) for name, values in minutes.items()},  # of the day, local time
            "log_distance": np.log(flights["distance"]),
            **{name: np.where(row < 0, np.nan, weather[name][row]) for name in WEATHER},
        },
        categories={
            **texts,
            "number": np.char.add(texts["carrier"], flights["flight"].astype(str)),
            "hour": flights["hour"],
            "weekday": days.astype(int) % 7,
        },
        label=flights["arr_delay"] > LATE,
        left_out={"no arrival": int((~arrived).sum())},
    )


def rating_rows(ratings: Table) -> Rows:
    """Makes rows of MovieLens: does a user give a film at least 4 stars?

    Besides the user and the film, a row summarises earlier ratings: how many the user gave and how many the film got,
    and which fraction of each was at least 4 stars.
    """
    order = np.argsort(ratings["timestamp"], kind="stable")
    ratings = {name: column[order] for name, column in ratings.items()}
    time, label = ratings["timestamp"], ratings["rating"] >= LIKED
    user_count, user_liked = earlier(ratings["userId"], time, label)
    film_count, film_liked = earlier(ratings["movieId"], time, label)
    return Rows(
        time=time,
        dense={
            "age": 1970 + time / YEAR - ratings["year"],  # of the film, in years
            "log_user_count": np.log1p(user_count),
            "user_liked": (user_liked + 1) / (user_count + 2),
            "log_film_count": np.log1p(film_count),
            "film_liked": (film_liked + 1) / (film_count + 2),
        },
        categories={
            "user": ratings["userId"],
            "film": ratings["movieId"],
            "genres": ratings["genres"].astype(str),  # all of a film together
            "year": ratings["year"].astype(str),
        },
        label=label,
        left_out={},
    )


def earlier(key: np.ndarray, time: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts, for each row, the earlier rows with its key, and how many of these have the label; (n,) each."""
    order = np.lexsort((time, key))
    key, time = key[order], time[order]
    is_key = np.r_[True, key[1:] != key[:-1]]  # begins here
    is_time = is_key | np.r_[True, time[1:] != time[:-1]]
    place = np.arange(len(key))
    first, current = (np.maximum.accumulate(np.where(begins, place, 0)) for begins in (is_key, is_time))
    before = np.r_[0, np.cumsum(label[order])]
    counts, labels = np.empty(len(key), int), np.empty(len(key), int)
    counts[order], labels[order] = current - first, before[current] - before[first]
    return counts, labels


def _hours(texts: np.ndarray) -> np.ndarray:
    """Returns hours since 1970 of texts such as 2013-01-01T10:00:00Z."""
    return np.array([text.removesuffix("Z") for text in texts], "M8[h]").astype(int)
