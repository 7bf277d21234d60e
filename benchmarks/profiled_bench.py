"""Times of candidates from JAX's profiler, for the records that the cost models are fitted to. They are times of
kernels alone. The tuner's own times (`Bench`) have the pauses between kernels, too, some 2 microseconds for each."""

import contextlib
from collections.abc import Sequence

from benchmarks import profile
from jax_splitk.tuning.measure import Bench, Contestant, run

ATTEMPTS = 2  # profiles: a pause of the host can spoil one


class ProfiledBench(Bench):
    """A bench whose device times are the profiler's."""

    def _device_times(self, contestants: Sequence[Contestant], counts: Sequence[int], rounds: int) -> list[list[float]]:
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(RuntimeError):
                return self._profiled(contestants, counts, rounds)
        return self._profiled(contestants, counts, rounds)

    def _profiled(self, contestants: Sequence[Contestant], counts: Sequence[int], rounds: int) -> list[list[float]]:
        """As `_device_times`, from one profile, which takes longer to start and to read than to run what it shows."""
        together = [*zip(contestants, counts, strict=True)] * rounds
        with self._device():
            data = profile.recorded(lambda: [run(contestant, count) for contestant, count in together])
        turns = profile.turns(profile.module_times(data), {contestant.module for contestant in contestants})
        if [module for module, _ in turns] != [contestant.module for contestant, _ in together]:
            raise RuntimeError(f"{len(turns)} turns of {len(contestants)} candidates in {rounds} rounds")
        times: list[list[float]] = [[] for _ in contestants]
        for number, ((_, turn), (_, count)) in enumerate(zip(turns, together, strict=True)):
            parts = count // self._alike
            ns = profile.part_time(((start, end) for _, start, end in turn), parts)
            times[number % len(contestants)].append(ns * 1e-3 / (self._alike * self._called_together))
        return times
