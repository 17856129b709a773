"""Files that only a program with a GPU reads: they are no evidence where there was none."""

from __future__ import annotations

import re

REASON = "for a GPU, and the test ran without one"

_PACKAGE = re.compile(
    r"(nvidia|cuda|pytorch-triton|triton|cupy|rocm|nvshmem)(-.*)?|.*-cu\d{2,3}|jax-cuda.*"
)
_FOLDER = re.compile(r"(nvidia|triton)/.*")
_LIBRARY = re.compile(
    r".*(cuda|cudnn|cublas|cufft|curand|cusolver|cusparse|nccl|nvrtc|nvtx|nvjit|cupti|gpu"
    r"|hip|rocm|rccl|miopen).*",
    re.IGNORECASE,
)
_FOR_LINKERS = "_static.a"
"""NVIDIA's name for what is a shared library as well: no program loads it, with or without a GPU.

Other archives hold code for a GPU, which is linked when a program runs (libnvshmem_device.a)."""
_SHARED = re.compile(r"\.(so|bc|cubin|fatbin|ptx|hsaco)(\.\d+)*$")


def needs_gpu(package: str, path: str) -> bool:
    """Return whether a file is one of CUDA, ROCm or Triton, and no copy for linkers alone."""
    if path.endswith(_FOR_LINKERS):
        return False
    if _PACKAGE.fullmatch(package) or _FOLDER.fullmatch(path):
        return True
    name = path.rpartition("/")[2]
    return bool(_SHARED.search(name) and _LIBRARY.fullmatch(name))
