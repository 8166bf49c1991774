"""Configs: page counts, bounds, and the field that an error names."""

from __future__ import annotations

import pytest

from kvproof.model.catalogue import model_for
from kvproof.model.config import ALLOCATORS, MAX_PAGES, Config, validate
from kvproof.model.errors import UserError
from kvproof.model.hisparse import HisparseModel
from kvproof.model.hisparse_v4 import HisparseV4Model
from kvproof.model.interleave import InterleaveModel
from kvproof.model.mamba import MambaModel
from kvproof.model.paged import PagedModel
from kvproof.model.swa import SwaModel
from kvproof.model.swa_variants import PureSwaModel, SwaRingModel
from kvproof.model.token import TokenModel
from tests.model.strategies import SMALL


@pytest.mark.parametrize(("size", "page_size", "pages"), [(16, 4, 4), (19, 4, 4), (7, 1, 7), (4, 4, 1)])
def test_a_remainder_makes_no_page(size, page_size, pages):
    assert validate(Config("paged", size, page_size)).num_pages == pages


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config("buddy", 16, 4), r"config\.allocator is 'buddy'; known allocators: token, paged, swa, "),
        (Config("swa", 16, 4), r"config\.swa_size is 0; it must give 1\.\.1048576 pages of 4"),
        (Config("swa", 16, 4, swa_size=3), r"config\.swa_size is 3; it must give"),
        (Config("swa", 16, 4, swa_size=-4), r"config\.swa_size is -4; it must lie in 0\.\."),
        (Config("swa", 16, 4, swa_size=1 << 37), r"config\.swa_size is .*; it must lie in 0\.\."),
        (Config("paged", 16, 4, swa_size=16), r"config\.swa_size is 16; the paged allocator has no such"),
        (Config("swa", 16, 4, swa_size=16, ratio=2), r"config\.ratio is 2; the swa allocator has no such"),
        (Config("swa", 16, 4, swa_size=16, page_offset=1), r"config\.page_offset is 1; only token and paged"),
        (Config("pure-swa", 16, 4), r"config\.page_size is 4; the pure-swa allocator has pages of 1 slot"),
        (Config("swa-ring", 16, 1, ring=5, request_rows=1), r"config\.page_size is 1; a ring's full side"),
        (Config("swa-ring", 16, 4, request_rows=1), r"config\.ring is 0; it must lie in 1\.\."),
        (Config("swa-ring", 16, 4, ring=5, request_rows=-1), r"config\.request_rows is -1; it must lie in 0"),
        (Config("hisparse", 16, 4), r"config\.ratio is 0; it must lie in 1\.\.64"),
        (Config("hisparse", 16, 4, ratio=65), r"config\.ratio is 65; it must lie in 1\.\.64"),
        # 2**19 device pages are allowed, 2**20 + 2 logical ones are not.
        (Config("hisparse", (1 << 19) + 1, 1, ratio=2), r"config\.size is 524289, 1048578 pages"),
        (
            Config("hisparse-v4", 16, 6, swa_size=16, device_size=4),
            r"config\.page_size is 6; .* multiples of 4",
        ),
        (
            Config("hisparse-v4", 16, 8, swa_size=16, device_size=1),
            r"config\.device_size is 1; .* pages of 2",
        ),
        (Config("hisparse-v4", 16, 8, swa_size=7, device_size=2), r"config\.swa_size is 7; .* pages of 8"),
        (Config("mamba", 8, 2), r"config\.page_size is 2; the mamba allocator has pages of 1 slot"),
        (Config("mamba", 8, 1, need_sort=True), r"config\.need_sort is set; state slots are never staged"),
        (Config("page-interleave", 16, 4), r"config\.shards is 0; it must lie in 2\.\.64"),
        (Config("page-interleave", 16, 4, shards=1), r"config\.shards is 1; it must lie in 2\.\.64"),
        (Config("paged", 16, 0), r"config\.page_size is 0"),
        (Config("paged", 1 << 20, (1 << 16) + 1), r"config\.page_size is 65537"),
        (Config("token", 16, 4), r"config\.page_size is 4; the token allocator"),
        (Config("paged", 3, 4), r"config\.size is 3, 0 pages"),
        (Config("paged", -8, 4), r"config\.size is -8"),
        (Config("token", MAX_PAGES + 1, 1), r"config\.size is 1048577"),
        (Config("paged", 16, 4, row_dtype="int16"), r"config\.row_dtype is 'int16'"),
        (Config("paged", 16, 4, page_offset=-1), r"config\.page_offset is -1"),
        # Top slot (offset + 4 + 1) * 4 - 1: at most 2**40 - 1.
        (Config("paged", 16, 4, page_offset=(1 << 38) - 4), r"config\.page_offset is .*2\*\*40"),
        (
            Config("paged", 16, 4, row_dtype="int32", page_offset=(1 << 29) - 4),
            r"config\.row_dtype is 'int32'",
        ),
        (Config("paged", 16, 4, checked=True, page_offset=1), r"config\.checked and config\.page_offset"),
    ],
)
def test_what_is_out_of_bounds_is_named(config, message):
    with pytest.raises(UserError, match=message):
        validate(config)
    with pytest.raises(UserError, match=message):
        model_for(config)


