"""Lanes: the ways to run a target, and what each costs.

    seeded        the plain loop, long traces: the torch path where a target has one, else its kernels
    audited       kernels in Triton's interpreter, every load and store checked (always on the CPU)
    hypothesis    the state machine, short traces
    fenced        compiled kernels on a GPU, every tensor ending at an unmapped page
    fenced-begin  the same, every tensor beginning behind one
    sanitizer     compiled kernels under compute-sanitizer: memcheck, or the tool behind the dash

On a GPU, seeded and hypothesis run the compiled kernels there.
"""

from dataclasses import dataclass
from typing import Final

from kvproof.model.errors import InfrastructureError, UserError


@dataclass(frozen=True, slots=True)
class Lane:
    """One way to run a target.

    path, device, audited, fence: as in `protocol.Ticket`. sanitizer: the tool it runs under, or "".
    lease_ops: ops in one lease, chosen so that it takes a second or two. shares: how many of a campaign's
    leases it gets, relative to others.
    """

    name: str
    path: str
    device: str
    audited: bool
    lease_ops: int
    shares: int
    fence: str = ""
    sanitizer: str = ""


GPU_LANES: Final = {
    "fenced": ("end", ""),
    "fenced-begin": ("begin", ""),
    "sanitizer": ("", "memcheck"),
    "sanitizer-initcheck": ("", "initcheck"),
    "sanitizer-racecheck": ("", "racecheck"),
}
"""Lanes that only a GPU has: the fence and the sanitizer's tool of each."""

LANES: Final = ("seeded", "audited", "hypothesis", *GPU_LANES)
EVERYWHERE: Final = ("seeded", "audited", "hypothesis")
"""What "all" lanes are where there is no GPU."""

ON_A_GPU: Final = (*EVERYWHERE, "fenced")
"""What they are on one. The sanitizer is asked for by name: it is tens of times slower."""

PATHS: Final = ("auto", "torch", "kernels")


def lane_for(name: str, *, device: str, path: str = "auto") -> Lane:
    """The lane of this name. Raises UserError for an unknown name, or a path the lane cannot take;
    InfrastructureError for one that needs a GPU where there is none."""
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
        case name if name in GPU_LANES:
            return _gpu_lane(name, device=device, path=path)
        case _:
            raise UserError(f"--lane {name} is not known; choose all or some of {', '.join(LANES)}")


def _gpu_lane(name: str, *, device: str, path: str) -> Lane:
    if path == "torch":
        raise UserError(f"--lane {name} watches compiled kernels; use --path kernels or auto with it")
    if device == "cpu":
        raise InfrastructureError(
            f"--lane {name} needs a CUDA GPU, and torch sees none here; use --lane audited"
        )
    fence, sanitizer = GPU_LANES[name]
    ops = 300 if sanitizer else 1000
    return Lane(
        name, "kernels", device, audited=False, lease_ops=ops, shares=2, fence=fence, sanitizer=sanitizer
    )
