"""Parity, sums and words: the product of a string's elements in a group, asked after every element."""

from collections.abc import Callable
from itertools import permutations

import torch
from torch import Generator, Tensor, nn

from flash_delta.layers import GatedDeltaNet, GatedDeltaProduct
from flash_delta.proof.task import Learner, Paper, Task, at_least, at_most

SIZES = 20, 60, 128, 256
PROMISED = SIZES[:3]  # beyond, a small error of each turn adds up
LAST = 8  # answers of a string that count: those at its end


def cyclic(n: int) -> Tensor:
    """The table [n, n] of sums modulo n: entry (a, b) is a + b."""
    return (torch.arange(n)[:, None] + torch.arange(n)) % n


def permutation_table(n: int, even: bool = False) -> Tensor:
    """The table [order, order] of products in S_n, or in A_n, which has the even permutations alone.

    Elements are numbered in the lexicographic order of their images. Entry (a, b) is "first b, then a": it sends i to
    a(b(i)).
    """
    elements = [p for p in permutations(range(n)) if not (even and _is_odd(p))]
    number = {p: i for i, p in enumerate(elements)}
    return torch.tensor([[number[tuple(a[i] for i in b)] for b in elements] for a in elements])


def _is_odd(p: tuple[int, ...]) -> bool:
    return sum(p[i] > p[j] for j in range(len(p)) for i in range(j)) % 2 == 1


class Words:
    """Strings of a group's elements. The answer at each position is the product of the elements up to there.

    Args:
        table: the products [order, order] of the group. Element 0 is the neutral one.
        start: whether a string begins with a symbol of its own, number ``order``. Its answer is the neutral element.
    """

    def __init__(self, table: Tensor, start: bool) -> None:
        self.table, self.order, self.start = table, len(table), start
        self.symbols = self.order + start

    def __call__(self, generator: Generator, rows: int, size: int) -> tuple[Tensor, Tensor]:
        """Tokens and answers, [rows, T] each, with T = size, or one more with the first symbol."""
        elements = torch.randint(self.order, (rows, size), generator=generator)
        product, products = torch.zeros(rows, dtype=torch.long), []
        for column in elements.unbind(1):
            product = self.table[column, product]
            products.append(product)
        answers = torch.stack(products, 1)
        if not self.start:
            return elements, answers
        first = torch.full((rows, 1), self.order)
        return torch.cat((first, elements), 1), torch.cat((torch.zeros_like(first), answers), 1)


def gated_delta_net(allow_neg_eigval: bool) -> Callable[[int], list[nn.Module]]:
    """One layer of Gated DeltaNet without a convolution, two heads."""

    def make(width: int) -> list[nn.Module]:
        options = {"head_dim": width // 2, "num_heads": 2, "expand_v": 1}
        return [GatedDeltaNet(width, use_short_conv=False, allow_neg_eigval=allow_neg_eigval, **options)]

    return make


def product(updates: int, allow_neg_eigval: bool = True) -> Callable[[int], list[nn.Module]]:
    """One layer of DeltaProduct, without decay, convolution and output gate: heads of 16."""

    def make(width: int) -> list[nn.Module]:
        options = {"use_short_conv": False, "use_forget_gate": False, "use_output_gate": False, "expand_v": 1}
        options |= {"head_dim": 16, "num_heads": width // 16}
        return [GatedDeltaProduct(width, num_householder=updates, allow_neg_eigval=allow_neg_eigval, **options)]

    return make


def words_task(name: str, title: str, table: Tensor, start: bool, **options: object) -> Task:
    """A task of words in the group of this table."""
    batch = Words(table, start)
    shapes = {"symbols": batch.symbols, "answers": batch.order, "chance": 1 / batch.order}
    defaults = {"unit": "symbols", "sizes": SIZES, "last": LAST, "shortest": 4, "trained": 60}
    return Task(name=name, title=title, batch=batch, **shapes, **(defaults | options))


NEGATIVE = Paper(
    "With eigenvalues of transitions above 0 alone, no such network with finite precision solves parity. With "
    "eigenvalues down to -1, DeltaNet does.",
    "Grazzi et al., arXiv:2411.12537",
)
PRODUCTS = Paper(
    "Each update of a token multiplies the state by one more generalized Householder matrix. More updates track more "
    "groups.",
    "Siems et al., arXiv:2502.10297",
)

PARITY = words_task(
    "parity",
    "Parity of bits",
    cyclic(2),
    start=False,
    learners=(
        Learner("Gated DeltaNet, beta to 2", gated_delta_net(True), at_least(0.9, PROMISED)),
        Learner("Gated DeltaNet, beta to 1", gated_delta_net(False), at_most(0.6, SIZES), control=True),
    ),
    papers=(NEGATIVE,),
    steps=150,
    lr=2e-2,
)
SUMS = words_task(
    "sums",
    "Sums modulo 3",
    cyclic(3),
    start=True,
    learners=(
        Learner("product of 2 updates, beta to 2", product(2), at_least(0.95, PROMISED)),
        Learner("product of 1 update, beta to 2", product(1), at_most(0.5, SIZES), control=True),
        Learner("product of 2 updates, beta to 1", product(2, False), at_most(0.5, SIZES), control=True),
    ),
    papers=(
        Paper("To count modulo 3, transitions must not be triangular.", "Grazzi et al., arXiv:2411.12537"),
        PRODUCTS,
    ),
    width=64,
    steps=300,
)
S3 = words_task(
    "words-s3",
    "Words of permutations of three (S3)",
    permutation_table(3),
    start=True,
    learners=(
        Learner("product of 2 updates, beta to 2", product(2), at_least(0.9, PROMISED)),
        Learner("product of 1 update, beta to 2", product(1), at_most(0.5, SIZES), control=True),
    ),
    papers=(PRODUCTS,),
    width=64,
    steps=300,
    trained=31,  # with the first symbol 64 rows of two updates, which are one chunk
)
A5 = words_task(
    "words-a5",
    "Words of even permutations of five (A5)",
    permutation_table(5, even=True),
    start=True,
    learners=(
        Learner("product of 2 updates, beta to 2", product(2), at_least(0.95, (20, 60))),
        Learner("product of 1 update, beta to 2", product(1), at_most(0.2, SIZES), control=True),
    ),
    papers=(PRODUCTS,),
    width=128,
    rows=256,
    steps=6000,
    lr=3e-3,
    device="cuda",
)
S5 = words_task(
    "words-s5",
    "Words of permutations of five (S5)",
    permutation_table(5),
    start=True,
    learners=(
        Learner("product of 4 updates, beta to 2", product(4), at_least(0.95, (20, 60))),
        Learner("product of 1 update, beta to 2", product(1), at_most(0.2, SIZES), control=True),
    ),
    papers=(PRODUCTS,),
    width=128,
    rows=128,
    steps=6000,
    lr=3e-3,
    device="cuda",
)
