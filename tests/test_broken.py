"""Each class of broken checkpoint that `broken_starts.py` gives to servers is refused with its message, here without one."""

import pytest

from broken_starts import CLASSES, copy_of
from toy import write_toy
from vllm_tilequant.checkpoint.verify import verify
from vllm_tilequant.schema import FormatError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("base") / "toy", kind="mixed2468", bias=True, kv_heads=2)


def test_the_base_is_sound(base):
    assert verify(base).modules == 14


@pytest.mark.parametrize("name", CLASSES)
def test_it_is_refused_with_its_message(base, tmp_path, name):
    with pytest.raises(FormatError) as e:
        verify(copy_of(base, tmp_path / "broken", name))
    assert CLASSES[name].says in str(e.value)
    assert verify(base).modules == 14  # the change was made in the copy
