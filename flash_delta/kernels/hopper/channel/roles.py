"""What kernels hand to their roles and functions, and what the roles pass to each other."""

from collections import namedtuple
from typing import Any, NamedTuple


class Described(NamedTuple):
    """Descriptors of tokens, of the first and final states, and of states that programs hand over."""

    q: Any
    k: Any
    v: Any
    g: Any
    b: Any  # None, as w, without a strength per channel
    w: Any
    o: Any
    initial: Any
    final: Any
    handed: Any


# Where tokens are: the tokens between batch rows, how many value heads a key head has, and the strides between heads.
Places = namedtuple(
    "Places", "q_batch k_batch g_batch v_batch b_batch w_batch group q_head k_head g_head v_head b_head w_head",
    defaults=[None, None],
)  # fmt: skip


class GateParameters(NamedTuple):
    """What gates and strengths are computed with. ``beta_strides``: between tokens and between heads. ``beta_top``: the
    factor of beta's sigmoid."""

    A_log: Any
    dt_bias: Any
    bound: Any
    scale: Any
    beta: Any
    beta_batch: Any
    beta_strides: Any
    beta_top: Any


class Tiles(NamedTuple):
    """One of each for q, k and g: rings of what is loaded, descriptors, or numbers. ``b``: of the erase gate, with a
    strength per channel."""

    q: Any
    k: Any
    g: Any
    b: Any = None


class StepFactors(NamedTuple):
    """Rings of what the gate group and the factor group make of 32 tokens."""

    rows: Any  # decayed erase keys, and below them decayed q
    columns: Any  # k divided by their decay
    maps: Any  # A, and below it P
    norms: Any  # the factors of rows that are norms, and the scale
    strengths: Any  # b, twice
    lead: Any  # the factor of the state before the tokens
    trail: Any  # and after them
    flags: Any  # whether it is the last piece of the tokens; None if gates have a bound


class Barriers(NamedTuple):
    """A ring of barriers for each step that one role waits for."""

    g_full: Any  # g is loaded
    full: Any  # q and k are loaded, and b
    left: Any  # they are no longer needed
    v_full: Any  # v is loaded, and w
    v_done: Any  # v is no longer needed
    tiled: Any  # rows and columns are there
    ready: Any  # A and P are there
    done: Any  # the state group has read all of them


class StateBuffers(NamedTuple):
    """Shared memory through which states and outputs go, and barriers of the copy engine; of both halves."""

    so: Any
    sbar: Any
    so2: Any
    sbar2: Any


class Source(NamedTuple):
    """Where the tokens of a chunk come from, and go to: descriptors, rings, and as in `Places`."""

    descs: Any
    tiles: Any
    full: Any
    batches: Any
    heads: Any
    group: Any


class Erasing(NamedTuple):
    """The erase gate b: its address, the tokens between batch rows, and the strides between tokens and heads."""

    b: Any
    batch: Any
    strides: Any


class Strengths(NamedTuple):
    """The parameters of gates and strengths, and the strides of beta."""

    A_log: Any
    dt_bias: Any
    beta: Any
    beta_batch: Any
    beta_strides: Any


class HalfTiles(NamedTuple):
    """Tiles of a chunk, and those from which the scores of a half are made. ``g`` gets Kd."""

    q: Any
    k: Any
    g: Any
    rows: Any
    columns: Any
    far: Any


class ChunkKeys(NamedTuple):
    """Rings of what `scan_channels` needs of the keys and queries of a chunk."""

    Qg: Any
    Kg: Any
    Kd: Any
    rates: Any
    gamma: Any


class ChunkValues(NamedTuple):
    """Rings of what it needs besides."""

    v: Any
    A: Any
    P: Any
    w: Any = None  # with a strength per channel
