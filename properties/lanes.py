"""Lanes: the ways to run a target, and what each costs.

    seeded      the plain loop, long traces: the torch path where a target has one, else its kernels
    audited     kernels in Triton's interpreter, every load and store checked (always on the CPU)
    hypothesis  the state machine, short traces

On a GPU, seeded and hypothesis run the compiled kernels there.
"""

from dataclasses import dataclass
from typing import Final

from kvproof.model.errors import UserError


@dataclass(frozen=True, slots=True)
class Lane:
    """One way to run a target.

    path, device, audited: as in `protocol.Ticket`. lease_ops: ops in one lease, chosen so that it takes a
    second or two. shares: how many of a campaign's leases it gets, relative to others.
    """

    name: str
    path: str
    device: str
    audited: bool
    lease_ops: int
    shares: int


LANES: Final = ("seeded", "audited", "hypothesis")
PATHS: Final = ("auto", "torch", "kernels")


def lane_for(name: str, *, device: str, path: str = "auto") -> Lane:
    """The lane of this name. Raises UserError for an unknown name, or a path the lane cannot take."""
    if path not in PATHS:
        raise UserError(f"--path {path} is not known; choose one of {', '.join(PATHS)}")
    match name:
        case "seeded":
            return Lane(name, path, device, audited=False, lease_ops=4000, shares=2)
        case "audited":
            if path == "torch":
                raise UserError("--lane audited audits kernels; use --path kernels or auto with it")
            return Lane(name, "kernels", "cpu", audited=True, lease_ops=1000, shares=2)
        case "hypothesis":
            return Lane(name, path, device, audited=False, lease_ops=300, shares=1)
        case _:
            raise UserError(f"--lane {name} is not known; choose all or some of {', '.join(LANES)}")
