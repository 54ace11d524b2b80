"""What a task of `flash-delta prove` consists of: strings, models that learn from them, bounds of their accuracy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Generator, Tensor, nn

UNASKED = -100  # the answer at a position that is not asked


@dataclass(frozen=True)
class Bound:
    """The accuracy that a model must reach (``least``), or that a control must not exceed (``most``)."""

    least: float = 0.0
    most: float = 1.0

    def holds(self, accuracy: float) -> bool:
        return self.least <= accuracy <= self.most

    def __str__(self) -> str:
        return f">= {self.least:.2f}" if self.most == 1.0 else f"<= {self.most:.2f}"


@dataclass(frozen=True)
class Learner:
    """A model of a task: its mixers, and the bounds of its accuracy by the size of the test."""

    name: str
    mixers: Callable[[int], list[nn.Module]]  # from the width of the model
    bounds: dict[int, Bound]
    control: bool = False  # it has to fail


@dataclass(frozen=True)
class Paper:
    """What a paper says about such tasks."""

    claim: str
    source: str


@dataclass(frozen=True)
class Task:
    """One experiment: learn from strings that grow up to size ``trained``, then answer new strings of other sizes.

    ``batch(generator, rows, size)`` gives tokens and answers, both [rows, T] int64. An answer is ``UNASKED`` where
    nothing is asked.
    """

    name: str
    title: str
    unit: str  # what a size counts
    batch: Callable[[Generator, int, int], tuple[Tensor, Tensor]]
    symbols: int
    answers: int
    learners: Sequence[Learner]
    shortest: int  # the size of strings in the first step of training
    trained: int  # and in the second half of the steps
    sizes: Sequence[int]
    chance: float
    papers: Sequence[Paper] = field(default=())
    width: int = 32
    rows: int = 32  # of a batch in training
    steps: int = 400
    lr: float = 1e-2
    device: str = "cpu"  # or "cuda": a CPU would take hours
    last: int | None = None  # accuracy counts the last answers of a string alone; None: all

    @property
    def settings(self) -> dict[str, float]:
        """The numbers that a result depends on, beside its model and seed."""
        names = "width", "rows", "steps", "lr", "shortest", "trained"
        return {name: getattr(self, name) for name in names}

    def size_at(self, step: int) -> int:
        """The size of the strings in a step of training. It grows by equal factors in the first half of the steps."""
        return round(self.shortest * (self.trained / self.shortest) ** min(1, 2 * step / self.steps))


def at_least(accuracy: float, sizes: Sequence[int]) -> dict[int, Bound]:
    """The bounds of a model that has to learn a task, at each of these sizes."""
    return dict.fromkeys(sizes, Bound(least=accuracy))


def at_most(accuracy: float, sizes: Sequence[int]) -> dict[int, Bound]:
    """The bounds of a control, at each of these sizes."""
    return dict.fromkeys(sizes, Bound(most=accuracy))
