"""Spaces: every config drawn is valid and stays inside what the target can be asked."""

from __future__ import annotations

import pytest

from kvproof.impl.targets.protocol import Capabilities
from kvproof.model.config import ALLOCATORS, SINGLE_SLOT, Config, validate
from kvproof.properties.draw import SeededDraw
from kvproof.properties.space import Space, draw_config, is_wide, space_for


def drawn(space: Space, count: int = 3000) -> list[Config]:
    draw = SeededDraw("space")
    return [draw_config(draw, space) for _ in range(count)]


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("misuse", [False, True])
def test_every_config_is_valid(allocator, checked, misuse):
    space = Space(allocator, checked=checked, misuse=misuse)
    for config in drawn(space, 1000):
        assert validate(config).allocator == allocator
        assert checked or not config.checked
        assert not misuse or (config.checked is checked and not config.page_offset)


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_wide_space_reaches_its_edges(allocator):
    configs = drawn(Space(allocator, checked=True))
    tops = [(config.page_offset + config.num_pages + 1) * config.page_size for config in configs]
    assert {config.need_sort for config in configs} == ({False} if allocator == "mamba" else {False, True})
    assert {config.checked for config in configs} == {False, True}
    assert {config.row_dtype for config in configs} == {"int64", "int32"}
    assert min(config.num_pages for config in configs) == 1
    if allocator in ("token", "paged"):
        assert max(tops) > (1 << 40) - 3 * 128
        # Pools that begin below 2**31 (2**32) and end above.
        for edge in (1 << 31, 1 << 32):
            assert any(
                config.page_offset * config.page_size < edge < top
                for config, top in zip(configs, tops, strict=True)
            )
    if allocator not in SINGLE_SLOT:
        assert any(config.size % config.page_size for config in configs)
    if allocator in ("paged", "swa", "hisparse", "page-interleave"):
        assert any(config.page_size & (config.page_size - 1) for config in configs)
        assert {1, 2, 4, 16, 64, 128} <= {config.page_size for config in configs}


@pytest.mark.parametrize(
    ("allocator", "field", "page_size"),
    [
        ("swa", "swa_size", "page_size"),
        ("hisparse-v4", "swa_size", "page_size"),
        ("hisparse-v4", "device_size", "device_page_size"),
    ],
)
def test_sides_are_of_about_one_size_so_that_either_is_the_tight_one(allocator, field, page_size):
    differences = [
        getattr(config, field) // getattr(config, page_size) - config.num_pages
        for config in drawn(Space(allocator), 1000)
    ]
    assert {-2, -1, 0, 1, 2} <= set(differences)
    close = sum(abs(difference) <= 2 for difference in differences)
    assert len(differences) // 2 < close < len(differences)


def test_what_else_a_kind_needs_varies():
    assert {config.ratio for config in drawn(Space("hisparse"), 300)} >= {1, 2}
    assert {config.shards for config in drawn(Space("page-interleave"), 300)} >= {2, 3, 4}
    rings = drawn(Space("swa-ring"), 300)
    assert any(config.ring > config.page_size for config in rings)
    assert any(config.ring % config.page_size for config in rings)
    assert {config.request_rows for config in rings} >= {0, 1}


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_wide_configs_have_room_for_batches_of_hundreds_on_all_sides(allocator):
    draw = SeededDraw("wide")
    for _ in range(100):
        config = draw_config(draw, Space(allocator), wide=True)
        assert is_wide(validate(config))
        if allocator in ("swa", "hisparse-v4"):
            assert config.swa_size // config.page_size > 1000
            assert config.page_size > 1  # plain alloc knows no rows


def test_pools_with_a_mapping_are_small_enough_to_be_read_whole():
    for allocator in ("swa", "hisparse", "hisparse-v4"):
        assert max(config.size for config in drawn(Space(allocator), 1000)) <= 8192 + 255


def test_a_target_may_have_some_page_sizes_only():
    configs = drawn(Space("hisparse-v4", page_sizes=(8, 64)), 300)
    assert {config.page_size for config in configs} == {8, 16, 64}


def test_what_a_target_cannot_do_is_not_drawn():
    configs = drawn(Space("paged", any_page_size=False, page_offset=False))
    assert not [config for config in configs if config.page_size & (config.page_size - 1)]
    assert not [config for config in configs if config.page_offset or config.checked]


def test_the_space_follows_from_the_capabilities():
    capabilities = Capabilities(
        ("paged",), frozenset({"Resize"}), any_page_size=False, page_offset=False, checked=True
    )
    assert space_for(capabilities, "paged") == Space(
        "paged", any_page_size=False, page_offset=False, checked=True, lacks=frozenset({"Resize"})
    )
    slow = space_for(Capabilities(("token",)), "token", misuse=True, slow=True)
    assert slow.misuse
    assert slow.max_batch < Space("token").max_batch
    assert slow.max_row_tokens < Space("token").max_row_tokens
