"""Remarks of the preflight on NVIDIA drivers and GPUs, once all nodes have answered."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from ..checks.cuda import OWN, CudaNeed, driver_problem, needed, newest, parsed
from ..checks.findings import few_names
from ..protocol.messages import Gpu, GpuFacts, PreflightAnswer
from .state import State


def compare(state: State) -> None:
    """Give each node whose driver is too old for the bundle a problem, and note what is unusual."""
    layers = () if state.bundle is None else state.bundle.manifest.layers
    need = needed((layer.name, layer.version) for layer in layers if layer.kind == "wheel")
    answers = state.answers_of(PreflightAnswer)
    for node, answer in answers.items():
        problem = driver_problem(node, answer.gpus, need)
        if problem is not None:
            problems = (*answer.problems, problem)
            state.answers[node] = replace(answer, ok=False, problems=problems)
    for note in notes({node: answer.gpus for node, answer in answers.items()}, need):
        state.note(note)


def notes(nodes: Mapping[str, GpuFacts | None], need: CudaNeed | None) -> list[str]:
    """Return notes on the drivers and GPUs of nodes that can run the bundle."""
    broken = [
        f"{node}: the NVIDIA driver does not work: {facts.fault}"
        for node, facts in nodes.items()
        if facts is not None and facts.fault
    ]
    return [*broken, *_without(nodes, need), *_outdated(nodes, need), *_mixed(nodes)]


def _without(nodes: Mapping[str, GpuFacts | None], need: CudaNeed | None) -> Iterator[str]:
    without = [node for node, facts in nodes.items() if facts is None]
    if need is not None and without:
        yield (
            f"{few_names(without)}: no NVIDIA driver, so what {need.package} is for, CUDA "
            f"{need.text}, cannot be used there"
        )


def _outdated(nodes: Mapping[str, GpuFacts | None], need: CudaNeed | None) -> Iterator[str]:
    """Yield a line about drivers that run the bundle but are older than its CUDA version's."""
    own = None if need is None else OWN.get(need.version)
    if need is None or own is None:
        return
    runs = [node for node, facts in nodes.items() if driver_problem(node, facts, need) is None]
    older = [node for node in runs if _is_older(nodes[node], own)]
    if older:
        yield (
            f"{few_names(older)}: the driver is older than the one of CUDA {need.text} "
            f"({own}): built kernels run, what the driver must compile (PTX) does not"
        )


def line(node: str, facts: GpuFacts) -> str:
    """Return what the preflight's log says of a node: ``hpc07 driver=570.124.06 gpus=4 x ...``."""
    gpus = described(facts.gpus) or "none"
    return f"{node} driver={facts.driver or 'unknown'} gpus={gpus}"


def described(gpus: Collection[Gpu]) -> str:
    """Return GPUs in words: ``4 x NVIDIA A100-SXM4-80GB (80 GiB)``."""
    counts: dict[str, int] = {}
    for gpu in gpus:
        counts[_kind(gpu)] = counts.get(_kind(gpu), 0) + 1
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items())


def _is_older(facts: GpuFacts | None, own: str) -> bool:
    return facts is not None and bool(facts.driver) and newest(facts) < parsed(own)


def _mixed(nodes: Mapping[str, GpuFacts | None]) -> list[str]:
    groups: dict[str, list[str]] = {}
    kinds = set()
    for node, facts in nodes.items():
        gpus = () if facts is None else facts.gpus
        groups.setdefault(described(gpus) or "no NVIDIA GPU", []).append(node)
        kinds.add(frozenset(map(_kind, gpus)))
    if len(kinds) < 2:
        return []
    parts = [f"{few_names(named)}: {kind}" for kind, named in groups.items()]
    return [f"the nodes' GPUs differ, and the slowest sets the pace: {'; '.join(parts)}"]


def _kind(gpu: Gpu) -> str:
    """Return a GPU without its number: its name, its memory, its MIG instances."""
    size = f" ({round(gpu.memory / (1 << 30))} GiB)" if gpu.memory else ""
    mig = f" as MIG {'+'.join(gpu.mig)}" if gpu.mig else ""
    return gpu.name + size + mig
