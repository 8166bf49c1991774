"""The command line: `kvproof fuzz | replay | shrink | targets | doctor | properties | bench`.

Commands parse, call, print and choose an exit code; what they do stands elsewhere. Exit codes: 0 clean, 1 new
failure, 2 usage or bad input, 3 infrastructure or no work, 4 only known failures, 130 stopped by Ctrl-C or
SIGTERM.
"""

import os
import secrets
import signal
import sys
import traceback
from typing import Annotated, Any, Final, TextIO

import typer

from kvproof.ci import commands
from kvproof.ci.bench import run as run_bench
from kvproof.ci.bench_isolation import run as run_isolation
from kvproof.ci.commands import FuzzOptions, RunOptions
from kvproof.ci.doctor import doctor as run_doctor
from kvproof.ci.process import Limits
from kvproof.ci.targets import show_targets
from kvproof.model.errors import InfrastructureError, KvproofError, UserError

INTERRUPTED: Final = 130

# Typer brings its own copy of click in newer releases and imports click in older ones; this is the root of
# what either raises for bad usage.
_CommandLineError: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="kvproof",
    help="Property-based verification and fuzzing of KV-cache slot allocators.",
    epilog="Exit codes: 0 clean, 1 new failure, 2 bad input, 3 infrastructure or no work, 4 known failures.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure kvproof itself.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench, name="bench")

Target = Annotated[
    str,
    typer.Option(
        "--target", "-t", help="kvproof, reference, null, sglang, sglang==VERSION, sglang@PATH, planted:NAME."
    ),
]
Path_ = Annotated[str, typer.Option("--path", help="auto, torch or kernels (interpreted on a CPU).")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
TraceFile = Annotated[str, typer.Argument(metavar="TRACE", help="A trace file (JSON).")]
HangSeconds = Annotated[
    float, typer.Option("--hang-seconds", min=0.1, help="An op that takes longer has hung.")
]
MemoryLimit = Annotated[
    int, typer.Option("--memory-limit", min=1, metavar="MIB", help="What a worker may grow by.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]

FUZZ_EXAMPLES = """Examples:

  kvproof fuzz --target kvproof --seconds 60

  kvproof fuzz --target sglang==0.5.20 --allocator paged --lane audited --seed 0

  kvproof fuzz --target sglang@../sglang --leases 40 --workers 2 --out results
"""


@app.command(epilog=FUZZ_EXAMPLES)
def fuzz(
    target: Target,
    allocator: Annotated[str, typer.Option(help="all, or some of paged, token (comma-separated).")] = "all",
    lane: Annotated[
        str,
        typer.Option(help="all, or some of seeded, audited, hypothesis; on a GPU also fenced, sanitizer…"),
    ] = "all",
    seed: Annotated[int | None, typer.Option(min=0, help="Drawn and printed when left out.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Deal leases for so long (default 60, without --leases).")
    ] = None,
    leases: Annotated[int | None, typer.Option(min=1, help="Deal exactly so many leases.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Workers a lane; default: one a GPU, or a core (at most 8).")
    ] = None,
    misuse: Annotated[bool, typer.Option("--misuse", help="Draw forbidden calls as well.")] = False,
    path: Path_ = "auto",
    device: Device = "auto",
    longest: Annotated[int, typer.Option("--max-trace-ops", min=1, help="Longest trace, in ops.")] = 3000,
    hang_seconds: HangSeconds = 20.0,
    memory_limit: MemoryLimit = 4096,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Result folder; never overwritten, gone on with.")
    ] = None,
) -> None:
    """Fuzz a target in lockstep with the model. Stopped, the same command goes on where it was."""
    if seed is None:
        seed = secrets.randbelow(1 << 32)
    run = RunOptions(target, path, device, Limits(hang_seconds, memory_limit))
    if seconds is None and leases is None:
        seconds = 60.0
    options = FuzzOptions(run, allocator, lane, seed, seconds, leases, workers, misuse, longest, out)
    raise typer.Exit(commands.fuzz(options))


@app.command(epilog="Example: kvproof replay kvproof-out/kvproof-seed0/failures/9208e54a.json --times 5")
def replay(
    trace: TraceFile,
    target: Annotated[str | None, typer.Option("--target", "-t", help="Default: the trace's own.")] = None,
    lane: Annotated[str | None, typer.Option(help="Default: the trace's own.")] = None,
    path: Path_ = "auto",
    device: Device = "auto",
    times: Annotated[int, typer.Option(min=1, help="Replays.")] = 1,
    isolate: Annotated[bool, typer.Option("--isolate", help="Each replay in a process of its own.")] = False,
    hang_seconds: HangSeconds = 20.0,
    memory_limit: MemoryLimit = 4096,
    json: Json = False,
    emit_script: Annotated[
        bool,
        typer.Option(
            "--emit-script", help="Write a script that shows the fault with sglang and torch alone."
        ),
    ] = False,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Where the script goes; default: standard output.")
    ] = None,
) -> None:
    """Run a stored trace again: FAILED (exit 1, or 4 when known) or PASSED (exit 0)."""
    run = RunOptions(target, path, device, Limits(hang_seconds, memory_limit))
    if emit_script:
        if times != 1 or isolate or json:
            raise UserError("--emit-script goes with none of --times, --isolate and --json; leave them out")
        raise typer.Exit(commands.emit_script(trace, run, lane, out))
    if out is not None:
        raise UserError("--out says where a script goes; give --emit-script with it")
    raise typer.Exit(commands.replay(trace, run, lane, times, isolate=isolate, as_json=json))


@app.command(epilog="Example: kvproof shrink failing.json --out small.json")
def shrink(
    trace: TraceFile,
    target: Annotated[str | None, typer.Option("--target", "-t", help="Default: the trace's own.")] = None,
    lane: Annotated[str | None, typer.Option(help="Default: the trace's own.")] = None,
    fingerprint: Annotated[str | None, typer.Option(help="Which failure; default: the first.")] = None,
    path: Path_ = "auto",
    device: Device = "auto",
    hang_seconds: HangSeconds = 20.0,
    memory_limit: MemoryLimit = 4096,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="Default: TRACE with .min.json.")] = None,
) -> None:
    """Find the smallest trace with the same failure, and write it."""
    run = RunOptions(target, path, device, Limits(hang_seconds, memory_limit))
    raise typer.Exit(commands.shrink(trace, run, lane, fingerprint, out))


