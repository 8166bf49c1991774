"""What the allocators raise when they refuse a call.

A pool that is merely too small is no error: the answer is then `None`. Errors of torch, Triton or the driver
pass through unchanged and are not covered here.
"""


class AllocatorError(ValueError):
    """The caller broke the contract; root of every refusal. The allocator is what it was before the call.

    call: the refused call, as `free` or `alloc_extend call 12`. expected, actual: what the contract asks and
    what came. remedy: what the caller should do instead, one sentence.
    """

    def __init__(self, call: str, expected: str, actual: str, remedy: str) -> None:
        # All four go to args, so that the error survives the way between processes.
        super().__init__(call, expected, actual, remedy)
        self.call = call
        self.expected = expected
        self.actual = actual
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.call}: expected {self.expected}, got {self.actual}. {self.remedy}"


class UnsupportedCallError(AllocatorError, NotImplementedError):
    """This kind of allocator has no such call. Also a NotImplementedError, which SGLang's callers expect."""


class StateError(AllocatorError):
    """The allocator's own lists contradict what it handed out. Checked mode only.

    Somebody wrote into its tensors, or an allocation computed a wrong slot.
    """
