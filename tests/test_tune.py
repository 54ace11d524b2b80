"""The tuner: only right tiles get a time, the best comes first, and its line can be pasted."""

import os
from importlib.util import find_spec
from typing import NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from workshop.bench.timing import Spread
from workshop.cli.app import app
from workshop.tune.stage import Stage
from workshop.tune.trials import Trial, Tuner, ranked, row, trials

CPU = torch.device("cpu")


class Tile(NamedTuple):
    BV: int
    warps: int


WRONG, FORGETFUL, TOO_LARGE, DEADLY = Tile(128, 8), Tile(16, 4), Tile(256, 8), Tile(0, 0)
MS = {Tile(32, 4): 2.0, Tile(64, 4): 1.0, Tile(64, 8): 1.5}  # of those that are right


def launch(inputs, tile):
    x = inputs["x"]
    if tile == TOO_LARGE:
        raise RuntimeError("out of resource: shared memory")
    if tile == DEADLY:
        os.abort()
    y, z = 2 * x, torch.empty_like(x)
    z[: 15 if tile == FORGETFUL else 16] = x[: 15 if tile == FORGETFUL else 16]
    return {"y": 1.05 * y if tile == WRONG else y, "z": z}


STAGE = Stage(
    sizes=(128, 64),
    tiles=lambda target: [*MS, WRONG, FORGETFUL, TOO_LARGE],
    make=lambda device: {"x": torch.randn(16, 16, device=device)},
    launch=launch,
    truth=lambda inputs: {"y": 2 * inputs["x"].double(), "z": inputs["x"].double()},
)
STAGES = {"copy": STAGE}


def trial(tile):
    """By a clock that knows how long every tile takes."""

    def time(run, device, repeats):
        run()
        return [MS[tile]] * repeats

    return Tuner(STAGE, CPU, time).trial(tile)


def test_the_fastest_right_tile_comes_first():
    best_first = ranked(trial(tile) for tile in (WRONG, *MS))
    assert [t.tile for t in best_first] == [Tile(64, 4), Tile(64, 8), Tile(32, 4), WRONG]
    assert best_first[0].ms == Spread(1.0, 1.0, 1.0)
    assert best_first[0].error < 1e-6
    line = row((128, 64), best_first, "sm_90a", "NVIDIA H200")
    assert line == '("sm_90a", 128, 64): Tile(BV=64, warps=4),  # NVIDIA H200: 1 ms; next 1.5 at warps=8'
    assert row((128, 64), best_first[:1], "sm_90a", "NVIDIA H200").endswith("# NVIDIA H200: 1 ms")


def test_a_wrong_tile_gets_no_time():
    wrong = trial(WRONG)
    assert wrong.ms is None
    assert wrong.failure == "y is off by 5.0e-02, 2e-02 is allowed"
    assert row((128, 64), [wrong], "sm_90a", "NVIDIA H200") is None
    assert trial(FORGETFUL).failure == "z is off by inf, 2e-02 is allowed"


def test_a_tile_is_timed_often_enough():
    times = []

    def time(run, device, repeats):
        times.append(repeats)
        return [1.0] * repeats

    Tuner(STAGE, CPU, time).trial(Tile(64, 4))
    assert times[-1] >= 20


def test_a_failing_tile_costs_its_own_row():
    """By the CPU's clock, in a process of its own: one tile raises, one takes the process along, the others go on."""
    tiles = [Tile(64, 4), TOO_LARGE, DEADLY, Tile(32, 4)]
    first, raised, died, last = trials(__name__, "copy", tiles, CPU, 60)
    assert first.ms.median > 0
    assert last.ms.median > 0
    assert raised == Trial(TOO_LARGE, failure="RuntimeError: out of resource: shared memory")
    assert died.failure.startswith("its process died")


def test_the_command_needs_a_gpu():
    ran = CliRunner().invoke(app, ["tune", "scan", "--device", "cpu"])
    assert ran.exit_code == 2
    assert "device: expected a GPU, got 'cpu'" in ran.output


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "gfx942"])
def test_stages_offer_tiles(target):
    from workshop.tune.stages import STAGES

    for stage in STAGES.values():
        tiles = stage.tiles(target)
        assert len(set(tiles)) == len(tiles) >= 2
