"""The small change of `script.py`: how things are called in a script, and what stands in its comments.

Not here: which of it a script says, and in what order.
"""

from kvproof.ci.literals import Group, call, listed, numbers
from kvproof.model.base import Outcome
from kvproof.model.ops import Misuse
from kvproof.properties.record import Part, Record


def plain(text: str) -> str:
    """Text that may stand in a docstring."""
    return " ".join(text.replace("\\", "/").replace('"""', "'''").split())


def nested(lines: tuple[str, ...]) -> list[str]:
    """Definitions inside a function have one blank line between them where a module has two."""
    kept: list[str] = []
    for line in lines:
        if line or (kept and kept[-1]):
            kept.append(line)
    return kept


def page_label(side: str) -> str:
    """What the free pages of a pool are called."""
    return f"free pages ({side})" if side else "free pages"


def mapping_label(side: str) -> str:
    """What a side mapping is called."""
    return f"mapping to {side}"


def bases(given: list[int | None]) -> Group:
    """Rotation bases as a list."""
    return listed([str(base) for base in given])


def compare_slots(what: str, due: str | Group, got: str, part: Part, state: str | None) -> Group:
    """The comparison of slots with those due, or others as free. state: as in the helper of that name."""
    rows = listed([f"({row.prefix}, {row.seq}, {row.last})" for row in part.rows])
    return call(
        "compare_slots",
        what,
        due,
        got,
        rows=rows,
        free=numbers(part.free),
        page_size=str(part.page_size),
        state=state,
    )


def told_outcome(record: Record) -> str:
    """What the contract says must come back, for people."""
    match record.outcome:
        case Outcome.SLOTS:
            return f"slots {numbers(record.due or [])}, or others that are as free"
        case Outcome.OOM:
            return "None, and nothing changes"
        case Outcome.REFUSED:
            return "it is refused, or changes nothing" if isinstance(record.op, Misuse) else "a refusal"
        case _:
            return "no answer"
