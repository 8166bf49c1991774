"""Wrong answers made by hand, where a pool has several lists: two sides, buffers, shards.

What is wrong with a second side is named with it. Not here: pools of one side (`wrong_answers.py`).
"""

from __future__ import annotations

from kvproof.impl.targets.protocol import Answer, Lists, State
from kvproof.model import ops
from kvproof.model.config import Config
from tests.model.strategies import new
from tests.properties.wrong_answers import REFUSED, Case

# Two pages of two slots on either side: full slots 2 … 5, swa slots 2 … 5; 4 + 2 entries and the last.
PAIR = Config("swa", 4, 2, swa_size=4)
BOTH = {"full": 2, "swa": 2}


def pair(
    mapping: list[int],
    free: tuple[int, ...] = (2,),
    swa: tuple[int, ...] = (2,),
    sizes: dict[str, int] = BOTH,
) -> State:
    """After new(2) both sides have page 2 left."""
    return State([*free], [], sides={"swa": Lists([*swa], [])}, mappings={"swa": mapping}, sizes=sizes)


def twos(slots: list[int] | None, peers: list[int]) -> Answer:
    return Answer(slots, available=2, peers={"swa": peers})


MAPPED = [0, 0, 2, 3, 0, 0, -1]
UNMAPPED = [0] * 6 + [-1]
LOST = (new(2), ops.FreeSwa(0))
FREED = (new(2), ops.Free((0,)))
FOUR = Answer(available=4)
ALL = {"full": 4, "swa": 4}
WRONG_PAIRS = [
    Case("P10", "mapping-not-there (swa)", (new(2),), Answer([2, 3], available=2), config=PAIR),
    Case("P10", "mapping-not-there (swa)", (new(2),), twos([2, 3], [2]), config=PAIR),
    Case("P10", "live-slot-unmapped (swa)", (new(2),), twos([2, 3], [2, 0]), config=PAIR),
    Case("P10", "stale-entry (swa)", (ops.ExtendTail(-1, 2),), twos([2, 3], [0, 3]), config=PAIR),
    Case("P3", "padding-page-handed-out (swa)", (new(2),), twos([2, 3], [1, 2]), config=PAIR),
    Case("P9", "slot-out-of-range (swa)", (new(2),), twos([2, 3], [6, 7]), config=PAIR),
    Case("P4", "not-one-page (swa)", (new(2),), twos([2, 3], [2, 4]), config=PAIR),
    Case(
        "P1", "page-handed-out-twice (swa)", (new(1, 1),), Answer([2, 4], peers={"swa": [2, 2]}), config=PAIR
    ),
    Case(
        "P1",
        "owned-page-handed-out (swa)",
        (new(2), new(2)),
        Answer([4, 5], peers={"swa": [2, 3]}),
        config=PAIR,
    ),
    Case(
        "P5",
        "not-last-loc-plus-one (swa)",
        (new(1), ops.Decode((0,))),
        twos([3], [5]),
        config=PAIR,
    ),
    Case(
        "P14",
        "other-slots (swa)",
        (new(2),),
        twos([2, 3], [4, 5]),
        config=PAIR,
        exact=True,
        seen=pair([0, 0, 4, 5, 0, 0, -1], swa=(1,)),
    ),
    Case(
        "P10", "mapping-end (swa)", (new(2),), twos([2, 3], [2, 3]), config=PAIR, seen=pair([*MAPPED[:-1], 0])
    ),
    Case(
        "P9", "mapping-size (swa)", (new(2),), twos([2, 3], [2, 3]), config=PAIR, seen=pair([0, 0, 2, 3, -1])
    ),
    Case(
        "P10", "live-slot-unmapped (swa)", (new(2),), twos([2, 3], [2, 3]), config=PAIR, seen=pair(UNMAPPED)
    ),
    Case(
        "P10",
        "wrong-peer (swa)",
        (new(2),),
        twos([2, 3], [2, 3]),
        config=PAIR,
        seen=pair([0, 0, 3, 2, 0, 0, -1]),
    ),
    Case(
        "P10",
        "stale-entry (swa)",
        LOST,
        Answer(available=2),
        config=PAIR,
        seen=pair(MAPPED, swa=(1, 2), sizes={"full": 2, "swa": 4}),
    ),
    Case(
        "P10",
        "stale-entry-of-free-page (swa)",
        FREED,
        FOUR,
        config=PAIR,
        seen=pair(MAPPED, (1, 2), (1, 2), ALL),
    ),
    Case("P2", "leaked-page (swa)", FREED, FOUR, config=PAIR, seen=pair(UNMAPPED, (1, 2), (2,), ALL)),
    Case(
        "P1",
        "duplicate-in-free-list (swa)",
        FREED,
        FOUR,
        config=PAIR,
        seen=pair(UNMAPPED, (1, 2), (1, 1), ALL),
    ),
    Case(
        "P3",
        "padding-page-in-free-list (swa)",
        FREED,
        FOUR,
        config=PAIR,
        seen=pair(UNMAPPED, (1, 2), (0, 2), ALL),
    ),
    Case(
        "P9",
        "unknown-page-in-free-list (swa)",
        FREED,
        FOUR,
        config=PAIR,
        seen=pair(UNMAPPED, (1, 2), (3, 2), ALL),
    ),
    Case(
        "P14",
        "free-list-order (swa)",
        FREED,
        FOUR,
        config=PAIR,
        exact=True,
        seen=pair(UNMAPPED, (1, 2), (2, 1), ALL),
    ),
    Case(
        "P2",
        "swa-size",
        FREED,
        FOUR,
        config=PAIR,
        seen=pair(UNMAPPED, (1, 2), (1, 2), {"full": 4, "swa": 2}),
    ),
    Case("P2", "full-size", FREED, FOUR, config=PAIR, seen=pair(UNMAPPED, (1, 2), (1, 2), {"swa": 4})),
    Case(
        "P6",
        REFUSED + "leaked-page (swa)",
        (new(5),),
        FOUR,
        config=PAIR,
        seen=pair(UNMAPPED, (1, 2), (2,), ALL),
    ),
    Case(
        "P6",
        REFUSED + "live-slot-unmapped (swa)",
        (new(2), new(4)),
        twos(None, []),
        config=PAIR,
        seen=pair(UNMAPPED),
    ),
    Case(
        "P3",
        "misuse-corrupts free-swa-of-unmapped",
        (*LOST, ops.Misuse("free-swa-of-unmapped")),
        Answer(available=2),
        config=PAIR,
        seen=pair(UNMAPPED, swa=(0, 1, 2), sizes={"full": 2, "swa": 6}),
    ),
    Case(
        "P2",
        "side-not-shown (swa)",
        FREED,
        FOUR,
        config=PAIR,
        seen=State([1, 2], [], mappings={"swa": UNMAPPED}, sizes=ALL),
    ),
]

