"""The canonical form of lists whose order means nothing (contract 5)."""

from __future__ import annotations

import torch

from dsa_verify.judge.normalise import UNUSED, SortedItems

DEVICE = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def canonical(rows: list[tuple[int, int]]) -> list[list[int]]:
    items = SortedItems(torch.tensor(rows, dtype=torch.int32, device=DEVICE))
    items.update()
    return items.copy.tolist()


def test_listed_rows_ascend_and_the_rest_is_unused() -> None:
    unused = [UNUSED, UNUSED]
    assert canonical([(99, 2), (7, 500), (3, 400), (5, 123), (1, 9)]) == [[99, 2], [3, 400], [7, 500], unused, unused]


def test_two_orders_of_one_list_are_equal_and_two_lists_are_not() -> None:
    assert canonical([(9, 2), (1, 5), (2, 6)]) == canonical([(9, 2), (2, 6), (1, 5)])
    assert canonical([(9, 2), (1, 5), (2, 6)]) != canonical([(9, 2), (1, 5), (1, 5)]), "a row listed twice"
    assert canonical([(9, 1), (1, 5), (2, 6)]) != canonical([(9, 2), (1, 5), (2, 6)])


def test_a_count_that_is_poison_is_survived() -> None:
    assert canonical([(9, -1633771874), (1, 5)]) == [[9, -1633771874], [UNUSED, UNUSED]]
    assert canonical([(9, 1 << 30), (1, 5)]) == [[9, 1 << 30], [1, 5]]
