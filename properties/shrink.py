"""The shrinker: the smallest trace that still shows the same failure.

Moves, again and again until none helps: leave ops out (large pieces first), make the config plainer, make
single ops plainer, take pages from pool and row together, leave rows out, make room and leave out what made
it. A candidate counts when the same fingerprint comes again, so shrinking never slides from one fault to
another. Every list of ops is valid for every config, so there is nothing to repair.

Deterministic: no clock, only a bound on runs.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, Final

from kvproof.model import ops
from kvproof.model.catalogue import model_for
from kvproof.model.config import COMPRESSION, Config, validate
from kvproof.model.errors import UserError
from kvproof.model.ops import Op
from kvproof.model.trace import Trace

Reproduce = Callable[[Trace], int | None]
"""Runs a trace; the index of the op that fails with the fingerprint sought, or None."""

_PLAIN_PAGES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_ROOMY_PAGES: Final = 256
_PLAIN_PAGE_SIZES: Final = (1, 2, 4, 8, 16)
_FREES: Final = (ops.FreeSegment, ops.FreeSegments, ops.FreePages)
_SIDES: Final = {"swa_size": 1, "device_size": COMPRESSION}
"""Config fields that are sizes of second sides, and into how many parts their pages are cut."""

_LOWER: Final = {"ratio": 1, "shards": 2, "ring": 1, "request_rows": 0}
"""Other fields of a kind, and how low they may go."""


class Shrinker:
    """Shrinks one trace. runs: how many candidates were tried."""

    def __init__(self, reproduce: Reproduce, trace: Trace, *, most_runs: int = 4000) -> None:
        self._reproduce = reproduce
        self._left = most_runs
        self.runs = 0
        self.best = trace

    def shrink(self) -> Trace:
        """The smallest trace found; the one given when it does not fail at all."""
        if not self._try(self.best):
            return self.best
        # A plain pool first: every later run is cheaper on it, a hundred times where pages are long.
        self._plain_config()
        before = None
        while before != (self.best.config, self.best.ops) and self._left:
            before = (self.best.config, self.best.ops)
            self._drop_ops()
            self._merge_extends()
            self._plain_config()
            self._plain_ops()
            self._tighten()
            self._drop_rows()
            self._keep_rows()
            self._with_more_room()
        return self.best

    def _try(self, candidate: Trace) -> bool:
        """Keep the candidate if it fails alike, cut behind the failing op."""
        if not self._left:
            return False
        self._left -= 1
        self.runs += 1
        at = self._reproduce(candidate)
        if at is None:
            return False
        self.best = replace(candidate, ops=candidate.ops[: at + 1])
        return True

    def _drop_ops(self) -> None:
        size = max(1, len(self.best.ops) // 2)
        while True:
            end = len(self.best.ops)
            while end > 0:
                start = max(0, end - size)
                kept = self.best.ops[:start] + self.best.ops[end:]
                if kept:
                    self._try(replace(self.best, ops=kept))
                # A success may have cut the trace shorter than `start`.
                end = min(start, len(self.best.ops))
            if size == 1:
                return
            size //= 2

    def _merge_extends(self) -> None:
        """Let one extend do what it and a later one did: new rows and tokens move forward in the trace."""
        for later in range(len(self.best.ops) - 1, 0, -1):
            for earlier in range(later - 1, -1, -1):
                here = self.best.ops
                if later >= len(here):
                    break
                first, second = here[earlier], here[later]
                if isinstance(first, ops.Extend) and isinstance(second, ops.Extend):
                    merged = _merged(first, second, self._live_before(earlier))
                    rest = (*here[earlier + 1 : later], *here[later + 1 :])
                    if self._try(replace(self.best, ops=(*here[:earlier], merged, *rest))):
                        break

    def _live_before(self, index: int) -> int:
        """Rows that live before the op at this index."""
        model = model_for(self.best.config)
        for op in self.best.ops[:index]:
            model.apply(op)
        return len(model.rows)

    def _plain_config(self) -> None:
        for candidate in self._configs():
            if candidate != (self.best.config, self.best.ops):
                self._try(replace(self.best, config=candidate[0], ops=candidate[1]))

    def _configs(self) -> Iterator[tuple[Config, tuple[Op, ...]]]:
        """Plainer configs, each from the best so far; with another page size, ops scaled to it."""
        yield replace(self.best.config, page_offset=0), self.best.ops
        yield replace(self.best.config, checked=False), self.best.ops
        yield replace(self.best.config, need_sort=False), self.best.ops
        yield replace(self.best.config, row_dtype="int64"), self.best.ops
        for field, least in _LOWER.items():
            value = getattr(self.best.config, field)
            for lower in dict.fromkeys((least, value // 2, value - 1)):
                if least <= lower < getattr(self.best.config, field):
                    fewer: dict[str, Any] = {field: lower}
                    yield replace(self.best.config, **fewer), self.best.ops
        for page_size in _PLAIN_PAGE_SIZES:
            config = self.best.config
            if page_size < config.page_size:
                smaller = _with_pages_of(config, page_size)
                if _is_valid(smaller):
                    yield smaller, tuple(_scaled(op, config.page_size, page_size) for op in self.best.ops)
        for pages in _PLAIN_PAGES:
            config = self.best.config
            if pages * config.page_size < config.size:
                yield replace(config, size=pages * config.page_size), self.best.ops
        for field, parts in _SIDES.items():
            for pages in (*_PLAIN_PAGES, self.best.config.num_pages):
                config = self.best.config
                size: int = pages * config.page_size // parts
                if size < getattr(config, field):
                    sides: dict[str, Any] = {field: size}
                    yield replace(config, **sides), self.best.ops

    def _keep_rows(self) -> None:
        """Leave out a release that ends a row, and let later ops name the rows behind it by one more."""
        for index in range(len(self.best.ops) - 2, -1, -1):
            if index < len(self.best.ops) - 1 and isinstance(self.best.ops[index], (ops.Free, *_FREES)):
                model = model_for(self.best.config)
                for earlier in self.best.ops[:index]:
                    model.apply(earlier)
                before = list(model.rows)
                model.apply(self.best.ops[index])
                gone = [at for at, row in enumerate(before) if row not in model.rows]
                if len(gone) == 1:
                    later = tuple(_with_row(op, gone[0]) for op in self.best.ops[index + 1 :])
                    self._try(replace(self.best, ops=(*self.best.ops[:index], *later)))

    def _with_more_room(self) -> None:
        """Ops that only made room can go when the pool is larger; fewer ops are worth more pages."""
        before = self.best
        roomy = before.config.resized(_ROOMY_PAGES * before.config.page_size)
        # A window that ends at the last slot there is has no room above it.
        if before.config.num_pages >= _ROOMY_PAGES or not _is_valid(roomy):
            return
        if self._try(replace(before, config=roomy)):
            self._drop_ops()
            self._drop_rows()
            self._keep_rows()
            self._merge_extends()
            if len(self.best.ops) >= len(before.ops):
                self.best = before

    def _tighten(self) -> None:
        """Take the same number of pages from the pool and from one row: exhaustion needs both to move."""
        for index, op in enumerate(self.best.ops):
            if isinstance(op, ops.Extend):
                for place in range(len(op.entries)):
                    self._tighten_entry(index, place)

    def _tighten_entry(self, index: int, place: int) -> None:
        pages = self.best.config.num_pages
        while pages:
            here = self.best.ops[index] if index < len(self.best.ops) else None
            if not isinstance(here, ops.Extend) or place >= len(here.entries):
                return
            config = self.best.config
            row, tokens = here.entries[place]
            fewer = tokens - pages * config.page_size
            if fewer < 0 or pages >= config.num_pages:
                pages //= 2
                continue
            op = ops.Extend((*here.entries[:place], (row, fewer), *here.entries[place + 1 :]))
            smaller = config.resized((config.num_pages - pages) * config.page_size)
            changed = (*self.best.ops[:index], op, *self.best.ops[index + 1 :])
            if not self._try(replace(self.best, config=smaller, ops=changed)):
                pages //= 2

    def _drop_rows(self) -> None:
        """Leave out a new row and let later ops name the rows behind it by one less."""
        index = 0
        while index < len(self.best.ops):
            op = self.best.ops[index]
            places = range(len(op.entries)) if isinstance(op, _BATCHES) else range(_opens_row(op))
            for place in places:
                if isinstance(op, _BATCHES) and op.entries[place][0] > ops.NEW_ROW:
                    continue
                if self._drop_row(index, place):
                    break
            else:
                index += 1

    def _drop_row(self, index: int, place: int) -> bool:
        """Leave out the new row of one entry, and every mention of it."""
        op = self.best.ops[index]
        model = model_for(self.best.config)
        for earlier in self.best.ops[:index]:
            model.apply(earlier)
        gone, changed = len(model.rows), list(self.best.ops[:index])
        if isinstance(op, _BATCHES):
            gone += sum(row <= ops.NEW_ROW for row, _ in op.entries[:place])
            shorter = (*op.entries[:place], *op.entries[place + 1 :])
            changed += [replace(op, entries=shorter)] if shorter else []
        model.apply(op)
        row = model.rows[gone] if gone < len(model.rows) else None
        for later in self.best.ops[index + 1 :]:
            at = model.rows.index(row) if row in model.rows else None
            plain = later if at is None else _without_row(later, at)
            changed.extend([] if plain is None else [plain])
            model.apply(later)
        return bool(changed) and self._try(replace(self.best, ops=tuple(changed)))

    def _plain_ops(self) -> None:
        index = 0
        while index < len(self.best.ops):
            while self._plain_op(index):
                pass
            index += 1

    def _plain_op(self, index: int) -> bool:
        if index >= len(self.best.ops):
            return False
        here = self.best.ops
        return any(
            self._try(replace(self.best, ops=(*here[:index], op, *here[index + 1 :])))
            for op in _plainer(here[index])
        )


_BATCHES: Final = (ops.Extend, ops.ExtendLogical)
"""Ops that name rows and tokens in entries."""


def _merged(first: ops.Extend, second: ops.Extend, live: int) -> ops.Extend:
    """One extend for two; live: rows before the first. The second names the first's new rows behind those."""
    entries = [list(entry) for entry in first.entries]
    ordinals = {row % live: at for at, (row, _) in enumerate(first.entries) if row > ops.NEW_ROW and live}
    for at, (row, _) in enumerate(first.entries):
        if row <= ops.NEW_ROW or not live:
            ordinals[live + sum(each <= ops.NEW_ROW for each, _ in first.entries[:at])] = at
    for row, tokens in second.entries:
        if row > ops.NEW_ROW and row in ordinals:
            entries[ordinals[row]][1] += tokens
        else:
            entries.append([row, tokens])
    return ops.Extend(tuple((row, tokens) for row, tokens in entries))


