"""The reviewed list of known faults: `known.json`.

A fault of a release that a person has looked at and judged does not fail a campaign (exit code 4), for the
releases it names and no others. Strictly decoded, like every file here.
"""

from pathlib import Path
from typing import Final

import msgspec

from kvproof.model.errors import UserError

KNOWN_FILE: Final = Path(__file__).parent / "known.json"
JUDGEMENTS: Final = ("fault", "undocumented misuse")


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One judged fault.

    fingerprint: of the failure. package, releases: whose fault and in which versions it was seen.
    trace: file under `corpus/traces` that shows it. judgement: one of `JUDGEMENTS`. reason: one line;
    `FINDINGS.md` has the story.
    """

    fingerprint: str
    package: str
    releases: tuple[str, ...]
    trace: str
    judgement: str
    reason: str

    def covers(self, fingerprint: str, release: str) -> bool:
        """Whether this is that failure in that release ("sglang 0.5.23")."""
        package, _, version = release.partition(" ")
        return fingerprint == self.fingerprint and package == self.package and version in self.releases


def read_known(path: Path = KNOWN_FILE) -> tuple[Known, ...]:
    """The list. Raises UserError naming file and field."""
    try:
        known = msgspec.json.decode(path.read_bytes(), type=tuple[Known, ...])
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a valid list of known faults: {error}") from None
    for index, entry in enumerate(known):
        if entry.judgement not in JUDGEMENTS:
            raise UserError(
                f"{path}: $[{index}].judgement is {entry.judgement!r}; known: {', '.join(JUDGEMENTS)}"
            )
    return known
