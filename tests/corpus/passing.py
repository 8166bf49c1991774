"""What is wrong with a target's run of a stored trace. Run as `python -m tests.corpus.passing` with
TRITON_INTERPRET=1, it prints that of our kernels for every stored trace, as one JSON object."""

from __future__ import annotations

import json
import warnings

from kvproof.corpus.store import StoredTrace, stored_traces
from kvproof.impl.targets.ours import Kvproof
from kvproof.impl.targets.protocol import Target, Ticket
from kvproof.properties.run import run_trace


def wrong_with(target: Target, stored: StoredTrace) -> list[str]:
    """Failures, accepted misuses, and answers that are not the stored ones; one line each."""
    assert stored.file.outcomes is not None
    result = run_trace(target, stored.file.trace, misuse_fails=True, record=True)
    wrong = [failure.message for failure in result.failures]
    wrong += [f"accepted {kind}: {left}" for kind, left in result.tally.accepted.items()]
    if result.tally.skipped:
        wrong.append(f"skipped {dict(result.tally.skipped)}")
    # No call, no answer; a stored word means that no slots come back.
    due = [outcome for outcome in stored.file.outcomes if outcome != "no call"]
    answers = [answer if answer is None else list(answer) for answer in result.answers or []]
    if answers != [None if isinstance(outcome, str) else outcome for outcome in due]:
        wrong.append(f"answers {answers}; stored {due}")
    return wrong


if __name__ == "__main__":
    warnings.simplefilter("error")
    kernels = Kvproof(Ticket(path="kernels"))
    assert kernels.path == "kernels"
    print(json.dumps({stored.name: wrong_with(kernels, stored) for stored in stored_traces()}))
