"""The device on which a process measures. `device.state` is this process's."""

import threading

from jax_splitk.problems.problem import Problem
from jax_splitk.tuning.shared_profile import SharedProfile


class Device:
    """Who has the device, and what is known of it.

    Attributes:
      lock: held while a search times something on the device, or XLA times kernels for one: nothing may disturb it.
      profile: the next profile that is taken of the device.
      poisoned_by: the problem of a candidate that failed as it ran: what fails after it may fail because of it.
      xla_chose: whether XLA has chosen a problem's kernels together with others', for those that were tried so
        (xla_choices.py).
      xla_seconds: what XLA last took for such a choice, for each problem; None before the first.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.profile = SharedProfile()
        self.poisoned_by: Problem | None = None
        self.xla_chose: dict[Problem, bool] = {}
        self.xla_seconds: float | None = None


state = Device()
