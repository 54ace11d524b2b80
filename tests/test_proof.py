"""`flash-delta prove`: the tasks ask what they say, bounds are judged, and results are kept, resumed and shown."""

import json
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from typer.testing import CliRunner

import flash_delta.proof
from flash_delta.cli.app import app
from flash_delta.proof import TASKS, learning
from flash_delta.proof.learning import learn, share_right
from flash_delta.proof.needle import Needles
from flash_delta.proof.page import accuracy_figure
from flash_delta.proof.recall import Recall
from flash_delta.proof.results import Result, read, verdicts, write
from flash_delta.proof.task import UNASKED, Bound, at_least, at_most
from flash_delta.proof.words import PARITY, S3, Words, cyclic, permutation_table

CPU = torch.device("cpu")


def drawn(batch, rows, size, seed=0):
    tokens, answers = batch(torch.Generator().manual_seed(seed), rows, size)
    assert tokens.shape == answers.shape
    assert tokens.dtype == answers.dtype == torch.int64
    assert tokens.min() >= 0
    assert tokens.max() < batch.symbols
    return tokens.tolist(), answers.tolist()


@pytest.mark.parametrize(("n", "even", "order"), [(3, False, 6), (5, True, 60), (5, False, 120)])
def test_words_are_products_of_permutations(n, even, order):
    """Brute force: apply one permutation after the other to a row of things."""
    elements = list(permutations(range(n)))
    if even:
        elements = [p for p in elements if torch.eye(n)[list(p)].det() > 0]
    assert len(elements) == order
    batch = Words(permutation_table(n, even), start=True)
    for tokens, answers in zip(*drawn(batch, 3, 30), strict=True):
        assert tokens[0] == order
        things = list(range(n))
        for token, answer in zip(tokens, answers, strict=True):
            if token < order:
                things = [elements[token][thing] for thing in things]
            assert elements[answer] == tuple(things)


@pytest.mark.parametrize("n", [2, 3])
def test_sums(n):
    for tokens, answers in zip(*drawn(Words(cyclic(n), start=False), 4, 50), strict=True):
        assert answers == [sum(tokens[: t + 1]) % n for t in range(50)]


@pytest.mark.parametrize(("times", "size"), [(1, 16), (3, 8), (2, 1)])
def test_recall_asks_every_key_for_its_last_value(times, size):
    for tokens, answers in zip(*drawn(Recall(20, 9, times), 5, size), strict=True):
        told = size * times
        pairs = dict(zip(tokens[0 : 2 * told : 2], tokens[1 : 2 * told : 2], strict=True))  # a later one replaces
        assert len(pairs) == size
        assert sorted(tokens[2 * told :]) == sorted(pairs)
        assert answers[: 2 * told] == [UNASKED] * 2 * told
        assert answers[2 * told :] == [pairs[key] - 20 for key in tokens[2 * told :]]


def test_needles_are_told_once_in_noise():
    places = set()
    for tokens, answers in zip(*drawn(Needles(6, 5, 7, needles=3), 50, 20), strict=True):
        pairs = {tokens[t]: tokens[t + 1] - 6 for t in range(20) if tokens[t] < 6}
        assert len(pairs) == sum(token < 6 for token in tokens[:20]) == 3
        assert sum(6 <= token < 11 for token in tokens) == 3
        assert set(tokens[20:]) == set(pairs)
        assert answers == [UNASKED] * 20 + [pairs[key] for key in tokens[20:]]
        places |= {t for t in range(20) if tokens[t] < 6}
    assert len(places) == 10


def test_strings_of_a_test_have_another_seed_than_those_of_training():
    seeds = []

    def batch(generator, rows, size):
        seeds.append(generator.initial_seed())
        return PARITY.batch(generator, rows, size)

    learning.prove(replace(PARITY, batch=batch, steps=2, sizes=(4,)), PARITY.learners[0], 7, CPU)
    assert seeds[:3] == [7, 7, learning.TEST_SEED + 7]


def test_the_same_seed_gives_the_same_network():
    task = replace(PARITY, steps=3, trained=5)
    one, other = (learn(task, task.learners[0], 4, CPU) for _ in range(2))
    assert one[1] == other[1]
    assert all(map(torch.equal, one[0].parameters(), other[0].parameters()))
    assert learn(task, task.learners[0], 5, CPU)[1] != one[1]


def test_strings_grow_up_to_their_length():
    sizes = [replace(PARITY, steps=100, shortest=4, trained=40).size_at(step) for step in range(100)]
    assert sizes[0] == 4
    assert sizes == sorted(sizes)
    assert set(sizes[50:]) == {40}
    assert sizes[25] == round((4 * 40) ** 0.5)


