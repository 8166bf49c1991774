"""What each command does, as functions that return exit codes. Parsing stands in `cli.py`."""

import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from shlex import quote

import msgspec
from rich.console import Console

from kvproof.ci import wire
from kvproof.ci.campaign import Campaign, Plan
from kvproof.ci.confirm import confirm
from kvproof.ci.folder import FolderReporter, evidence, open_folder
from kvproof.ci.isolation import failure_of
from kvproof.ci.machine import fence_trouble, gpu_uuids, seats
from kvproof.ci.process import Limits, Seat, Worker, WorkerDied
from kvproof.ci.render import failure_lines, heading, replay_line
from kvproof.ci.terminal import TerminalReporter
from kvproof.corpus.format import TraceFile, encode, read
from kvproof.corpus.known import read_known
from kvproof.impl.targets.registry import split_name
from kvproof.model.config import ALLOCATORS
from kvproof.model.errors import InfrastructureError, KvproofError, UserError
from kvproof.model.trace import Trace
from kvproof.properties.catalogue import PROPERTIES
from kvproof.properties.failure import Failure
from kvproof.properties.lanes import EVERYWHERE, GPU_LANES, LANES, ON_A_GPU, Lane, lane_for

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What to run and how. target: None takes the trace's own."""

    target: str | None
    path: str
    device: str
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class FuzzOptions:
    """The command line of `fuzz`. workers: None for one a GPU or a core."""

    run: RunOptions
    allocator: str
    lane: str
    seed: int
    seconds: float | None
    leases: int | None
    workers: int | None
    misuse: bool
    longest: int
    out: str | None


def fuzz(options: FuzzOptions) -> int:
    """Run a campaign; see `campaign.py`."""
    target = options.run.target or ""
    split_name(target)
    device = device_for(options.run.device)
    names = _everything(device) if options.lane == "all" else _some(options.lane, LANES, "--lane")
    lanes = tuple(lane_for(name, device=device, path=options.run.path) for name in names)
    gpus = () if device == "cpu" else gpu_uuids()
    allocators = _some(options.allocator, ALLOCATORS, "--allocator")
    plan = Plan(
        target,
        allocators,
        lanes,
        options.seed,
        options.seconds,
        options.leases,
        options.workers or seats(gpus),
        options.misuse,
        options.longest,
        options.run.limits,
        gpus,
    )
    known = read_known()
    record = plan.record()
    wanted = _named(options.out) or _default_folder(target, options.seed)
    with (
        open_folder(wanted, record) as folder,
        TerminalReporter(Console(), folder.path, _flags(options.run)) as terminal,
    ):
        if folder.path != wanted:
            _say(f"results     go to {folder.path}, since {wanted} holds something else")
        # The terminal first: what the disk refuses has been seen all the same.
        return Campaign(plan, known, [terminal, FolderReporter(folder.path, record)], folder).run()


def _everything(device: str) -> tuple[str, ...]:
    """What "all" lanes are here; what is left out is said."""
    if device == "cpu":
        return EVERYWHERE
    if why := fence_trouble():
        print(f"left out    lane fenced: {why}", file=sys.stderr)
        return EVERYWHERE
    return ON_A_GPU


def _named(out: str | None) -> Path | None:
    """What --out names, if it was given."""
    if out == "":
        raise UserError("--out is empty; name a place, or leave the flag out")
    return None if out is None else Path(out)


def _default_folder(target: str, seed: int) -> Path:
    name = "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in target)
    return Path("kvproof-out") / f"{name}-seed{seed}"


def _some(text: str, known: tuple[str, ...], flag: str) -> tuple[str, ...]:
    """The names in a comma-separated flag; "all" is all."""
    if text == "all":
        return known
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise UserError(f"{flag} {text}: {name!r} is not known; choose all or some of {', '.join(known)}")
    return names


def device_for(wanted: str) -> str:
    """The device that --device means here. Raises UserError or InfrastructureError."""
    if wanted not in DEVICES:
        raise UserError(f"--device {wanted} is not known; choose one of {', '.join(DEVICES)}")
    if wanted == "cpu":
        return wanted
    import torch  # only here: it takes seconds to import

    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise InfrastructureError(
            "--device cuda: torch sees no GPU here; use --device cpu, or install a CUDA torch"
        )
    return "cpu"


