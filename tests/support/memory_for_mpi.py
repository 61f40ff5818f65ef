"""A module in CuPy's place for the two processes that try whether MPI takes device memory."""

# Device memory is the host's, which every MPI takes.
CUPY = """
import types
import numpy as np

copies = []

class ndarray(np.ndarray):
    @property
    def data(self):
        return types.SimpleNamespace(ptr=POINTER)
    def get(self):
        return np.array(self)

class Device:
    def __init__(self, index):
        assert index in (0, 1)
    def use(self):
        SECONDS
    def synchronize(self):
        pass

def asarray(array):
    return np.array(array).view(ndarray)

cuda = types.SimpleNamespace(Device=Device, runtime=types.SimpleNamespace(getDeviceCount=lambda: 2))
"""


def cupy_with(pointer: str = "self.ctypes.data", seconds: str = "pass") -> str:
    """The module's text.

    Args:
        pointer: gives the address of the array `self`.
        seconds: what choosing a device does.
    """
    return CUPY.replace("POINTER", pointer).replace("SECONDS", seconds)
