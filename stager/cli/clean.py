"""``stager clean``: remove what nobody uses any more from the nodes and the offline root."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from .grouped import grouped
from .options import CleanFlags, LaunchFlags, LogDir, Place, SlurmFlags, Talk, job_options
from .program import app, boundary

if TYPE_CHECKING:
    from ..config.load import Config
    from ..console import Console
    from ..jobs.job import JobOptions


@app.command()
@grouped
def clean(
    *,
    what: CleanFlags,
    place: Place,
    slurm: SlurmFlags,
    log_dir: LogDir = None,
    talk: Talk,
) -> None:
    """Remove environments, bundles and layers that nobody uses."""
    from ..jobs.prepare import project

    what.check()
    options = replace(
        job_options(slurm, LaunchFlags(log_dir=log_dir), place.allocation), dry_run=what.dry_run
    )
    console = talk.console()
    with boundary(console):
        config = project(place.bundle, place.asked)
        items: list[dict[str, Any]] = []
        code, skipped = 0, ""
        if not what.store_only:
            skipped = "" if what.nodes_only else _unreachable(config, place, options)
            if not skipped:
                code, items = _nodes(console, config, place, options, everything=what.everything)
        if not what.nodes_only:
            items += _store(console, config, what)
        if skipped:
            console.warn(f"the nodes were not cleaned: {skipped}")
        report = {
            "ok": code == 0,
            "dry_run": what.dry_run,
            "nodes_skipped": skipped or None,
            "items": items,
            "bytes": sum(int(item["bytes"]) for item in items),
        }
        console.stop()
        if talk.json:
            console.emit(report)
        else:
            console.cleaned(report)
        raise typer.Exit(code)


def _unreachable(config: Config, place: Place, options: JobOptions) -> str:
    """Why the nodes cannot be cleaned from here; empty where they can be, or must.

    What is asked for by name must be done, and its errors are errors.
    """
    from ..core.errors import StagerError
    from ..jobs.prepare import named_bundle, source_of

    if place.bundle is not None or place.asked or place.allocation != "auto":
        return ""
    try:
        source_of(options, config, batch=False)
        named_bundle(config, None)
    except StagerError as exc:
        return f"{exc.message}; {exc.hint}" if exc.hint else exc.message
    return ""


def _nodes(
    console: Console, config: Config, place: Place, options: JobOptions, *, everything: bool
) -> tuple[int, list[dict[str, Any]]]:
    """Clean the nodes of an allocation: the exit code, and what went."""
    from bundle.redaction.masking import masked

    from ..cleanup.clean import nodes_keep
    from ..jobs.driver import carry_out
    from ..jobs.job import numbered
    from ..jobs.prepare import named_bundle, prepare, source_of, way
    from ..jobs.result import Outcome

    source = source_of(options, config, batch=False)
    path, manifest = named_bundle(config, place.bundle, place.asked)
    prepared = prepare(config, options, (path, manifest), action="clean", source=source)
    how = way(prepared, os.environ)
    if options.dry_run and how.asks_slurm:
        asked = shlex.join(masked(how.argv))
        console.say(f"what the nodes have is known inside an allocation: {asked}")
        return 0, []
    kept = nodes_keep(manifest.id, (), everything=everything)
    outcome = Outcome(job=replace(numbered(prepared.job), keep=tuple(kept)), bundle=path)
    found: list[dict[str, Any]] = []

    def listen(event: Mapping[str, Any]) -> None:
        if event.get("event") == "clean":
            found.append(dict(event))
        console.event(event)

    console.job(outcome.job, path)
    carry_out(outcome, prepared.config, how, listen, console.talk)
    return console.nodes_cleaned(outcome), [item for event in found for item in _removed(event)]


def _removed(event: dict[str, Any]) -> list[dict[str, Any]]:
    """What one node removed, or would."""
    node = str(event["node"])
    items = []
    for root in event.get("roots", []):
        named = [(f"{root['root']}/envs/{name}", size) for name, size in root["removed"]]
        named += [(f"{root['root']}/{name}", size) for name, size in root["left_overs"]]
        items += [
            {"place": node, "path": path, "bytes": size, "kind": "environment", "why": "not in use"}
            for path, size in named
        ]
    return items


def _store(console: Console, config: Config, what: CleanFlags) -> list[dict[str, Any]]:
    """Clean the offline root: what went."""
    from ..building.current_bundle import offline_root
    from ..cleanup.clean import Rules, apply, plan
    from ..core.store import Store

    store = Store(offline_root(config))
    rules = Rules(keep_newest=not what.everything, wheels=what.wheels, projects=(config.root,))
    if what.dry_run:
        items = plan(store, rules, time.time())
    else:
        swept = apply(
            store, rules, time.time(), lambda: console.note("waiting for a build that is under way")
        )
        items = swept.removed
        for item, why in swept.left:
            console.note(f"{item.path} could not be removed: {why}")
    return [{"place": "offline root", "bytes": one.size, **_named(one.to_json())} for one in items]


def _named(item: dict[str, Any]) -> dict[str, Any]:
    return {key: item[key] for key in ("kind", "path", "why")}
