"""The errors of this folder.

They cover everything that keeps a release of SGLang from being used: not fetched, not importable, a package
missing, and a name that means no release at all. They do NOT cover what an allocator does wrong once it is
loaded; that is what the properties judge.
"""

from __future__ import annotations


class SglangUnavailable(RuntimeError):
    """A release of SGLang cannot be fetched or loaded; the message is one line: the cause and a remedy."""


class UnknownSglang(SglangUnavailable):
    """What was named is no SGLang, or none that is known here: the caller's to mend, on any machine."""
