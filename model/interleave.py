"""The page-interleave allocator, as its contract has it: pages dealt over the ranks that share one KV cache.

Page p is owned by rank p % N, its class; pages below N are padding. A chain with rotation base b takes its
position-page P from class (b + P) % N, so that its pages go round the ranks. A new chain without a base has
the class with most free pages drawn for it, the lowest on ties.

Not covered: which rank holds what of a page, and who remembers a chain's base but its row.
"""

from collections.abc import Callable
from typing import Any

from kvproof.model import calls, ops
from kvproof.model.base import Expectation, Growth, Outcome, Row, hand_over
from kvproof.model.config import Config
from kvproof.model.marks import Mark
from kvproof.model.ops import Op
from kvproof.model.paged import PagedModel
from kvproof.model.pool import Pool


class ChainRow(Row):
    """A row that knows its rotation base, None until one is given or drawn."""

    __slots__ = ("base",)

    def __init__(self) -> None:
        super().__init__([], 0)
        self.base: int | None = None


class InterleaveModel(PagedModel):
    """One pool a class, and the rows in them. The main pool is class 0, the sides are "class 1" …"""

    def __init__(self, config: Config) -> None:
        self.shards = self.padding = config.shards
        super().__init__(config)

    def _handle(self) -> dict[type[Op], Callable[[Any], Expectation]]:
        handlers = super()._handle()
        for op_type in (ops.Decode, ops.Alloc, ops.FreePages, ops.Resize):
            del handlers[op_type]
        return handlers | {ops.Chain: self._chain}

    def _reset(self) -> None:
        super()._reset()
        n, pages = self.shards, self.config.num_pages
        self.classes = [Pool(range(n + rank, n * (pages + 1), n), self.config.need_sort) for rank in range(n)]
        self.pool = self.classes[0]
        self.sides = {f"class {rank}": self.classes[rank] for rank in range(1, n)}

    @property
    def available(self) -> int:
        """`available_size()`: as if every class had as little as the one that has least."""
        return self.shards * self.page_size * min(pool.count for pool in self.classes)

    @property
    def sizes(self) -> dict[str, int]:
        """See AllocatorModel."""
        return {"aggregate": self.page_size * sum(pool.count for pool in self.classes)}

    def owners(self, side: str = "") -> dict[int, str]:
        """See AllocatorModel. A page number names its class, so one map serves all."""
        owners: dict[int, str] = {}
        for pool in self.classes:
            owners.update(dict.fromkeys(pool.free, "free"))
            owners.update(dict.fromkeys(pool.staged, "staged"))
            owners.update(dict.fromkeys(pool.deferred(), "deferred"))
        for pages, name in self._holders(side):
            owners.update(dict.fromkeys(pages, name))
        return owners

    def deferred(self) -> list[int]:
        """See AllocatorModel: of all classes."""
        return [page for pool in self.classes for page in pool.deferred()]

    def due_class(self, growth: Growth, place: int) -> int:
        """The class that the row's page at this place must come from."""
        assert isinstance(growth.row, ChainRow)
        assert growth.row.base is not None
        return (growth.row.base + place) % self.shards

    # --- allocation -------------------------------------------------------------------------------

    def _new_row(self) -> Row:
        return ChainRow()

    def _can_grow(self, row: Row) -> bool:
        return row.length % self.page_size == 0

    def _chain(self, op: ops.Chain) -> Expectation:
        growths, fresh = self._batch([(ops.NEW_ROW, op.tokens)])
        row = growths[0].row
        assert isinstance(row, ChainRow)
        row.base = op.base % self.shards
        expectation = self._grow_pages(growths)
        if expectation.outcome is Outcome.SLOTS:
            self.rows.extend(fresh)
        return expectation

    def _allocate(self, call: calls.Call, growths: list[Growth], need: int, may_need: int) -> Expectation:
        """All rows or none; every class first decides whether it has what its share comes to."""
        assert isinstance(call, calls.ExtendCall)
        call.bases = [growth.row.base for growth in growths if isinstance(growth.row, ChainRow)]
        bases, wanted = self._deal(growths, call.bases)
        left = [pool.count - len(places) for pool, places in zip(self.classes, wanted, strict=True)]
        if min(left) < 0:
            self._note_short(need)
            return Expectation(call, Outcome.OOM, self.available, bases=list(call.bases))
        if any(len(places) > len(pool.free) for pool, places in zip(self.classes, wanted, strict=True)):
            for pool in self.classes:
                if pool.merge_for(1 << 62):
                    self.marks[Mark.STAGED_MERGE] += 1
        taken = self._take(growths, wanted)
        slots: list[int] = []
        for growth, base in zip(growths, bases, strict=True):
            assert isinstance(growth.row, ChainRow)
            growth.row.length, growth.row.base = growth.seq, base
            slots += self.slots_of(growth.row, growth.prefix, growth.seq)
        self._note_classes(taken)
        return Expectation(call, Outcome.SLOTS, self.available, slots, growths, taken, bases=[*bases])

    def _deal(
        self, growths: list[Growth], given: list[int | None]
    ) -> tuple[list[int], list[list[tuple[int, int]]]]:
        """The rows' bases, drawn where none is given, and which (row, page) places each class serves."""
        counts = [pool.count for pool in self.classes]
        bases: list[int] = []
        wanted: list[list[tuple[int, int]]] = [[] for _ in self.classes]
        for number, (growth, base) in enumerate(zip(growths, given, strict=True)):
            if base is None:
                if counts.count(max(counts)) > 1:
                    self.marks[Mark.BASE_TIED] += 1
                base = counts.index(max(counts))
                self.marks[Mark.BASE_DRAWN] += 1
            bases.append(base)
            for place in range(growth.first_new, self.pages(growth.seq)):
                owner = (base + place) % self.shards
                counts[owner] -= 1
                wanted[owner].append((number, place))
        return bases, wanted

    def _take(self, growths: list[Growth], wanted: list[list[tuple[int, int]]]) -> list[int]:
        """Each class serves its places in batch order. The pages taken, in batch order."""
        placed: dict[tuple[int, int], int] = {}
        for pool, places in zip(self.classes, wanted, strict=True):
            placed.update(zip(places, pool.take(len(places)), strict=True))
        taken: list[int] = []
        for number, growth in enumerate(growths):
            new = [placed[number, place] for place in range(growth.first_new, self.pages(growth.seq))]
            growth.row.pages += new
            taken += new
        return taken

    def adopt(self, expectation: Expectation, pages: list[int], peers: dict[str, list[int]]) -> None:
        """See AllocatorModel. Each chosen page is of the class that was due."""
        for rank, pool in enumerate(self.classes):
            mine = [page for page in expectation.taken if page % self.shards == rank]
            pool.adopt(mine, [page for page in pages if page % self.shards == rank])
        hand_over(expectation.growths, pages)
        expectation.taken = pages

    # --- release ----------------------------------------------------------------------------------

    def _release_slots(self, pages: list[int], slots: list[int], order: int) -> None:
        self._release_in_order(pages)

    def _release_in_order(self, pages: list[int], first: int = 0) -> None:
        """Every free splits by owner, and counts as a set."""
        self._note_deferred(pages)
        for rank, pool in enumerate(self.classes):
            mine = [page for page in pages if page % self.shards == rank]
            if mine:
                pool.release_set(mine)

    # --- marks ------------------------------------------------------------------------------------

    def _note_short(self, need: int) -> None:
        self.marks[Mark.REFUSAL] += 1
        if need <= sum(pool.count for pool in self.classes):
            self.marks[Mark.CLASS_SHORT] += 1

    def _note_classes(self, taken: list[int]) -> None:
        marks = self.marks
        if taken and not any(pool.count for pool in self.classes):
            marks[Mark.EXACT_EXHAUSTION] += 1
        if taken and self.deferred():
            marks[Mark.ALLOC_IN_GROUP] += 1
        if any(not pool.released.isdisjoint(taken) for pool in self.classes):
            marks[Mark.RECYCLED] += 1
