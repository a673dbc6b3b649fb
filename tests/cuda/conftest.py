import pytest

from polarlm.engine.backends.cuda.ops import CudaOps
from tests.cuda.emulated import open_device


@pytest.fixture
def ops() -> CudaOps:
    return CudaOps(open_device())
