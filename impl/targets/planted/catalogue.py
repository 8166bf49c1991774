"""The list of planted faults: what each changes in a copy of our allocators, and which properties it breaks.

Every plant is data: one piece of text, which must occur exactly once in one file of `impl/`, and what stands
in its place. Where the text no longer occurs, `copy.faulty` and a test say so: no change of `impl/` disarms a
plant unseen. Faults that no caller can see (a wasted copy, a check made late but in time) are not listed.
Faults in code that several kinds of allocators share are hunted on one of them, or on each under an id of
its own.

`PLANTS` can be hunted within a process; `DEADLY` end the process that meets them.

Not covered: row tables and entry points, which are not there yet.
"""

from typing import Final

from kvproof.impl.targets.planted.dealt import DEALT_PLANTS
from kvproof.impl.targets.planted.deaths import DEATH_PLANTS
from kvproof.impl.targets.planted.devices import DEVICE_PLANTS
from kvproof.impl.targets.planted.plant import Plant
from kvproof.impl.targets.planted.pools import POOL_PLANTS
from kvproof.impl.targets.planted.side_kernels import SIDE_KERNEL_PLANTS
from kvproof.impl.targets.planted.sides import SIDE_PLANTS
from kvproof.impl.targets.planted.slots import SLOT_PLANTS
from kvproof.impl.targets.planted.variants import VARIANT_PLANTS

PLANTS: Final[tuple[Plant, ...]] = (
    POOL_PLANTS
    + SLOT_PLANTS
    + SIDE_PLANTS
    + VARIANT_PLANTS
    + DEVICE_PLANTS
    + DEALT_PLANTS
    + SIDE_KERNEL_PLANTS
)
DEADLY: Final[tuple[Plant, ...]] = DEATH_PLANTS