def test_accuracy_counts_what_is_asked():
    answers = torch.tensor([[UNASKED, 1, 2, 3], [0, 1, UNASKED, 3]])
    said = torch.tensor([[0, 1, 0, 3], [0, 0, 0, 0]])
    assert share_right(said, answers, None) == 3 / 6
    assert share_right(said, answers, 1) == 1 / 2


def result(accuracy, seed=0, control=False):
    name = PARITY.learners[control].name
    return Result("parity", name, seed, "torch", 0.1, 1.0, dict.fromkeys(PARITY.sizes, accuracy))


@pytest.mark.parametrize(
    ("accuracies", "control", "holds"),
    [((1.0, 0.99), False, True), ((1.0, 0.98), False, False), ((0.5, 0.6), True, True), ((0.5, 0.61), True, False)],
)
def test_every_seed_is_judged(accuracies, control, holds):
    """A control that does not fail breaks its bound."""
    bounds = (at_least(0.99, PARITY.sizes), at_most(0.6, PARITY.sizes))
    learners = [replace(of, bounds=given) for of, given in zip(PARITY.learners, bounds, strict=True)]
    results = [result(a, seed, control) for seed, a in enumerate(accuracies)]
    found = list(verdicts(replace(PARITY, learners=learners), results))
    assert len(found) == len(PARITY.sizes)
    assert {verdict.holds for verdict in found} == {holds}
    assert {verdict.nearest for verdict in found} == {max(accuracies) if control else min(accuracies)}


def test_a_size_without_a_bound_is_measured_only():
    learner = replace(PARITY.learners[0], bounds=at_least(0.9, (20,)))
    found = {v.size: v.holds for v in verdicts(replace(PARITY, learners=(learner,)), [result(0.1)])}
    assert not found[20]
    assert found[256]


def test_every_task_has_controls_and_bounds_that_can_break():
    assert len({task.name for task in TASKS}) == len(TASKS)
    for task in TASKS:
        assert any(learner.control for learner in task.learners), task.name
        assert not all(learner.control for learner in task.learners), task.name
        assert len({learner.name for learner in task.learners}) == len(task.learners)
        models = [learner for learner in task.learners if not learner.control]
        for learner in task.learners:
            assert learner.bounds
            assert learner.bounds.keys() <= set(task.sizes)
            for size, bound in learner.bounds.items():
                assert not bound.holds(1.0 if learner.control else task.chance)
                if learner.control:  # it stays below every model that has a bound at its size
                    assert all(bound.most < model.bounds[size].least for model in models if size in model.bounds)


def tiny(task):
    size = min(task.sizes)
    learners = [replace(learner, bounds={size: Bound()}) for learner in task.learners]
    options = {"steps": 1, "rows": 2, "trained": task.shortest, "device": "cpu"}
    return replace(task, sizes=(size,), learners=learners, **options)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_every_task_runs_on_a_cpu(task, monkeypatch):
    monkeypatch.setattr(learning, "TESTED", 2)
    small = tiny(task)
    for learner in small.learners:
        found = learning.prove(small, learner, 0, CPU)
        assert 0 <= found.accuracy[small.sizes[0]] <= 1
        assert found.backend in ("torch", "none")


ANYTHING = {20: Bound()}


def command(monkeypatch, *arguments, bounds=ANYTHING):
    """The command with two small tasks, of which the first has one model with these bounds."""
    small = tiny(PARITY)
    tasks = [replace(small, learners=[replace(small.learners[0], bounds=bounds)]), tiny(S3)]
    monkeypatch.setattr(flash_delta.proof, "TASKS", tasks)
    monkeypatch.setattr(learning, "TESTED", 2)
    return CliRunner().invoke(app, ["prove", *map(str, arguments)])


