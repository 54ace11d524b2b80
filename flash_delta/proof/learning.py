"""Trains one model of a task, and measures it on new strings."""

import time

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from flash_delta.ops._backend import choose_backend
from flash_delta.proof.network import Network
from flash_delta.proof.results import Result
from flash_delta.proof.task import UNASKED, Learner, Task
from flash_delta.testing.recorder import recording

TESTED = 256  # strings of each size
TEST_SEED = 2**31  # is added to a seed for the test strings, so that training does not see them


def prove(task: Task, learner: Learner, seed: int, device: torch.device) -> Result:
    """Trains a model from a seed, and measures it at every size of the task."""
    began = time.perf_counter()
    network, loss = learn(task, learner, seed, device)
    seconds = time.perf_counter() - began
    found = accuracies(task, network, seed, device)
    backend = backend_of(network, task, device)
    return Result(task.name, learner.name, seed, backend, round(loss, 5), round(seconds, 2), found)


def learn(task: Task, learner: Learner, seed: int, device: torch.device) -> tuple[Network, float]:
    """The trained network, and its loss on the last batch. The rate is constant for half of the steps, then it falls
    to 0."""
    torch.manual_seed(seed)
    network = Network(task.symbols, task.answers, task.width, learner.mixers(task.width)).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=task.lr, weight_decay=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, 2 - 2 * step / task.steps))
    generator = Generator().manual_seed(seed)
    for step in range(task.steps):
        tokens, answers = (x.to(device) for x in task.batch(generator, task.rows, task.size_at(step)))
        loss = cross_entropy(network(tokens).flatten(0, 1), answers.flatten(), ignore_index=UNASKED)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return network, loss.item()


@torch.no_grad()
def accuracies(task: Task, network: nn.Module, seed: int, device: torch.device) -> dict[int, float]:
    """By size: the part of the asked positions of new strings where the network's answer is right."""
    generator, found = Generator().manual_seed(TEST_SEED + seed), {}
    for size in task.sizes:
        tokens, answers = task.batch(generator, TESTED, size)
        said = torch.cat([network(rows.to(device)).argmax(-1).cpu() for rows in tokens.split(task.rows)])
        found[size] = round(share_right(said, answers, task.last), 4)
    return found


def share_right(said: Tensor, answers: Tensor, last: int | None) -> float:
    """The part of the asked positions where ``said`` is right: of all, or of the ``last`` columns."""
    columns = slice(None) if last is None else slice(-last, None)
    said, answers = said[:, columns], answers[:, columns]
    asked = answers != UNASKED
    return (said == answers)[asked].double().mean().item()


@torch.no_grad()
def backend_of(network: nn.Module, task: Task, device: torch.device) -> str:
    """The backends that run the network's ops in training, or "none" if it has no such op."""
    tokens, _ = task.batch(Generator().manual_seed(0), 1, task.trained)
    with recording(network) as calls:
        network(tokens.to(device))
        problems = [call.problem._replace(needs_grad=True) for call in calls]
    return ", ".join(sorted({choose_backend(problem, None) for problem in problems})) or "none"
