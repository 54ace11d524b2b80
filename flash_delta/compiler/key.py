"""The key of a compilation. It is another one as soon as anything that the compiled code depends on is another."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any
from unittest.mock import patch

import triton
import triton.language as tl
from triton.runtime.jit import DependenciesFinder, JITCallable, JITFunction

from flash_delta.kernels.runtime import pack


def key_of(kernel: JITFunction, backend: Any, signature: dict, constants: dict, options: Any, attributes: dict) -> str:
    """The key of what Triton is about to compile. ``with_all_that_is_read`` it is the same in every process.

    It has what Triton's own keys have: the source of the kernel and of all that it calls, the types, alignments and
    constants of its arguments, the options, the target, and the version of ptxas. Then Triton's version, and the
    settings that packs ask about.
    """
    source = kernel.ASTSource(kernel, signature, constants, attributes)
    facts = source.hash(), backend.hash(), options.hash(), triton.__version__, pack.settings()
    return sha256(repr(facts).encode()).hexdigest()


@contextmanager
def with_all_that_is_read() -> Iterator[None]:
    """A context in which Triton's hash of a function also covers all values that the function reads of modules: fields
    of tuples, defaults, and numbers that a ``constexpr_function`` reads. It does not cover the line where the function
    starts, which changes no instruction. So a change above a function does not change its hash."""
    record = DependenciesFinder.record_reference

    def note(finder: DependenciesFinder, value: Any, *where: Any) -> None:
        record(finder, value)  # and not `where`, which Triton 3.6 hashes in no fixed order
        finder.hasher.update(_text(value).encode())

    line = property(lambda function: 0, lambda function, line: function.__dict__.update(starting_line_number=line))
    with (
        patch.object(JITCallable, "starting_line_number", line, create=True),
        patch.object(DependenciesFinder, "record_reference", note),
    ):
        yield


def _text(value: Any) -> str:
    """A value, the same in every process. Functions have only their names here, since Triton takes their hashes."""
    if hasattr(value, "_fields"):
        return f"{value._fields} {value._field_defaults}"
    if callable(value) and not isinstance(value, tl.constexpr):
        return getattr(value, "__name__", repr(value))
    return "" if inspect.ismodule(value) else repr(value)