@pytest.mark.long
def test_the_quick_tasks_are_learnt(tmp_path):
    done = CliRunner().invoke(app, ["prove", "--quick", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert {result.task for result in read(tmp_path / "prove.json", TASKS, CPU)} == {"parity", "words-s3"}


def test_the_command_writes_results_and_a_page(monkeypatch, tmp_path):
    done = command(monkeypatch, "--out", tmp_path, "--seeds", 2)
    assert done.exit_code == 0, done.output
    assert "holds" in done.output
    written = json.loads((tmp_path / "prove.json").read_text())
    assert written.keys() == {"flash_delta", "device", "machine", "tasks", "results"}
    assert written["flash_delta"] == flash_delta.__version__
    assert written["machine"]["torch"] == torch.__version__
    seen = [(line["task"], line["learner"], line["seed"]) for line in written["results"]]
    assert len(set(seen)) == len(seen) == 2 * (1 + len(S3.learners))
    first = written["results"][0]
    assert written["tasks"]["parity"]["steps"] == 1
    assert first["backend"] == "torch"
    assert first["bounds"] == {"20": {"least": 0.0, "most": 1.0}}
    assert first["accuracy"].keys() == {"20"}
    assert first["seconds"] > 0
    page = (tmp_path / "prove.html").read_text()
    assert page.count("<picture>") == 2
    for words in (PARITY.title, S3.title, S3.learners[1].name, PARITY.papers[0].source):
        assert words in page
    assert "http" not in page.replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    ("bounds", "told"),
    [
        (at_least(1.0, (20,)), "expected >= 1.00 at 20 from every seed, got"),
        (at_most(0.0, (20,)), "expected <= 0.00 at 20 from every seed, got"),
    ],
)
def test_a_broken_bound_is_exit_code_1(monkeypatch, tmp_path, bounds, told):
    monkeypatch.setattr(learning, "share_right", lambda *_: 0.5)
    done = command(monkeypatch, "parity", "--out", tmp_path, "--seeds", 1, bounds=bounds)
    assert done.exit_code == 1
    assert told in done.output
    assert "broken" in done.output
    assert (tmp_path / "prove.html").exists()


def test_resume_trains_only_what_is_missing(monkeypatch, tmp_path):
    trained, train = [], learning.learn
    monkeypatch.setattr(learning, "learn", lambda *given: trained.append(given) or train(*given))
    assert command(monkeypatch, "parity", "--out", tmp_path, "--seeds", 1).exit_code == 0
    first = json.loads((tmp_path / "prove.json").read_text())["results"]
    assert len(trained) == len(first) == 1
    assert command(monkeypatch, "parity", "--out", tmp_path, "--seeds", 3, "--resume").exit_code == 0
    assert [seed for _, _, seed, _ in trained] == [0, 1, 2]
    assert json.loads((tmp_path / "prove.json").read_text())["results"][:1] == first
    command(monkeypatch, "parity", "--out", tmp_path, "--seeds", 1)
    assert len(trained) == 4


def test_results_are_read_back(tmp_path):
    file, results = tmp_path / "prove.json", [result(0.7), result(0.3, control=True)]
    write(file, TASKS, results, CPU)
    assert read(file, TASKS, CPU) == results


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda found: found.update(flash_delta="0.0.1"), "resume: expected results with flash_delta"),
        (lambda found: found["machine"].update(torch="1.0"), "resume: expected results with machine"),
        (lambda found: found["tasks"]["parity"].update(lr=7), "resume: expected models and settings of today's tasks"),
        (lambda found: found["results"][0].update(learner="RNN"), "of today's tasks, got parity, RNN, {'width': 32"),
        (lambda found: found["results"][0].pop("seed"), "resume: expected what `flash-delta prove` wrote, got"),
        (lambda found: found.pop("results"), "resume: expected what `flash-delta prove` wrote, got"),
    ],
)
def test_results_of_others_are_not_continued(monkeypatch, tmp_path, change, told):
    assert command(monkeypatch, "parity", "--out", tmp_path, "--seeds", 1).exit_code == 0
    found = json.loads((tmp_path / "prove.json").read_text())
    change(found)
    (tmp_path / "prove.json").write_text(json.dumps(found))
    done = command(monkeypatch, "parity", "--out", tmp_path, "--seeds", 1, "--resume")
    assert done.exit_code == 2
    assert told in done.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("majority",), "tasks: expected some of parity, sums, words-s3, "),
        (("words-a5",), "on cpu, got 'words-a5', which needs a GPU"),
        (("--seeds", "0"), "'--seeds'"),
        (("--device", "tpu"), "device: expected a device that torch can use here, got 'tpu'"),
        (("--device", "meta"), "device: expected a device that computes, got 'meta'"),
        (("parity", "--quick"), "tasks: expected none beside --quick, got ['parity']"),
        (("--quick", "--seeds", "2"), "seeds: expected none beside --quick, got 2"),
        (("--resume",), "resume: expected"),
    ],
)
def test_bad_input_is_one_line(tmp_path, arguments, told):
    done = CliRunner().invoke(app, ["prove", "--out", str(tmp_path), *arguments])
    assert done.exit_code == 2
    assert told in done.output
    assert done.output.startswith("error: ")
    assert not list(tmp_path.iterdir())


def test_the_legend_is_beside_the_lines():
    figure = accuracy_figure(PARITY, list(verdicts(PARITY, [result(1.0), result(0.5, control=True)])))
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} >= {"chance", *(of.name for of in PARITY.learners)}
    (axes,) = figure.axes
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())
