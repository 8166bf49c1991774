"""A trace on a release of SGLang as a Python script that runs without us.

The script makes the trace's calls with literal arguments, checks on the way that the release answers as it
did, and compares what the last call came to with the contract. What only instruments see it shows by means of
its own: accesses outside a tensor and undefined lanes in Triton's interpreter, unwritten elements in what
`torch.empty` gave out, waits for the device by torch's own switch.

Not covered: failures of two runs, calls that end their process, and what takes a shadow of memory to see
(races, elements written twice, recompilations).
"""

import textwrap
from typing import Final

from kvproof.ci import script_parts as parts
from kvproof.ci.literals import Group, call, entries, listed, mapping, numbers, statement
from kvproof.ci.script_calls import Calls
from kvproof.ci.script_words import (
    bases,
    compare_slots,
    mapping_label,
    nested,
    page_label,
    plain,
    told_outcome,
)
from kvproof.impl.targets.sglang.spelling import Spelling
from kvproof.model.base import Outcome
from kvproof.model.config import Config
from kvproof.model.errors import UserError
from kvproof.model.ops import Misuse
from kvproof.properties.catalogue import by_id
from kvproof.properties.failure import DEVICE_LOST, ILLEGAL_ACCESS, Failure
from kvproof.properties.record import Record, View
from kvproof.properties.replay import is_relation

_WIDTH: Final = 100
_INDENT: Final = 4
_LONGEST: Final = 600

_OUTSIDE: Final = ("read-out-of-bounds", "write-out-of-bounds")
_NOT_FORWARDED: Final = "not-forwarded"
_FILLED: Final = ("unwritten", "uninitialised-read", "guard-words")
_NEED_US: Final = (
    *("double-write", "write-over-other-programs-write", "read-of-other-programs-write"),
    *("misaligned-access", "sanitizer", "recompiled", "launches"),
)


def refuse_unless_scriptable(failure: Failure) -> None:
    """Raise UserError for a failure that no script can show."""
    if is_relation(failure.op):
        raise UserError(
            f"{failure.fingerprint} compares two runs ({failure.op}), and a script makes one;"
            " give the trace that fails by itself, or the other --path"
        )
    if failure.deadly:
        raise UserError(f"{failure.fingerprint} ends its process ({failure.divergence}); no script is made")
    kind = failure.divergence.partition(" ")[0]
    if kind in _NEED_US:
        raise UserError(f"{failure.fingerprint}: {kind} is only seen with kvproof's instruments; no script")


def script(
    failure: Failure, config: Config, records: list[Record], spelling: Spelling, device: str, *, kernels: bool
) -> str:
    """The script's text. records: of the trace, the last of them the one that failed.

    Raises UserError for a failure that no script can show.
    """
    refuse_unless_scriptable(failure)
    return _Writer(failure, config, records, spelling, device, kernels).text()


