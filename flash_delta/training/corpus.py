"""Byte-level text for training: the files, which of them are held out, and the windows of each step.

A text is a sequence of bytes. So the vocabulary is 256, any text file can be used, and bits per byte can be compared
between corpora. All results depend only on the files' contents and on (seed, step). Two machines with the same files
train on the same batches, and a resumed run gets the same batches as an uninterrupted run.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from flash_delta.training.checkpoint import latest_checkpoint

HELD_OUT_FRACTION = 0.05
# Folders that are not part of the standard library itself: installed packages, tests, and compiled files.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


EXCERPT_BYTES = 2048


@dataclass(frozen=True)
class Summary:
    """The facts about a corpus that a checkpoint saves, so that a report does not need the text."""

    name: str
    files: int
    train_bytes: int
    held_out_bytes: int
    entropy: float  # of the held-out text, in bits per byte: `order0_entropy`
    excerpt: str  # the beginning of the held-out text, a character per byte (latin1)


@dataclass(frozen=True)
class Corpus:
    """Training and held-out bytes. Whole files belong to one or the other."""

    name: str
    paths: tuple[str, ...]  # absolute; empty for the default corpus
    train: torch.Tensor  # [N] uint8
    held_out: torch.Tensor  # [M] uint8
    train_begins: torch.Tensor  # [N] uint8: 1 where a file begins
    held_out_begins: torch.Tensor  # [M]
    files: int  # distinct text files read
    skipped: int  # files left out: not UTF-8 text, empty, or the same bytes as an earlier file

    @classmethod
    def read(cls, paths: Sequence[str | Path] = ()) -> "Corpus":
        """Reads files and folders (recursively). Without paths, it reads the standard library of the running Python."""
        name = ", ".join(str(path) for path in paths) or "Python's standard library"
        files = list(_find_files(paths) if paths else _standard_library())
        texts: dict[bytes, bytes] = {}  # by digest, since a copy of a file must not be in both splits
        for file in files:
            text = _read_text(file)
            if text:
                texts.setdefault(hashlib.sha256(text).digest(), text)
        if not texts:
            raise ValueError(f"paths: expected at least one UTF-8 text file, got {len(files)} other files in {name}")
        train, held_out = map(_join, _split(texts))
        given = tuple(str(Path(path).resolve()) for path in paths)
        begins = train[1], held_out[1]
        return cls(name, given, train[0], held_out[0], *begins, len(texts), len(files) - len(texts))

    @cached_property
    def digest(self) -> str:
        """A hash of the content. A run may resume only on the bytes that it started with."""
        return hashlib.sha256(self.train.numpy().tobytes() + b"|" + self.held_out.numpy().tobytes()).hexdigest()

    @cached_property
    def summary(self) -> Summary:
        excerpt = self.held_out[:EXCERPT_BYTES].numpy().tobytes().decode("latin1")
        sizes = self.files, len(self.train), len(self.held_out)
        return Summary(self.name, *sizes, order0_entropy(self.held_out), excerpt)


def order0_entropy(text: torch.Tensor) -> float:
    """The Shannon entropy of the text's byte histogram, in bits per byte.

    A model that ignores context cannot use fewer bits per byte on this text, even if it knows the histogram.
    """
    counts = torch.bincount(text.long(), minlength=256).double()
    p = counts[counts > 0] / len(text)
    return -(p * p.log2()).sum().item()


def training_batch(text: torch.Tensor, batch_size: int, seq_len: int, *, seed: int, step: int) -> torch.Tensor:
    """[batch_size, seq_len] random windows of the text, which depend only on the text and (seed, step)."""
    require_length("training", text, seq_len)
    starts = np.random.default_rng([seed, step]).integers(len(text) - seq_len + 1, size=batch_size)
    return _windows(text, starts, seq_len)


def evaluation_windows(text: torch.Tensor, count: int, seq_len: int) -> torch.Tensor:
    """[at most count, seq_len] windows, which are spread evenly over the text and never overlap."""
    require_length("held-out", text, seq_len)
    count = min(count, len(text) // seq_len)
    return _windows(text, np.linspace(0, len(text) - seq_len, count).astype(np.int64), seq_len)


def require_length(which: str, text: torch.Tensor, seq_len: int) -> None:
    if len(text) < seq_len:
        raise ValueError(f"seq_len: expected at most the {len(text)} bytes of {which} text, got {seq_len}")


def _windows(text: torch.Tensor, starts: np.ndarray, seq_len: int) -> torch.Tensor:
    return text[torch.from_numpy(starts)[:, None] + torch.arange(seq_len)].long()


def _find_files(paths: Iterable[str | Path]) -> Iterator[Path]:
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"paths: expected files or folders, got {path}, which does not exist")
        if not path.is_dir() and not path.is_file():  # a pipe or a device cannot be read again when a run resumes
            raise ValueError(f"paths: expected files or folders, got {path}, which is neither")
        yield from _walk(path) if path.is_dir() else [path]


def _standard_library() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return (file for file in _walk(root, excluded=NOT_LIBRARY) if file.suffix == ".py")


def _walk(folder: Path, excluded: Iterable[str] = ()) -> Iterator[Path]:
    """Files below the folder, ordered by name on every file system. Hidden folders and folders of runs are left out.

    A run's own folder may be among its texts. Its files must not count as texts, or else the run could not resume.
    """
    for root, folders, names in os.walk(folder):
        if "checkpoints" in folders and latest_checkpoint(root):
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if name not in excluded and not name.startswith("."))
        yield from (file for file in (Path(root, name) for name in sorted(names)) if file.is_file())


def _read_text(file: Path) -> bytes | None:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise OSError(f"paths: expected files that can be read, got {file} ({error.strerror})") from error
    try:
        data.decode()
    except UnicodeDecodeError:
        return None
    return None if b"\0" in data else data


def _split(texts: dict[bytes, bytes]) -> tuple[list[bytes], list[bytes]]:
    """Splits whole files. In the order of their digests, files are held out as long as they fit into 5 % of the bytes.

    The digest makes the choice random, but independent of where the files are. If no file fits (a single book), the end
    of the text is held out instead.
    """
    left = budget = int(HELD_OUT_FRACTION * sum(map(len, texts.values())))
    held_out = set()
    for digest in sorted(texts):
        if len(texts[digest]) <= left:
            held_out.add(digest)
            left -= len(texts[digest])
    train = [text for digest, text in texts.items() if digest not in held_out]
    held = [text for digest, text in texts.items() if digest in held_out]
    return (train, held) if held else _cut(train, sum(map(len, train)) - budget)


def _cut(files: list[bytes], at: int) -> tuple[list[bytes], list[bytes]]:
    """The first ``at`` bytes, and the rest."""
    before, behind = [], []
    for file in files:
        before.append(file[:at])
        behind.append(file[at:])
        at = max(0, at - len(file))
    return [file for file in before if file], [file for file in behind if file]


def _join(files: list[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
    """All bytes [N], and where files begin [N]."""
    data = b"".join(files)
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    begins = torch.zeros_like(text)
    begins[[0, *accumulate(map(len, files[:-1]))] if files else []] = 1
    return text, begins
