"""Page numbers that turn out, on the device, to be none: counted without waiting where they are released.

A segment release on the swa side resolves peers on the device, and counts them, as a lawful caller may
expect, by the length of its input. A page without a peer, a caller's error, comes out as page 0, and only the
device knows. So the release sends word of it to the host and goes on; whoever needs to know for certain how
many pages there are waits for that word, which is behind the release's own work and no other, and all others
look whether it has come.

    pages on the device  --count-->  pinned word on the host        found(): is there a new stray?
                         --event-->                                 wait=False: as far as heard

On a CPU the word is the count itself and always there. Not covered: what to do about strays (`swa.py`).
"""

from typing import Any

import torch

# torch's events are not fully typed.
_cuda: Any = torch.cuda


class Strays:
    """The count of page 0 among the pages noted. device: where they live."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._heard = 0
        self._open = False
        if device.type == "cuda":
            self._word = torch.zeros(1, dtype=torch.int64, pin_memory=True)
            self._sent = _cuda.Event()
        else:
            self._word = self._count
            self._sent = None

    def note(self, pages: torch.Tensor) -> None:
        """Count the strays among these pages. pages: [n] on our device. Does not synchronise."""
        self._count += (pages == 0).sum()
        if self._sent is not None:
            self._word.copy_(self._count, non_blocking=True)
            self._sent.record(_cuda.current_stream(self._device))
        self._open = True

    def found(self, *, wait: bool) -> bool:
        """Whether there are strays that no earlier call told of.

        wait: until the device has counted the latest pages noted; without it the answer may still change.
        """
        if not self._open:
            return False
        if self._sent is not None and not self._sent.query():
            if not wait:
                return False
            self._sent.synchronize()
        self._open = False
        heard, self._heard = self._heard, int(self._word.item())
        return self._heard > heard
