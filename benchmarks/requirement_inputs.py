"""Requirement files in the shape of those of public machine learning projects.

An entry of ``environment.requirements``, and the files that it needs, for each name.
"""

from __future__ import annotations

from collections.abc import Mapping

_PROJECT = '[project]\nname = "odd-project"\nversion = "0.1"\nrequires-python = ">=3.9"\n'


def _file(text: str) -> tuple[str, Mapping[str, str]]:
    """Return a requirement file alone; `` | `` stands for the end of a line."""
    return "requirements.txt", {"requirements.txt": text.replace(" | ", "\n") + "\n"}


def _project(entry: str, text: str) -> tuple[str, Mapping[str, str]]:
    return entry, {"pyproject.toml": _PROJECT + text}


INPUTS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    # One file, as small training repositories have it.
    "small-gpt": _file("numpy | tiktoken | tqdm | requests"),
    "ranges": _file("numpy>=1.24,<2 | pandas>=2.0,!=2.1.0 | scipy>=1.10 | scikit-learn~=1.3"),
    "pinned": _file("numpy==1.26.4 | pandas==2.2.2 | PyYAML==6.0.1 | tqdm==4.66.4"),
    "compatible": _file("einops~=0.7 | omegaconf~=2.3.0 | hydra-core~=1.3"),
    "wildcards": _file("numpy==1.26.* | regex!=2019.12.17 | packaging>=23,==24.*"),
    "three-equals": _file("click===8.1.7 | colorama"),
    "comments": _file("# base | numpy  # arrays |  | # tools | tqdm>=4.27 # progress"),
    "upper-case": _file("PyYAML | Pillow>=9 | Jinja2 | MarkupSafe | Werkzeug"),
    "dots-and-lines": _file("ruamel.yaml | typing_extensions | importlib-metadata"),
    "spaces": _file("numpy >= 1.24 , < 2 | pandas [excel] >=2 | tqdm ;python_version>='3.8'"),
    "byte-order-mark": _file("\ufeffnumpy<2 | tqdm"),
    # Extras and markers.
    "extras": _file("uvicorn[standard] | requests[socks] | coverage[toml]"),
    "markers-of-systems": _file(
        "tqdm | colorama; sys_platform == 'win32' | pyobjc; platform_system == 'Darwin' | "
        "uvloop; platform_system != 'Windows' | bitsandbytes>=0.43; sys_platform == 'win32'"
    ),
    "markers-of-pythons": _file(
        "numpy==1.21.6; python_version < '3.8' | numpy>=1.24; python_version >= '3.8' | "
        "dataclasses; python_version < '3.7' | tomli; python_version < '3.11'"
    ),
    "machines": _file("psutil; platform_machine == 'x86_64' | uvloop; platform_machine == 'arm64'"),
    "jax-cpu": _file("jax[cpu] | flax | optax | chex"),
    "ray": _file("ray[default]>=2.9 | pyarrow | pandas"),
    "hub": _file("huggingface_hub[cli]>=0.23 | safetensors>=0.4 | tokenizers>=0.19 | regex"),
    "data": _file("datasets>=2.14 | evaluate | sentencepiece!=0.1.92 | protobuf | sacrebleu"),
    "vision": _file("opencv-python-headless>=4.8 | Pillow | scikit-image | imageio[ffmpeg]"),
    "audio": _file("soundfile | librosa>=0.10 | numba | more-itertools | jiwer"),
    "logging": _file("wandb>=0.15 | tensorboard | mlflow-skinny | rich"),
    "serving": _file("fastapi | uvicorn | pydantic>=2 | gradio-client | sse-starlette"),
    "notebook": _file("jupyterlab | ipywidgets | matplotlib | seaborn"),
    "transformers": _file("transformers>=4.40 | tokenizers | gone-since; python_version < '3'"),
    "boosting": _file("xgboost-cpu | lightgbm | catboost; sys_platform == 'win32' | optuna"),
    "remote-calls": _file("protobuf>=3.20.3,<5 | grpcio>=1.60 | googleapis-common-protos"),
    "onnx": _file("onnx | onnxruntime | protobuf>=3.20.2 | sympy"),
    # Several files, options, hashes.
    "nested": (
        "requirements/dev.txt",
        {
            "requirements/dev.txt": "-r base.txt\n-c limits.txt\npytest>=7\nruff\n",
            "requirements/base.txt": "numpy\npandas\n--requirement more/extra.txt\n",
            "requirements/more/extra.txt": "tqdm\n",
            "requirements/limits.txt": "numpy<2\npandas<2.3\npluggy<1.5\n",
        },
    ),
    "options": _file("--prefer-binary | --trusted-host index.example | numpy<2 | tqdm"),
    "pre-releases": _file("--pre | ruff | black"),
    "only-binary": _file("--only-binary :all: | pyyaml | ujson"),
    "hashed": _file(
        "tqdm==4.66.4 \\ | "
        "  --hash=sha256:b75ca56b413b030bc3f00af51fd2c1a1a5eac6a0c1cca83cbb37a5c52abce644 \\ | "
        "  --hash=sha256:e4d936c9de8727928f3be6079590e97d9abfe8d39a590be678eb5919ffc186bb"
    ),
    # pyproject.toml.
    "project": _project(
        "pyproject.toml[all]",
        'dependencies = ["numpy>=1.24", "tqdm"]\n[project.optional-dependencies]\n'
        'data = ["pandas"]\nplot = ["matplotlib>=3.8"]\n'
        "all = [\"odd-project[data,plot]\", \"odd_project[data] ; sys_platform == 'linux'\"]\n",
    ),
    "groups": _project(
        "pyproject.toml:dev",
        'dependencies = ["numpy"]\n[dependency-groups]\nlint = ["ruff"]\ntest = ["pytest>=8"]\n'
        'dev = [{include-group = "lint"}, {include-group = "test"}, "mypy"]\n',
    ),
    "uv-settings": _project(
        "pyproject.toml",
        'dependencies = ["pandas", "requests"]\n[tool.uv]\n'
        'constraint-dependencies = ["numpy<2"]\noverride-dependencies = ["urllib3<2"]\n'
        'exclude-dependencies = ["certifi"]\n',
    ),
    "uv-lowest": _project(
        "pyproject.toml",
        'dependencies = ["click>=8.1", "rich>=13"]\n[tool.uv]\nresolution = "lowest-direct"\n',
    ),
    "script": (
        "train.py",
        {
            "train.py": "# /// script\n# requires-python = '>=3.9'\n"
            "# dependencies = ['httpx<1', 'rich>=13']\n# ///\nprint(1)\n"
        },
    ),
    "uv-lock": _project(
        "uv.lock",
        'dependencies = ["httpx", "numpy<2"]\n[dependency-groups]\ndev = ["pytest"]\n',
    ),
    "uv-lock-of-a-workspace": (
        "uv.lock",
        {
            "pyproject.toml": _PROJECT + 'dependencies = ["inner", "tqdm"]\n[tool.uv.workspace]\n'
            'members = ["packages/*"]\n[tool.uv.sources]\ninner = {workspace = true}\n',
            "packages/inner/pyproject.toml": '[project]\nname = "inner"\nversion = "1"\n'
            'requires-python = ">=3.9"\ndependencies = ["click"]\n',
        },
    ),
}  # fmt: skip