@pytest.mark.parametrize(
    "config",
    [
        Config("token", MAX_PAGES, 1),
        Config("paged", 1 << 16, 1 << 16),
        Config("paged", 16, 4, page_offset=(1 << 38) - 5),
        Config("paged", 16, 4, row_dtype="int32", page_offset=(1 << 29) - 5),
        Config("paged", 16, 4, checked=True),
        Config("swa", 16, 4, swa_size=4),
        Config("swa", 1, 1, swa_size=1),
        Config("swa-ring", 16, 2, ring=1),
        Config("hisparse", 1, 1, ratio=64),
        Config("hisparse-v4", 4, 4, swa_size=4, device_size=1),
        Config("page-interleave", 16, 4, shards=64),
    ],
)
def test_the_bounds_themselves_are_valid(config):
    assert validate(config) is config


@pytest.mark.parametrize(
    ("config", "most"),
    [
        (Config("token", 4, 1), MAX_PAGES),
        (Config("paged", 16, 4, page_offset=(1 << 38) - 5), 4),
        (Config("paged", 16, 4, row_dtype="int32", page_offset=(1 << 29) - 9), 8),
        (Config("paged", 1 << 16, 1 << 16, row_dtype="int32"), (1 << 15) - 1),
    ],
)
def test_a_pool_may_grow_to_the_bounds_and_no_further(config, most):
    assert config.most_pages == most
    assert validate(config.resized(most * config.page_size)).num_pages == most
    with pytest.raises(UserError):
        validate(config.resized((most + 1) * config.page_size))


def test_a_resized_config_differs_in_size_alone():
    config = Config("paged", 16, 4, True, False, "int32", 7)
    assert config.resized(20) == Config("paged", 20, 4, True, False, "int32", 7)


def test_each_allocator_has_its_model():
    assert {kind: type(model_for(config)) for kind, config in SMALL.items()} == {
        "token": TokenModel,
        "paged": PagedModel,
        "swa": SwaModel,
        "swa-ring": SwaRingModel,
        "pure-swa": PureSwaModel,
        "hisparse": HisparseModel,
        "hisparse-v4": HisparseV4Model,
        "mamba": MambaModel,
        "page-interleave": InterleaveModel,
    }
    assert SMALL.keys() == set(ALLOCATORS)


def test_the_main_pool_is_the_largest_side():
    """Twice as many logical pages as device pages; of shards, one's pages and all slots."""
    assert (SMALL["hisparse"].num_pages, SMALL["hisparse"].slots) == (8, 32)
    assert (SMALL["page-interleave"].num_pages, SMALL["page-interleave"].slots) == (4, 32)
    assert (SMALL["swa"].num_pages, SMALL["swa"].slots) == (8, 32)


def test_a_compressed_page_has_a_slot_for_every_four_tokens():
    assert SMALL["hisparse-v4"].device_page_size == 2
    assert SMALL["hisparse"].device_page_size == 4
