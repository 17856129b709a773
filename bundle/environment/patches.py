"""Repairs of known faults between versions that an environment may have pinned together.

This file is also copied into every environment as ``_stager_patches.py``, beside a
``_stager_patches.pth`` with :data:`PTH_LINE`: every interpreter of the environment activates it if
``STAGER_PATCHES`` is set. So it stands alone, and imports nothing that a patch is about.

``STAGER_PATCHES`` is ``1`` or ``all`` for every patch, a comma list of names for only these, and
``0`` or empty for none. A patch is applied after the import of its module, if the fault is there.
"""

import contextlib
import os
import sys
import types
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import get_ident
from typing import Any, Callable, NamedTuple, Optional

PTH_LINE = (
    'import os; os.environ.get("STAGER_PATCHES") and __import__("_stager_patches").activate()'
)
"""The one line of ``_stager_patches.pth``; :mod:`site` executes lines that begin with import."""

GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA, WSL, AMD

_SAID = "STAGER_PATCHES_SAID"


class Patch(NamedTuple):
    """One repair: its module, its condition and its action."""

    name: str  # its name for users and logs: lower case, words joined by hyphens
    reason: str
    link: str
    module: str  # full name of the module after whose import the patch is considered
    applies: Callable[[types.ModuleType], bool]
    """Returns True if the imported module has the fault; must turn false once it is patched."""
    apply: Callable[[types.ModuleType], None]  # repairs the imported module in place


def _is_without_cuda(torch: types.ModuleType) -> bool:
    """Return True if this process can have no GPU, without waking the driver."""
    is_for_cpus = torch.version.cuda is None and getattr(torch.version, "hip", None) is None
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    return is_for_cpus or is_hidden or not any(map(os.path.exists, GPU_NODES))


def _torch_cpu(torch: types.ModuleType) -> Optional[types.ModuleType]:
    with contextlib.suppress(ModuleNotFoundError):  # a torch that is too old to have it
        return import_module(torch.__name__ + ".cpu")
    return None


def _set_device_is_missing(torch: types.ModuleType) -> bool:
    cpu = _torch_cpu(torch)
    return cpu is not None and not hasattr(cpu, "set_device") and _is_without_cuda(torch)


def _add_set_device(torch: types.ModuleType) -> None:
    def set_device(device: object) -> None:
        """Do nothing: there is one CPU device, as in torch versions that have this function."""

    cpu: Any = _torch_cpu(torch)
    cpu.set_device = set_device


def _formatter_refuses_to_copy(formatting: types.ModuleType) -> bool:
    """Try the extractor behind ``with_format("numpy")`` (and "torch", "jax") on one row."""
    numpy = sys.modules.get("numpy")
    extractor = getattr(formatting, "NumpyArrowExtractor", None)
    if numpy is None or extractor is None or int(numpy.__version__.split(".")[0]) < 2:
        return False
    try:
        extractor().extract_column(formatting.pa.table({"x": [1]}))
    except ValueError as error:
        if "copy" in str(error):
            return True
        raise
    return False


def _allow_copies(formatting: types.ModuleType) -> None:
    """Give the one module a view of NumPy whose ``array(copy=False)`` means "only if needed".

    That is what it meant before NumPy 2. In datasets 2.19.0 this module has every such call.
    """
    numpy: Any = formatting.np
    view: Any = types.ModuleType(numpy.__name__)
    view.__dict__.update(vars(numpy))

    def array(*args: object, **kwargs: object) -> object:
        if kwargs.get("copy") is False:
            kwargs["copy"] = None
        return numpy.array(*args, **kwargs)

    view.array = array
    formatting.np = view  # type: ignore[attr-defined]


def _in_hub_datasets(name: str) -> Callable[[types.ModuleType], Any]:
    """Return a function of the module about the hub's cache, which is imported at the call."""

    def call(module: types.ModuleType) -> Any:  # noqa: ANN401 - passed on
        # It lies beside this one, here or as a copy.
        beside = f"{__package__}.hub_datasets" if __package__ else "_stager_hub_datasets"
        return getattr(import_module(beside), name)(module)

    return call


def _locate_torch_link() -> str:
    """Return the path of a link to torch beside code that outlives the environment; else, empty."""
    environment = os.environ.get("STAGER_ENV", "")
    kept = os.path.join(os.path.dirname(os.path.dirname(environment)), "compiled", "")
    code = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    is_kept = environment and code.startswith(kept)
    return os.path.join(os.path.dirname(code), ".torch") if is_kept else ""