def _opens_row(op: Op) -> bool:
    """Whether the op is there for one new row alone."""
    return isinstance(op, (ops.Alloc, ops.Chain)) or (
        isinstance(op, ops.ExtendTail) and op.row <= ops.NEW_ROW
    )


def _without_row(op: Op, gone: int) -> Op | None:
    """The op with the row `gone` left out and those behind it one lower; None when nothing is left."""
    if isinstance(op, _BATCHES):
        op = replace(op, entries=tuple(entry for entry in op.entries if entry[0] != gone))
        if not op.entries:
            return None
    elif isinstance(op, (ops.Decode, ops.Free)):
        op = replace(op, rows=tuple(row for row in op.rows if row != gone))
        if not op.rows:
            return None
    elif gone in (getattr(op, "row", None), getattr(op, "donor", None)):
        return None
    return _renamed(op, lambda row: row - 1 if row > gone else row)


def _with_row(op: Op, kept: int) -> Op:
    """The op when a row more lives, at `kept`: rows from there on are one higher."""
    return _renamed(op, lambda row: row + 1 if row >= kept else row)


def _renamed(op: Op, rename: Callable[[int], int]) -> Op:
    """The op with other ordinals for its rows."""
    if isinstance(op, _BATCHES):
        return replace(op, entries=tuple((rename(row), tokens) for row, tokens in op.entries))
    if isinstance(op, (ops.Decode, ops.Free)):
        return replace(op, rows=tuple(rename(row) for row in op.rows))
    named: dict[str, Any] = {
        name: rename(getattr(op, name)) for name in ("row", "donor") if hasattr(op, name)
    }
    return replace(op, **named) if named else op


