import pytest
from rotated_heads import ROPES

from tl_posgen.rope.rotation import Rope


@pytest.fixture(params=ROPES.values(), ids=ROPES.keys())
def rope(request) -> Rope:
    return request.param
