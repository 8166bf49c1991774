"""One free list: where released pages go, when staged ones come back, and what a group holds."""

from __future__ import annotations

import pytest

from kvproof.model.pool import Pool, Queue


def pool(kind: type[Pool] = Pool, *, need_sort: bool = False) -> Pool:
    """Pages 1 … 6, of which 1 … 4 are taken: the list is [5, 6]."""
    made = kind(range(1, 7), need_sort)
    assert made.take(4) == [1, 2, 3, 4]
    return made


def test_pages_are_taken_from_the_front():
    made = pool()
    assert (made.free, made.count) == ([5, 6], 2)
    assert made.take(0) == []


def test_a_set_returns_ascending_and_a_list_as_it_is():
    made = pool()
    made.release_set([3, 1])
    assert made.free == [1, 3, 5, 6]
    made.release_list([4, 2])
    assert made.free == [4, 2, 1, 3, 5, 6]


def test_a_queue_takes_all_back_at_its_end_as_it_is():
    made = pool(Queue)
    made.release_set([3, 1])
    made.release_list([4, 2])
    assert made.free == [5, 6, 3, 1, 4, 2]


@pytest.mark.parametrize(("kind", "staged"), [(Pool, [1, 3, 4, 2]), (Queue, [3, 1, 4, 2])])
def test_with_need_sort_releases_wait(kind, staged):
    made = pool(kind, need_sort=True)
    made.release_set([3, 1])
    made.release_list([4, 2])
    assert (made.free, made.staged, made.count) == ([5, 6], staged, 6)


def test_a_merge_is_sorted_and_comes_when_the_list_may_be_too_short():
    made = pool(need_sort=True)
    assert not made.merge_for(3)  # nothing waits
    made.release_list([4, 2])
    assert not made.merge_for(2)  # 2 > 2 does not hold
    assert (made.free, made.staged) == ([5, 6], [4, 2])
    assert made.merge_for(3)
    assert (made.free, made.staged) == ([2, 4, 5, 6], [])


def test_a_group_holds_and_its_end_releases_the_sets_as_one_and_then_the_lists_as_one():
    made = pool()
    made.begin()
    made.release_set([3])
    made.release_list([4])
    made.release_set([1])
    made.release_list([2])
    assert (made.free, made.count, sorted(made.deferred())) == ([5, 6], 2, [1, 2, 3, 4])
    assert made.end() == ([3, 1], [4, 2])
    # {3, 1} ascending to the front, then 4, 2 before them.
    assert (made.free, made.deferred(), made.held) == ([4, 2, 1, 3, 5, 6], [], None)


def test_an_end_without_a_begin_releases_nothing():
    made = pool()
    assert made.end() == ([], [])
    assert made.free == [5, 6]


def test_a_reset_forgets_everything():
    made = pool(need_sort=True)
    made.release_list([1])
    made.begin()
    made.release_list([2])
    made.reset()
    assert (made.free, made.staged, made.held, made.released) == ([1, 2, 3, 4, 5, 6], [], None, set())


def test_released_pages_are_remembered():
    made = pool()
    made.release_list([2])
    made.take(1)
    assert made.released == {2}


def test_another_choice_takes_the_place_of_the_predicted_one():
    """5 was predicted; the target took 2, which waited, and then 6."""
    made = pool(need_sort=True)
    made.release_list([2, 1])
    made.adopt(made.take(1), [2])
    assert (made.free, made.staged) == ([5, 6], [1])
    made.adopt(made.take(1), [6])
    assert (made.free, made.staged) == ([5], [1])