def _flags(options: RunOptions) -> str:
    """What a line that reproduces a run must repeat of how it was made."""
    chosen = (("--path", options.path), ("--device", options.device))
    flags = "".join(f" {flag} {value}" for flag, value in chosen if value != "auto")
    usual, limits = Limits(), options.limits
    if limits.hang_seconds != usual.hang_seconds:
        flags += f" --hang-seconds {limits.hang_seconds:g}"
    if limits.memory_mib != usual.memory_mib:
        flags += f" --memory-limit {limits.memory_mib}"
    return flags


def _trace_lane(file: TraceFile, options: RunOptions, lane: str | None) -> tuple[str, Lane]:
    """The target and the lane to run a stored trace on."""
    origin = file.trace.origin
    target = options.target or origin.target
    if not target:
        raise UserError("the trace does not say which target it is for; name one with --target")
    split_name(target)
    name = lane or origin.lane
    if lane is None and name not in ("audited", *GPU_LANES):
        name = "seeded"
    return target, lane_for(name, device=device_for(options.device), path=options.path)


def replay(
    path: str, options: RunOptions, lane: str | None, times: int, *, isolate: bool = False, as_json: bool
) -> int:
    """Run a stored trace in a fresh process (isolate: in a fresh one each time) and print what it shows."""
    file = read(Path(path))
    target, where = _trace_lane(file, options, lane)
    done, release = _replayed(target, where, file.trace, times, options.limits, isolate=isolate)
    failed = sum(bool(run) for run in done.runs)
    first = {failure.fingerprint: failure for run in done.runs for failure in run}
    known = read_known()
    is_known = {name: any(entry.covers(name, release) for entry in known) for name in first}
    status = 0 if not failed else 4 if all(is_known.values()) else 1
    if not failed and not done.checked:
        raise _nothing_done(path, file, target, done)
    if as_json:
        failures = [{**msgspec.to_builtins(f), "fingerprint": name} for name, f in first.items()]
        report = {
            "target": target,
            "failed": failed,
            "times": times,
            "failures": failures,
            "skipped": done.skipped,
        }
        print(msgspec.json.encode({**report, "accepted": done.accepted, "exit_code": status}).decode())
        return status
    for name, failure in first.items():
        _say(f"{'KNOWN' if is_known[name] else 'NEW'}  {heading(failure)}")
        maps = done.maps if done.maps is not None and failure == _first(done) else None
        flags = f" --target {quote(target)} --lane {where.name}{_flags(options)}"
        reproduce = replay_line(path, flags, failure)
        for line in failure_lines(file.trace, failure, maps, reproduce):
            _say(line)
    for kind, left in done.accepted.items():
        _say(f"accepted   {kind}: {left}")
    if done.skipped:
        _say(f"skipped    {_counts(done.skipped)} (the target has no such call)")
    verdict = f"FAILED {failed} of {times}" if failed else f"PASSED {times} of {times}"
    _say(f"{verdict} on {target} ({where.name}), {done.checked} ops checked")
    return status


def _first(done: wire.Replayed) -> Failure | None:
    return next((run[0] for run in done.runs if run), None)


def _nothing_done(path: str, file: TraceFile, target: str, done: wire.Replayed) -> KvproofError:
    """Why no call was made: the trace's fault, on any target, or this target's."""
    if not file.trace.ops:
        return UserError(f"{path}: has no ops, so nothing to check; give a trace that makes a call")
    if not done.skipped:
        return UserError(
            f"{path}: every op of it comes to nothing (as a free does before there are rows), so nothing to"
            " check; give a trace that makes a call"
        )
    return InfrastructureError(
        f"{path}: no op of it could be run: {target} has no such call ({_counts(done.skipped)});"
        " choose another with --target"
    )


def _replayed(
    target: str, lane: Lane, trace: Trace, times: int, limits: Limits, *, isolate: bool = False
) -> tuple[wire.Replayed, str]:
    """What `times` replays showed, and of which release. One process, or as many as it takes."""
    runs: list[list[Failure]] = []
    done = wire.Replayed([], None, {}, {}, 0)
    seat = Seat(limits=limits, allocators=(trace.config.allocator,))
    with Worker(target, lane, seat) as worker:
        while len(runs) < times:
            if isolate and runs:
                worker.revive()
            more = 1 if isolate else times - len(runs)
            try:
                latest = worker.ask(wire.Replay(wire.text_of(trace), more), wire.Replayed)
            except WorkerDied as died:
                worker.revive()
                failure = failure_of(died.death, worker.ready.path)
                if failure is None:
                    raise
                runs.append([failure])
                continue
            runs.extend(latest.runs)
            # The maps are those of the first replay that failed; the counts those of the last.
            maps = done.maps if any(run for run in runs[: -len(latest.runs)]) else latest.maps
            done = msgspec.structs.replace(latest, maps=maps)
            if latest.lost and len(runs) < times:
                worker.revive()
        return msgspec.structs.replace(done, runs=runs), worker.ready.release


