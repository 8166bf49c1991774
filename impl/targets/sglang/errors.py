"""The one error of this folder.

It covers everything that keeps a release of SGLang from being used: not fetched, not importable, a package
missing. It does NOT cover what an allocator does wrong once it is loaded; that is what the properties
judge.
"""

from __future__ import annotations


class SglangUnavailable(RuntimeError):
    """A release of SGLang cannot be fetched or loaded; the message is one line: the cause and a remedy."""
