"""Text for training: the files, which of them are held out, their tokens, and the windows of each step.

A token is a byte, or what a tokenizer makes of some bytes. Losses are told in bits per byte, so they can be compared
between corpora and tokenizers. All results depend only on the files' contents and on (seed, step). Two machines with
the same files train on the same batches, and a resumed run gets the same batches as an uninterrupted run.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from flash_delta.training.checkpoint import latest_checkpoint

HELD_OUT_FRACTION = 0.05
# Folders that are not part of the standard library itself: installed packages, tests, and compiled files.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
EXCERPT_BYTES = 2048


@dataclass(frozen=True)
class Summary:
    """The facts about a corpus that a run saves, so that a report does not need the text."""

    name: str
    digest: str  # of the content; a run may resume only on the bytes that it started with
    files: int
    skipped: int  # files left out: not UTF-8 text, empty, or the same bytes as an earlier file
    train_bytes: int
    held_out_bytes: int
    train_tokens: int
    held_out_tokens: int
    entropy: float  # of the held-out text, in bits per byte: `order0_entropy`
    excerpt: str  # the beginning of the held-out text, a character per byte (latin1)


@dataclass(frozen=True)
class Corpus:
    """Training and held-out tokens. Whole files belong to one or the other."""

    train: torch.Tensor  # [N]; uint8 if a token is a byte
    held_out: torch.Tensor  # [M]
    train_begins: torch.Tensor  # [N] uint8: 1 where a file begins
    held_out_begins: torch.Tensor  # [M]
    summary: Summary

    @classmethod
    def read(cls, paths: Sequence[str | Path] = (), tokenizer: PreTrainedTokenizerBase | None = None) -> "Corpus":
        """Reads files and folders (recursively). Without paths, it reads the standard library of the running Python.
        Without a tokenizer a token is a byte."""
        name = ", ".join(str(path) for path in paths) or "Python's standard library"
        files = list(_find_files(paths) if paths else _standard_library())
        texts: dict[bytes, bytes] = {}  # by digest, since a copy of a file must not be in both splits
        for file in files:
            text = _read_text(file)
            if text:
                texts.setdefault(hashlib.sha256(text).digest(), text)
        if not texts:
            raise ValueError(f"paths: expected at least one UTF-8 text file, got {len(files)} other files in {name}")
        train, held_out = _split(texts)
        (train_tokens, train_begins), (tokens, begins) = _tokens(train, tokenizer), _tokens(held_out, tokenizer)
        whole, rest = b"".join(train), b"".join(held_out)
        digest = hashlib.sha256(whole + b"|" + rest).hexdigest()
        counts = len(texts), len(files) - len(texts), len(whole), len(rest), len(train_tokens), len(tokens)
        facts = Summary(name, digest, *counts, order0_entropy(rest), rest[:EXCERPT_BYTES].decode("latin1"))
        return cls(train_tokens, tokens, train_begins, begins, facts)


def order0_entropy(text: bytes) -> float:
    """The Shannon entropy of the text's byte histogram, in bits per byte.

    A model that ignores context cannot use fewer bits per byte on this text, even if it knows the histogram.
    """
    counts = np.bincount(np.frombuffer(text, np.uint8), minlength=256)
    p = counts[counts > 0] / len(text)
    return float(-(p * np.log2(p)).sum())


def training_starts(length: int, batch_size: int, seq_len: int, *, seed: int, step: int) -> np.ndarray:
    """[batch_size] where the random windows of a step begin in a text of so many tokens."""
    return np.random.default_rng([seed, step]).integers(length - seq_len + 1, size=batch_size)


def evaluation_starts(length: int, count: int, seq_len: int) -> np.ndarray:
    """[at most count] where windows begin that are spread evenly over the text and never overlap."""
    return np.linspace(0, length - seq_len, min(count, length // seq_len)).astype(np.int64)


def require_length(corpus: Corpus, seq_len: int) -> None:
    for which, text in (("training", corpus.train), ("held-out", corpus.held_out)):
        if len(text) < seq_len:
            raise ValueError(f"seq_len: expected at most the {len(text)} tokens of {which} text, got {seq_len}")


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
        if latest_checkpoint(root):
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


def _tokens(files: list[bytes], tokenizer: PreTrainedTokenizerBase | None) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens [N], and where files begin [N]."""
    if tokenizer is None:
        documents = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
    else:  # a cut may divide a character
        texts = [file.decode(errors="ignore") for file in files]
        documents = [torch.tensor(ids) for ids in tokenizer(texts, add_special_tokens=False, verbose=False).input_ids]
    text = torch.cat(documents) if documents else torch.empty(0, dtype=torch.uint8)
    begins = torch.zeros(len(text) + 1, dtype=torch.uint8)  # one more: the last file may have no tokens
    begins[[0, *accumulate(map(len, documents[:-1]))]] = 1
    return text, begins[:-1]
