"""Checks on a device buffer (`alloc_device_buffer`, HiSparse): P1, P3, P9.

A buffer is made of the row's own device slots first and of new pages then. Which of them, and in what order,
is the target's choice, as long as nobody else had them.
"""

from kvproof.model.hisparse import DeviceModel
from kvproof.properties.step import Finding, Step, some


def check_buffer(step: Step) -> Finding | None:
    """P1: a buffer's slots are the row's own or were free, and each is there once."""
    slots, own = step.answer.slots, step.expectation.detached
    if slots is None or own is None or step.expectation.slots is None:
        return None
    if len(slots) != len(set(slots)):
        return Finding("buffer-slot-twice", f"slots {some(slots)} of a buffer repeat")
    owners = step.owners_before("device")
    # The model has given the buffer its pages already, and given back what was left over.
    owners.update(dict.fromkeys(own, "the row"))
    for page in dict.fromkeys(slot // step.config.device_page_size for slot in slots):
        if owners.get(page) not in ("free", "staged", "the row"):
            return Finding(
                "owned-page-in-buffer", f"device page {page} of the buffer: {owners.get(page, 'nobody')}"
            )
    return None


def adopt_buffer(step: Step) -> None:
    """Take over the pages that the target made the buffer of. After `check_buffer`."""
    slots = step.answer.slots or []
    pages = list(dict.fromkeys(slot // step.config.device_page_size for slot in slots))
    assert isinstance(step.model, DeviceModel)
    step.model.adopt_buffer(step.expectation, pages)
