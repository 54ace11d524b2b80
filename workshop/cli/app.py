"""The `flash-delta-dev` application: its commands."""

from flash_delta.cli.app import make_app
from workshop.cli.bench import bench
from workshop.cli.check import check
from workshop.cli.compile import compile_kernels
from workshop.cli.machine import machine
from workshop.cli.parity import parity
from workshop.cli.release import release
from workshop.cli.report import report
from workshop.cli.tune import tune

app = make_app(
    "flash-delta-dev",
    "Tools of flash_delta's developers: how fast it is, whether its kernels compile as they should, peers beside it.",
    {
        "check": check,
        "bench": bench,
        "report": report,
        "tune": tune,
        "compile": compile_kernels,
        "parity": parity,
        "machine": machine,
        "release": release,
    },
)
