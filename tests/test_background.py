"""Copies beside the loader: what they promise, and how many there are."""

import threading

import pytest
import torch

from vllm_tilequant import background

CPU = torch.device("cpu")


def test_a_copy_is_there_when_it_says_so():
    source = torch.arange(1000, dtype=torch.int32).view(10, 100).T  # neither contiguous nor small
    target, copy = background.copied(source, CPU)
    copy.result()
    assert torch.equal(target, source) and target.data_ptr() != source.data_ptr()


def test_what_a_copy_raises_is_raised_by_its_result_and_leaves_room():
    target = torch.zeros(3)
    for _ in range(3 * background._MOST):  # none of them keeps its place
        failed = background.start(CPU, target.copy_, torch.zeros(4))
        with pytest.raises(RuntimeError, match="size"):
            failed.result()
    background.start(CPU, target.copy_, torch.ones(3)).result()
    assert bool((target == 1).all())


def test_the_loader_is_only_a_few_copies_ahead():
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def copy():
        begun.release()
        go_on.wait(60)

    under_way = [background.start(CPU, copy) for _ in range(background._MOST)]
    more = threading.Thread(target=lambda: under_way.append(background.start(CPU, copy)))
    more.start()
    for _ in range(background._WORKERS):
        assert begun.acquire(timeout=60)
    more.join(0.2)
    assert more.is_alive() and len(under_way) == background._MOST  # waits for room
    go_on.set()
    more.join(60)
    for future in under_way:
        future.result(60)
    assert len(under_way) == background._MOST + 1
