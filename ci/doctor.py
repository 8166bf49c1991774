"""`kvproof doctor`: what this machine is, and whether the harness sees every planted fault on it."""

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from itertools import chain

import msgspec

from kvproof.impl.targets.sglang import fetch
from kvproof.impl.targets.sglang.releases import SUPPORTED
from kvproof.model.errors import InfrastructureError


def doctor(*, as_json: bool) -> int:
    """Check the machine, then every control. 0 when all is well, 3 otherwise."""
    # Must stand before Triton's first import: the kernel plants are hunted in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"
    from kvproof.ci.deadly import deadly_controls
    from kvproof.properties.controls import all_controls

    facts = _machine()
    if not as_json:
        for name, fact in facts.items():
            print(f"{name:<12} {fact}")
    failed = skipped = total = 0
    rows = []
    for control in chain(all_controls(), deadly_controls()):
        total += 1
        skipped += control.outcome == "cannot run here"
        failed += not control.passed and control.outcome != "cannot run here"
        caught = control.catch
        how = (
            f"{caught.property_id} {caught.divergence}, {caught.ops} ops, {caught.seconds:.1f} s"
            if caught
            else ""
        )
        rows.append({"name": control.name, "what": control.what, "outcome": control.outcome, "how": how})
        if not as_json:
            print(f"{control.outcome:<16} {control.name:<40} {how}", flush=True)
    status = 0 if not failed and total > skipped else 3
    if as_json:
        print(msgspec.json.encode({"machine": facts, "controls": rows, "exit_code": status}).decode())
    else:
        print(f"{total - failed - skipped} of {total} controls as they should be, {skipped} cannot run here")
    return status


def _machine() -> dict[str, str]:
    """Facts that explain most surprises."""
    import torch

    facts = {"python": platform.python_version()}
    for package in ("kvproof", "torch", "triton", "hypothesis"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "absent"
    facts["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: lanes run on the CPU"
    cache = fetch.cache_dir()
    facts["cache"] = str(cache)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        facts["cache room"] = f"{shutil.disk_usage(cache).free >> 20} MiB free"
    except OSError as error:
        raise InfrastructureError(
            f"the cache folder {cache} cannot be made: {error.strerror}; set KVPROOF_CACHE"
        ) from None
    fetched = [number for number in SUPPORTED if fetch.cached(number)]
    facts["sglang"] = f"fetched: {', '.join(fetched) or 'none yet'}"
    return facts
