"""Serving as an engine does it, at random: ten thousand steps, each against float64, and not a bit more is touched."""

import pytest
import torch
from serving_calls import DRAFT, Request, decode, prefill
from serving_pool import Pool
from serving_truth import DEVICES, GPU, needs_triton

REQUESTS = 6
MACHINES = [
    ("gdn-raw", torch.float32, True, torch.float32),
    ("gdn-raw", torch.bfloat16, False, None),
    ("kda-raw", torch.float32, False, None),
    ("kda-raw", torch.bfloat16, True, torch.bfloat16),
]
# Of each of the four machines; in Triton's interpreter a call takes as long as hundreds.
STEPS, INTERPRETED = 2_500, 8


class Engine:
    """Takes a random step at a time on one pool."""

    def __init__(self, pool, kind, backend):
        self.pool, self.random, self.call = pool, pool.random, (pool, kind, backend)
        self.requests: list[Request] = []
        steps = (self.admit, self.fork, self.extend, self.verify, self.roll_back, self.evict)
        self.taken = dict.fromkeys(steps, 0)

    def step(self):
        steps = [self.admit] if len(self.requests) < REQUESTS else []
        if steps and self.requests:
            steps.append(self.fork)
        if self.requests:
            steps += [self.extend, self.extend, self.verify, self.verify, self.evict]
        if any(request.kept for request in self.requests):
            steps.append(self.roll_back)
        step = self.random.choice(steps)
        step()
        self.taken[step] += 1

    def some(self, most=3):
        return self.random.sample(self.requests, min(len(self.requests), self.random.randint(1, most)))

    def admit(self):
        """A request with slots of no order; its prompt, or the first piece of it, runs beside others of all lengths."""
        others = self.some(2) if self.requests and self.random.random() < 0.5 else []
        request = Request([self.pool.take() for _ in range(DRAFT)])
        self.requests.append(request)
        self.prefill([request, *others])

    def fork(self):
        """A request that begins with the tokens of another one: up to a state that is kept, or to its last."""
        other = self.random.choice(self.requests)
        request = Request([self.pool.take() for _ in range(DRAFT)], self.random.choice([other.at, *other.kept]))
        self.requests.append(request)
        if self.random.random() < 0.5:
            self.prefill([request])
        else:
            decode(*self.call, [request], self.random.randint(1, DRAFT), "last")

    def extend(self):
        """More of the prompts, or a few tokens of which the last state is written, or none."""
        if self.random.random() < 0.3:
            self.prefill(self.some(), writes=self.random.random() < 0.8)
        else:
            decode(*self.call, self.some(), self.random.choice((1, 1, 3)), self.random.choice(("last", "last", "none")))

    def verify(self):
        """A draft, a chain or a tree, of which the next call goes on from any token."""
        decode(*self.call, self.some(), self.random.randint(1, DRAFT), "each", tree=self.random.random() < 0.3)

    def roll_back(self):
        """One goes on from a state that was kept; what was kept after it is forgotten."""
        request = self.random.choice([request for request in self.requests if request.kept])
        place = self.random.randrange(len(request.kept))
        request.at = request.kept[place]
        self.pool.release(request.kept[place + 1 :])
        del request.kept[place + 1 :]
        if self.random.random() < 0.2:
            self.prefill([request])
        else:
            decode(*self.call, [request], self.random.randint(1, 2), self.random.choice(("last", "each")))

    def evict(self):
        request = self.requests.pop(self.random.randrange(len(self.requests)))
        self.pool.release([*request.table, *request.kept])

    def prefill(self, requests, writes=True):
        """Pieces of prompts, some as short as what is decoded."""
        longest = self.random.choice((1, 16, 16, 40, 150))
        prefill(*self.call, requests, [self.random.randint(0, longest) for _ in requests], writes)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize(("kind", "dtype", "v_first", "around"), MACHINES)
def test_steps_of_an_engine(kind, dtype, v_first, around, backend):
    seed = MACHINES.index((kind, dtype, v_first, around))
    engine = Engine(Pool(dtype, v_first, DEVICES[backend], seed, around), kind, backend)
    steps = STEPS if GPU or backend == "torch" else INTERPRETED
    for _ in range(steps):
        engine.step()
    engine.pool.judge_outputs()
    assert min(engine.taken.values()) >= steps // 16