def emit_script(path: str, options: RunOptions, lane: str | None, out: str | None) -> int:
    """Write a script that reproduces a stored trace on a release of SGLang without kvproof, to a file or else
    to standard output. On a CPU, unless a device is named or the fault needs a GPU."""
    file = read(Path(path))
    destination = _named(out)
    if destination is not None and destination.exists():
        raise UserError(f"{destination} is there already; name another file with --out")
    shown = file.evidence
    if options.device == "auto" and not (shown and shown.divergence.startswith("synchronised")):
        options = replace(options, device="cpu")
    if lane is None and options.device == "cpu" and file.trace.origin.lane in GPU_LANES:
        lane = "audited"
    target, where = _trace_lane(file, options, lane)
    if split_name(target)[0] != "sglang":
        raise UserError(f"--emit-script is for releases of SGLang, not for {target}; name one with --target")
    seat = Seat(limits=options.limits, allocators=(file.trace.config.allocator,))
    with Worker(target, where, seat) as worker:
        prefer = (shown.fingerprint, shown.property) if shown else ("", "")
        request = wire.Script(wire.text_of(file.trace), prefer, where.device)
        scripted = worker.ask(request, wire.Scripted)
    if shown and scripted.failure.fingerprint != shown.fingerprint:
        note = f"the script shows {scripted.failure.fingerprint}: {shown.fingerprint} is not seen there"
        print(f"note        {note}", file=sys.stderr)
    if destination is None:
        print(scripted.text, end="")
        return 0
    try:
        destination.write_text(scripted.text, encoding="utf-8")
    except OSError as error:
        raise InfrastructureError(f"{destination}: cannot be written: {error.strerror or error}") from None
    _say(f"{heading(scripted.failure)}\nscript     {destination}")
    return 0


def shrink(path: str, options: RunOptions, lane: str | None, fingerprint: str | None, out: str | None) -> int:
    """Shrink a stored failing trace and write the smallest one."""
    file = read(Path(path))
    target, where = _trace_lane(file, options, lane)
    destination = _named(out) or Path(path).with_suffix(".min.json")
    if destination.exists():
        raise UserError(f"{destination} is there already; name another file with --out")
    done, _ = _replayed(target, where, file.trace, 1, options.limits)
    failure = _chosen(done.runs[0], fingerprint, path, target)
    confirmed = confirm(target, where, file.trace, failure, limits=options.limits)
    small, found = wire.trace_of(confirmed.trace), confirmed.failure or failure
    try:
        destination.write_bytes(encode(TraceFile(small, evidence=evidence(found))))
    except OSError as error:
        raise InfrastructureError(f"{destination}: cannot be written: {error.strerror or error}") from None
    _say(heading(found))
    flags = f" --target {quote(target)} --lane {where.name}{_flags(options)}"
    reproduce = replay_line(str(destination), flags, found)
    for line in failure_lines(small, found, confirmed.maps, reproduce):
        _say(line)
    _say(f"{len(file.trace.ops)} -> {len(small.ops)} ops in {confirmed.runs} runs: {destination}")
    return 0


def _chosen(failures: list[Failure], fingerprint: str | None, path: str, target: str) -> Failure:
    for failure in failures:
        if fingerprint in (None, failure.fingerprint):
            return failure
    what = f"failure {fingerprint}" if fingerprint else "failure"
    raise UserError(f"{path}: shows no {what} on {target}; nothing to shrink")


def properties(*, as_json: bool) -> int:
    """Print the catalogue."""
    if as_json:
        print(msgspec.json.encode([asdict(entry) for entry in PROPERTIES]).decode())
        return 0
    for entry in PROPERTIES:
        _say(f"{entry.id:<4} {entry.name:<24} {entry.asked:<9} {entry.statement}")
    return 0


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} x{count}" for name, count in counts.items())


def _say(text: str) -> None:
    print(text, file=sys.stdout)
