"""The traffic of a simulated day, and its failures: drawn from a seed, before anything runs."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from .day_fleet import Goals, Lengths, Paces, measured_times

HOST, RACKS = 8, (32, 64)  # workers that fail together


@dataclass(frozen=True, slots=True)
class Weather:
    """What a day is like; lengths and the rate follow waves of different phases."""

    seconds: int = 86400  # of one day, in which each wave has one period
    days: float = 1.0
    rate_wave: float = 0.5
    prompt_wave: float = 0.6
    answer_wave: float = 0.4
    noise: float = 0.03  # of a minute's rate and lengths, which last for minutes
    peak: float = 0.9  # the highest rate, in rates that the best roles bear then
    failures: bool = True

    def steady(self) -> Weather:
        """The same noise without waves and failures."""
        return Weather(self.seconds, self.days, 0.0, 0.0, 0.0, self.noise, self.peak, False)


@dataclass(frozen=True, slots=True)
class Failure:
    """Workers that end at a moment, and are back as new processes after some seconds."""

    workers: range
    down_s: float


@dataclass(frozen=True, slots=True)
class Minute:
    """The load of a minute."""

    rate: float
    lengths: Lengths
    paces: Paces


class Traffic:
    """Minutes of load, and failures."""

    def __init__(self, weather: Weather, workers: int, seed: int) -> None:
        self.weather, self.workers = weather, workers
        self.seconds = round(weather.seconds * weather.days)
        self.goals = Goals()
        self.times = measured_times()
        draw = random.Random(f"{seed} traffic")
        shapes = [self._shape(60.0 * number) for number in range(self.seconds // 60 + 1)]
        paces = [Paces(self.times, Lengths(*lengths), self.goals) for _, *lengths in shapes]
        bears = [workers * self._most_rate(one) for one in paces]
        most = max(wave / one for (wave, *_), one in zip(shapes, bears, strict=True))
        self.minutes = []
        level = [0.0, 0.0, 0.0]
        for wave, prompt, answer in shapes:
            level = [0.8 * one + 0.6 * draw.gauss(0, weather.noise) for one in level]
            rate = weather.peak * wave / most * math.exp(level[0])
            lengths = Lengths(prompt * math.exp(level[1]), answer * math.exp(level[2]))
            self.minutes.append(Minute(rate, lengths, Paces(self.times, lengths, self.goals)))
        self._by_second: dict[int, list[Failure]] = {}
        if weather.failures:
            self._draw_failures(draw)
        self.arrivals = self._arrivals(random.Random(f"{seed} arrivals"))

    def minute(self, second: int) -> Minute:
        """The load of a second."""
        return self.minutes[second // 60]

    def lost(self, second: int) -> list[Failure]:
        """The failures that begin in it."""
        return self._by_second.get(second, [])

    def _shape(self, now: float) -> tuple[float, float, float]:
        weather, turn = self.weather, 2 * math.pi * now / self.weather.seconds
        return (
            1 + weather.rate_wave * math.sin(turn),
            2000 * math.exp(weather.prompt_wave * math.sin(turn + 2.0)),
            320 * math.exp(weather.answer_wave * math.sin(turn + 4.0)),
        )

    @staticmethod
    def _most_rate(paces: Paces) -> float:
        """Requests a second for each worker, with the best share of them for prompts."""
        answers = paces.at(paces.most_batch)[0] / paces.answer
        return answers / (1 + answers * paces.prompt_s)

    def _draw_failures(self, draw: random.Random) -> None:
        """Single workers, hosts and racks: each worker fails about twice in five days."""
        day = self.weather.seconds
        for size, each_day, down_s in (
            (1, 0.2, 60.0),
            (HOST, 0.1, 600.0),
            *((rack, 0.05, 1200.0) for rack in RACKS),
        ):
            if size > self.workers // 4:
                continue
            number = self.weather.days * each_day * self.workers / size
            for _ in range(max(1, round(number))):
                first = size * draw.randrange(self.workers // size)
                failure = Failure(range(first, first + size), down_s * day / 86400)
                self._by_second.setdefault(draw.randrange(1, self.seconds), []).append(failure)

    def _arrivals(self, draw: random.Random) -> list[float]:
        """Requests in each second: a Poisson process, which is normal at such rates."""
        found = []
        for second in range(self.seconds):
            rate = self.minute(second).rate
            found.append(max(0.0, round(draw.gauss(rate, math.sqrt(rate)))))
        return found
