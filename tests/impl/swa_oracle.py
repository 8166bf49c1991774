"""Section 5 of the contract in plain Python: two free lists, a mapping as a dict, no torch, none of our code.

Rows are the caller's: lists of full slots. Not covered: misuse, and the ring and pure variants.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class OraclePool:
    """One free list. fifo: releases go to the end, in order (pages of one slot)."""

    pages: int
    need_sort: bool
    fifo: bool
    free: list[int] = field(init=False)
    staged: list[int] = field(init=False)
    held: tuple[list[int], list[int]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.free, self.staged = list(range(1, self.pages + 1)), []

    def count(self) -> int:
        return len(self.free) + len(self.staged)

    def merge(self, may_need: int) -> None:
        if self.staged and may_need > len(self.free):
            self.free, self.staged = sorted(self.free + self.staged), []

    def take(self, n: int) -> list[int]:
        taken, self.free = self.free[:n], self.free[n:]
        return taken

    def give(self, pages: list[int]) -> None:
        if self.need_sort:
            self.staged += pages
        else:
            self.free = self.free + pages if self.fifo else pages + self.free

    def release_set(self, pages: list[int]) -> None:
        if self.held is None:
            self.give(sorted(set(pages)))
        else:
            self.held[0].extend(pages)

    def release_list(self, pages: list[int]) -> None:
        if self.held is None:
            self.give(pages)
        else:
            self.held[1].extend(pages)

    def end(self) -> None:
        sets, lists = self.held
        self.held = None
        self.give(sorted(set(sets)))
        self.give(lists)


class SwaOracle:
    """Two pools and the mapping. peer: full slot -> swa slot."""

    def __init__(self, size: int, size_swa: int, page_size: int, need_sort: bool) -> None:
        self.ps = page_size
        self.full = OraclePool(size // page_size, need_sort, page_size == 1)
        self.swa = OraclePool(size_swa // page_size, need_sort, page_size == 1)
        self.entries = size + page_size
        self.peer: dict[int, int] = {}

    def mapping(self) -> list[int]:
        return [self.peer.get(slot, 0) for slot in range(self.entries)] + [-1]

    def alloc(self, n: int) -> list[int] | None:
        if n > min(self.full.count(), self.swa.count()):
            return None
        self.full.merge(n)
        self.swa.merge(n)
        slots = self.full.take(n)
        self.peer.update(zip(slots, self.swa.take(n), strict=True))
        return slots

    def extend(self, rows: list[tuple[int, int, int]], tail: int | None = None) -> list[int] | None:
        """Rows (prefix, seq, last_loc)."""
        tokens = sum(seq - prefix for prefix, seq, _ in rows)
        estimate = tokens // self.ps + len(rows) + 1
        if tail is None:
            return self._grow(rows, estimate, estimate)
        return self._grow(rows, estimate, tail // self.ps + 2 if tail else 0, tail)

    def decode(self, rows: list[tuple[int, int]]) -> list[int] | None:
        """Rows (seq after the step, last_loc)."""
        return self._grow([(seq - 1, seq, last) for seq, last in rows], len(rows), len(rows))

    def _grow(
        self, rows: list[tuple[int, int, int]], may_full: int, may_swa: int, tail: int | None = None
    ) -> list[int] | None:
        ps = self.ps
        need = sum(-(-seq // ps) - -(-prefix // ps) for prefix, seq, _ in rows)
        need_swa = need if tail is None else -(-tail // ps)
        if need > self.full.count() or need_swa > self.swa.count():
            return None
        self.full.merge(may_full)
        self.swa.merge(may_swa)
        slots: list[int] = []
        for prefix, seq, last in rows:
            start = seq - tail if tail is not None else prefix
            peer = self.peer.get(last, -1) if tail is None else -1
            for q in range(prefix, seq):
                last = last + 1 if q % ps else self.full.take(1)[0] * ps
                slots.append(last)
                self.peer.pop(last, None)
                if q >= start:
                    fresh = (q - start) % ps == 0 if tail is not None else q % ps == 0
                    peer = self.swa.take(1)[0] * ps if fresh else peer + 1
                    self.peer[last] = peer
        return slots

    def _peer_pages(self, pages: list[int]) -> list[int]:
        """The swa pages of full pages, each once; their entries are gone."""
        found: list[int] = []
        for page in pages:
            for slot in range(page * self.ps, (page + 1) * self.ps):
                peer = self.peer.pop(slot, None)
                if peer is not None and peer // self.ps not in found:
                    found.append(peer // self.ps)
        return found

    def free_swa(self, slots: list[int]) -> None:
        if self.ps == 1:
            self.swa.release_list(self._peer_pages(slots))
        else:
            self.swa.release_set(self._peer_pages([slot // self.ps for slot in slots]))

    def free_full(self, slots: list[int]) -> None:
        if self.ps == 1:
            self.full.release_list(slots)
        else:
            self.full.release_set([slot // self.ps for slot in slots])

    def free(self, slots: list[int]) -> None:
        self.free_swa(slots)
        self.free_full(slots)

    def free_swa_segment(self, slots: list[int]) -> None:
        self.swa.release_list(self._peer_pages([slot // self.ps for slot in slots[:: self.ps]]))

    def free_full_segment(self, slots: list[int]) -> None:
        self.full.release_list([slot // self.ps for slot in slots[:: self.ps]])

    def free_segment(self, slots: list[int]) -> None:
        self.free_swa_segment(slots)
        self.free_full_segment(slots)

    def begin(self) -> None:
        self.full.held, self.swa.held = ([], []), ([], [])

    def end(self) -> None:
        self.full.end()
        self.swa.end()
