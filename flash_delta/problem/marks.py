"""Names and limits that all rooms share, and the marks on fields of problems."""

from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

PACKAGE = __name__.removesuffix(".problem.marks")  # a longer name if another package contains this library (`make hub`)

# Marks on fields of problems. Schemas of operators and compile keys are made from them.
Kind = TypeVar("Kind")
Schema = Annotated[Kind, "schema"]  # an argument of operators of torch.library, because it does not follow from tensors
Compiled = Annotated[Kind, "compiled"]  # kernels are compiled for the field's value

MOST_TAPS, WIDEST_ROW, MOST_GATES = 8, 8192, 128 * 65535  # of kernels: taps; numbers in a norm's row; a token's gates
ENVIRONMENT = "FLASH_DELTA_BACKEND"  # the variable that names a backend for calls that do not
SHORT = 16  # prefill runs sequences of at most so many tokens token by token: a chunk would be mostly empty


def marked(fields: type, mark: Any) -> dict[str, Any]:
    """Names and types of the fields of a named tuple that have ``mark``: `Schema` or `Compiled`."""
    hints = get_type_hints(fields, include_extras=True)
    marks = {name: hint.__metadata__ for name, hint in hints.items() if get_origin(hint) is Annotated}
    return {name: hints[name].__origin__ for name in marks if mark.__metadata__[0] in marks[name]}