def _is_unpatched(name: str) -> Callable[[types.ModuleType], bool]:

    def applies(module: types.ModuleType) -> bool:
        function = getattr(module, name, None)
        return bool(_locate_torch_link() and function) and not hasattr(function, "patched")

    return applies


def _remove_environment_from_keys(codecache: types.ModuleType) -> None:
    """Leave out paths of the compiler's command line, from which the keys are made.

    Headers are not precompiled for code that is there: that takes seconds on a new node.
    """
    module: Any = codecache
    compute: Any = module.code_hash
    precompile: Any = getattr(module, "_precompile_header", None)
    paths = os.environ["STAGER_ENV"], _locate_torch_link()
    latest = ["", ""]  # keys: a kernel has one or two

    def code_hash(code: object, extra: object = "") -> str:
        if isinstance(extra, str):
            for path in paths:
                extra = extra.replace(path, "")
        key = str(compute(code, extra))
        latest[:] = latest[1], key
        return key

    def precompile_header(header: str, *args: object, **kwargs: object) -> object:
        if any(os.path.exists(module.get_path(key, "main.so")[2]) for key in latest if key):
            return header  # which the compiler finds as well
        return precompile(header, *args, **kwargs)

    code_hash.patched = True  # type: ignore[attr-defined]
    module.code_hash = code_hash
    if precompile is not None:
        module._precompile_header = precompile_header
        # Each has 150 MB; torch keeps them in /tmp, where `stager clean` would not find them.
        module._HEADER_DIR = os.path.join(os.path.dirname(_locate_torch_link()), ".headers")
        module._HEADER_LOCK_DIR = os.path.join(module._HEADER_DIR, "locks")


def _find_headers_by_a_link(extension: types.ModuleType) -> None:
    """Let the compiler find torch's headers by a link, and in the environment if it leads nowhere.

    The key of a precompiled header is made from its preprocessed text, which holds their paths.
    """
    list_paths, link = extension.include_paths, _locate_torch_link()
    torch, new = os.path.dirname(extension.TORCH_LIB_PATH), f"{link}.{os.getpid()}"
    os.makedirs(os.path.dirname(link), 0o700, exist_ok=True)
    os.symlink(torch, new)
    os.replace(new, link)  # other ranks may do so concurrently

    def include_paths(*args: object, **kwargs: object) -> list[str]:
        paths = list_paths(*args, **kwargs)
        return [*(path.replace(torch, link) for path in paths if path.startswith(torch)), *paths]

    include_paths.patched = True  # type: ignore[attr-defined]
    extension.include_paths = include_paths  # type: ignore[attr-defined]


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="torch-cpu-set-device",
        reason="accelerate calls torch.cpu.set_device, which torch has only from 2.2 on.",
        link="https://github.com/huggingface/accelerate/issues/2954",
        module="torch",
        applies=_set_device_is_missing,
        apply=_add_set_device,
    ),
    Patch(
        name="datasets-numpy2",
        reason="datasets up to 2.19 calls np.array(copy=False), which NumPy 2 refuses to copy for.",
        link="https://github.com/huggingface/datasets/pull/6976",
        module="datasets.formatting.formatting",
        applies=_formatter_refuses_to_copy,
        apply=_allow_copies,
    ),
    Patch(
        name="hub-datasets",
        reason="datasets, when offline, does not look into the hub's cache for a data set's name.",
        link="https://github.com/huggingface/datasets/issues/4760",
        module="datasets.load",
        applies=_in_hub_datasets("is_needed"),
        apply=_in_hub_datasets("read_snapshots"),
    ),
    Patch(
        name="hub-files",
        reason="transformers, when offline, goes on without a file that the cache does not have.",
        link="https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/utils/hub.py",
        module="huggingface_hub.file_download",
        applies=_in_hub_datasets("has_missing_files"),
        apply=_in_hub_datasets("refuse_missing_files"),
    ),
    Patch(
        name="hub-spaces",
        reason="evaluate, when offline, does not look into the hub's cache for a metric's name.",
        link="https://github.com/huggingface/evaluate/issues/456",
        module="evaluate.loading",
        applies=_in_hub_datasets("has_hub_spaces"),
        apply=_in_hub_datasets("read_spaces"),
    ),
    Patch(
        name="inductor-keys",
        reason="torch.compile's keys for C++ contain torch's path.",
        link="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_inductor/codecache.py",
        module="torch._inductor.codecache",
        applies=_is_unpatched("code_hash"),
        apply=_remove_environment_from_keys,
    ),
    Patch(
        name="inductor-headers",
        reason="The keys of its precompiled headers contain torch's path.",
        link="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_inductor/codecache.py",
        module="torch.utils.cpp_extension",
        applies=_is_unpatched("include_paths"),
        apply=_find_headers_by_a_link,
    ),
)


