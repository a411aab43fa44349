"""The laws of rounds, under a simulated clock: nothing is lost, and all workers have one state."""

import warnings

import numpy as np
import pytest

from tests.jaxcomm.rounds.simulation import (
    Archive,
    Faulty,
    SimClock,
    Site,
    check_nothing_is_lost,
    check_replay,
    manifests,
    tree,
)


def run(*sites, **starts):
    """Runs sites to the end; returns the members of every round."""
    clock = sites[0].clock
    for site in sites:
        site.start(**starts.get(site.name, {}))
    clock.loop()
    return members(getattr(sites[0].store, "behind", sites[0].store))


def members(store):
    return ["".join(member.header.worker for member in manifest.members) for manifest in manifests(store)]


def check(archive, *sites):
    check_nothing_is_lost(archive, *sites)
    last = check_replay(archive, sites[0].worker._model)
    for site in sites:
        if site.worker.round == len(manifests(archive)):
            np.testing.assert_array_equal(site.worker.params["w"], last.params["w"])


def test_equal_workers():
    clock, archive = SimClock(), Archive()
    sites = [Site(clock, archive, name) for name in "ab"]
    assert run(*sites) == ["ab"] * 8
    assert [site.worker.round for site in sites] == [8, 8]
    check(archive, *sites)


def test_a_slow_worker_does_what_it_can():
    """It counts in almost every round, with fewer rows, and the others do not wait for all of its steps."""
    clock, archive = SimClock(), Archive()
    a, b, slow = (
        Site(clock, archive, name, last=12, steps=8, seconds=s) for name, s in zip("abs", (1, 1, 4), strict=True)
    )
    rounds = run(a, b, slow)
    first = next(number for number, names in enumerate(rounds) if "s" in names)
    assert first <= 4  # it does not know the usual time yet
    assert all("s" in names for names in rounds[first:])
    rows = {m.header.worker: m.header.rows for m in manifests(archive)[-2].members}
    assert rows["s"] < rows["a"] / 2
    assert clock.time < 12 * 8 * 1.5  # and 12 * 8 * 4 if they waited
    check(archive, a, b, slow)


def test_workers_that_begin_in_the_middle_of_a_round_come_into_step():
    """Else two groups would take turns, each counting in every second round."""
    clock, archive = SimClock(), Archive()
    sites = [Site(clock, archive, name, last=8, steps=8, overlap=0) for name in "abcd"]
    for site, at in zip(sites, (0.0, 0.0, 3.0, 4.0), strict=True):
        site.start(at)
    clock.loop()
    assert members(archive)[0] == "ab"
    assert members(archive)[2:] == ["abcd"] * 6
    check(archive, *sites)


def test_a_worker_much_slower_than_a_round():
    """One step takes longer than two rounds: it counts again and again, and is never raced out for good."""
    clock, archive = SimClock(), Archive()
    a, b, slow = (Site(clock, archive, name, last=30, seconds=s) for name, s in zip("abs", (1, 1, 10), strict=True))
    rounds = run(a, b, slow)
    assert sum("s" in names for names in rounds) >= 5
    assert clock.time < 30 * 4 * 2
    check(archive, a, b, slow)


def test_a_slow_link():
    """Its upload takes longer than a round and a grace. What was late is counted later: its grace doubles."""
    clock, archive = SimClock(), Archive()

    a, b, far = (Site(clock, archive, name, last=20, grace=0.5) for name in "abf")
    put = far.store.put

    class Link:
        def __getattr__(self, verb):
            return getattr(archive, verb)

        def put(self, path, raw, **kwargs):
            if path.endswith("/payload/f"):
                clock.spend(6.0)  # 1.5 rounds
            put(path, raw, **kwargs)

    far.store = Link()
    rounds = run(a, b, far)
    assert sum("f" in names for names in rounds) >= 4, rounds
    assert far.worker.counted >= 4
    check(archive, a, b, far)


def test_a_joiner_and_one_that_leaves_and_returns():
    clock, archive = SimClock(), Archive()
    a, b, c, d = (Site(clock, archive, name, last=14, seed=ord(name)) for name in "abcd")
    a.start()
    b.start()
    clock.start(two_lives(c, 9, 20.0), "c")
    d.start(at=20.0)
    clock.loop()
    rounds = members(archive)
    assert "c" in rounds[0]
    assert "c" not in rounds[5]
    assert "abcd" in rounds[-3:]
    assert "workers/c" not in archive.paths()
    check(archive, a, b, c, d)


def two_lives(site, most, pause):
    yield from site.main(most=most, leave=True)
    yield pause
    yield from site.main()


def later(site, at):
    yield at
    yield from site.main()


