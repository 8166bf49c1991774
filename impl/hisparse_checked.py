"""Checked mode of the HiSparse allocators: the ledger of the device pool, and the mapping that leads to it.

A device page is a row's, as the mapping tells, of which the entries in question are read back; or it is part
of a buffer, of which nothing but this ledger knows. Calls are checked on both sides before either is
changed:

    logical page 3   12 13 14 15      live: row 0
    mapping          28 29  0  0      device page 7; 30 and 31 are nobody's, decode has taken no device slots
    device page 7    28 29            live: row 0, until alloc_device_buffer makes 28 to 31 a buffer's

Not covered: what the logical side's own ledger says (`checked.py`, `swa_checked.py`).
"""

from collections.abc import Iterable

import torch

from kvproof.impl.checked import Ledger


class DeviceLedger:
    """Who has which device slots.

    logical, device: the ledgers of the two pools. mapping: the allocator's, [entries + 1] int64; read, never
    written. compression: logical slots for which an entry stands, the last of them being its token.
    page_size: device slots in a page, which are the entries of a logical page. All checks raise
    AllocatorError (StateError for damage) and change nothing.
    """

    def __init__(
        self, logical: Ledger, device: Ledger, mapping: torch.Tensor, compression: int, page_size: int
    ) -> None:
        self._logical = logical
        self._device = device
        self._mapping = mapping
        self._compression = compression
        self._page_size = page_size
        self._buffers: set[int] = set()
        device.side = "device"

    # --- allocation -------------------------------------------------------------------------------

    def check_growth(self, prefix_lens: list[int], seq_lens: list[int], last_loc: list[int]) -> None:
        """Check the device side of an extend just begun. Lengths and slots are the logical ones."""
        each = self._compression
        rows: list[tuple[int, int, int]] = []
        for row, (prefix, seq, last) in enumerate(zip(prefix_lens, seq_lens, last_loc, strict=True)):
            first, grown = prefix // each, seq // each
            if first % self._page_size == 0 or grown <= first:
                rows.append((0, 0, -1))
                continue
            peer = self._entries([(last + 1) // each - 1])[0]
            if peer < self._page_size:
                self._device.refuse(
                    "last_loc to have a device slot, for the row goes on inside its page",
                    f"slot {last} in batch row {row} of prefix {prefix}, unmapped",
                    "Extend it by its logical side alone, at least up to the page's end.",
                )
            rows.append((first, grown, peer))
        self._device.check_growth(*([row[at] for row in rows] for at in range(3)))

    def hand_out(self, slots: list[int], counts: list[int] | None) -> None:
        """Write down the device side of what the call just begun is about to return.

        slots: logical ones, which are mapped already; counts: how many device slots each batch row gets, None
        when there are no rows. Raises StateError when one is not a new one.
        """
        each = self._compression
        entries = [slot // each for slot in slots if slot % each == each - 1]
        self._device.hand_out(self._entries(entries), counts)

    # --- release ----------------------------------------------------------------------------------

    def check_free(self, call: str, slots: list[int]) -> list[int]:
        """Before the device half of logical slots is released. Returns the device pages for `retire`."""
        self._device.begin(call)
        ps = self._page_size
        pages = dict.fromkeys(slot // (ps * self._compression) for slot in slots)
        entries = [page * ps + offset for page in pages for offset in range(ps)]
        return self._device.check_slots([peer for peer in self._entries(entries) if peer], repeats=False)

    def check_free_hisparse(self, slots: list[int]) -> list[int]:
        """Before `free_hisparse`: live logical slots. Returns as `check_free`."""
        self._logical.begin("free_hisparse")
        self._logical.check_live(slots)
        return self.check_free("free_hisparse", slots)

    def check_bare(self, call: str, slots: list[int]) -> None:
        """Before the logical side of these slots is released alone: their pages have no device slots."""
        for page in self.check_free(call, slots):
            peer = page * self._page_size
            self._device.refuse(
                "slots without device slots",
                f"slots mapped to page {page}, of {self._device.owner(peer)}",
                "Release those by free_hisparse first, or all sides by free.",
            )

    def retire(self, pages: Iterable[int]) -> None:
        """These device pages are released by the call just checked."""
        self._device.retire(pages)

    # --- buffers ----------------------------------------------------------------------------------

    def check_buffer(self, entries: list[int]) -> list[int]:
        """Before an `alloc_device_buffer` just begun: the entries of live slots of one row, each once, that
        lead to whole pages. Returns these device pages in row order.
        """
        each = self._compression
        self._logical.begin("alloc_device_buffer")
        self._logical.check_live(entry * each + each - 1 for entry in entries)
        seen: set[int] = set()
        for entry in entries:
            if entry in seen:
                self._logical.refuse(
                    "every slot once", f"slot {entry} twice in one call", "Pass a row, uncut and unsorted."
                )
            seen.add(entry)
        return self._device.check_segments([[peer for peer in self._entries(entries) if peer]])

    def note_buffer(self, buffer: list[int], surplus: list[int]) -> None:
        """The call just checked has made a buffer of these device pages, and released the others."""
        self._device.retire(surplus)
        self._device.hand_over(buffer)
        self._buffers.update(buffer)

    def free_buffer(self, slots: list[int]) -> None:
        """`free_hisparse_indices`: all slots of pages of buffers, apart from those of the padding page."""
        self._device.begin("free_hisparse_indices")
        pages = self._device.check_slots([slot for slot in slots if slot >= self._page_size], repeats=True)
        for page in pages:
            if page not in self._buffers:
                self._device.refuse(
                    "slots of buffers",
                    f"page {page}, a row's: {self._device.owner(page * self._page_size)}",
                    "Release what a row is mapped to by free_hisparse.",
                )
        self._buffers.difference_update(pages)
        self._device.retire(pages)

    # --- the parts --------------------------------------------------------------------------------

    def _entries(self, entries: list[int]) -> list[int]:
        """The mapping there; 0 where there is none, outside the pool included."""
        last = self._mapping.numel() - 1
        at = torch.tensor(
            [entry if 0 <= entry < last else 0 for entry in entries],
            dtype=torch.int64,
            device=self._mapping.device,
        )
        return self._mapping[at].tolist()
