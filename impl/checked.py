"""The ledger of checked mode: who has which slot, kept on the host beside an allocator.

The allocator tells the ledger of every call *before* it changes anything; the ledger raises, naming slots and
owners, or writes the call down. It knows the contract, not the free list's order. Reading the arguments
from the device synchronises, which is the price of checked mode.

The slots of a page are handed out from its start without gaps, so that a page is known by how many of them
are out, and to whom:

    page 4 of 4 slots   16 17 | 18 | 19        [(2, extend call 1, row 0), (3, decode call 2, row 5)]
                        row 0 | 5  | not out

Not covered: slots that a caller keeps using after their release, and calls on an unchecked allocator.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from kvproof.impl.errors import AllocatorError, StateError

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Owner:
    """The call, and the row of its batch, that a slot was handed to. row: None for `alloc`."""

    call: str
    row: int | None

    def __str__(self) -> str:
        return self.call if self.row is None else f"{self.call}, batch row {self.row}"


# The owners of a live page by stretch: (offset just past the stretch, owner), ascending and never empty.
_Stretches = list[tuple[int, Owner]]


class Ledger:
    """What one allocator has handed out.

    page_size: slots in a page. num_pages: pages of the pool, numbered from `padding`, the number of padding
    pages. Calls are numbered from 1 in the order in which they were made since the ledger was opened, refused
    ones included. side: what errors call the pool where an allocator has several; "" where there is one.

    An allocator of several pools checks a call on each ledger before it writes it down on any: `begin`,
    `check_…` and `reckon` change nothing but the numbers of calls, `retire` and `write_down` refuse nothing.
    """

    def __init__(self, page_size: int, num_pages: int, padding: int = 1) -> None:
        self.side = ""
        self._page_size = page_size
        self._num_pages = num_pages
        self._pages_of_pool = range(padding, padding + num_pages)
        self._live: dict[int, _Stretches] = {}
        self._released_by: dict[int, str] = {}
        self._deferred: set[int] = set()
        self._in_group = False
        self._calls = 0
        self._call = ""

    def begin(self, call: str) -> None:
        """Number the call; what follows is said of it."""
        self._calls += 1
        self._call = f"{call} call {self._calls}"

    # --- allocation -------------------------------------------------------------------------------

    def begin_allocation(self, call: str, free: Sequence[int], staged: Sequence[int]) -> None:
        """Number the call and check the lists it would allocate from.

        free, staged: page numbers. Raises StateError when a page is there twice, is not of the pool, or is
        live or deferred as well, or when the pages do not add up.
        """
        self.begin(call)
        seen: set[int] = set()
        for page in (*free, *staged):
            if page not in self._pages_of_pool:
                self._damaged(f"page {page} in it, outside {self._range}")
            if page in seen:
                self._damaged(f"page {page} twice in it")
            if page in self._live:
                self._damaged(f"page {page} in it, live: {self._owners(page, range(self._used(page)))}")
            if page in self._deferred:
                self._damaged(f"page {page} in it, deferred by {self._released_by[page]}")
            seen.add(page)
        parts = (len(free), len(staged), len(self._deferred), len(self._live))
        if sum(parts) != self._num_pages:
            self._damaged(
                "{} free + {} staged + {} deferred + {} live".format(*parts) + f" of {self._num_pages} pages"
            )

    def check_extend(
        self,
        prefix_lens: list[int],
        prefix_lens_cpu: list[int],
        seq_lens: list[int],
        seq_lens_cpu: list[int],
        last_loc: list[int],
        num_tokens: int,
        num_new_pages: int | None,
    ) -> None:
        """Check the arguments of `alloc_extend`, all of one length. Raises AllocatorError."""
        self._require_equal("prefix_lens", prefix_lens, prefix_lens_cpu)
        self._require_equal("seq_lens", seq_lens, seq_lens_cpu)
        for row, (prefix, seq) in enumerate(zip(prefix_lens, seq_lens, strict=True)):
            if not 0 <= prefix <= seq:
                self.refuse(
                    "0 <= prefix_lens <= seq_lens",
                    f"prefix {prefix} and sequence {seq} in batch row {row}",
                    "A row cannot shrink; free its tail instead.",
                )
        total = sum(seq_lens) - sum(prefix_lens)
        if num_tokens != total:
            self.refuse(
                f"extend_num_tokens = sum(seq_lens - prefix_lens) = {total}",
                f"{num_tokens}",
                "Pass the number of slots that the batch needs.",
            )
        pages = sum(map(self._pages, seq_lens)) - sum(map(self._pages, prefix_lens))
        if num_new_pages not in (None, pages):
            self.refuse(
                f"num_new_pages = {pages}",
                f"{num_new_pages}",
                "Leave it out, or count pages(seq) - pages(prefix).",
            )
        self.check_growth(prefix_lens, seq_lens, last_loc)

    def check_decode(self, seq_lens: list[int], seq_lens_cpu: list[int], last_loc: list[int]) -> None:
        """Check the arguments of `alloc_decode`, all of one length. Raises AllocatorError."""
        self._require_equal("seq_lens", seq_lens, seq_lens_cpu)
        for row, seq in enumerate(seq_lens):
            if seq < 1:
                self.refuse("seq_lens >= 1", f"{seq} in batch row {row}", "Pass the lengths after the step.")
        self.check_growth([seq - 1 for seq in seq_lens], seq_lens, last_loc)

    def check_growth(self, prefix_lens: list[int], seq_lens: list[int], last_loc: list[int]) -> None:
        """Check that rows of these lengths may grow behind these slots. Raises AllocatorError."""
        size = self._page_size
        last_out: dict[
            int, int
        ] = {}  # offset of the last slot out, for pages that earlier batch rows grew in
        for row, (prefix, seq, last) in enumerate(zip(prefix_lens, seq_lens, last_loc, strict=True)):
            if (last + 1) % size != prefix % size:
                self.refuse(
                    f"(last_loc + 1) % {size} = prefix % {size} = {prefix % size}",
                    f"last_loc {last} in batch row {row} of prefix {prefix}",
                    "Pass the slot of the row's last token, -1 for an empty row.",
                )
            if prefix % size == 0:
                continue
            page, offset = divmod(last, size)
            if offset >= self._used(page):
                self.refuse(
                    "last_loc to be a live slot",
                    f"slot {last} in batch row {row} of prefix {prefix}, {self._why_dead(page)}",
                    "Extend a row only while its slots are live.",
                )
            if seq == prefix:
                continue
            newest = last_out.get(page, self._used(page) - 1)
            if offset != newest:
                self.refuse(
                    "last_loc to be the last slot handed out of its page",
                    f"slot {last} in batch row {row}, but slot {last + 1} is out too"
                    + (
                        f": {self._owners(page, [offset + 1])}"
                        if offset + 1 < self._used(page)
                        else " in this batch"
                    ),
                    "Two rows cannot both grow in one page; give one a page of its own.",
                )
            last_out[page] = min(offset + seq - prefix, size - 1)

    def hand_out(self, slots: list[int], counts: list[int] | None) -> None:
        """Write down what the call just begun is about to return.

        Arguments and errors as `reckon`.
        """
        self.write_down(self.reckon(slots, counts))

    def reckon(self, slots: list[int], counts: list[int] | None) -> dict[int, _Stretches]:
        """What `write_down` is to be told when the call just begun returns these slots.

        slots: its output; counts: how many of them each batch row gets, None when there are no rows. Raises
        StateError when a slot is handed out twice, skips a slot of its page, or is not of the pool.
        """
        new: dict[int, _Stretches] = {}
        at = 0
        for row, count in enumerate([len(slots)] if counts is None else counts):
            owner = Owner(self._call, None if counts is None else row)
            for slot in slots[at : at + count]:
                page, offset = divmod(slot, self._page_size)
                stretches = new[page] if page in new else list(self._live.get(page, ()))
                used = stretches[-1][0] if stretches else 0
                if page not in self._pages_of_pool or page in self._deferred or offset != used:
                    self._wrong_slot(slot, used, stretches)
                if stretches and stretches[-1][1] == owner:
                    stretches.pop()
                stretches.append((offset + 1, owner))
                new[page] = stretches
            at += count
        return new

    def write_down(self, new: dict[int, _Stretches]) -> None:
        """These pages have these owners from here on."""
        self._live.update(new)
        for page in new:
            self._released_by.pop(page, None)

    # --- release ----------------------------------------------------------------------------------

    def release_slots(self, call: str, slots: list[int], *, repeats: bool) -> None:
        """A free by slots: they must be all live slots of the pages they touch.

        repeats: whether a slot may be named more than once. Raises AllocatorError.
        """
        self.begin(call)
        self.retire(self.check_slots(slots, repeats=repeats))

    def check_slots(self, slots: list[int], *, repeats: bool) -> list[int]:
        """The pages of these slots, in order of appearance, when the slots are all that is live of them.

        Otherwise AllocatorError, and when one is named twice without `repeats`.
        """
        named: dict[int, set[int]] = {}
        for slot in slots:
            page, offset = divmod(slot, self._page_size)
            offsets = named.setdefault(page, set())
            if offset in offsets and not repeats:
                self.refuse("every slot once", f"slot {slot} twice in one call", "Remove repeated slots.")
            offsets.add(offset)
        for page, offsets in named.items():
            self._require_live(page, self._slots(page, offsets))
            used = self._used(page)
            beyond = [offset for offset in sorted(offsets) if offset >= used]
            if beyond:
                self.refuse(
                    "live slots", f"{self._slots(page, beyond)}, never handed out", "Free what was allocated."
                )
            kept = [offset for offset in range(used) if offset not in offsets]
            if kept:
                verb = "is" if len(kept) == 1 else "are"
                self.refuse(
                    "all live slots of every page",
                    f"a free of {self._slots(page, offsets)} that would release page {page}, whose "
                    f"{self._slots(page, kept)} {verb} live: {self._owners(page, kept)}",
                    "Free whole pages, or the tail of a row from a page boundary on.",
                )
        return list(named)

    def release_segments(self, call: str, segments: list[list[int]]) -> None:
        """A free by stretches of one row, each from a page boundary: as `release_slots`, and in row order."""
        self.begin(call)
        self.retire(self.check_segments(segments))

    def check_segments(self, segments: list[list[int]]) -> list[int]:
        """The pages of these stretches, when `release_segments` may release them. Raises AllocatorError."""
        self.check_order(segments)
        return self.check_slots([slot for slots in segments for slot in slots], repeats=False)

    def release_pages(self, call: str, pages: list[int]) -> None:
        """A free by page numbers: each live, each once. Raises AllocatorError."""
        self.begin(call)
        seen: set[int] = set()
        for page in pages:
            self._require_live(page, f"page {page}")
            if page in seen:
                self.refuse("every page once", f"page {page} twice in one call", "Remove repeated page ids.")
            seen.add(page)
        self.retire(pages)

    def retire(self, pages: Iterable[int]) -> None:
        """These live pages are released, or deferred while a group is open."""
        for page in pages:
            owner = self._owners(page, range(self._used(page)))
            del self._live[page]
            self._released_by[page] = f"{self._call} (until then: {owner})"
            if self._in_group:
                self._deferred.add(page)

    def open_group(self) -> None:
        """From here on released pages are deferred."""
        self._in_group = True

    def close_group(self) -> None:
        """Deferred pages are in the lists again."""
        self._in_group = False
        self._deferred.clear()

    # --- what an allocator of several pools asks beside ---------------------------------------------

    def check_live(self, slots: Iterable[int]) -> None:
        """Raises AllocatorError unless each of these slots is live."""
        for slot in slots:
            page, offset = divmod(slot, self._page_size)
            self._require_live(page, f"slot {slot}")
            if offset >= self._used(page):
                self.refuse("live slots", f"slot {slot}, never handed out", "Pass what was allocated.")

    def check_order(self, segments: Iterable[list[int]]) -> None:
        """Raises AllocatorError unless each segment is a stretch of a row from a page boundary on."""
        size = self._page_size
        for slots in segments:
            for index, slot in enumerate(slots):
                expected = slots[index - index % size] + index % size
                if slot != expected or slot % size != index % size:
                    self.refuse(
                        "the slots of one row in position order from a page boundary",
                        f"slot {slot} at index {index} of a segment that starts with slot {slots[0]}",
                        "Pass a slice of the row, uncut and unsorted.",
                    )

    def owner(self, slot: int) -> str:
        """The call and batch row that this live slot was handed to."""
        page, offset = divmod(slot, self._page_size)
        return self._owners(page, [offset])

    def hand_over(self, pages: Iterable[int]) -> None:
        """All slots of these pages, live or new ones, belong to the call begun last from here on."""
        self.write_down({page: [(self._page_size, Owner(self._call, None))] for page in pages})

    def give_up(self, page: int, used: int) -> None:
        """Only the first `used` >= 1 slots of this live page are anybody's from here on."""
        kept = [(min(end, used), owner) for end, owner in self._live[page]]
        self._live[page] = [part for at, part in enumerate(kept) if not at or part[0] > kept[at - 1][0]]

    def refuse(self, expected: str, actual: str, remedy: str) -> NoReturn:
        """Raise AllocatorError for the call begun last."""
        raise AllocatorError(self._where, expected, actual, remedy)

    # --- the parts --------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        """The call begun last, and the pool where there are several."""
        return f"{self._call}, {self.side} side" if self.side else self._call

    @property
    def _range(self) -> str:
        return f"pages {self._pages_of_pool.start} to {self._pages_of_pool.stop - 1}"

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def _used(self, page: int) -> int:
        stretches = self._live.get(page)
        return stretches[-1][0] if stretches else 0

    def _require_equal(self, name: str, on_device: list[int], on_host: list[int]) -> None:
        for row, (device, host) in enumerate(zip(on_device, on_host, strict=True)):
            if device != host:
                self.refuse(
                    f"{name} and {name}_cpu to be equal",
                    f"{device} and {host} in batch row {row}",
                    "Update both when a length changes.",
                )

    def _require_live(self, page: int, what: str) -> None:
        if page in self._live:
            return
        if page in self._released_by:
            remedy = "Free every page once; it has been free since, or is another's."
        else:
            remedy = "Free only what was allocated."
        self.refuse("live slots", f"{what}, {self._why_dead(page)}", remedy)

    def _why_dead(self, page: int) -> str:
        """Why slots of this page, as far as they are not live, are not."""
        if 0 <= page < self._pages_of_pool.start:
            return "of the padding page"
        if page not in self._pages_of_pool:
            return f"outside {self._range}"
        if page in self._released_by:
            return f"of page {page}, released by {self._released_by[page]}"
        return f"of page {page}, never handed out"

    def _slots(self, page: int, offsets: Iterable[int]) -> str:
        return _listed("slot", [page * self._page_size + offset for offset in sorted(offsets)])

    def _owners(self, page: int, offsets: Iterable[int]) -> str:
        """The owners of these live offsets, each once."""
        owners = [next(owner for end, owner in self._live[page] if offset < end) for offset in offsets]
        return "; ".join(map(str, dict.fromkeys(owners)))

    def _wrong_slot(self, slot: int, used: int, stretches: _Stretches) -> NoReturn:
        offset = slot % self._page_size
        if offset < used:
            owner = next(owner for end, owner in stretches if offset < end)
            raise StateError(self._where, "new slots only", f"slot {slot} a second time: {owner}", _REBUILD)
        expected = f"slots of {self._range}, from each page's start without gaps"
        raise StateError(self._where, expected, f"slot {slot}", _REBUILD)

    def _damaged(self, actual: str) -> NoReturn:
        raise StateError(
            self._where, "every page once, free, staged, deferred or live", f"a list with {actual}", _REBUILD
        )


_REBUILD = (
    "The allocator's tensors were written from outside, or it is at fault itself; clear() rebuilds them."
)


def _listed(noun: str, numbers: list[int]) -> str:
    """`slot 3`, `slots 3, 4`, or the first few and how many more."""
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"{noun}{'' if len(numbers) == 1 else 's'} {shown}{more}"