def test_a_worker_killed_at_every_moment_of_its_rounds():
    """The others end their rounds, also where the dead one was to write a manifest; its next life takes part."""
    clock, archive = SimClock(), Archive()
    sites = [Site(clock, archive, name, last=6) for name in "abc"]
    run(*sites)
    total = clock.moments["c"]
    for moment in range(1, total, 3):
        clock, archive = SimClock(), Archive()
        sites = [Site(clock, archive, name, last=6) for name in "abc"]
        clock.deaths["c"] = moment
        for site in sites:
            site.start()
        again = Site(clock, archive, "c", last=6)
        clock.start(later(again, 12.0), "next life of c")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Round .* has another payload of 'c'")
            clock.loop()
        assert sites[0].worker.round == sites[1].worker.round == again.worker.round == 6
        check(archive, *sites[:2])


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_a_store_that_fails(share):
    clock, archive = SimClock(), Archive()
    faulty = Faulty(archive, np.random.default_rng(0), share)
    sites = [Site(clock, faulty, name) for name in "ab"]
    with pytest.warns(UserWarning, match=r"The store could not .* status 500.* Trying again"):
        run(*sites)
    assert faulty.failed > 10
    assert [site.worker.round for site in sites] == [8, 8]
    check(archive, *sites)


def test_a_store_that_fails_for_good():
    clock, archive = SimClock(), Archive()
    site = Site(clock, Faulty(archive, np.random.default_rng(0), 1.0), "a", timeout=20.0)
    with (
        pytest.warns(UserWarning, match="Trying again"),
        pytest.raises(TimeoutError, match=r"could not (create|read) 'settings'.*status 500.*Gave up after 20 s"),
    ):
        run(site)


def random_schedule(seed):
    """Workers of any speed that begin, leave, return and die at any time, and a store that sometimes fails."""
    rng = np.random.default_rng(seed)
    clock, archive = SimClock(rng), Archive()
    store = Faulty(archive, rng, rng.choice([0.0, 0.05]))
    last, alive, names = 8, [], "abcd"
    for name in names:
        options = {"grace": 1.0, "quorum": 2, "overlap": int(rng.integers(0, 3))}
        site = Site(
            clock, store, name, seconds=rng.lognormal(0, 0.7), last=last, rows=int(rng.integers(1, 6)), **options
        )
        at, fate = float(rng.exponential(8.0)), rng.random()
        if name in "ab" or fate < 0.3:
            site.start(at)
            alive.append(site)
        elif fate < 0.6:
            clock.start(two_lives(site, int(rng.integers(1, 20)), 10.0), name, at)
            alive.append(site)
        else:
            clock.deaths[name] = int(rng.integers(1, 400))
            site.start(at)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Trying again|waited for)")
        clock.loop()
    assert all(site.worker.round == last for site in alive)
    check(archive, *alive)


@pytest.mark.parametrize("seed", range(10))
def test_random_schedules(seed):
    random_schedule(seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_random_schedules(part):
    for seed in range(100 + 20 * part, 120 + 20 * part):
        random_schedule(seed)


class Sick(Site):
    """Its parameters are NaN for some time."""

    sick = (0.0, 0.0)

    def step(self, params, local, batch):
        params, local, metrics = super().step(params, local, batch)
        if self.sick[0] <= self.clock.now() < self.sick[1]:
            params = tree(lambda x: (x * np.nan).astype(np.float32), params)
        return params, local, metrics


def stopped_lives(site, ends, rng):
    """A program that is stopped at some times, wherever it waits; half of them with its threads."""
    for end in ends:
        site.options["stop"] = lambda end=end: site.clock.now() >= end
        yield from site.main()
        if site.worker.done:
            return
        yield from site.worker.depart(5.0, True)
        site.close()
        if rng.random() < 0.5:
            site.clock.kill(site.name)
        yield float(rng.exponential(10.0))
    site.options["stop"] = None
    yield from site.main()


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 50))])
def test_random_stops(seed):
    """Any worker is stopped at any time, and goes on; one is not finite for some time. Nothing is lost."""
    rng = np.random.default_rng(seed)
    clock, archive = SimClock(rng), Archive()
    store = Faulty(archive, rng, rng.choice([0.0, 0.05]))
    sites = [Sick(clock, store, name, seconds=rng.lognormal(0, 0.5), grace=1.0) for name in "abc"]
    sites[2].sick = float(rng.uniform(0, 20)), float(rng.uniform(10, 40))
    for site in sites:
        ends = sorted(rng.uniform(2, 60, int(rng.integers(0, 4))))
        clock.start(stopped_lives(site, ends, rng), site.name, float(rng.exponential(5.0)))
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*(Trying again|waited for|not finite|of 'c': this worker has put it)"
        )
        clock.loop()
    assert [site.worker.round for site in sites] == [8] * 3
    check(archive, *sites[:2])