def _with_pages_of(config: Config, page_size: int) -> Config:
    """The config with as many pages, of another size."""
    sides: dict[str, Any] = {
        field: getattr(config, field) // (config.page_size // parts) * (page_size // parts)
        for field, parts in _SIDES.items()
        if getattr(config, field)
    }
    size = config.size // config.page_size * page_size
    return replace(config, page_size=page_size, size=size, **sides)


def _is_valid(config: Config) -> bool:
    try:
        validate(config)
    except UserError:
        return False
    return True


def _scaled(op: Op, old: int, new: int) -> Op:
    """Lengths in pages of another size: as many whole pages, and as near to the page's end."""
    if isinstance(op, _BATCHES):
        return replace(op, entries=tuple((row, _scale(tokens, old, new)) for row, tokens in op.entries))
    lengths = {field.name for field in fields(op)} & _IN_TOKENS
    if isinstance(op, (ops.FreePages, ops.Remap)):
        return op  # theirs are pages
    scaled: dict[str, Any] = {name: _scale(getattr(op, name), old, new) for name in lengths}
    return replace(op, **scaled) if scaled else op


_IN_TOKENS: Final = frozenset({"keep", "start", "tokens", "tail"})
"""Fields of ops that are lengths or positions in tokens."""


def _scale(tokens: int, old: int, new: int) -> int:
    pages, rest = divmod(tokens, old)
    return pages * new + min(rest, new - 1)


