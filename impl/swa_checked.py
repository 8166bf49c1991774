"""Checked mode of the sliding-window allocator: the ledgers of both pools and the mapping between them.

Every call is checked on both sides before it is written down on either. What the swa side owns is told by the
mapping, of which the entries in question are read back:

    full page 3   12 13 14 15      live: row 0           entry 0: no peer
    mapping       28 29  0  0      page 7 of the swa side, of which the first two slots are anybody's
    swa page 7    28 29            live: row 0

Not covered: what a single pool's ledger says (`checked.py`), and the ring and pure variants, which have one
pool.
"""

from collections.abc import Iterable

import torch

from kvproof.impl.checked import Ledger


class PairLedger:
    """Who has which slots on both sides.

    full, swa: the ledgers of the two pools. mapping: the allocator's, [entries + 1] int64; read, never
    written. page_size: slots in a page of either pool. All checks raise AllocatorError (StateError for
    damage) and change nothing.
    """

    def __init__(self, full: Ledger, swa: Ledger, mapping: torch.Tensor, page_size: int) -> None:
        self._full = full
        self._swa = swa
        self._mapping = mapping
        self._page_size = page_size
        full.side, swa.side = "full", "swa"

    # --- allocation -------------------------------------------------------------------------------

    def check_extend(
        self,
        prefix_lens: list[int],
        prefix_lens_cpu: list[int],
        seq_lens: list[int],
        seq_lens_cpu: list[int],
        last_loc: list[int],
        num_tokens: int,
        num_new_pages: int | None,
        *,
        paired: bool,
    ) -> None:
        """Check an extend just begun on both ledgers. paired: its rows go on in their old pages on both
        sides.
        """
        lens = prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu
        self._full.check_extend(*lens, last_loc, num_tokens, num_new_pages)
        if paired:
            self._check_growth(prefix_lens, seq_lens, last_loc)

    def check_decode(self, seq_lens: list[int], seq_lens_cpu: list[int], last_loc: list[int]) -> None:
        """Check a decode just begun on both ledgers."""
        self._full.check_decode(seq_lens, seq_lens_cpu, last_loc)
        self._check_growth([seq - 1 for seq in seq_lens], seq_lens, last_loc)

    def hand_out(self, slots: list[int], counts: list[int] | None, heads: int) -> None:
        """Write down what the call just begun is about to return, on both sides.

        slots: full slots, which are mapped already; counts: how many each batch row gets, None when there are
        no rows. heads: slots at the start, of the only row then, that have no peer. Raises StateError when a
        slot or a peer is not a new one.
        """
        full = self._full.reckon(slots, counts)
        peers = self._entries(slots[heads:])
        if counts is not None and heads:
            counts = [counts[0] - heads]
        self._swa.write_down(self._swa.reckon(peers, counts))
        self._full.write_down(full)

    def _check_growth(self, prefix_lens: list[int], seq_lens: list[int], last_loc: list[int]) -> None:
        ps = self._page_size
        batch = list(zip(prefix_lens, seq_lens, last_loc, strict=True))
        inside = [prefix % ps != 0 and seq > prefix for prefix, seq, _ in batch]
        peers = iter(
            self._entries([last for (_, _, last), goes_on in zip(batch, inside, strict=True) if goes_on])
        )
        rows = []
        for row, ((prefix, seq, last), goes_on) in enumerate(zip(batch, inside, strict=True)):
            peer = next(peers) if goes_on else -1
            if peer == 0:
                self._swa.refuse(
                    "last_loc to have a peer, for the row goes on inside its page",
                    f"slot {last} in batch row {row} of prefix {prefix}, unmapped",
                    "Extend it by a tail that begins at a page.",
                )
            rows.append((prefix, seq, peer) if goes_on else (0, 0, -1))
        self._swa.check_growth(*map(list, zip(*rows, strict=True))) if rows else None

    # --- release ----------------------------------------------------------------------------------

    def free(self, call: str, slots: list[int], *, repeats: bool) -> None:
        """`free`: all live slots of the full pages they touch, with the peers those have."""
        self._begin(call)
        pages = self._full.check_slots(slots, repeats=repeats)
        self._release(pages, self._check_peers(pages, each=self._page_size == 1))

    def free_segments(self, call: str, segments: list[list[int]]) -> None:
        """`free_segment(s)`: the same for stretches of a row, every page of which has a peer."""
        self._begin(call)
        pages = self._full.check_segments(segments)
        self._release(pages, self._check_peers(pages, each=True))

    def free_swa(self, call: str, slots: list[int]) -> None:
        """`free_swa`: live full slots; the peers of their whole pages, or with pages of one slot of each."""
        self._begin(call)
        ps = self._page_size
        if ps == 1:
            self._full.check_slots(slots, repeats=False)
        else:
            self._full.check_live(slots)
        pages = list(dict.fromkeys(slot // ps for slot in slots))
        self._release([], self._check_peers(pages, each=ps == 1))

    def free_swa_segment(self, call: str, slots: list[int]) -> None:
        """`free_swa_segment`: live full slots in row order; every page of theirs has a peer."""
        self._begin(call)
        ps = self._page_size
        self._full.check_live(slots)
        self._full.check_order([slots])
        pages = [slot // ps for slot in slots[::ps]]
        if len(set(pages)) != len(pages):
            twice = next(page for at, page in enumerate(pages) if page in pages[:at])
            self._full.refuse(
                "every page once", f"page {twice} twice in one call", "Pass a slice of the row."
            )
        self._release([], self._check_peers(pages, each=True))

    def free_full(self, call: str, slots: list[int], *, repeats: bool) -> None:
        """`free_full`: all live slots of full pages that have no peers."""
        self._begin(call)
        self._release_bare(self._full.check_slots(slots, repeats=repeats))

    def free_full_segments(self, call: str, segments: list[list[int]]) -> None:
        """`free_full_segment(s)`: the same for stretches of a row."""
        self._begin(call)
        self._release_bare(self._full.check_segments(segments))

    # --- the mapping ------------------------------------------------------------------------------

    def check_set(self, full_indices: torch.Tensor, swa_indices: torch.Tensor) -> list[int]:
        """Before `set_full_to_swa_mapping`: live slots of either side, each once. Returns the swa slots that
        `note_edit` is to be told of."""
        full, swa = full_indices.tolist(), swa_indices.tolist()
        self._begin("set_full_to_swa_mapping")
        for ledger, slots in ((self._full, full), (self._swa, swa)):
            ledger.check_live(slots)
            seen: set[int] = set()
            for slot in slots:
                if slot in seen:
                    ledger.refuse(
                        "every slot once", f"slot {slot} twice in one call", "Pair slots one to one."
                    )
                seen.add(slot)
        return [*swa, *self._peers(full)]

    def check_clear(self, full_indices: torch.Tensor) -> list[int]:
        """Before `clear_full_to_swa_mapping`: live full slots. Returns the swa slots that `note_edit` is to
        be told of."""
        full = full_indices.tolist()
        self._begin("clear_full_to_swa_mapping")
        self._full.check_live(full)
        return self._peers(full)

    def note_edit(self, swa: Iterable[int]) -> None:
        """After an edit of the mapping: these swa slots have gained or lost a full slot.

        A row may take over a page of another that filled more of it; what lies beyond is nobody's from then
        on. A page that no slot is mapped to stays as it is: an edit may come in two calls.
        """
        ps = self._page_size
        entries = self._mapping[:-1]
        for page in dict.fromkeys(peer // ps for peer in swa):
            used = entries[entries // ps == page]
            if used.numel():
                self._swa.give_up(page, int(used.max()) % ps + 1)

    # --- the parts --------------------------------------------------------------------------------

    def _begin(self, call: str) -> None:
        self._full.begin(call)
        self._swa.begin(call)

    def _entries(self, slots: list[int]) -> list[int]:
        """The mapping of these slots, which lie in the pool or are -1."""
        return self._mapping[torch.tensor(slots, dtype=torch.int64, device=self._mapping.device)].tolist()

    def _peers(self, slots: list[int]) -> list[int]:
        """The peers that these slots have."""
        return [peer for peer in self._entries(slots) if peer]

    def _mapped(self, pages: list[int]) -> list[tuple[int, int]]:
        """The slots of these full pages that have a peer, with it."""
        ps = self._page_size
        slots = [page * ps + offset for page in pages for offset in range(ps)]
        return [(slot, peer) for slot, peer in zip(slots, self._entries(slots), strict=True) if peer]

    def _check_peers(self, pages: list[int], *, each: bool) -> list[int]:
        """The swa pages of these full pages, when they may be released. each: every full page must have
        one.
        """
        mapped = self._mapped(pages)
        if each:
            bare = set(pages).difference(slot // self._page_size for slot, _ in mapped)
            for page in pages:
                if page in bare:
                    self._swa.refuse(
                        "a peer for every page",
                        f"page {page} of the full side, unmapped: {self._full.owner(page * self._page_size)}",
                        "Release what has no peers by free_full, or by free with pages of several slots.",
                    )
        peers = [peer for _, peer in mapped]
        swa_pages = self._swa.check_slots(peers, repeats=False)
        self._check_sharing(pages, swa_pages)
        return swa_pages

    def _check_sharing(self, pages: list[int], swa_pages: list[int]) -> None:
        """Nobody outside these full pages is mapped into these swa pages."""
        ps = self._page_size
        full, swa = (
            torch.tensor(ids, dtype=torch.int64, device=self._mapping.device) for ids in (pages, swa_pages)
        )
        slots = torch.nonzero(torch.isin(self._mapping[:-1] // ps, swa)).reshape(-1)
        others = slots[~torch.isin(slots // ps, full)].tolist()
        if others:
            peer = self._entries(others[:1])[0]
            self._swa.refuse(
                "peers of the released slots only",
                f"swa slot {peer}, to which slot {others[0]} of the full side is mapped too: "
                f"{self._full.owner(others[0])}",
                "Clear the mapping of the slots that lose a peer to others.",
            )

    def _release_bare(self, pages: list[int]) -> None:
        for slot, peer in self._mapped(pages)[:1]:
            self._full.refuse(
                "slots without peers",
                f"slot {slot}, mapped to swa slot {peer} of {self._swa.owner(peer)}",
                "Release the peers by free_swa first, or both sides by free.",
            )
        self._full.retire(pages)

    def _release(self, full_pages: list[int], swa_pages: list[int]) -> None:
        self._full.retire(full_pages)
        self._swa.retire(swa_pages)