def select_patches(wanted: str) -> tuple[Patch, ...]:
    """Return the patches that a value of ``STAGER_PATCHES`` asks for; report unknown names."""
    names = {name.strip() for name in wanted.split(",")} - {""}
    if names & {"1", "all"}:
        return PATCHES
    known = {patch.name for patch in PATCHES}
    if unknown := ", ".join(sorted(names - known - {"0", "none"})):
        takes = f"STAGER_PATCHES takes 1, 0 or a comma list of {', '.join(sorted(known))}"
        _say_once("unknown", f"patch failed: {unknown}: no patch has this name ({takes})")
    return tuple(patch for patch in PATCHES if patch.name in names)


def activate() -> None:
    """Apply the patches of ``STAGER_PATCHES`` as modules are imported, or were; never raise."""
    if any(getattr(finder, "finds_for_stager", False) for finder in sys.meta_path):
        return
    patches = select_patches(os.environ.get("STAGER_PATCHES", ""))
    sys.meta_path[:0] = [_PatchFinder(patches)] if patches else []
    for patch in patches:
        if module := sys.modules.get(patch.module):
            _apply_if_needed(patch, module)


class _PatchFinder:
    """A finder that delegates to the others, and patches a module after its execution."""

    # Recognised by this mark, not by its class: a test may load this file under two names.
    finds_for_stager = True

    def __init__(self, patches: tuple[Patch, ...]) -> None:
        self._patches = patches
        self._searching: set[tuple[str, int]] = set()

    def find_spec(self, fullname: str, path: object, target: object = None) -> Optional[ModuleSpec]:
        patches = [patch for patch in self._patches if patch.module == fullname]
        # A finder made like this one asks us in turn; other threads may ask at the same time.
        search = (fullname, get_ident())
        if not patches or search in self._searching:
            return None
        self._searching.add(search)
        try:
            spec = _ask_finders(fullname, path, target)
        finally:
            self._searching.discard(search)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            _patch_after_exec(spec, patches)
        return spec


def _ask_finders(fullname: str, path: object, target: object) -> Optional[ModuleSpec]:
    finds = (getattr(finder, "find_spec", None) for finder in [*sys.meta_path])
    specs = (find(fullname, path, target) for find in finds if find)
    return next((each for each in specs if each is not None), None)


def _patch_after_exec(spec: ModuleSpec, patches: list[Patch]) -> None:
    """Extend this one loader object; it keeps its class for inspect, pkgutil and resources."""
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: types.ModuleType) -> None:
        # Drop the extension first: a loader may outlive the import, or be shared by others.
        if vars(loader).get("exec_module") is exec_module:
            del loader.exec_module
        execute(module)
        if module.__name__ == spec.name:
            for patch in patches:
                _apply_if_needed(patch, module)

    loader.exec_module = exec_module


def _apply_if_needed(patch: Patch, module: types.ModuleType) -> None:
    try:
        if not patch.applies(module):
            return
        patch.apply(module)
        if patch.applies(module):
            raise RuntimeError(f"the fault is still there in {module.__file__}")
    except Exception as error:
        # The user's import comes first: whatever a patch stumbles over, it goes on unpatched.
        why = " ".join(f"{type(error).__name__}: {error}".split())
        _say_once(f"failed.{patch.name}", f"patch failed: {patch.name}: {why} (see {patch.link})")
    else:
        _say_once(patch.name, f"patch applied: {patch.name}")


def _say_once(topic: str, line: str) -> None:
    """Print a line on stderr unless a process of this node's job already did, or a parent."""
    try:
        marker = Path(os.environ["STAGER_JOB_DIR"], f"patch.{topic}")
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return
    except (KeyError, OSError):
        said = os.environ.get(_SAID, "").split(",")
        if topic in said:
            return
        os.environ[_SAID] = ",".join([*filter(None, said), topic])
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)