def _plainer(op: Op) -> Iterator[Op]:
    """Plainer ops that might do as well, the boldest first."""
    yield from _commoner(op)
    if isinstance(op, _BATCHES):
        yield from (replace(op, entries=entries) for entries in _plainer_tuples(op.entries))
        for index, (row, tokens) in enumerate(op.entries):
            for entry in [(row, fewer) for fewer in _lower(tokens)] + [(ops.NEW_ROW, tokens)] * (row > 0):
                yield replace(op, entries=(*op.entries[:index], entry, *op.entries[index + 1 :]))
        return
    for field in fields(op):
        value: Any = getattr(op, field.name)
        if isinstance(value, tuple):
            values: list[Any] = list(_plainer_tuples(value))
            values += [
                (*value[:i], low, *value[i + 1 :]) for i, item in enumerate(value) for low in _lower(item)
            ]
        elif isinstance(value, bool):
            values = [False] if value else []
        else:
            values = list(_lower(value)) if isinstance(value, int) else []
        yield from (replace(op, **{field.name: plainer}) for plainer in values)


def _commoner(op: Op) -> Iterator[Op]:
    """The commoner op that does most of what this one does."""
    match op:
        case ops.FreeSegment(row) | ops.FreeSegments(row) | ops.FreePages(row):
            yield ops.Free((row,))
        case ops.ExtendTail(row, tokens) if row <= ops.NEW_ROW:
            yield ops.Extend(((row, tokens),))
        case ops.Chain(_, tokens):
            yield ops.Extend(((ops.NEW_ROW, tokens),))
        case ops.ExtendLogical(entries):
            yield ops.Extend(entries)
        case ops.FreeSwaSegment(row, start, tokens):
            yield ops.FreeSwa(row, start, tokens)
        case ops.FreeFullSegment(row, keep):
            yield ops.FreeFull(row, keep)


def _plainer_tuples(items: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if len(items) > 3:
        yield items[: len(items) // 2]
        yield items[len(items) // 2 :]
    for index in range(len(items)):
        yield items[:index] + items[index + 1 :]


def _lower(number: int) -> Iterator[int]:
    """Smaller numbers: none, one, half, one less."""
    yield from dict.fromkeys(low for low in (0, 1, number // 2, number - 1) if 0 <= low < number)
