"""Marks of bundles that a batch script names, by the command line and by themselves."""

from __future__ import annotations

import os
import re
import time

import pytest

from stager.core.store import Store
from stager.pack.bundle_file import DAYS, is_marked, mark, marked, marks_in, unmark

DAY = 86400.0


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "offline")


def bundle_in(store, name="lab-0123456789ab.pkgs.tar"):
    path = store.bundles / name
    path.touch()
    return path


def test_a_bundle_that_a_printed_script_names_survives_a_change(project):
    project.settings("alpha", more='[launch]\nlauncher = "processes"').build()
    script = project.stager("script", "--nodes", "2", "--", "train.py")
    assert script.returncode == 0, script.stderr
    [named] = project.store.bundles.glob("*.pkgs.tar")
    assert str(named) in script.stdout

    (project.root / "train.py").write_text("print('changed')\n")
    said = project.stager("exec", "--", "python", "train.py")
    assert said.stdout == "changed\n", said.stderr
    assert f"replaces {named.name}, which stays: a batch script names it" in said.stderr
    assert named.exists()

    cleaned = project.stager("clean", "--store-only")
    assert "kept: 1 bundle that batch scripts name" in cleaned.stderr, cleaned.stderr
    assert named.exists()
    assert project.stager("clean", "--store-only", "--all").returncode == 0
    assert not re.findall(r"\.pkgs\.tar", "".join(os.listdir(project.store.bundles)))


def test_a_mark_counts_until_the_job_is_over(store):
    bundle, now = bundle_in(store), time.time()
    assert not is_marked(bundle, now)
    assert mark(store, bundle, "4711")
    assert mark(store, bundle, "4712")
    unmark(bundle, "4711")
    assert marked(store, now) == [bundle]
    unmark(bundle, "4712")
    assert not is_marked(bundle, now)


def test_a_mark_is_given_up_after_a_month(store):
    bundle = bundle_in(store)
    assert mark(store, bundle)
    assert is_marked(bundle, time.time() + (DAYS - 1) * DAY)
    assert not is_marked(bundle, time.time() + (DAYS + 1) * DAY)


def test_a_mark_is_of_one_bundle(store):
    assert mark(store, bundle_in(store))
    assert not is_marked(bundle_in(store, "lab-fedcba987654.pkgs.tar"), time.time())


def test_a_bundle_elsewhere_needs_no_mark(store, tmp_path):
    elsewhere = tmp_path / "copy.pkgs.tar"
    elsewhere.touch()
    assert mark(store, elsewhere)
    assert [*marks_in(tmp_path)] == []


def test_what_cannot_be_marked_is_said(store):
    bundle = bundle_in(store)
    (store.root / "tmp").write_text("not a directory")
    assert not mark(store, bundle)
