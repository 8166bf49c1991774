"""Wrong answers made by hand, at pools of one side, and what each must be called.

All of them on a pool of 4 pages of 4 slots: pages 1 … 4, slots 4 … 19, free list [1, 2, 3, 4]. Not here:
those of kinds with several lists (`wrong_sides.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproof.impl.targets.protocol import Answer, Damage, State
from kvproof.model import ops
from kvproof.model.config import Config
from kvproof.model.ops import Op
from tests.model.strategies import new

POOL = Config("paged", 16, 4)
SORTED = Config("paged", 16, 4, need_sort=True)
TOKEN = Config("token", 4, 1)
HELD = (new(4), ops.GroupBegin(), ops.Free((0,)))


@dataclass
class Case:
    """An answer (and lists) to the last op of a trace, and what it must be called. exact: only such targets
    are held to it. seen: the whole state, where lists do not tell it."""

    property_id: str
    divergence: str
    trace: tuple[Op, ...]
    answer: Answer
    free: list[int] | None = None
    staged: tuple[int, ...] = ()
    later: tuple[Damage, ...] = ()
    config: Config = POOL
    exact: bool = False
    seen: State | None = None

    @property
    def state(self) -> State | None:
        if self.seen is not None:
            return self.seen
        return None if self.free is None else State(self.free, list(self.staged), self.later)


def damaged(kind: str, where: str) -> tuple[Damage, ...]:
    return (Damage(kind, where, "by hand"),)


FIVE = [4, 5, 6, 7, 8]  # the right answer to new(5): pages 1 and 2; 8 slots are left
WRONG_ANSWERS = [
    Case("P6", "raised ValueError", (new(5),), Answer(error=ValueError("no"), available=16)),
    Case("P6", "raised RuntimeError", (new(17),), Answer(error=RuntimeError(), available=16)),
    Case("P9", "dtype", (new(5),), Answer(FIVE, None, 8, "int32")),
    Case("P2", "refused-with-room", (new(5),), Answer(None, available=16)),
    Case("P2", "refused-with-room", (ops.Extend(()),), Answer(None, available=16)),
    Case("P2", "answered-when-short", (new(17),), Answer(list(range(4, 21)), available=0)),
    Case("P2", "answer-not-due", (new(4), ops.Free((0,))), Answer([4], available=16)),
    Case("P8", "wrong-length", (new(5),), Answer(FIVE[:4], available=8)),
    Case("P8", "wrong-length", (new(5),), Answer([*FIVE, 9], available=8)),
    Case(
        "P8",
        "unwritten the output",
        (new(5),),
        Answer(FIVE, None, 8, damage=damaged("unwritten", "the output")),
    ),
    Case(
        "P8",
        "written-twice k.out",
        (new(5),),
        Answer(FIVE, None, 8, damage=damaged("written-twice", "k.out")),
    ),
    Case("P3", "padding-page-handed-out", (new(5),), Answer([4, 5, 6, 7, 0], available=8)),
    Case("P3", "padding-page-handed-out", (new(1),), Answer([1], available=12)),
    Case("P9", "slot-out-of-range", (new(5),), Answer([4, 5, 6, 7, 20], available=8)),
    Case("P9", "slot-out-of-range", (new(1),), Answer([-4], available=12)),
    Case("P9", "slot-out-of-range", (new(1),), Answer([5], available=3), config=TOKEN),
    Case("P5", "not-last-loc-plus-one", (new(1), ops.Extend(((0, 2),))), Answer([6, 7], available=12)),
    Case("P5", "not-last-loc-plus-one", (new(2), ops.Decode((0,))), Answer([8], available=12)),
    Case("P4", "old-page-not-filled-in-order", (new(1), ops.Extend(((0, 2),))), Answer([5, 7], available=12)),
    Case("P4", "not-one-page", (new(5),), Answer([4, 5, 6, 8, 9], available=8)),
    Case("P4", "not-one-page", (new(5),), Answer([4, 5, 6, 7, 9], available=8)),
    Case("P4", "not-one-page", (new(4), ops.Decode((0,))), Answer([9], available=8)),
    Case("P1", "page-handed-out-twice", (new(4, 4),), Answer([4, 5, 6, 7] * 2, available=8)),
    Case("P1", "page-handed-out-twice", (new(8),), Answer([4, 5, 6, 7] * 2, available=8)),
    Case("P1", "owned-page-handed-out", (new(4), new(2)), Answer([4, 5], available=8)),
    Case("P1", "owned-page-handed-out", (new(4), ops.Decode((0,))), Answer([4], available=8)),
    Case("P1", "owned-page-handed-out", (*HELD, new(4)), Answer([4, 5, 6, 7], available=8)),
    Case("P1", "owned-page-handed-out", (new(1), new(1)), Answer([1], available=2), config=TOKEN),
    Case("P14", "other-slots", (new(2),), Answer([8, 9], available=12), [1, 3, 4], exact=True),
]
REFUSED = "refusal-changed-state: "
WRONG_STATES = [
    Case("P6", REFUSED + "available-deficit", (new(17),), Answer(None, available=12)),
    Case("P6", REFUSED + "leaked-page", (new(17),), Answer(None, available=16), [1, 2, 3]),
    Case("P6", REFUSED + "duplicate-in-free-list", (new(17),), Answer(None, available=16), [1, 1, 2, 3]),
    Case("P3", "padding-page-in-free-list", (new(4), ops.Free((0,))), Answer(available=16), [0, 2, 3, 4]),
    Case("P9", "unknown-page-in-free-list", (new(4), ops.Free((0,))), Answer(available=16), [5, 2, 3, 4]),
    Case("P9", "unknown-page-in-free-list", (new(4), ops.Free((0,))), Answer(available=16), [-1, 2, 3, 4]),
    Case("P1", "duplicate-in-free-list", (new(4), ops.Free((0,))), Answer(available=20), [1, 1, 2, 3, 4]),
    Case(
        "P1",
        "duplicate-in-free-list",
        (new(4), ops.Free((0,))),
        Answer(available=16),
        [2, 3, 4],
        (2,),
        config=SORTED,
    ),
    Case("P1", "owned-page-in-free-list", (new(4),), Answer([4, 5, 6, 7], available=12), [1, 2, 3, 4]),
    Case("P1", "owned-page-in-free-list", HELD, Answer(available=16), [1, 2, 3, 4], exact=True),
    # A target may let a group's frees act at once, and has then one page more.
    Case("P2", "available-deficit", HELD, Answer(available=8)),
    Case("P2", "available-excess", (new(4), ops.Free((0,))), Answer(available=20)),
    Case("P2", "available-deficit", (new(4), ops.Free((0,))), Answer(available=12)),
    Case("P2", "leaked-page", (new(4), ops.Free((0,))), Answer(available=16), [2, 3, 4]),
    Case("P14", "free-list-order", (new(4), ops.Free((0,))), Answer(available=16), [2, 3, 4, 1], exact=True),
    Case(
        "P14",
        "staged-order",
        (new(8), ops.FreeSegment(0)),
        Answer(available=16),
        [3, 4],
        (2, 1),
        config=SORTED,
        exact=True,
    ),
    Case(
        "P7",
        "read-out-of-bounds k.free_pages",
        (new(17),),
        Answer(None, None, 16, damage=damaged("read-out-of-bounds", "k.free_pages")),
    ),
    Case(
        "P7",
        "guard-words an output",
        (new(5),),
        Answer(FIVE, None, 8, damage=damaged("guard-words", "an output")),
    ),
    Case(
        "P7",
        "input-changed last_loc",
        (new(5),),
        Answer(FIVE, None, 8, damage=damaged("input-changed", "last_loc")),
    ),
    Case(
        "P7",
        "write-out-of-bounds k.o",
        (new(5),),
        Answer(FIVE, None, 8, damage=damaged("write-out-of-bounds", "k.o")),
    ),
    Case(
        "P7",
        "output-changed an earlier output",
        (new(5),),
        Answer(FIVE, available=8),
        [3, 4],
        later=damaged("output-changed", "an earlier output"),
    ),
    Case(
        "P7",
        "illegal-access k",
        (new(5),),
        Answer(FIVE, None, 8, damage=damaged("illegal-access", "k")),
    ),
    *(
        Case("P15", f"{kind} here", (new(5),), Answer(FIVE, None, 8, damage=damaged(kind, "here")))
        for kind in ("synchronised", "recompiled", "launches")
    ),
    Case(
        "P8",
        "undefined-lane-used k.lens",
        (new(5),),
        Answer(FIVE, None, 8, damage=damaged("undefined-lane-used", "k.lens")),
    ),
    # What kernels do in every call hides nothing that they do now and then.
    Case(
        "P7",
        "read-out-of-bounds k.free_pages",
        (new(5),),
        Answer(
            FIVE,
            None,
            8,
            damage=damaged("undefined-lane-used", "k.lens") + damaged("read-out-of-bounds", "k.free_pages"),
        ),
    ),
    # What is dear hides nothing else.
    Case(
        "P7",
        "guard-words an output",
        (new(5),),
        Answer(FIVE, None, 8, damage=damaged("launches", "here") + damaged("guard-words", "an output")),
    ),
    Case("P2", "available-deficit", (new(5),), Answer(FIVE, None, 4, damage=damaged("synchronised", "here"))),
    # Whatever the fault looks like, in a group's calls and after a clobber it has one name.
    Case("P11", "duplicate-in-free-list", (*HELD, ops.GroupEnd()), Answer(available=20), [1, 1, 2, 3, 4]),
    Case("P11", "available-deficit", (*HELD, ops.GroupEnd()), Answer(available=12)),
    Case("P11", "padding-page-in-free-list", (*HELD, ops.GroupEnd()), Answer(available=16), [0, 2, 3, 4]),
    Case("P11", "available-excess", (new(4), ops.GroupBegin()), Answer(available=16)),
    Case("P11", "keeps-callers-tensor", (new(4, 4), *HELD[1:], ops.Clobber()), Answer(available=8), [2, 4]),
    Case("P11", "keeps-callers-tensor", (new(4), ops.Clobber()), Answer(available=8)),
]

BUILT = Case(
    "P16",
    "not-forwarded debug_print",
    (new(5),),
    Answer(FIVE, None, 8, damage=damaged("not-forwarded", "debug_print")),
)
