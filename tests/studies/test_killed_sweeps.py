"""A study over every model at hand, killed -9 in the middle again and again: nothing is lost, nothing done twice."""

import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tl_posgen.models.tokens import bundled_text
from tl_posgen.studies.sweep import JOBS, states, sweep

CHECKPOINTS = Path(__file__).parents[2] / "examples" / "mini_model" / "checkpoints"
STUDY = """
name = "killed"
length = 64
n_prompts = 2
measures = ["three_axis", "variance", "slash", "loss"]
texts = [{texts}]
models = [
    "mini", {models},
    {{ name = "{checkpoints}", label = "training", revisions = [{revisions}], tokenizer = "mini" }},
]
"""
N_JOBS = 33

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def study(tmp_path_factory, shared):
    """Eleven models and checkpoints on three texts."""
    directory = tmp_path_factory.mktemp("study")
    words, texts = bundled_text(), []
    for number in range(3):
        path = directory / f"text{number}.txt"
        path.write_text(words[20_000 * number :][:20_000], encoding="utf-8")
        texts.append(path.name)
    quoted = lambda names: ", ".join(f'"{name}"' for name in names)  # noqa: E731
    models = (shared / "models" / name for name in ("stories260K", "babyllama105"))
    entries = {"texts": quoted(texts), "models": quoted(models), "checkpoints": CHECKPOINTS}
    path = directory / "study.toml"
    path.write_text(STUDY.format(**entries, revisions=quoted(sorted(one.name for one in CHECKPOINTS.iterdir()))))
    return path


@pytest.fixture(scope="module")
def undisturbed(study, tmp_path_factory):
    """name -> bytes of the files of a run that nobody disturbed."""
    out = tmp_path_factory.mktemp("undisturbed")
    assert len(sweep(study, out=out, workers=2, progress=False).finished) == N_JOBS
    return {path.name: path.read_bytes() for path in (out / JOBS).glob("*.nc")}


def children(driver):
    """Every process that a driver has started."""
    return psutil.Process(driver.pid).children(recursive=True)


def written(out):
    """name -> inode and time of every file of a job."""
    stats = {path.name: path.stat() for path in (out / JOBS).glob("*.nc")}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def killed_until_done(command, out, kills, rng, workers_of=children):
    """Run a driver again and again; kill -9 one of its workers, then itself, at random moments; then let it end.

    Returns:
        How many kills there were, fewer if all was finished before. What was finished before a kill is never written
        again.
    """
    for number in range(kills):
        driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before = written(out)
        while driver.poll() is None and len(written(out)) == len(before):
            time.sleep(0.02)
        time.sleep(rng.random() * 0.3)
        if driver.poll() is not None:  # all was finished
            return number
        workers = workers_of(driver)
        victim = rng.choice(workers) if number % 2 == 0 and workers else psutil.Process(driver.pid)
        victim.kill()
        if victim.pid != driver.pid:
            time.sleep(rng.random() * 0.3)
        driver.kill()
        driver.wait()
        psutil.wait_procs(workers, timeout=60)  # they end with the driver
        assert not [one for one in workers if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        now = written(out)
        assert {name: now[name] for name in before} == before
    before = written(out)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    now = written(out)
    assert {name: now[name] for name in before} == before
    return kills


def kill(study, undisturbed, place, kills, seed, *words, **how):
    """How many kills there were until the study was whole; its files are those of the run that nobody disturbed."""
    command = [sys.executable, "-m", "tl_posgen.cli", "sweep", str(study), "--out", str(place), *words]
    found = killed_until_done(command, place, kills, random.Random(seed), **how)
    assert set(states(study, place).values()) == {"finished"}
    assert {path.name: path.read_bytes() for path in (place / JOBS).glob("*.nc")} == undisturbed
    return found


def test_twenty_kills_of_local_processes(study, undisturbed, tmp_path):
    kills = 0
    for seed in range(20):  # whole again after some five
        (place := tmp_path / str(seed)).mkdir()
        kills += kill(study, undisturbed, place, 20 - kills, seed, "--workers", "2")
        if kills == 20:
            break
    assert kills == 20


def test_three_kills_on_two_nodes_of_ray(study, undisturbed, tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed; the extra ray brings it")
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=1, memory=4 * 2**30, object_store_memory=10**8)
    words = ["--ray", cluster.address]
    try:
        assert kill(study, undisturbed, tmp_path, 3, 0, *words, workers_of=ray_workers) == 3
    finally:
        cluster.shutdown()


def ray_workers(driver):
    """The processes of Ray that are at a task of ours now: the others bear titles of their own."""
    found = psutil.process_iter(["cmdline"])  # None of one that has just ended
    titles = {one: " ".join(one.info["cmdline"] or ()) for one in found}
    others = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::SPILL", "ray::RESTORE", "ray::DELETE")
    return [one for one, title in titles.items() if title.startswith("ray::") and not title.startswith(others)]
