"""``stager clean``: remove what nobody uses any more from the nodes and the offline root."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from bundle.protocol.words import Action

from .grouped import grouped
from .options import CleanFlags, LaunchFlags, LogDir, PlaceFlags, SlurmFlags, Talk, job_options
from .program import app, boundary

if TYPE_CHECKING:
    from bundle.protocol.clean_answers import CleanAnswer
    from bundle.protocol.records import Record

    from ..cleanup.clean import UnusedItem
    from ..config.load import Config
    from ..console import Console
    from ..jobs.job import JobOptions


@app.command()
@grouped
def clean(
    *,
    what: CleanFlags,
    place: PlaceFlags,
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
        if not (what.store_only or what.nodes_only):
            skipped = _unreachable(config, place, options)
        if not (what.store_only or skipped):
            code, items = _clean_nodes(console, config, place, options, what.everything)
        if not what.nodes_only:
            items += _clean_store(console, config, what)
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


def _unreachable(config: Config, place: PlaceFlags, options: JobOptions) -> str:
    """Return the reason why the nodes cannot be cleaned from here; empty where they can be.

    A bundle or an allocation that the user names must be used: its errors are errors.
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


def _clean_nodes(
    console: Console, config: Config, place: PlaceFlags, options: JobOptions, everything: bool
) -> tuple[int, list[dict[str, Any]]]:
    """Clean the nodes of an allocation, and return the exit code and what was removed."""
    from bundle.protocol.clean_answers import CleanAnswer
    from bundle.redaction.masking import masked

    from ..cleanup.clean import nodes_keep
    from ..jobs.driver import carry_out
    from ..jobs.job import numbered
    from ..jobs.prepare import named_bundle, prepare, source_of, way
    from ..jobs.result import Outcome

    source = source_of(options, config, batch=False)
    path, manifest = named_bundle(config, place.bundle, place.asked)
    prepared = prepare(config, options, (path, manifest), action=Action.CLEAN, source=source)
    driver = way(prepared, os.environ)
    if options.dry_run and driver.asks_slurm:
        command = shlex.join(masked(driver.argv))
        console.say(f"what the nodes have is known inside an allocation: {command}")
        return 0, []
    kept = nodes_keep(manifest.id, (), everything=everything)
    outcome = Outcome(job=replace(numbered(prepared.job), keep=tuple(kept)), bundle=path)
    items: list[dict[str, Any]] = []

    def listen(record: Record) -> None:
        if isinstance(record.event, CleanAnswer):
            items.extend(_removed(record.event))
        console.event(record)

    console.job(outcome.job, path)
    carry_out(outcome, prepared.config, driver, listen, console.talk)
    return console.nodes_cleaned(outcome), items


def _removed(answer: CleanAnswer) -> Iterator[dict[str, Any]]:
    """Yield what a node removed, or would remove."""
    for root in answer.roots:
        environments = [(f"envs/{name}", size) for name, size in root.removed]
        for name, size in [*environments, *root.left_overs]:
            yield {
                "place": answer.node,
                "path": f"{root.root}/{name}",
                "bytes": size,
                "kind": "environment",
                "why": "not in use",
            }


def _clean_store(console: Console, config: Config, what: CleanFlags) -> list[dict[str, Any]]:
    """Clean the offline root, and return what was removed."""
    from ..building.current_bundle import offline_root
    from ..cleanup.clean import Rules, apply, plan
    from ..core.store import Store

    store = Store(offline_root(config))
    rules = Rules(keep_newest=not what.everything, wheels=what.wheels, projects=(config.root,))
    if what.dry_run:
        items = plan(store, rules, time.time())
    else:
        cleaned = apply(
            store, rules, time.time(), lambda: console.note("waiting for a build that is under way")
        )
        items = cleaned.removed
        for item, why in cleaned.left:
            console.note(f"{item.path} could not be removed: {why}")
    return [_stored(item) for item in items]


def _stored(item: UnusedItem) -> dict[str, Any]:
    """Return an item of the offline root as the report has it."""
    fields = item.to_json()
    return {"place": "offline root", "bytes": fields.pop("size"), **fields}