class _Writer:
    """One script."""

    def __init__(
        self,
        failure: Failure,
        config: Config,
        records: list[Record],
        spelling: Spelling,
        device: str,
        kernels: bool,
    ) -> None:
        self._failure = failure
        self._config = config
        self._records = records
        self._spelling = spelling
        self._device = device
        self._calls = Calls(spelling, config)
        self._interpreted = kernels and device == "cpu"
        self._kind = failure.divergence.partition(" ")[0]
        seen = {damage.kind for record in records for damage in record.answer.damage}
        self._undefined = self._interpreted and self._kind == "undefined-lane-used"
        self._watched = self._interpreted and (self._undefined or not seen.isdisjoint(_OUTSIDE))
        self._filled = self._undefined or self._kind in _FILLED
        promised = records[-1].model.sizes
        self._sizes = {name: text for name, text in spelling.sizes.items() if name in promised}
        self._lines: list[str] = []

    # --- the whole --------------------------------------------------------------------------------

    def text(self) -> str:
        """Everything, in order."""
        self._reproduce()
        end = 'if __name__ == "__main__":\n    sys.exit(main())'
        blocks = [self._before(), "\n".join(self._lines), self._helpers(), parts.MAIN.strip(), end]
        return self._head() + "\n\n" + "\n\n\n".join(blocks) + "\n"

    def _head(self) -> str:
        failure, version = self._failure, self._spelling.version
        entry = by_id(failure.property_id)
        told = [
            f"What should happen ({entry.name}): {entry.statement}",
            f"What does, in the last of the calls below: {failure.message}",
            f"Found by kvproof; fingerprint {failure.fingerprint}.",
        ]
        lines = [
            f'"""sglang {version}, {self._config.allocator} allocator: {self._kind} in {self._last_call()}',
            "",
        ]
        for paragraph in told:
            lines += [*textwrap.wrap(plain(paragraph), _WIDTH, break_on_hyphens=False), ""]
        lines += [f"    pip install sglang=={version}", f"    {self._environment()}python this_script.py", ""]
        lines.append(
            "It ends with 1 when the fault shows, 0 when it does not, 2 when the script does not fit."
        )
        lines.append('"""')
        head = lines[0]
        return "\n".join([head if len(head) <= 110 else head[:109] + "…", *lines[1:]])

    def _last_call(self) -> str:
        return self._calls.name(self._records[-1].call)

    def _environment(self) -> str:
        return "TRITON_INTERPRET=1 " if self._interpreted else ""

    def _before(self) -> str:
        """Imports, constants and the environment."""
        modules = ["ast", "contextlib", "functools", "importlib.abc", "importlib.machinery", "importlib.util"]
        modules += ["inspect", *(["itertools"] if self._undefined else []), "json"]
        lines = [f"import {name}" for name in [*modules, "os", "sys"]]
        lines += ["from collections import Counter", "from pathlib import Path"]
        simple = any("SimpleNamespace" in line for line in [*self._lines, *self._spelling.build])
        lines += [f"from types import ModuleType{', SimpleNamespace' if simple else ''}", ""]
        if self._device == "cpu":
            lines.append('os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU')
        lines.append(f'os.environ["SGLANG_DEBUG_MEMORY_POOL"] = "{str(self._config.checked).lower()}"')
        lines += ["", "import torch  # noqa: E402 - Triton reads the environment when it is imported", ""]
        lines += [f'RELEASE = "{self._spelling.version}"', f'DEVICE = "{self._device}"']
        return "\n".join(lines)

    def _helpers(self) -> str:
        body = "\n".join(self._lines)
        chosen = [parts.COMPARE]
        for part, word in (
            (parts.ON_COURSE, "on_course("),
            (parts.PAGES, " pages("),
            (parts.CLASS_PAGES, "class_pages("),
            (parts.ENTRIES, "entries("),
            (parts.UNLIKE, "compare_slots("),
            (parts.MEMORY, "Memory("),
            (parts.UNDEFINED, "leave_lanes_undefined("),
            (parts.FILLED, "filled_empty"),
        ):
            if word in body:
                chosen.append(part)
        return "\n\n\n".join(part.strip() for part in [*chosen, parts.STAND_INS])

    # --- reproduce() ------------------------------------------------------------------------------

    def _reproduce(self) -> None:
        self._lines.append("def reproduce():")
        spelling = self._spelling
        for module in spelling.first:
            self._add(f"import {module}  # noqa: F401 - the modules below import each other")
        for module in dict.fromkeys(module for module, _ in spelling.imports):
            names = sorted({name for home, name in spelling.imports if home == module})
            self._import(module, names)
        self._add("")
        if spelling.classes:
            self._lines += [f"    {line}" if line else "" for line in nested(spelling.classes)]
            self._add("")
        if self._filled:
            self._add("torch.empty = filled_empty")
        for line in spelling.build:
            self._built(line)
        self._look()
        if self._watched:
            self._add("memory = Memory()")
            self._add("")
        for number, record in enumerate(self._records, 1):
            if record is self._records[-1]:
                self._last(number, record)
            else:
                self._earlier(number, record)

    def _import(self, module: str, names: list[str]) -> None:
        line = f"from {module} import {', '.join(names)}"
        if len(line) + _INDENT <= 110:
            self._add(line)
            return
        self._add(f"from {module} import (")
        for name in names:
            self._add(f"    {name},")
        self._add(")")

    def _built(self, line: str) -> None:
        """One statement of the construction, which may be too long for a line."""
        head, bracket, rest = line.partition("(")
        if len(line) + _INDENT <= 110 or not bracket:
            self._add(line)
        else:
            self._put("", Group(head + "(", tuple(rest.removesuffix(")").split(", ")), ")"))

    def _look(self) -> None:
        """The function that tells everything that can be seen of the allocator."""
        spelling = self._spelling
        seen = {page_label(side): text for side, text in spelling.pages.items()}
        seen |= {mapping_label(side): f"entries({text})" for side, text in spelling.mappings.items()}
        seen["available_size()"] = spelling.available
        seen |= {text.removeprefix("allocator."): text for text in self._sizes.values()}
        self._add("")
        self._add("def look():")
        self._lines += statement("return ", mapping(dict(seen)), _INDENT + 4)
        self._add("")

    def _view(self, view: View) -> dict[str, str | Group]:
        """The same of a view, as literals."""
        seen: dict[str, str | Group] = {
            page_label(side): numbers(view.pages[side]) for side in self._spelling.pages
        }
        seen |= {mapping_label(side): entries(view.mappings[side]) for side in self._spelling.mappings}
        seen["available_size()"] = str(view.available)
        for name, text in self._sizes.items():
            seen[text.removeprefix("allocator.")] = str(view.sizes[name])
        return seen

    # --- calls ------------------------------------------------------------------------------------

    def _earlier(self, number: int, record: Record) -> None:
        if isinstance(record.op, Misuse) and isinstance(record.answer.error, AttributeError):
            return  # there is no such method
        written = self._calls.write(number, record)
        self._comment(f"Call {number}: {written.told}")
        for before, value in written.given:
            self._put(before, value)
        if written.call is not None and record.answer.error is not None:
            self._comment(f"  refused, as it should be: {type(record.answer.error).__name__}")
            self._put("", written.call)
        elif written.call is not None:
            self._put("answer = ", written.call)
            then: str | Group = "None" if record.answer.slots is None else numbers(record.answer.slots)
            self._put("", call("on_course", str(number), "answer", then))
            for side in record.parts:
                if side in record.answer.peers:
                    peers = numbers(record.answer.peers[side])
                    self._put("", call("on_course", str(number), self._peers(side), peers))
            if record.bases is not None:
                self._put("", call("on_course", str(number), "bases", bases(record.answer.bases or [])))
        for line in written.after:
            self._add(line)
        self._add("")

    def _last(self, number: int, record: Record) -> None:
        written = self._calls.write(number, record)
        self._comment(f"Call {number}: {written.told}")
        for before, value in written.given:
            self._put(before, value)
        due, got = self._view(record.model), self._view(record.target)
        odd = [name for name in due if str(got[name]) != str(due[name])]
        told = [told_outcome(record), *(f"{name} {due[name]}" for name in odd)]
        seen = [*self._seen(record), *(f"{name} {got[name]}" for name in odd)]
        self._comment(f"By the contract: {'; '.join(told)}")
        self._comment(f"sglang {self._spelling.version}: {'; '.join(seen)}")
        if self._watched:
            for pool in self._spelling.paged:
                self._add(f"mark_behind({pool})")
            self._add("memory.strays.clear()")
        if self._undefined:
            self._add("leave_lanes_undefined()")
        if record.outcome in (Outcome.OOM, Outcome.REFUSED):
            self._add("before = look()")
        sync = self._kind == "synchronised"
        if sync:
            self._add('torch.cuda.set_sync_debug_mode("error")')
        if written.call is not None:
            self._put("answer = ", written.call)
        for line in written.after:
            self._add(line)
        if sync:
            self._add('torch.cuda.set_sync_debug_mode("default")')
        if self._kind in (DEVICE_LOST, ILLEGAL_ACCESS):
            self._add('compare("waiting for the device", None, call(torch.cuda.synchronize))')
            self._tidy()
            return
        self._judge(record, answered=written.call is not None)
        self._instruments(written.given)
        self._tidy()

    def _judge(self, record: Record, *, answered: bool) -> None:
        """Comparisons of the answer, and then of everything that can be seen."""
        match record.outcome:
            case Outcome.OOM | Outcome.REFUSED:
                if answered and record.outcome is Outcome.OOM:
                    self._add('compare("answer", None, answer)')
                    if record.bases is not None:
                        self._put("", call("compare", '"bases"', bases(record.bases), "bases"))
                self._add("compare_all(before, look())")
                return
            case Outcome.SLOTS:
                self._put("expected = ", mapping(self._view(record.model)))
                self._slots(record)
            case _:
                self._put("expected = ", mapping(self._view(record.model)))
                if answered:
                    self._add('compare("answer", None, answer)')
        self._add("compare_all(expected, look())")

    def _slots(self, record: Record) -> None:
        due = numbers(record.due or [])
        main = record.parts.get("")
        if main is None or any(row.classes for row in main.rows):
            self._put("", call("compare", '"slots"', due, "answer"))
        else:
            state = "expected" if len(record.parts) == 1 and not self._spelling.mappings else None
            self._put("", compare_slots('"slots"', due, "answer", main, state))
        if record.bases is not None:
            self._put("", call("compare", '"bases"', bases(record.bases), "bases"))
        if self._kind == "dtype":
            self._add('compare("dtype of the slots", torch.int64, ANSWERS[-1].dtype)')
        sides = [side for side in record.parts if side]
        if sides:
            self._add("if isinstance(answer, list):")
        for side in sides:
            part, peers = record.parts[side], self._peers(side)
            head = part.rows[0].head if len(part.rows) == 1 else 0
            grown = sum(row.seq - row.prefix for row in part.rows)
            self._put(f"{side}_peers = ", peers, 4)
            expected: str | Group = numbers(part.slots)
            if head or grown != len(part.slots):
                comparison = call("compare", f'"peers ({side})"', expected, f"{side}_peers")
            else:
                comparison = compare_slots(f'"peers ({side})"', expected, f"{side}_peers", part, None)
            self._put("", comparison, 4)

    def _peers(self, side: str) -> str | Group:
        each = self._spelling.each[side]
        more = [str(each)] if each != 1 else []
        return call("peers", self._spelling.mappings[side], "answer", *more)

    def _instruments(self, given: list[tuple[str, str | Group]]) -> None:
        if self._watched and (self._undefined or self._failure.property_id == "P7"):
            self._add('compare("accesses outside their tensors", [], memory.strays[:4])')
        if self._kind in _FILLED:
            self._add('compare("changed around the tensors of torch.empty", [], around())')
        if self._kind == _NOT_FORWARDED:
            missing = self._failure.message.rpartition(" lacks ")[2].split(", ")
            self._put("names = ", listed([f'"{name}"' for name in missing]))
            self._add("missing = [name for name in names if not hasattr(allocator, name)]")
            self._add('compare("what the wrapped allocator has and this has not", [], missing)')
        if self._kind == "input-changed":
            for before, value in given:
                name = before.removesuffix(" = ")
                if isinstance(value, Group) and value.open == "tensor(":
                    self._put("", call("compare", f'"{name} afterwards"', value.items[0], f"{name}.tolist()"))
        if self._kind == "output-changed":
            kept = [record for record in self._records if record.answer.slots is not None]
            for place, record in enumerate(kept):
                values = numbers(record.answer.slots or [])
                name = f'"answer {place + 1} afterwards"'
                self._put("", call("compare", name, values, f"ANSWERS[{place}].tolist()"))

    def _seen(self, record: Record) -> list[str]:
        """What the release came to, but for what is left of the allocator."""
        answer = record.answer
        if answer.error is not None:
            seen = [f"{type(answer.error).__name__}"]
        elif answer.slots is not None:
            seen = [str(numbers(answer.slots))]
        else:
            seen = ["None" if record.outcome in (Outcome.SLOTS, Outcome.OOM) else "no answer"]
        seen += [f"{damage.kind} ({damage.detail})" for damage in answer.damage if damage.kind == self._kind]
        return seen

    # --- lines ------------------------------------------------------------------------------------

    def _add(self, line: str) -> None:
        if line or (self._lines and self._lines[-1]):
            self._lines.append(" " * _INDENT + line if line else "")

    def _put(self, before: str, value: str | Group, deeper: int = 0) -> None:
        self._lines += statement(before, value, _INDENT + deeper)

    def _comment(self, text: str) -> None:
        short = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
        for line in textwrap.wrap(plain(short), _WIDTH, break_on_hyphens=False, subsequent_indent="  "):
            self._add(f"# {line}")

    def _tidy(self) -> None:
        while not self._lines[-1]:
            self._lines.pop()