# Two device pages of two slots under two logical ones.
DEVICE = Config("hisparse", 4, 2, ratio=1)
ONE = (new(2), ops.DeviceBuffer(0, 1))
TWO = (new(2), ops.DeviceBuffer(0, 2))
WRONG_BUFFERS = [
    Case("P1", "buffer-slot-twice", TWO, Answer([2, 3, 2, 3], available=0), config=DEVICE),
    Case("P3", "padding-page-in-buffer", ONE, Answer([0, 1], available=2), config=DEVICE),
    Case("P9", "slot-out-of-range (device)", ONE, Answer([6, 7], available=2), config=DEVICE),
    Case("P1", "owned-page-in-buffer", (new(2, 2), ONE[1]), Answer([4, 5], available=0), config=DEVICE),
    Case("P4", "part-of-page-in-buffer", ONE, Answer([2, 4], available=2), config=DEVICE),
    Case("P8", "wrong-length", TWO, Answer([2, 3], available=2), config=DEVICE),
]

# One page in each of two classes: pages 2 and 3.
SHARDS = Config("page-interleave", 1, 1, shards=2)
WRONG_DEALS = [
    Case("P14", "rotation-bases", (new(1),), Answer([2], available=0, bases=[1]), config=SHARDS),
    Case("P14", "rotation-bases", (new(1),), Answer([2], available=0), config=SHARDS),
    Case("P4", "page-of-other-class", (new(1),), Answer([3], available=0, bases=[0]), config=SHARDS),
    Case("P3", "padding-page-handed-out", (new(1),), Answer([1], available=0, bases=[0]), config=SHARDS),
    Case(
        "P6",
        REFUSED + "rotation-bases",
        (new(3),),
        Answer(available=2, bases=[0]),
        config=SHARDS,
        seen=State([2], [], sides={"class 1": Lists([3], [])}, sizes={"aggregate": 2}),
    ),
    Case(
        "P2",
        "aggregate-size",
        (new(1),),
        Answer([2], available=0, bases=[0]),
        config=SHARDS,
        seen=State([], [], sides={"class 1": Lists([3], [])}, sizes={"aggregate": 2}),
    ),
]
