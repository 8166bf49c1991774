"""Finding targets by name, through the entry-point group `kvproof.targets`.

A name is the entry point's, followed by whatever it takes: `sglang`, `sglang==0.5.23`, `sglang@../sglang`.
"""

import re
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from kvproof.impl.targets.protocol import Target, Ticket
from kvproof.model.errors import InfrastructureError, KvproofError, UserError

GROUP: Final = "kvproof.targets"
_NAME: Final = re.compile(r"([A-Za-z0-9_.-]+?)((?:==|@|:).*)?\Z", re.DOTALL)


def known_targets() -> dict[str, EntryPoint]:
    """Entry points by name."""
    return {entry.name: entry for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)}


def split_name(name: str) -> tuple[str, str]:
    """("sglang", "==0.5.23"). Raises UserError when no target is called that."""
    match = _NAME.match(name)
    base = match[1] if match else name
    known = known_targets()
    if base not in known:
        names = ", ".join(known) or "none; is kvproof installed?"
        raise UserError(
            f"there is no target {name!r}; known: {names} (sglang==VERSION and sglang@PATH as well)"
        )
    return base, (match[2] or "") if match else ""


def load_target(name: str, ticket: Ticket) -> Target:
    """Load a target in this process. Raises UserError or InfrastructureError, one line each."""
    base, spec = split_name(name)
    try:
        factory = known_targets()[base].load()
        target: Target = factory(replace(ticket, spec=spec))
    except KvproofError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())
        raise InfrastructureError(f"target {name}: {type(error).__name__}: {words}") from error
    return target
