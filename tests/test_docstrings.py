"""Every public name has an example in its docstring, and every example gives what it says."""

import doctest
from importlib import import_module
from importlib.util import find_spec
from inspect import getdoc, isclass, isfunction

import pytest

MODULES = ("flash_delta", *(f"flash_delta.{name}" for name in ("ops.serving", "modules", "layers", "parallel")))
MIRRORS = ("flash_delta.integrations.fla", "flash_delta.integrations.aiter")  # of names; each has one example
WITH_TRANSFORMERS = ("flash_delta.models", "flash_delta.integrations.transformers")


def public():
    """The functions and classes that a reader imports from these modules, each once."""
    found = {}
    for name in MODULES + (WITH_TRANSFORMERS if find_spec("transformers") else ()):
        shown = vars(import_module(name))
        names = ("enable", "disable") if name.endswith(".transformers") else shown.get("__all__", shown)
        for thing in (shown[each] for each in names if not each.startswith("_")):
            if isclass(thing) or isfunction(thing):
                found.setdefault(thing, f"{name}.{thing.__name__}")
    found |= {import_module(name): name for name in MIRRORS}
    return [pytest.param(thing, id=name) for thing, name in found.items()]


@pytest.mark.parametrize("thing", public())
def test_the_example_gives_what_it_says(thing):
    """The example stands in a section ``Example:`` and can be pasted: it imports what it uses."""
    assert "\nExample:\n    >>> " in getdoc(thing), f"{thing.__name__} has no example"
    example = doctest.DocTestParser().get_doctest(getdoc(thing), {}, thing.__name__, None, None)
    said = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(example, out=said.append)
    assert runner.failures == 0, "".join(said)
