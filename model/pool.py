"""One free list of pages and what waits outside it: the part of the contract that every pool shares.

`Pool` is the paged kind: released pages return to the front, ascending where a free names slots. `Queue` is
the token kind: everything returns to the end in the order given. Both stage releases with `need_sort`, and
hold them while a group is open.

Not covered: who has a page that is not free (`base.py`), and how many a call needs.
"""


class Pool:
    """Pages of one pool.

    pages: all of them, in the initial order. free, staged: page numbers in list order. held: pages of an open
    group by kind of free, those that count as a set and those in order; None when no group is open. released:
    pages that have been released since the beginning.
    """

    __slots__ = ("free", "held", "need_sort", "pages", "released", "staged")

    def __init__(self, pages: range, need_sort: bool) -> None:
        self.pages = pages
        self.need_sort = need_sort
        self.reset()

    def reset(self) -> None:
        """Back to the initial state; a group is over and what it held is free."""
        self.free = list(self.pages)
        self.staged: list[int] = []
        self.held: tuple[list[int], list[int]] | None = None
        self.released: set[int] = set()

    @property
    def count(self) -> int:
        """Free and staged pages."""
        return len(self.free) + len(self.staged)

    def deferred(self) -> list[int]:
        """Pages an open group holds."""
        return [] if self.held is None else self.held[0] + self.held[1]

    def merge_for(self, may_need: int) -> bool:
        """Staged pages join the free list, sorted, when it may be too short. Whether any did."""
        if may_need <= len(self.free) or not self.staged:
            return False
        self.free = sorted(self.free + self.staged)
        self.staged = []
        return True

    def take(self, need: int) -> list[int]:
        """The first `need` pages; there must be as many."""
        taken = self.free[:need]
        del self.free[:need]
        return taken

    def adopt(self, predicted: list[int], chosen: list[int]) -> None:
        """Have taken the chosen pages, each free or staged before, and not the predicted ones."""
        self.free[:0] = predicted
        for page in chosen:
            (self.free if page in self.free else self.staged).remove(page)

    def release_set(self, pages: list[int]) -> None:
        """`free`: each page touched, once, ascending."""
        if self.held is not None:
            self.held[0].extend(pages)
        else:
            self._return(sorted(pages))

    def release_list(self, pages: list[int]) -> None:
        """`free_page_ids` and segments: these pages in this order."""
        if self.held is not None:
            self.held[1].extend(pages)
        else:
            self._return(pages)

    def begin(self) -> None:
        """Hold releases from here on."""
        self.held = ([], [])

    def end(self) -> tuple[list[int], list[int]]:
        """Release what was held: all sets as one, then all lists as one. Returns both."""
        sets, lists = self.held or ([], [])
        self.held = None
        self._return(sorted(sets))
        self._return(lists)
        return sets, lists

    def let_go(self, pages: list[int]) -> None:
        """Release some of what is held, though the group is still open."""
        gone = set(pages)
        for held in self.held or ():
            held[:] = [page for page in held if page not in gone]
        self._return(pages)

    def _return(self, pages: list[int]) -> None:
        self.released.update(pages)
        if self.need_sort:
            self.staged.extend(pages)
        else:
            self.free[:0] = pages


class Queue(Pool):
    """Slots of a token pool, first in, first out. A page is a slot."""

    __slots__ = ()

    def release_set(self, pages: list[int]) -> None:
        """As `release_list`: nothing is sorted or deduplicated."""
        self.release_list(pages)

    def _return(self, pages: list[int]) -> None:
        self.released.update(pages)
        (self.staged if self.need_sort else self.free).extend(pages)
