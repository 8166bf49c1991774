"""Checks on a device buffer (`alloc_device_buffer`, HiSparse): P1, P3, P4, P9.

A buffer is made of the row's own device slots first and of new pages then, whole ones. Which of them, and in
what order, is the target's choice, as long as nobody else had them.
"""

from kvproof.model.hisparse import DeviceModel
from kvproof.properties.step import Finding, Step, some


def check_buffer(step: Step) -> Finding | None:
    """P1: a buffer's slots are the row's own or were free, and each is there once."""
    return _of(step, "P1")


def check_buffer_padding(step: Step) -> Finding | None:
    """P3: no buffer holds the padding page."""
    return _of(step, "P3")


def check_buffer_shape(step: Step) -> Finding | None:
    """P4: a buffer is whole pages."""
    return _of(step, "P4")


def check_buffer_range(step: Step) -> Finding | None:
    """P9: a buffer's slots are of the device side."""
    return _of(step, "P9")


def _of(step: Step, property_id: str) -> Finding | None:
    found = _wrong_buffer(step)
    return found[1] if found is not None and found[0] == property_id else None


def _wrong_buffer(step: Step) -> tuple[str, Finding] | None:
    """The first thing wrong with a buffer, and which property that is."""
    slots, own = step.answer.slots, step.expectation.detached
    if slots is None or own is None or step.expectation.slots is None:
        return None
    if len(slots) != len(set(slots)):
        return "P1", Finding("buffer-slot-twice", f"slots {some(slots)} of a buffer repeat")
    owners = step.owners_before("device")
    # The model has given the buffer its pages already, and given back what was left over.
    owners.update(dict.fromkeys(own, "the row"))
    pages = _pages(step)
    for page in pages:
        owner = owners.get(page)
        if page == 0:
            return "P3", Finding("padding-page-in-buffer", f"slots {some(slots)} of a buffer: page 0")
        if owner is None:
            message = f"slots {some(slots)} of a buffer; pages {step.model.sides['device'].pages}"
            return "P9", Finding("slot-out-of-range (device)", message)
        if owner not in ("free", "staged", "the row"):
            return "P1", Finding("owned-page-in-buffer", f"device page {page} of the buffer: {owner}")
    # DeepSeek-V4's releases keep the newest slot in a place of its own, and with it one page more.
    in_parts = step.config.allocator == "hisparse-v4"
    if not in_parts and len(pages) * step.config.device_page_size != len(slots):
        message = f"{len(slots)} slots of a buffer lie in {len(pages)} pages: {some(slots)}"
        return "P4", Finding("part-of-page-in-buffer", message)
    return None


def adopt_buffer(step: Step) -> None:
    """Take over the pages that the target made the buffer of. After the checks."""
    assert isinstance(step.model, DeviceModel)
    step.model.adopt_buffer(step.expectation, _pages(step))


def _pages(step: Step) -> list[int]:
    """The pages of the buffer's slots, each once, in order."""
    slots = step.answer.slots or []
    return list(dict.fromkeys(slot // step.config.device_page_size for slot in slots))
