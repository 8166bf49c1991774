"""Configs: page counts, bounds, and the field that an error names."""

from __future__ import annotations

import pytest

from kvproof.model.catalogue import model_for
from kvproof.model.config import MAX_PAGES, Config, validate
from kvproof.model.errors import UserError
from kvproof.model.paged import PagedModel
from kvproof.model.token import TokenModel


@pytest.mark.parametrize(("size", "page_size", "pages"), [(16, 4, 4), (19, 4, 4), (7, 1, 7), (4, 4, 1)])
def test_a_remainder_makes_no_page(size, page_size, pages):
    assert validate(Config("paged", size, page_size)).num_pages == pages


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config("swa", 16, 4), r"config\.allocator is 'swa'"),
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
    assert type(model_for(Config("paged", 16, 4))) is PagedModel
    assert type(model_for(Config("token", 16, 1))) is TokenModel