@app.command(epilog="Example: kvproof targets --fetch")
def targets(
    fetch: Annotated[bool, typer.Option("--fetch", help="Fetch every supported release first.")] = False,
    json: Json = False,
) -> None:
    """List targets; load each SGLang release at hand and say what was stood in."""
    raise typer.Exit(show_targets(fetch_all=fetch, as_json=json))


@app.command(epilog="Example: kvproof doctor")
def doctor(json: Json = False) -> None:
    """Check this machine, and that every planted fault is caught."""
    raise typer.Exit(run_doctor(as_json=json))


@app.command(epilog="Example: kvproof properties --json")
def properties(json: Json = False) -> None:
    """List the properties that are checked."""
    raise typer.Exit(commands.properties(as_json=json))


@bench.command(epilog="Example: kvproof bench harness --target sglang==0.5.23")
def harness(
    target: Annotated[str, typer.Option(help="The real target to share time with.")] = "sglang==0.5.23",
    ops: Annotated[
        int, typer.Option(min=20_000, help="Checked ops of the null target, for rate and memory.")
    ] = 1_000_000,
    json: Json = False,
) -> None:
    """The harness's own speed, share of time and memory."""
    raise typer.Exit(run_bench(target, ops, as_json=json))


@bench.command(epilog="Example: kvproof bench isolation --target sglang==0.5.23")
def isolation(
    target: Annotated[str, typer.Option(help="The target to run leases of.")] = "kvproof",
    rounds: Annotated[int, typer.Option(min=3, help="Leases, each run both ways.")] = 21,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """What isolated workers cost in throughput, and how soon a dead one is back."""
    raise typer.Exit(run_isolation(target, rounds, device=commands.device_for(device), as_json=json))


def main() -> None:
    """Entry point of the `kvproof` script."""
    # Whoever ends us (`timeout`, a CI system), the workers end with us.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = _run()
        print(end="", flush=True)  # what was said before a complaint
    except OSError:  # not even a complaint can be written
        status = InfrastructureError.exit_code
        for stream in (sys.stdout, sys.stderr):
            _discard(stream)
    sys.exit(status)


def _run() -> int:
    """The command, whatever becomes of it, as an exit code. Raises OSError when that cannot be told."""
    status: int
    try:
        status = app(prog_name="kvproof", standalone_mode=False)
        if status == INTERRUPTED:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        print(end="", flush=True)
    except KvproofError as error:
        status = _complain(str(error), error.exit_code)
    except _CommandLineError as error:
        status = _explain(error)
    except (KeyboardInterrupt, typer.Abort):
        status = _complain("stopped", INTERRUPTED)
    # Typer makes SystemExit(1) of a broken pipe, but 1 means a failure of the target.
    except (OSError, SystemExit) as error:
        status = _complain(_output_lost(error), InfrastructureError.exit_code)
    except Exception:
        traceback.print_exc()
        status = _complain("an error of kvproof itself; please report it", InfrastructureError.exit_code)
    return status


def _output_lost(error: BaseException) -> str:
    """Why output could not be written."""
    _discard(sys.stdout)
    return f"output cannot be written: {error.strerror if isinstance(error, OSError) else 'nobody reads it'}"


def _discard(stream: TextIO) -> None:
    """What is left to write there goes nowhere, or Python would try again as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _explain(error: Any) -> int:
    """Bad usage in one line; a bare command's help as it is."""
    message = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(message)
        return 0
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "kvproof"
    return _complain(f"{message} (see `{command} --help`)", UserError.exit_code)


def _complain(message: str, status: int) -> int:
    typer.echo(f"kvproof: {message}", err=True)
    return status


if __name__ == "__main__":
    main()
