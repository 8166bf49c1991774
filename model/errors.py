"""Every error kvproof raises on purpose, under one root.

The split that matters to a caller is the exit code: what the user can mend (2) against what the machine
did (3). A found fault is never an exception; it is a `Failure` value.
"""


class KvproofError(Exception):
    """Root of all errors raised on purpose. `str(error)` is one line: cause and remedy."""

    exit_code = 3


class UserError(KvproofError):
    """Bad input: a flag, a file, an environment variable, a version. Exit code 2."""

    exit_code = 2


class InfrastructureError(KvproofError):
    """The machine let us down, or nothing could be done: no network, a dead worker. Exit code 3."""

    exit_code = 3
